"""A run that is resumed with another setting: no name of its history holds values that were measured in two ways."""

from __future__ import annotations

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
from tests.callbacks.test_trainer import llama, trainer
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, fit, neox
from tests.families import VOCAB

pytestmark = ADVICE

LABELS = [0, 1] * 6
BASE = {
    "metrics": ["prompt_entropy", "block_influence", "dataset_entropy", "infonce", "lidar"], "labels": LABELS,
    "every_n_steps": 2, "figures": False, "strict": True,
}  # fmt: skip
NAMES = {*BASE["metrics"], "label_accuracy"}  # type: ignore[misc]
VECTORS = {"dataset_entropy", "infonce", "lidar", "label_accuracy"}
CHANGED: dict[str, tuple[dict[str, Any], set[str], str]] = {
    # name: what changes, whose values of the run before are then of another kind, and what the warning calls it
    "nothing": ({}, set(), ""),
    "texts": ({"texts": [*TEXTS[:-1], "it rained"]}, NAMES, "inputs"),
    "order": ({"texts": TEXTS[::-1]}, NAMES, "inputs"),
    "metrics": ({"metrics": ["curvature", "prompt_entropy"]}, set(), ""),
    "layers": ({"layers": [0, 2]}, {"block_influence"}, "layers"),
    "other_layers": ({"layers": [-1, -2, 1, 0]}, set(), ""),  # the same in other words
    "norm": ({"norm": "final"}, VECTORS, "norm"),
    "pooling": ({"pooling": "last"}, VECTORS, "pooling"),
    "views": ({"views": 3}, {"lidar"}, "views"),
    "given_views": ({"views": VIEWS}, {"infonce", "lidar"}, "views"),
    "seed": ({"seed": 1}, {"infonce", "lidar", "label_accuracy"}, "seed"),
    "max_length": ({"max_length": 20}, NAMES, "inputs"),
    "labels": ({"labels": [0, 0, 1] * 4}, {"label_accuracy"}, "labels"),
    "renamed_labels": ({"labels": ["no", "yes"] * 6}, set(), ""),
    "cadence": ({"every_n_steps": 3}, set(), ""),
    "budget": ({"token_budget": 40}, set(), ""),
}


DIGESTED = {"tokenizer", "max_inputs"}  # seen in the digest of the inputs
PLACES = {"module", "blocks"}  # another module has a test of its own
WITHOUT_EFFECT = {"figures", "strict", "dirpath", "name"}  # on any value


def test_every_argument_is_changed_here_or_has_no_effect_on_a_value() -> None:
    given = {name for options, _, _ in CHANGED.values() for name in options} - {"texts"} | {"texts_or_dataloader"}
    known = set(inspect.signature(LayerMetricsCallback).parameters)
    assert known == given | DIGESTED | PLACES | WITHOUT_EFFECT


def changed(kind: Any, name: str, **more: Any) -> Any:
    options = {**BASE, "texts": TEXTS, **CHANGED[name][0], **more}
    return kind(options.pop("texts"), TOKENIZER, name=name, **options)


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Collect what the package warns of."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("midlayer_encoders").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("midlayer_encoders").removeHandler(handler)


def in_lightning(folder: Path) -> Any:
    """Return the callbacks of a resumed run and of one that had the changed settings from the start, and warnings."""
    rows = torch.randint(4, VOCAB, (8, 12), generator=torch.Generator().manual_seed(0))  # an epoch is 2 steps
    common: dict[str, Any] = {"rows": rows, "shuffle": False, "logger": False, "max_steps": 3}

    def made(where: str) -> list[Any]:
        return [changed(LayerMetricsCallback, name, dirpath=folder / where / name) for name in CHANGED]

    whole, resumed = made("whole"), made("resumed")
    fit(Boring(neox(dropout=0.0)), folder, whole, **common)
    base = changed(LayerMetricsCallback, "nothing", dirpath=folder / "before")
    _, stopped = fit(Boring(neox(dropout=0.0)), folder, [base], **{**common, "max_steps": 2})
    stopped.save_checkpoint(folder / "before.ckpt")
    checkpoint = torch.load(folder / "before.ckpt", weights_only=True)
    checkpoint["callbacks"] = {each.state_key: checkpoint["callbacks"][base.state_key] for each in resumed}
    torch.save(checkpoint, folder / "before.ckpt")
    with warnings() as warned:
        fit(Boring(neox(dropout=0.0, seed=4)), folder, resumed, ckpt=str(folder / "before.ckpt"), **common)
    return resumed, whole, warned, folder / "resumed"


