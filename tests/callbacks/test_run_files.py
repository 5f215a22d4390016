"""The steps at which a run is measured, also with accumulation, and the contents of its logs, file and figures."""

import io
import shlex
import threading
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from PIL import Image

from midlayer_encoders.callbacks import LayerMetricsCallback, LayerMetricsTrainerCallback
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.metrics import curvature
from midlayer_encoders.report.training_page import plot_steps_curves
from tests.callbacks.oracles import TEXTS, TrainerWeights, Weights
from tests.callbacks.test_trainer import make_trainer
from tests.callbacks.test_values import states_by_hand
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, Shapes, fit, neox

pytestmark = ADVICE

CADENCES: dict[str, tuple[Any, list[int]]] = {
    "number": (3, [0, 3, 5]),
    "list": ([4, 1], [1, 4, 5]),
    "powers": ("log2", [0, 5]),
    "once": ([5], [5]),
    "later": ([99], [5]),  # only the last step
}


def by_hand(weights: dict[str, torch.Tensor]) -> list[float]:
    model = neox()
    model.load_state_dict(weights)
    texts = [text for text in TEXTS if len(text) > 2]
    states = states_by_hand(model, TOKENIZER(texts)["input_ids"])
    return [float(torch.stack([curvature(text[layer]) for text in states]).mean()) for layer in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_steps_are_optimizer_steps_with_the_values_of_their_weights(library: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"metrics": "curvature", "figures": False, "strict": True}
    callbacks: Any
    weights: Any
    if library == "lightning":
        callbacks = {
            name: LayerMetricsCallback(TEXTS, TOKENIZER, every_n_steps=cadence, name=name, **common)
            for name, (cadence, _) in CADENCES.items()
        }
        weights, logger = Weights(), CSVLogger(tmp_path)
        fit(
            Boring(neox()),
            tmp_path,
            [weights, *callbacks.values()],
            max_steps=5,
            accumulate_grad_batches=2,
            logger=logger,
        )
        logged = polars.read_csv(Path(logger.log_dir) / "metrics.csv", infer_schema_length=None).rows(named=True)
        folder = Path(logger.log_dir)
    else:
        callbacks = {
            name: LayerMetricsTrainerCallback(TEXTS, every_n_steps=cadence, name=name, **common)
            for name, (cadence, _) in CADENCES.items()
        }
        weights, folder = TrainerWeights(), tmp_path
        hf_trainer = make_trainer(tmp_path, [weights, *callbacks.values()], max_steps=5, gradient_accumulation_steps=2)
        hf_trainer.train()
        logged = hf_trainer.state.log_history
    expected = {step: by_hand(weights.steps[step]) for step in range(6)}
    for name, (_, steps) in CADENCES.items():
        keys = [f"{name}/curvature/layer_{layer:02d}" for layer in range(4)]
        values = {row["step"]: [row[key] for key in keys] for row in logged if row.get(keys[0]) is not None}
        assert list(values) == steps
        for step in steps:
            assert values[step] == pytest.approx(expected[step], rel=1e-4)
        frame = polars.read_parquet(folder / name / "history.parquet")
        assert dict(frame.schema) == dict(FRAME_SCHEMA)
        rows = [
            ("GPTNeoXForCausalLM", f"step{step}", layer, layer / 3, "metric", "probe", "curvature")
            for step in steps
            for layer in range(4)
        ]
        assert frame.drop("value").rows() == rows
        assert frame["value"].to_list() == pytest.approx([value for step in steps for value in values[step]])
        assert [list(row.items()) for row in callbacks[name].history] == [list(row.items()) for row in frame.to_dicts()]


def test_figures_show_the_complete_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common: dict[str, Any] = {"metrics": ["curvature"], "every_n_steps": 1, "strict": True}
    callbacks = [LayerMetricsCallback(TEXTS, TOKENIZER, dirpath=tmp_path / "drawn", **common)]
    callbacks += [LayerMetricsCallback(TEXTS, TOKENIZER, dirpath=tmp_path / "not", figures=False, name="b", **common)]
    fit(Boring(neox()), tmp_path, callbacks, max_steps=2, logger=False)
    buffer = io.BytesIO()
    plot_steps_curves(callbacks[0].frame).savefig(buffer, dpi=110, format="png")
    expected, actual = (np.asarray(Image.open(source)) for source in (buffer, tmp_path / "drawn" / "curves.png"))
    assert np.array_equal(expected, actual)
    assert [path.name for path in (tmp_path / "not").iterdir()] == ["history.parquet"]
    assert capsys.readouterr().out.splitlines() == [
        f"LayerMetricsCallback wrote to {shlex.quote(str(tmp_path / 'drawn'))}: history.parquet, curves.png, report.html"
    ]
    page = (tmp_path / "drawn" / "report.html").read_text()
    assert "<h1>Every layer while it learned</h1>" in page
    assert "Metrics by layer at step 2" in page


@pytest.mark.parametrize("metrics", [["curvature"], "paper"])
def test_page_of_a_run_with_one_measurement_is_written(metrics: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"metrics": metrics, "every_n_steps": [1], "dirpath": tmp_path, "strict": True}
    fit(Boring(neox()), tmp_path, [LayerMetricsCallback(TEXTS, TOKENIZER, **options)], max_steps=1, logger=False)
    assert "1 step" in (tmp_path / "report.html").read_text()


def test_run_does_not_wait_for_its_figures(tmp_path: Path) -> None:
    run_ended = threading.Event()

    class Late(LayerMetricsCallback):
        def _draw_frame(self, *args: Any) -> None:
            assert run_ended.wait(60)
            super()._draw_frame(*args)

    callback = Late(TEXTS, TOKENIZER, metrics=["curvature"], every_n_steps=1, dirpath=tmp_path)
    fit(Boring(neox()), tmp_path, [callback], max_steps=1, logger=False)
    assert not list(tmp_path.glob("*.png"))
    run_ended.set()
    fit(
        Boring(neox()), tmp_path, [callback], max_steps=1, logger=False
    )  # the next run waits for the figures of the previous one
    assert {path.name for path in tmp_path.glob("*.png")} == {"curves.png"}
    assert callback._drawing is not None
    callback._drawing.join()


def test_history_file_is_complete_after_every_measurement(tmp_path: Path) -> None:
    class Killed(Weights):
        def on_train_batch_end(self, make_trainer: Any, *_: Any) -> None:
            history = polars.read_parquet(tmp_path / "history.parquet")
            assert history["revision"].unique(maintain_order=True).to_list() == [f"step{k}" for k in range(make_trainer.global_step + 1)]  # fmt: skip
            if make_trainer.global_step == 2:
                raise RuntimeError("killed")

    callback = LayerMetricsCallback(
        TEXTS, TOKENIZER, metrics=["curvature"], every_n_steps=1, dirpath=tmp_path, strict=True
    )
    with pytest.raises(RuntimeError, match="killed"):
        fit(Boring(neox()), tmp_path, [callback, Killed()], logger=False)
    assert len(polars.read_parquet(tmp_path / "history.parquet")) == 3 * 4
    assert [path.name for path in tmp_path.glob("history*")] == ["history.parquet"]


def test_inputs_are_fixed_when_the_run_starts(tmp_path: Path) -> None:
    """Inputs that change during a run would make its steps incomparable."""
    rows = torch.randint(4, 90, (6, 9), generator=torch.Generator().manual_seed(0))
    batches = [rows]

    class Changes(Weights):
        def on_train_batch_end(self, *_: Any) -> None:
            batches[0].fill_(5)

    callback = LayerMetricsCallback(batches, metrics=["curvature"], every_n_steps=1, figures=False, strict=True)
    fit(Boring(neox()), tmp_path / "a", [Changes(), callback], max_steps=2)
    rows = torch.randint(4, 90, (6, 9), generator=torch.Generator().manual_seed(0))
    reference = LayerMetricsCallback([rows], metrics=["curvature"], every_n_steps=1, figures=False, strict=True)
    fit(Boring(neox()), tmp_path / "b", [reference], max_steps=2)
    assert callback.frame.equals(reference.frame)


def test_texts_and_views_within_the_budget_are_read_in_one_pass(tmp_path: Path) -> None:
    callback = LayerMetricsCallback(TEXTS, TOKENIZER, metrics="paper", every_n_steps=[1], figures=False, strict=True)
    module = Shapes(neox())
    fit(module, tmp_path, [callback], max_steps=1)
    assert [rows for rows, _ in module.shapes] == [3 * len(TEXTS)]


def test_no_batch_holds_more_tokens_than_the_budget(tmp_path: Path) -> None:
    callback = LayerMetricsCallback(
        TEXTS, TOKENIZER, metrics="infonce", token_budget=100, every_n_steps=[1], figures=False, strict=True
    )
    module = Shapes(neox())
    fit(module, tmp_path, [callback], max_steps=1)
    shapes = module.shapes
    assert sum(rows for rows, _ in shapes) == 3 * len(TEXTS)  # the texts and two views
    assert max(rows * tokens for rows, tokens in shapes) <= 100
    assert max(rows for rows, _ in shapes) > 1
