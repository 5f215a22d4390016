"""A run resumed with other settings begins a new history: no history has values measured with different settings."""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import polars
import pytest
import torch

from midlayer_encoders.callbacks import LastLayerDecline, LayerMetricsCallback, LayerMetricsTrainerCallback
from tests.callbacks.oracles import TEXTS, VIEWS
from tests.callbacks.test_trainer import llama, make_trainer
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, fit, neox
from tests.support.families import VOCAB

pytestmark = ADVICE

LABELS = [0, 1] * 6
BASE = {
    "metrics": ["prompt_entropy", "block_influence", "dataset_entropy", "infonce", "lidar", "alignment"], "labels": LABELS,
    "every_n_steps": 2, "figures": False, "strict": True,
}  # fmt: skip
CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    # name: the change, and the settings in the warning if the values before it are then incompatible
    "nothing": ({}, ""),
    "texts": ({"texts": [*TEXTS[:-1], "it rained"]}, "inputs"),
    "order": ({"texts": TEXTS[::-1]}, "inputs"),
    "metrics": ({"metrics": ["curvature", "prompt_entropy"]}, "metrics, inputs"),
    "layers": ({"layers": [0, 2]}, "layers"),
    "other_layers": ({"layers": [-1, -2, 1, 0]}, ""),  # the same layers in another form
    "norm": ({"norm": "final"}, "norm"),
    "pooling": ({"pooling": "last"}, "pooling"),
    "views": ({"views": 3}, "inputs"),
    "given_views": ({"views": VIEWS}, "inputs"),
    "seed": ({"seed": 1}, "seed, inputs"),
    "max_length": ({"max_length": 20}, "inputs"),
    "labels": ({"labels": [0, 0, 1] * 4}, "labels"),
    "renamed_labels": ({"labels": ["no", "yes"] * 6}, ""),
    "cadence": ({"every_n_steps": 3}, ""),
    "budget": ({"token_budget": 40}, ""),
}


DIGESTED = {"tokenizer", "max_inputs"}  # part of the digest of the inputs
PLACES = {"module", "blocks"}  # another module has its own test
WITHOUT_EFFECT = {"figures", "strict", "dirpath", "name"}  # on the values


def test_every_argument_is_covered_or_has_no_effect() -> None:
    changed_arguments = {name for options, _ in CHANGED.values() for name in options} - {"texts"} | {
        "texts_or_dataloader"
    }
    all_arguments = set(inspect.signature(LayerMetricsCallback).parameters)
    assert all_arguments == changed_arguments | DIGESTED | PLACES | WITHOUT_EFFECT


def make_changed(callback_class: Any, name: str, **extra: Any) -> Any:
    options = {**BASE, "texts": TEXTS, **CHANGED[name][0], **extra}
    return callback_class(options.pop("texts"), TOKENIZER, name=name, **options)


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the package's warnings."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logging.getLogger("midlayer_encoders").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("midlayer_encoders").removeHandler(handler)


def resume_in_lightning(folder: Path) -> Any:
    """Return the callbacks of a resumed run and of a run with the changed settings from the start, and warnings."""
    rows = torch.randint(4, VOCAB, (8, 12), generator=torch.Generator().manual_seed(0))  # an epoch is 2 steps
    common: dict[str, Any] = {"rows": rows, "shuffle": False, "logger": False, "max_steps": 3}

    def make_all(folder_name: str) -> list[Any]:
        return [make_changed(LayerMetricsCallback, name, dirpath=folder / folder_name / name) for name in CHANGED]

    uninterrupted, resumed = make_all("whole"), make_all("resumed")
    fit(Boring(neox(dropout=0.0)), folder, uninterrupted, **common)
    base = make_changed(LayerMetricsCallback, "nothing", dirpath=folder / "before")
    _, stopped = fit(Boring(neox(dropout=0.0)), folder, [base], **{**common, "max_steps": 2})
    stopped.save_checkpoint(folder / "before.ckpt")
    checkpoint = torch.load(folder / "before.ckpt", weights_only=True)
    checkpoint["callbacks"] = {callback.state_key: checkpoint["callbacks"][base.state_key] for callback in resumed}
    torch.save(checkpoint, folder / "before.ckpt")
    with collect_warnings() as warned:
        fit(Boring(neox(dropout=0.0, seed=4)), folder, resumed, ckpt=str(folder / "before.ckpt"), **common)
    return resumed, uninterrupted, warned, folder / "resumed"


