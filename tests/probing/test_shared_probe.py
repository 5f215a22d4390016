"""Several processes read the examples of a probe, and the first one trains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.extras.probing import ProbeResult, ProbeSettings, probe
from midlayer_encoders.processes.group import Group, OtherProcessError
from midlayer_encoders.reading.reader import LayerReader
from tests.two_processes import in_two_processes

Folder = Callable[[str], str]
TEXTS = [f"{color} {number} " + "and more words " * (number % 5) for number in range(20) for color in ("red", "blue")]
LABELS = ["red", "blue"] * 20
MODULE = sys.modules[probe.__module__]


@pytest.mark.parametrize("kind", ["attentive", "linear", "live"])
def test_probe_of_two_processes_is_that_of_one(kind: str, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [LayerEncoder(tiny_folder("Llama"), -1, device="cpu") for _ in range(2)]
    keep = {"keep_gb": 0.0} if kind == "live" else {}
    settings = ProbeSettings(epochs=2, batch_size=16, **keep)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {"kind": "linear" if kind == "linear" else "attentive", "settings": settings}
    monkeypatch.setattr(
        MODULE, "batches_of", lambda *_, **__: [list(range(n, min(n + 7, 40))) for n in range(0, 40, 7)]
    )
    expected = probe(models[0], TEXTS, LABELS, **arguments)
    work = [0, 0]
    by_model = {id(model.transformer): rank for rank, model in enumerate(models)}
    plain = LayerReader.passes

    def passes(self: Any, inputs: Any, batches: Any, **options: Any) -> Any:
        work[by_model[id(self.model)]] += sum(map(len, batches))
        return plain(self, inputs, batches, **options)

    monkeypatch.setattr(LayerReader, "passes", passes)

    def run(group: Group) -> ProbeResult:
        def report(*_: Any) -> None:
            assert group.is_first

        return probe(models[group.rank], TEXTS, LABELS, devices=2, progress=report, **arguments)

    for result in in_two_processes(monkeypatch, run):
        assert isinstance(result, ProbeResult), result
        assert torch.equal(result.right, expected.right)
        assert torch.equal(result.validation, expected.validation)
        assert result.table.equals(expected.table)
    assert (work[1] > 0) == (kind != "live")


def test_error_while_training_is_raised_in_both(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [LayerEncoder(tiny_folder("Llama"), -1, device="cpu") for _ in range(2)]

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("training")

    monkeypatch.setattr(MODULE, "probe_tokens", fail)
    errors = in_two_processes(monkeypatch, lambda group: probe(models[group.rank], TEXTS, LABELS, devices=2))
    assert isinstance(errors[0], KeyError)
    assert isinstance(errors[1], OtherProcessError)
