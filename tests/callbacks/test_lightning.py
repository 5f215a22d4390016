"""The Lightning callbacks log correct values and do not change the run."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import polars as pl_frames
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from midlayer_encoders.callbacks import LastLayerDecline, LayerMetricsCallback
from midlayer_encoders.errors import AnatomyError, MidlayerError, OptionError
from tests.callbacks.training import ADVICE, INPUTS, TOKENIZER, Boring, Stack, assert_same, fit, neox

pytestmark = ADVICE

CHEAP = ["prompt_entropy", "dataset_entropy", "infonce"]


def make_callback(**options: Any) -> LayerMetricsCallback:
    return LayerMetricsCallback(INPUTS, TOKENIZER, **{"metrics": CHEAP, "figures": False, "strict": True, **options})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.slow),
        {"accumulate_grad_batches": 2, "num_sanity_val_steps": 1},
        pytest.param({"gradient_clip_val": 0.1}, marks=pytest.mark.slow),
    ],
    ids=["plain", "bf16", "accumulation and sanity check", "clipping"],
)
def test_run_is_bitwise_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    without, _ = fit(Boring(neox()), tmp_path / "a", [], **options)
    callback = make_callback(every_n_steps=3)
    with_callback, _ = fit(
        Boring(neox()), tmp_path / "b", [callback, LastLayerDecline(INPUTS, TOKENIZER, strict=True)], **options
    )
    assert_same(without, with_callback)
    assert len(set(callback.frame["revision"])) == 4  # steps 0, 3, 6 and 9


def test_run_with_batch_norm_is_the_same(tmp_path: Path) -> None:
    rows = torch.randn(32, 4, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(rows[:8] + 1, 4)
    without, _ = fit(Boring(Stack()), tmp_path / "a", [], rows=rows)
    callback = LayerMetricsCallback(
        loader, module="backbone", blocks="steps", metrics=["prompt_entropy", "lidar"], views=[loader, loader],
        figures=False, strict=True,
    )  # fmt: skip
    with_callback, _ = fit(Boring(Stack()), tmp_path / "b", [callback], rows=rows)
    assert_same(without, with_callback)
    assert set(callback.frame["name"]) == {"prompt_entropy", "lidar"}


def test_frozen_module_stays_in_eval_mode(tmp_path: Path) -> None:
    class Frozen(Boring):
        def on_train_start(self) -> None:
            self.backbone.gpt_neox.layers[0].eval()

    without, _ = fit(Frozen(neox()), tmp_path / "a", [])
    with_callback, _ = fit(Frozen(neox()), tmp_path / "b", [make_callback(every_n_steps=2)])
    assert_same(without, with_callback)
    assert without.modes.count(False) > 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["plain", "GPTNeoX"])
def test_compiled_module_is_not_recompiled(family: str, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    rows = torch.randn(32, 4, 8, generator=torch.Generator().manual_seed(0)) if family == "plain" else None
    callback = (
        make_callback(every_n_steps=2)
        if rows is None
        else LayerMetricsCallback([rows[:7]], module="backbone", blocks="steps", metrics=CHEAP[:1], strict=True)
    )
    graphs = []
    for callbacks in ([], [callback]):
        torch._dynamo.reset()
        counters.clear()
        backbone = neox() if rows is None else Stack()
        trace, _ = fit(Boring(backbone, compiled=True), tmp_path, callbacks, rows=rows)
        graphs.append((counters["stats"]["unique_graphs"], trace))
    assert graphs[0][0] == graphs[1][0] > 0
    assert_same(graphs[0][1], graphs[1][1])


def test_values_match_measure(tmp_path: Path) -> None:
    from midlayer_encoders import LayerEncoder, measure
    from midlayer_encoders.metrics.text_views import augment

    module = Boring(neox())
    callback = make_callback(metrics="paper", every_n_steps=[9])
    fit(module, tmp_path / "run", [callback])
    module.backbone.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    encoder = LayerEncoder(str(tmp_path / "model"), -1, norm="none", device="cpu")
    expected = measure(encoder, INPUTS, metrics="paper", views=augment(INPUTS, views=2))
    joined = callback.frame.join(expected, on=["name", "layer"], suffix="_expected")
    assert len(joined) == len(expected) == len(callback.frame)
    torch.testing.assert_close(
        torch.tensor(joined["value"]), torch.tensor(joined["value_expected"]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.long
def test_loggers_get_every_layer_at_the_exact_step(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    csv, board = CSVLogger(tmp_path), TensorBoardLogger(str(tmp_path), name="board")
    callback = make_callback(every_n_steps=3, figures=True)
    fit(Boring(neox()), tmp_path, [callback], logger=[csv, board], accumulate_grad_batches=2)
    logged = pl_frames.read_csv(Path(csv.log_dir) / "metrics.csv")
    key = "midlayer/prompt_entropy/layer_03"
    rows = logged.filter(pl_frames.col(key).is_not_null())
    assert rows["step"].to_list() == [0, 3, 6, 9]
    expected = callback.frame.filter((pl_frames.col("name") == "prompt_entropy") & (pl_frames.col("layer") == 3))
    assert rows[key].to_list() == pytest.approx(expected["value"].to_list())
    folder = Path(csv.log_dir) / "midlayer"
    assert {path.name for path in folder.iterdir()} == {"history.parquet", "curves.png", "report.html"}
    assert pl_frames.read_parquet(folder / "history.parquet").equals(callback.frame)
    event_bytes = b"".join(path.read_bytes() for path in Path(board.log_dir).glob("events*"))
    assert b"midlayer/infonce/layer_00" in event_bytes


class Killed(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 10:
            raise RuntimeError("killed")


@pytest.mark.slow
def test_killed_and_resumed_run_has_the_history_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def train(folder: str, callbacks: list[Any], **options: Any) -> None:
        # Lightning does not restore the generators of shuffling and dropout; an epoch has 8 steps.
        model = neox(dropout=0.0, seed=3 if "ckpt" in options else 0)
        fit(Boring(model), tmp_path / folder, callbacks, shuffle=False, max_steps=12, **options)

    uninterrupted, killed, resumed = (make_callback(every_n_steps=1) for _ in range(3))
    train("a", [uninterrupted])
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=8)
    with pytest.raises(RuntimeError, match="killed"):
        train("b", [killed, Killed(), saver], enable_checkpointing=True)
    assert len(set(killed.frame["revision"])) == 11  # steps 0 to 10; the checkpoint has 0 to 8
    train("c", [resumed], ckpt=str(next((tmp_path / "ckpt").glob("*step=8.ckpt"))))
    assert resumed.frame.equals(uninterrupted.frame)
    assert pl_frames.read_parquet(next((tmp_path / "c").rglob("history.parquet"))).equals(uninterrupted.frame)


def test_model_created_in_configure_model_is_found(tmp_path: Path) -> None:
    class Late(Boring):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def configure_model(self) -> None:
            self.backbone = self.run_backbone = neox()

    callback = make_callback(every_n_steps=[1])
    fit(Late(), tmp_path, [callback], max_steps=1)
    assert len(set(callback.frame["layer"])) == 4


class Two(Boring):
    def __init__(self) -> None:
        super().__init__(neox())
        self.teacher = neox()


@pytest.mark.parametrize(
    ("module", "make_invalid", "error", "message"),
    [
        (lambda: Boring(Stack()), make_callback, AnatomyError, "models are: none.*`blocks`.*'backbone.steps'"),
        (Two, make_callback, AnatomyError, "`module` must be .* models are: 'backbone' .*'teacher'"),
        (Two, lambda: make_callback(module="teachr"), AnatomyError, "but got 'teachr'.*'teacher'"),
        (None, lambda: LayerMetricsCallback(["a", "b"], TOKENIZER), OptionError, "at least 2 texts of 4 tokens"),
        (None, lambda: LayerMetricsCallback("a text", TOKENIZER), OptionError, "write `\\[text\\]`"),
        (None, lambda: LayerMetricsCallback([*INPUTS, 3], TOKENIZER), OptionError, r"`texts_or_dataloader\[8\]` must be a string"),
        (None, lambda: LayerMetricsCallback([], TOKENIZER), OptionError, "must hold at least one text, but got none"),
        (None, lambda: make_callback(labels=["a"] * 8), MidlayerError, "labels"),
        (None, lambda: LayerMetricsCallback(INPUTS), OptionError, "`tokenizer` must be given"),
        (None, lambda: make_callback(layers=[9]), MidlayerError, r"must be in \[0, 3\]"),
        (None, lambda: make_callback(views=[INPUTS]), OptionError, "must hold 2 lists of 8 texts"),
        (None, lambda: make_callback(views=[INPUTS, INPUTS[:2]]), OptionError, "must hold 2 lists of 8 texts"),
        (None, lambda: make_callback(labels=[0, 1]), OptionError, "one for each of the 8 inputs"),
        (None, lambda: LayerMetricsCallback([("x", "y")], metrics=CHEAP[:1]), OptionError, "dicts of tensors with 'input_ids'"),
        (None, lambda: LayerMetricsCallback([{"pixels": torch.ones(2, 4)}], metrics=CHEAP[:1]), OptionError, "it gave \\['pixels'\\]"),
        (None, lambda: LayerMetricsCallback([torch.ones(1, 4).long()], metrics=CHEAP[:1]), OptionError, "at least 2 inputs"),
        (None, lambda: LayerMetricsCallback([torch.ones(2, 4).long()]), OptionError, "`views` must hold 2 dataloaders"),
        (None, lambda: LayerMetricsCallback([torch.ones(2, 4).long()], metrics="alignment"), OptionError, "`views` must hold 1 dataloader.*Alignment"),
        (None, lambda: LayerMetricsCallback([torch.ones(2, 4).long()], metrics="alignment", views=[]), OptionError, "`views` must hold 1 dataloader"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_before_training(
    module: Any, make_invalid: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    lightning_module = Boring(neox()) if module is None else module()
    with pytest.raises(error, match=message):
        fit(lightning_module, tmp_path, [make_invalid()])
    assert lightning_module.losses == []


def test_invalid_options_are_refused_in_the_constructor() -> None:
    with pytest.raises(MidlayerError, match="Did you mean"):
        make_callback(metrics=["prompt_entrpy"])
    with pytest.raises(OptionError, match=r"1 or more, .* but got 0"):
        make_callback(every_n_steps=0)
    with pytest.raises(MidlayerError, match="on_decline"):
        LastLayerDecline(INPUTS, TOKENIZER, on_decline="halt")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`patience`"):
        LastLayerDecline(INPUTS, TOKENIZER, patience=0)
    with pytest.raises(OptionError, match="no frame before the first run"):
        _ = make_callback().frame


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    larger = TOKENIZER.__class__(tokenizer_object=TOKENIZER.backend_tokenizer)
    larger.add_tokens(["one more"])
    with pytest.raises(OptionError, match="100 tokens and the embedding 99 rows"):
        fit(Boring(neox()), tmp_path, [LayerMetricsCallback(INPUTS, larger, metrics=CHEAP)])


def test_sharded_weights_are_refused(tmp_path: Path) -> None:
    class FSDPStrategy:  # building the real one needs a GPU
        pass

    class Trainer:
        strategy, loggers = FSDPStrategy(), [1]

    with pytest.raises(MidlayerError, match=r"but FSDPStrategy splits the weights.*FSDP2.*midlayer progression"):
        make_callback().setup(Trainer(), Boring(neox()), "fit")


class Failing(LayerMetricsCallback):
    """A measurement that fails after the second step, as if out of memory."""

    def _measure(self, root: nn.Module, step: int, *given: Any) -> None:
        if step > 2 and self._measurement is not None:
            self._measurement.batches[0].inputs["input_ids"] = torch.full((8, 4), 10**6)
        super()._measure(root, step, *given)


@pytest.mark.parametrize("strict", [False, True])
def test_error_in_a_measurement_does_not_stop_the_run(
    strict: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(INPUTS, TOKENIZER, metrics=CHEAP[:2], every_n_steps=1, figures=False, strict=strict)
    if strict:
        with pytest.raises(IndexError):
            fit(Boring(neox()), tmp_path, [failing])
        return
    without, _ = fit(Boring(neox()), tmp_path / "a", [])
    with caplog.at_level(logging.ERROR, "midlayer_encoders"):
        with_callback, _ = fit(Boring(neox()), tmp_path / "b", [failing])
    assert_same(without, with_callback)
    assert set(failing.frame["revision"]) == {"step0", "step1", "step2"}
    (record,) = [log_record for log_record in caplog.records if log_record.name == "midlayer_encoders"]
    assert "failed at step 3; training continues" in record.getMessage()
    assert record.exc_info is not None


LABELS = [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
LABELLED = [f"{'good' if label else 'bad'} text {chr(97 + number)}" for number, label in enumerate(LABELS)]


@pytest.mark.parametrize("action", ["stop", "checkpoint"])
def test_collapse_stops_or_saves_the_run(action: Any, tmp_path: Path) -> None:
    class Collapses(Boring):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 3:
                with torch.no_grad():
                    line = torch.linspace(-1e4, 1e4, 99)[:, None]
                    self.backbone.gpt_neox.embed_in.weight[:] = line  # all tokens on one line

    watch = LastLayerDecline(INPUTS, TOKENIZER, every_n_steps=1, on_decline=action, strict=True, figures=False)
    trace, _ = fit(Collapses(neox(dropout=0.0)), tmp_path, [watch])
    assert len(watch.events) == 1
    assert "the entropy of layer 0 collapsed" in watch.events[0]
    assert (trace.step < 9) == (action == "stop")
    assert bool(list(tmp_path.rglob("decline-step*.ckpt"))) == (action == "checkpoint")


def test_nonfinite_states_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Diverges(Boring):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 3:
                with torch.no_grad():
                    self.backbone.gpt_neox.layers[1].mlp.dense_4h_to_h.bias[:] = float("nan")

    watch = LastLayerDecline(LABELLED, TOKENIZER, labels=LABELS, every_n_steps=1, on_decline="stop", figures=False)
    trace, _ = fit(Diverges(neox()), tmp_path, [watch])
    assert trace.step <= 5
    assert "hold NaN or infinity" in watch.events[0]
    assert set(watch.frame["name"]) == {"prompt_entropy", "label_accuracy"}


def test_decline_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = LastLayerDecline(
        LABELLED, TOKENIZER, labels=LABELS, every_n_steps=1, patience=1, figures=False, strict=True
    )
    fit(Boring(neox()), tmp_path, [watch], max_steps=1)
    assert watch._measurement is not None
    steps = watch._steps
    entropy = steps.pop(0)["prompt_entropy"]
    steps.clear()
    steps[10] = {"prompt_entropy": entropy, "label_accuracy": dict(enumerate([0.1, 0.1, 0.1, 1.0]))}
    steps[20] = {"prompt_entropy": entropy, "label_accuracy": dict(enumerate([0.1, 0.9, 0.1, 0.2]))}
    with caplog.at_level(logging.WARNING, "midlayer_encoders"):
        assert watch._warn_of_events(20)
        assert not watch._warn_of_events(20)
    assert "while layer 1 rose from 0.100 to 0.900" in caplog.text


def test_two_callbacks_keep_their_own_history(tmp_path: Path) -> None:
    first, second = make_callback(every_n_steps=2), make_callback(every_n_steps=3, name="other")
    _, trainer = fit(Boring(neox()), tmp_path, [first, second], max_steps=6)
    trainer.save_checkpoint(tmp_path / "both.ckpt")
    saved = torch.load(tmp_path / "both.ckpt", weights_only=True)["callbacks"]
    saved_steps = {key: sorted(state["steps"]) for key, state in saved.items() if "LayerMetrics" in key}
    assert saved_steps == {"LayerMetricsCallback[midlayer]": [0, 2, 4, 6], "LayerMetricsCallback[other]": [0, 3, 6]}


def test_second_run_starts_a_new_history(tmp_path: Path) -> None:
    reused = make_callback(every_n_steps=1)
    fit(Boring(neox()), tmp_path / "a", [reused], max_steps=4)
    fit(Boring(neox(seed=1)), tmp_path / "b", [reused], max_steps=2)
    fresh = make_callback(every_n_steps=1)
    fit(Boring(neox(seed=1)), tmp_path / "c", [fresh], max_steps=2)
    assert reused.frame.equals(fresh.frame)


def test_callback_works_with_pytorch_lightning(tmp_path: Path) -> None:
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = neox()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.backbone(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = make_callback(dirpath=tmp_path, every_n_steps=2)
    trainer = pytorch_lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, callbacks=[callback], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Other(), DataLoader(torch.randint(4, 90, (8, 8)), 4))
    assert set(callback.frame["revision"]) == {"step0", "step2"}