def in_transformers(folder: Path) -> Any:
    saving = {"save_strategy": "steps", "save_steps": 2}

    whole, resumed = ([changed(LayerMetricsTrainerCallback, name) for name in CHANGED] for _ in range(2))
    trainer(folder / "whole", whole, model=llama(), max_steps=3).train()
    base = changed(LayerMetricsTrainerCallback, "nothing")
    trainer(folder / "run", [base], model=llama(), max_steps=3, **saving).train()
    for name in list(CHANGED)[1:]:
        copytree(folder / "run" / "nothing", folder / "run" / name)
    with warnings() as warned:
        again = trainer(folder / "run", resumed, model=llama(seed=5), max_steps=3, **saving)
        again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    return resumed, whole, warned, folder / "run"


@pytest.fixture(
    scope="module",
    params=[in_lightning, pytest.param(in_transformers, marks=pytest.mark.slow)],
    ids=["lightning", "transformers"],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    resumed, whole, warned, folder = request.param(tmp_path_factory.mktemp("resume"))
    return {a.name: (a.frame, b.frame) for a, b in zip(resumed, whole, strict=True)}, warned, folder


def values(frame: polars.DataFrame) -> dict[tuple[str, str, int], float]:
    return {(name, step, layer): value for step, name, layer, value in frame.select("revision", "name", "layer", "value").rows()}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_resumed_history_holds_only_what_is_measured_as_it_is_now(runs: Any, name: str) -> None:
    frames, warned, folder = runs
    _, others, word = CHANGED[name]
    found, wanted = map(values, frames[name])
    before = values(frames["nothing"][1])
    # What is still measured is as if it had always been measured so; what is not any more is what it was.
    for key, value in found.items():
        assert value == pytest.approx(wanted.get(key, before.get(key)), rel=1e-6), key
    assert {key for key in found if key[0] in others and key[1] == "step0"} == set()
    assert {key[2] for key in found} == {key[2] for key in wanted}
    lost = {key for key in wanted if key not in found}
    new = {"curvature"} if name == "metrics" else set()
    assert {key[0] for key in lost} == others | new
    assert {key[1] for key in lost} <= {"step0"}  # the checkpoint's own step is measured again
    mine = [words for words in warned if words.startswith(f"{name}:")]
    assert len(mine) == bool(others)
    assert all(other in mine[0] for other in others)
    assert word in "".join(mine)
    kept = polars.read_parquet(folder / name / "history.parquet")
    assert kept.equals(frames[name][0])
    if name == "cadence":  # a step that is not due any more was measured all the same
        assert {key[1] for key in found} == {f"step{step}" for step in (0, 2, 3)}
    if name == "metrics":
        assert {key[1] for key in found if key[0] == "lidar"} == {"step0", "step2"}


def test_the_file_that_a_resumed_trainer_begins_anew_is_kept_beside_it(runs: Any) -> None:
    _, _, folder = runs
    if folder.name != "run":
        pytest.skip("Lightning's checkpoint keeps it")
    beside = {path.parent.name for path in folder.rglob("history-before-step2.parquet")}
    assert beside == {name for name, (_, others, _) in CHANGED.items() if others}
    kept = polars.read_parquet(folder / "norm" / "history-before-step2.parquet")
    assert set(kept["revision"]) == {"step0", "step2", "step3"}
    assert set(kept["name"]) == NAMES


@pytest.mark.slow
def test_a_file_or_checkpoint_without_settings_is_not_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"metrics": ["curvature"], "every_n_steps": 1, "figures": False, "strict": True}
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer(
        tmp_path / "a", [LayerMetricsTrainerCallback(TEXTS, **options)], model=llama(), max_steps=2, **saving
    ).train()
    copytree(tmp_path / "a", tmp_path / "b")
    for name in "ab":
        file = tmp_path / name / "midlayer" / "history.parquet"
        if name == "b":
            polars.read_parquet(file).write_parquet(file)
        seen = LayerMetricsTrainerCallback(TEXTS, **options)
        with warnings() as warned:
            again = trainer(tmp_path / name, [seen], model=llama(), max_steps=3, **saving)
            again.train(resume_from_checkpoint=True)
        steps = set(seen.frame["revision"])
        assert steps == {"step2", "step3"} | ({"step0", "step1"} if name == "a" else set())
        assert len(warned) == (name == "b")


