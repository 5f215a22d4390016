"""Errors that would also stop the next task come out of every place that catches broad exceptions."""

import ast
import errno
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import midlayer_encoders
from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import Stage
from midlayer_encoders.callbacks import LayerMetricsTrainerCallback
from midlayer_encoders.comparing.progression import _measure_steps, _Step
from midlayer_encoders.encoder import build
from midlayer_encoders.errors import FATAL, CutError, DiskFullError, FolderError
from midlayer_encoders.extras.scaling.units import call_unit, run_units
from midlayer_encoders.files import read_artifact
from midlayer_encoders.sweeping import task_scoring
from midlayer_encoders.sweeping.mteb_jobs import run_job
from midlayer_encoders.sweeping.notes import ScoringResult
from midlayer_encoders.sweeping.task_scoring import TaskScorer
from tests.callbacks.oracles import TEXTS
from tests.callbacks.training import TOKENIZER, neox

ROOT = Path(midlayer_encoders.__file__).parents[1]
Raise = Callable[..., Any]
STOPS = [DiskFullError("made"), FolderError("made"), KeyboardInterrupt(), SystemExit(1)]
DISK = [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")]
MEMORY = [MemoryError(), torch.OutOfMemoryError("made")]
ORDINARY = ValueError("made")


# --- the places ------------------------------------------------------------------------------------------------------


def score_at_once(fail: Raise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(task_scoring, "scores_together", lambda _: None)
    stages = [Stage(None, name) for name in ("planning", "scoring")]
    embedder = SimpleNamespace(planning=stages[0])
    scorer = SimpleNamespace(folder=tmp_path, embedder=embedder, scoring=stages[1], _score_together=lambda *_: fail())
    job = SimpleNamespace(task=SimpleNamespace(make=lambda: None))
    return TaskScorer._score_at_once(scorer, [job], ScoringResult())  # type: ignore[arg-type, list-item]


@dataclass
class Layer:
    ensure: Any = None


def score_with_mteb(fail: Raise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    job = SimpleNamespace(task=SimpleNamespace(make=fail), encoder=Layer(), score=lambda **failed: failed)
    return run_job(job)  # type: ignore[arg-type]


def measure_checkpoints(fail: Raise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_Step, "_measure", lambda *_: fail())
    settings = {"metrics": ["curvature"], "views": 2}
    checkpoints: Any = [SimpleNamespace(name=name) for name in ("step1", "step2")]
    return _measure_steps([_Step(each, "m", settings, ["a"], [], None, None) for each in checkpoints], None, None)  # type: ignore[arg-type]


def load_encoder(fail: Raise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    calls: list[int] = []
    saved = SimpleNamespace(first_path="", modules=(), keywords=lambda _: {})
    monkeypatch.setattr(build, "load_saved_folder", lambda *_, **__: saved)
    monkeypatch.setattr(build.prompting, "resolve_prompts", lambda *_: None)
    monkeypatch.setattr(build, "open_model", lambda *_, **__: calls.append(len(calls)) or fail())
    try:
        return LayerEncoder(str(tmp_path), 1, device="cpu")
    finally:
        assert calls == [0]


def read_file(fail: Raise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "file").touch()
    try:
        return read_artifact(tmp_path / "file", lambda _: fail())
    finally:
        assert len(list(tmp_path.iterdir())) == 1


def run_unit(fail: Raise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return call_unit(SimpleNamespace(run=fail))  # type: ignore[arg-type]


def run_on_an_executor(fail: Raise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    executor = SimpleNamespace(submit=lambda *_: SimpleNamespace(result=fail, cancel=lambda: None))
    (error,) = run_units([Mock(is_done=False)], executor, stage=Stage(None, "units")).values()
    return error


def measure_in_training(method: str) -> Callable[..., Any]:
    """Return a run of a callback's method in which the part that the method calls fails."""

    def run(fail: Raise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        strict = not isinstance(getattr(fail, "error"), KeyboardInterrupt | SystemExit)  # noqa: B009
        callback = LayerMetricsTrainerCallback(TEXTS, TOKENIZER, metrics=["curvature"], strict=strict)
        callback._prepare(neox())
        if method == "_measure":
            monkeypatch.setattr(type(callback._measurement), "measure", lambda *_: fail())
            return callback._measure(neox(), 0, None, lambda _: None)  # type: ignore[arg-type]
        if method == "_complete":
            callback._pending = 0, SimpleNamespace(result=fail, done=lambda: True), lambda _: None  # type: ignore[assignment]
            return callback._complete()
        callback._steps[0] = {"curvature": {0: 0.5}}
        if method == "_write":
            monkeypatch.setattr("midlayer_encoders.frame.tidy_result.write_frame", lambda *_, **__: fail())
            return callback._write(tmp_path)
        monkeypatch.setattr("midlayer_encoders.report.plot_steps_curves", lambda _: fail())
        return callback._draw_frame(callback.frame, tmp_path, 0)

    return run


#: Place, a run in which a part of it fails, and the errors that come out besides those of ``STOPS``.
PLACES: dict[str, tuple[Callable[..., Any], list[BaseException]]] = {
    "midlayer_encoders/sweeping/task_scoring.py:_score_at_once": (score_at_once, []),
    "midlayer_encoders/sweeping/mteb_jobs.py:run_job": (score_with_mteb, []),
    "midlayer_encoders/comparing/progression.py:_measure_steps": (measure_checkpoints, []),
    "midlayer_encoders/files.py:read_artifact": (read_file, DISK),
    "midlayer_encoders/extras/scaling/units.py:call_unit": (run_unit, []),
    "midlayer_encoders/extras/scaling/units.py:run_units": (run_on_an_executor, []),
    **{
        f"callbacks/_recorder.py:{method}": (measure_in_training(method), [*DISK, *MEMORY, ORDINARY])
        for method in ("_measure", "_complete", "_write", "_draw_frame")
    },
}
#: Errors of ``FATAL`` that a place does not let out: why.
NOT_RAISED = {
    "midlayer_encoders/files.py:read_artifact": "no reader raises them, and without a number they are damage",
    "midlayer_encoders/extras/scaling/units.py:call_unit": "the driver shows the error beside others",
    "midlayer_encoders/extras/scaling/units.py:run_units": "an error of the engine: the unit is submitted again",
}
#: Places where any error means "no", and the plain way is right.
HARMLESS = {
    "midlayer_encoders/errors.py:short_repr",
    "midlayer_encoders/encoder/description.py:_text",
    "midlayer_encoders/extras/kernels/fused_blocks.py:_is_rms_norm",
    "midlayer_encoders/extras/kernels/fused_blocks.py:_agrees",
    "midlayer_encoders/sweeping/layer_sweep.py:plan",  # the task is scored without a plan, and then named
    "midlayer_encoders/extras/export/_engines.py:_main",  # prints the error and ends its process
    "midlayer_encoders/models/cut.py:_empty_like",
    "midlayer_encoders/models/hub.py:_query_hub",  # the error that follows names the cause
    "midlayer_encoders/models/hub.py:offline_cause",
    "callbacks/_settings.py:_make_views_ahead",  # the run calls it again
}


# --- the tests -------------------------------------------------------------------------------------------------------


def is_broad(node: ast.AST) -> bool:
    """Return True for a handler that may swallow any error, and for ``suppress(Exception)``."""
    if isinstance(node, ast.ExceptHandler):
        names = {"BaseException"} if node.type is None else {getattr(x, "id", "") for x in ast.walk(node.type)}
        return bool(names & {"Exception", "BaseException"}) and not isinstance(node.body[-1], ast.Raise)
    is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "suppress"
    return is_call and any(getattr(argument, "id", "") in ("Exception", "BaseException") for argument in node.args)  # type: ignore[attr-defined]


def broad_handlers() -> Iterator[str]:
    """Yield the file and function of every broad handler."""
    for path in sorted(path for room in ("midlayer_encoders", "callbacks") for path in ROOT.glob(f"{room}/**/*.py")):
        source = path.read_text(encoding="utf8")
        tree = ast.parse(source if "Exception" in source or "except:" in source else "")
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for handler in filter(is_broad, ast.walk(tree)):
            around = [each for each in functions if each.lineno <= handler.lineno <= (each.end_lineno or 0)]  # type: ignore[attr-defined]
            yield f"{path.relative_to(ROOT).as_posix()}:{around[-1].name if around else 'module'}"


def test_every_broad_handler_is_in_a_list() -> None:
    assert set(broad_handlers()) == PLACES.keys() | HARMLESS


CASES = [
    (place, error)
    for place, (_, others) in PLACES.items()
    for error in (*STOPS, *others)
    if not (place in NOT_RAISED and isinstance(error, FATAL))
]


@pytest.mark.parametrize(("place", "error"), CASES, ids=lambda value: str(value).rpartition("/")[2] or repr(value))
def test_error_comes_out_of_the_place(
    place: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise copy(error)  # each test gets its own traceback

    fail.error = error  # type: ignore[attr-defined]
    with pytest.raises(type(error)) as raised:
        PLACES[place][0](fail, tmp_path, monkeypatch)
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)


@pytest.mark.parametrize("error", [*STOPS, *DISK, *MEMORY], ids=repr)
def test_error_while_files_are_opened_is_raised(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise copy(error)

    with pytest.raises(type(error)) as raised:
        load_encoder(fail, tmp_path, monkeypatch)
    assert str(raised.value) == str(error)


def test_other_error_while_files_are_opened_names_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ORDINARY

    with pytest.raises(CutError, match=f"{tmp_path.name} cannot be built.*ValueError: made"):
        load_encoder(fail, tmp_path, monkeypatch)


@pytest.mark.parametrize("place", [place for place, (_, others) in PLACES.items() if ORDINARY not in others])
def test_other_errors_stay_in_the_place(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ORDINARY

    if place.endswith(":read_artifact"):
        assert read_artifact(tmp_path, fail) is None
    else:
        assert "made" in str(PLACES[place][0](fail, tmp_path, monkeypatch))
