"""Random models give the vectors of the uncut model, or a clear error; ``python -m benchmarks.quality.fuzz`` runs 20,000."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import random_models
from tests.fuzz.random_models import KINDS, run_case


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_random_models_are_those_of_the_uncut_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDLAYER_GGUF_CACHE", str(tmp_path))
    outcomes: Counter[str] = Counter()
    for number in range(5):
        outcome, description, error = run_case(kind, number)
        assert outcome in ("exact", "refused"), f"{kind}:{number} {outcome}: {description}: {error}"
        outcomes[outcome] += 1
    assert outcomes["exact"]


def test_wrong_vectors_and_raw_errors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself can fail: another pooling, and an error of another class."""
    monkeypatch.setattr(random_models, "pooled", lambda states, _: np.asarray(states.sum(axis=0)) + 1)
    assert run_case("module", 0)[0] == "wrong"
    monkeypatch.setattr(random_models, "pooled", lambda states, _: states[10**6])
    assert run_case("module", 0)[0] == "traceback"
