"""The benchmark that says where a run is equal with and without the callback, at toy size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speed import callbacks
from benchmarks.speed.callbacks import Run, compare_losses, difference, equality_page, parse
from midlayer_encoders.callbacks import _measurement
from tests.callbacks.training import ADVICE

pytestmark = ADVICE


def given(tmp_path: Path, *more: str) -> Any:
    sizes = {"--blocks": 1, "--width": 64, "--batch": 2, "--length": 8, "--steps": 3}
    options = [word for pair in sizes.items() for word in map(str, pair)]
    return parse(["equality", "--device", "cpu", "--metrics", "curvature", "--runs", str(tmp_path), *options, *more])


@pytest.mark.long
def test_a_callback_that_leaves_a_trace_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = given(tmp_path)
    plain = callbacks.train(options, compiled=False, watched=False)
    assert difference(plain, callbacks.train(options, compiled=False, watched=True)) == "bitwise equal"
    assert (tmp_path / "history.parquet").exists()
    isolated = _measurement.isolated_random

    def drawing() -> Any:
        torch.rand(())
        return isolated()

    monkeypatch.setattr(_measurement, "isolated_random", drawing)
    actual = difference(plain, callbacks.train(options, compiled=False, watched=True))
    assert actual.startswith("loss ")
    assert actual.endswith("from step 1 on")  # the first measurement is before it


def test_differences_are_the_largest_of_each_kind() -> None:
    run = Run(torch.tensor([3.0, 2.0, 1.0]), {"a": torch.zeros(2), "b": torch.ones(2)})
    other_run = Run(torch.tensor([3.0, 2.5, 1.25]), {"a": torch.zeros(2), "b": torch.tensor([1.0, 3.0])})
    assert difference(run, other_run) == "loss 5.0e-01, weights 2.0e+00, from step 2 on"
    weights = Run(run.losses, other_run.weights)
    assert difference(run, weights) == "loss 0.0e+00, weights 2.0e+00, from step 3 on"


def test_the_table_has_a_row_for_each_case(tmp_path: Path) -> None:
    rows = [
        {"compiled": compiled, "algorithms": algorithms, "again": "bitwise equal", "with": f"{compiled} {algorithms}"}
        for algorithms in callbacks.ALGORITHMS
        for compiled in (False, True)
    ]
    lines = equality_page(given(tmp_path), rows).splitlines()[-4:]
    assert [line.split("|")[1].strip() for line in lines] == ["eager", "eager", "compiled", "compiled"]
    assert lines[1] == "| eager | deterministic | bitwise equal | False deterministic |"


def test_what_torch_does_not_promise_is_no_error_of_the_overhead_benchmark() -> None:
    assert compare_losses(0.5, 0.5, promised=True) == "The last losses of both runs are bitwise equal."
    assert "differ by 2.5e-01" in compare_losses(0.5, 0.25, promised=False)
    with pytest.raises(RuntimeError, match=r"differ: 0\.5 and 0\.25"):
        compare_losses(0.5, 0.25, promised=True)