def resume_in_transformers(folder: Path) -> Any:
    saving = {"save_strategy": "steps", "save_steps": 2}

    uninterrupted, resumed = ([make_changed(LayerMetricsTrainerCallback, name) for name in CHANGED] for _ in range(2))
    make_trainer(folder / "whole", uninterrupted, model=llama(), max_steps=3).train()
    base = make_changed(LayerMetricsTrainerCallback, "nothing")
    make_trainer(folder / "run", [base], model=llama(), max_steps=3, **saving).train()
    for name in list(CHANGED)[1:]:
        copytree(folder / "run" / "nothing", folder / "run" / name)
    with collect_warnings() as warned:
        resumed_trainer = make_trainer(folder / "run", resumed, model=llama(seed=5), max_steps=3, **saving)
        resumed_trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    return resumed, uninterrupted, warned, folder / "run"


@pytest.fixture(
    scope="module",
    params=[resume_in_lightning, pytest.param(resume_in_transformers, marks=pytest.mark.slow)],
    ids=["lightning", "transformers"],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    resumed, uninterrupted, warned, folder = request.param(tmp_path_factory.mktemp("resume"))
    return {a.name: (a.frame, b.frame) for a, b in zip(resumed, uninterrupted, strict=True)}, warned, folder


def frame_values(frame: polars.DataFrame) -> dict[tuple[str, str, int], float]:
    return {(name, step, layer): value for step, name, layer, value in frame.select("revision", "name", "layer", "value").rows()}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_resumed_history_has_only_values_of_the_current_settings(runs: Any, name: str) -> None:
    frames, warned, folder = runs
    settings = CHANGED[name][1]
    resumed, expected = map(frame_values, frames[name])
    before = frame_values(frames["nothing"][1])
    for key, value in resumed.items():
        assert value == pytest.approx(expected.get(key, before.get(key)), rel=1e-6), key
    missing = {key for key in expected if key not in resumed}
    assert {key[1] for key in missing} == ({"step0"} if settings else set())  # the checkpoint's step is measured again
    assert not settings or {key[1] for key in resumed} == {"step2", "step3"}
    own_warnings = [message for message in warned if message.startswith(f"{name}:")]
    assert [message.rpartition(": ")[2] for message in own_warnings] == ([f"{settings}."] if settings else [])
    saved = polars.read_parquet(folder / name / "history.parquet")
    assert saved.equals(frames[name][0])
    if name == "cadence":  # a step that is no longer due was measured
        assert {key[1] for key in resumed} == {f"step{step}" for step in (0, 2, 3)}


def test_replaced_history_file_of_a_resumed_trainer_is_kept(runs: Any) -> None:
    _, _, folder = runs
    if folder.name != "run":
        pytest.skip("Lightning's checkpoint keeps it")
    backups = {path.parent.name for path in folder.rglob("history-before-step2.parquet")}
    assert backups == {name for name, (_, settings) in CHANGED.items() if settings}
    backup = polars.read_parquet(folder / "norm" / "history-before-step2.parquet")
    assert set(backup["revision"]) == {"step0", "step2", "step3"}


@pytest.mark.slow
def test_history_without_settings_is_not_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"metrics": ["curvature"], "every_n_steps": 1, "figures": False, "strict": True}
    saving = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(
        tmp_path / "a", [LayerMetricsTrainerCallback(TEXTS, **options)], model=llama(), max_steps=2, **saving
    ).train()
    copytree(tmp_path / "a", tmp_path / "b")
    for name in "ab":
        file = tmp_path / name / "midlayer" / "history.parquet"
        if name == "b":
            polars.read_parquet(file).write_parquet(file)
        callback = LayerMetricsTrainerCallback(TEXTS, **options)
        with collect_warnings() as warned:
            resumed_trainer = make_trainer(tmp_path / name, [callback], model=llama(), max_steps=3, **saving)
            resumed_trainer.train(resume_from_checkpoint=True)
        steps = set(callback.frame["revision"])
        assert steps == {"step2", "step3"} | ({"step0", "step1"} if name == "a" else set())
        assert len(warned) == (name == "b")