def test_another_transformer_of_the_same_module_begins_anew(tmp_path: Path) -> None:
    class Two(Boring):
        def __init__(self) -> None:
            super().__init__(neox(dropout=0.0))
            self.teacher = neox(seed=9)

    def seen(module: str) -> LayerMetricsCallback:
        options: dict[str, Any] = {"metrics": ["curvature"], "every_n_steps": 1, "dirpath": tmp_path}
        return LayerMetricsCallback(TEXTS, TOKENIZER, module=module, figures=False, strict=True, **options)

    _, stopped = fit(Two(), tmp_path, [seen("backbone")], max_steps=1, logger=False)
    stopped.save_checkpoint(tmp_path / "a.ckpt")
    after = seen("teacher")
    with warnings() as warned:
        fit(Two(), tmp_path, [after], max_steps=2, logger=False, ckpt=str(tmp_path / "a.ckpt"))
    assert set(after.frame["revision"]) == {"step1", "step2"}
    assert warned == [
        "midlayer: the resumed history omits values that were measured with other settings: curvature (other module)."
    ]


@pytest.mark.parametrize(("then", "now"), [([0, 2], [0, 1, 2, 3]), ([1, 2], [0, 2])])
def test_layers_are_matched_by_their_number(then: list[int], now: list[int], tmp_path: Path) -> None:
    def train(layers: Any, steps: int, ckpt: str | None = None) -> dict[tuple[str, str, int], float]:
        options: dict[str, Any] = {"metrics": ["curvature"], "every_n_steps": 1, "figures": False, "strict": True}
        seen = LayerMetricsCallback(TEXTS, TOKENIZER, layers=layers, dirpath=tmp_path, **options)
        _, made = fit(Boring(neox(dropout=0.0)), tmp_path, [seen], max_steps=steps, logger=False, ckpt=ckpt)
        made.save_checkpoint(tmp_path / "a.ckpt")
        return values(seen.frame)

    every = train("all", 1)
    train(then, 1)
    resumed = train(now, 2, str(tmp_path / "a.ckpt"))
    before = {("curvature", "step0", layer) for layer in set(then) & set(now)}
    again = {("curvature", "step1", layer) for layer in now}  # of the checkpoint: measured in what was missing
    assert set(resumed) == before | again | {("curvature", "step2", layer) for layer in now}
    assert {key: resumed[key] for key in before | again} == {key: every[key] for key in before | again}


def test_an_end_that_was_not_due_is_no_part_of_the_run_that_goes_on(tmp_path: Path) -> None:
    def train(every: Any, steps: int, ckpt: str | None = None) -> tuple[list[str], str]:
        options: dict[str, Any] = {"metrics": ["curvature"], "figures": False, "strict": True, "dirpath": tmp_path}
        seen = LayerMetricsCallback(TEXTS, TOKENIZER, every_n_steps=every, **options)
        _, made = fit(Boring(neox()), tmp_path, [seen], max_steps=steps, logger=False, ckpt=ckpt)
        path = str(tmp_path / f"{steps}.ckpt")
        made.save_checkpoint(path)
        return seen.frame["revision"].unique(maintain_order=True).to_list(), path

    first, path = train(2, 3)
    assert first == ["step0", "step2", "step3"]
    second, path = train(4, 6, path)
    assert second == ["step0", "step2", "step4", "step6"]  # 3 was the end, 6 is
    third, _ = train(3, 7, path)
    assert third == ["step0", "step2", "step4", "step6", "step7"]  # 6 is due now


def test_what_was_found_before_a_resume_is_not_found_again(tmp_path: Path) -> None:
    class Collapses(Boring):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 2:
                with torch.no_grad():
                    self.backbone.gpt_neox.embed_in.weight[:] = torch.linspace(-1e4, 1e4, 99)[:, None]

    def watch() -> LastLayerDecline:
        options: dict[str, Any] = {"every_n_steps": 1, "on_decline": "stop", "dirpath": tmp_path, "strict": True}
        return LastLayerDecline(TEXTS, TOKENIZER, figures=False, **options)

    first, second = watch(), watch()
    found, stopped = fit(Collapses(neox(dropout=0.0)), tmp_path, [first], max_steps=6, logger=False)
    stopped.save_checkpoint(tmp_path / "stopped.ckpt")
    found_again, _ = fit(
        Collapses(neox(dropout=0.0)), tmp_path, [second], max_steps=6, logger=False, ckpt=str(tmp_path / "stopped.ckpt")
    )
    assert (found.step, found_again.step) == (3, 6)
    assert first.events == second.events


@pytest.mark.parametrize("content", [b"", b"PAR1 and half of it"])
def test_a_torn_history_is_set_aside_and_the_run_goes_on(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.parquet"
    path.write_bytes(content)
    seen = LayerMetricsTrainerCallback(TEXTS, TOKENIZER, metrics=["curvature"], dirpath=tmp_path, strict=True)
    seen._prepare(neox())
    seen._resume_from(path, 4)
    assert seen.history == []
    assert path.with_name("history.parquet.broken").read_bytes() == content
    assert f"{path} could not be read" in caplog.text
