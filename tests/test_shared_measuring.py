"""Several processes measure what one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from midlayer_encoders import LayerEncoder, measure
from midlayer_encoders.metrics import TooFewTextsError
from midlayer_encoders.processes.group import Group, OtherProcessError
from tests.two_processes import in_two_processes

Folder = Callable[[str], str]
TEXTS = [f"text {number} " + "and more words " * (number % 7) for number in range(16)]


@pytest.mark.long
def test_metrics_of_two_processes_are_those_of_one(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [LayerEncoder(tiny_folder("Llama"), -1, norm="none", device="cpu") for _ in range(2)]
    arguments: dict[str, Any] = {"metrics": "all", "views": 2, "token_budget": 200}
    alone: dict[str, Any] = {}
    expected = measure(models[0], TEXTS, progress=lambda stage, *counts: alone.update({stage: counts}), **arguments)
    reports: list[Any] = []

    def run(group: Group) -> pl.DataFrame:
        progress = reports.append if group.is_first else pytest.fail
        return measure(
            models[group.rank], TEXTS, devices=2, progress=lambda *report: progress(report), **arguments
        )  # fmt: skip

    frames = in_two_processes(monkeypatch, run)
    for frame in frames:
        assert isinstance(frame, pl.DataFrame), frame
        rounded = pl.col("name") == "matrix_entropy"
        assert frame.filter(~rounded).equals(expected.filter(~rounded))
        assert_frame_equal(frame.filter(rounded), expected.filter(rounded), rel_tol=1e-12)
    assert set(expected["name"]) >= {"matrix_entropy", "half_match", "curvature", "block_influence", "lidar"}
    assert {stage: counts for stage, *counts in reports} == {stage: [*counts] for stage, counts in alone.items()}
    assert alone["measuring"][0] == alone["measuring"][1] > len(TEXTS) * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_one_process_is_raised_in_both(
    rank: int, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [LayerEncoder(tiny_folder("Llama"), -1, device="cpu") for _ in range(2)]

    def fail(*_: Any) -> None:
        raise KeyError("a broken model")

    models[rank].transformer.register_forward_pre_hook(fail)
    options: dict[str, Any] = {"metrics": ["curvature", "anisotropy"], "token_budget": 100}
    errors = in_two_processes(monkeypatch, lambda group: measure(models[group.rank], TEXTS, devices=2, **options))
    assert isinstance(errors[rank], KeyError)
    assert isinstance(errors[1 - rank], OtherProcessError)
    assert f"In process {rank}: KeyError" in str(errors[1 - rank])


def test_error_of_the_first_process_alone_is_raised_in_both(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first process computes the metrics, after the others have read their share."""
    models = [LayerEncoder(tiny_folder("Llama"), -1, device="cpu") for _ in range(2)]
    errors = in_two_processes(
        monkeypatch, lambda group: measure(models[group.rank], ["a"] * 3, metrics=["half_match"], devices=2)
    )
    assert isinstance(errors[0], TooFewTextsError)
    assert isinstance(errors[1], OtherProcessError)