def test_another_transformer_of_the_module_starts_a_new_history(tmp_path: Path) -> None:
    class Two(Boring):
        def __init__(self) -> None:
            super().__init__(neox(dropout=0.0))
            self.teacher = neox(seed=9)

    def make_callback(module: str) -> LayerMetricsCallback:
        options: dict[str, Any] = {"metrics": ["curvature"], "every_n_steps": 1, "dirpath": tmp_path}
        return LayerMetricsCallback(TEXTS, TOKENIZER, module=module, figures=False, strict=True, **options)

    _, stopped = fit(Two(), tmp_path, [make_callback("backbone")], max_steps=1, logger=False)
    stopped.save_checkpoint(tmp_path / "a.ckpt")
    after = make_callback("teacher")
    with collect_warnings() as warned:
        fit(Two(), tmp_path, [after], max_steps=2, logger=False, ckpt=str(tmp_path / "a.ckpt"))
    assert set(after.frame["revision"]) == {"step1", "step2"}
    assert warned == ["midlayer: a new history begins, because the previous run measured with other settings: module."]


def test_final_step_that_is_not_due_is_dropped_when_resumed(tmp_path: Path) -> None:
    def train(cadence: Any, steps: int, ckpt: str | None = None) -> tuple[list[str], str]:
        options: dict[str, Any] = {"metrics": ["curvature"], "figures": False, "strict": True, "dirpath": tmp_path}
        callback = LayerMetricsCallback(TEXTS, TOKENIZER, every_n_steps=cadence, **options)
        _, pl_trainer = fit(Boring(neox()), tmp_path, [callback], max_steps=steps, logger=False, ckpt=ckpt)
        path = str(tmp_path / f"{steps}.ckpt")
        pl_trainer.save_checkpoint(path)
        return callback.frame["revision"].unique(maintain_order=True).to_list(), path

    first, path = train(2, 3)
    assert first == ["step0", "step2", "step3"]
    second, path = train(4, 6, path)
    assert second == ["step0", "step2", "step4", "step6"]  # 3 was the last step, now 6 is
    third, _ = train(3, 7, path)
    assert third == ["step0", "step2", "step4", "step6", "step7"]  # 6 is due now


def test_event_before_a_resume_is_not_reported_again(tmp_path: Path) -> None:
    class Collapses(Boring):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 2:
                with torch.no_grad():
                    self.backbone.gpt_neox.embed_in.weight[:] = torch.linspace(-1e4, 1e4, 99)[:, None]

    def watch() -> LastLayerDecline:
        options: dict[str, Any] = {"every_n_steps": 1, "on_decline": "stop", "dirpath": tmp_path, "strict": True}
        return LastLayerDecline(TEXTS, TOKENIZER, figures=False, **options)

    first, second = watch(), watch()
    first_trace, stopped = fit(Collapses(neox(dropout=0.0)), tmp_path, [first], max_steps=6, logger=False)
    stopped.save_checkpoint(tmp_path / "stopped.ckpt")
    second_trace, _ = fit(
        Collapses(neox(dropout=0.0)), tmp_path, [second], max_steps=6, logger=False, ckpt=str(tmp_path / "stopped.ckpt")
    )
    assert (first_trace.step, second_trace.step) == (3, 6)
    assert first.events == second.events


@pytest.mark.parametrize("content", [b"", b"PAR1 and half of it"])
def test_torn_history_is_set_aside_and_the_run_continues(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.parquet"
    path.write_bytes(content)
    callback = LayerMetricsTrainerCallback(TEXTS, TOKENIZER, metrics=["curvature"], dirpath=tmp_path, strict=True)
    callback._prepare(neox())
    callback._resume_from(path, 4)
    assert callback.history == []
    assert path.with_name("history.parquet.broken").read_bytes() == content
    assert f"{path} could not be read" in caplog.text
