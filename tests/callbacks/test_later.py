"""Measurements whose metrics a thread computes while training continues, as on a GPU."""

import logging
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import polars
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from midlayer_encoders.callbacks._measurement import Measurement
from midlayer_encoders.callbacks._recorder import read_state
from transformers import TrainerCallback

from midlayer_encoders.callbacks import (
    LastLayerDecline,
    LayerMetricsCallback,
    LayerMetricsTrainerCallback,
    _measurement,
)
from tests.callbacks.oracles import TEXTS
from tests.callbacks.test_trainer import make_trainer
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, assert_same, fit, neox

pytestmark = ADVICE

compute_metrics = _measurement.compute_metrics


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurement, "_computes_on_cpu", lambda *_: True)


@pytest.fixture
def gate(later: None, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Computations of metrics wait for this event."""
    opened = threading.Event()

    def wait(*given: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert opened.wait(60)
        return compute_metrics(*given)

    monkeypatch.setattr(_measurement, "compute_metrics", wait)
    return opened


class Opens(pl.Callback):
    """Opens the gate after a step, and keeps the measured steps at the end of each."""

    def __init__(self, gate: threading.Event, step: int, recorder: Any) -> None:
        self.gate, self.step, self.recorder = gate, step, recorder
        self.measured: dict[int, list[int]] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.measured[trainer.global_step] = sorted(self.recorder._steps)
        if trainer.global_step == self.step:
            self.gate.set()


@pytest.mark.long
@pytest.mark.parametrize("metrics", ["all", ["curvature", "infonce"], "effective_rank"])
def test_run_and_values_are_those_of_a_run_that_waits(
    metrics: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def callback(name: str) -> LayerMetricsCallback:
        return LayerMetricsCallback(
            TEXTS,
            TOKENIZER,
            metrics=metrics,
            labels=[0, 1] * 6,
            every_n_steps=2,
            dirpath=tmp_path / name,
            figures=False,
        )

    without, _ = fit(Boring(neox()), tmp_path, [], precision="bf16-mixed")
    waiting = callback("waiting")
    fit(Boring(neox()), tmp_path, [waiting], precision="bf16-mixed")

    def refuse(*_: Any, **__: Any) -> None:
        assert threading.current_thread() is threading.main_thread(), "a setting of all threads was changed"

    enter = torch.autocast.__enter__
    monkeypatch.setattr(torch, "set_float32_matmul_precision", refuse)
    monkeypatch.setattr(torch.autocast, "__enter__", lambda context: refuse() or enter(context))
    monkeypatch.setattr(Measurement, "_computes_on_cpu", lambda *_: True)
    computed = callback("computed later")
    run, _ = fit(Boring(neox()), tmp_path, [computed], precision="bf16-mixed")
    assert_same(run, without)
    assert not computed._warned
    assert computed.frame.equals(waiting.frame)
    files = [read_state(tmp_path / name / "history.parquet") for name in ("waiting", "computed later")]
    assert files[0] == files[1]


def test_training_continues_and_values_have_their_own_step(gate: threading.Event, tmp_path: Path) -> None:
    callback = LayerMetricsCallback(TEXTS, TOKENIZER, metrics="curvature", every_n_steps=[1, 5, 6], figures=False)
    opens, logger = Opens(gate, 4, callback), CSVLogger(tmp_path)
    fit(Boring(neox()), tmp_path, [opens, callback], max_steps=7, logger=logger)
    assert [opens.measured[step] for step in (1, 2, 3, 4)] == [[], [], [], []]
    assert opens.measured[6][:1] == [1]
    assert opens.measured[7][:2] == [1, 5]  # the measurement of step 6 waited for that of step 5
    logged = polars.read_csv(Path(logger.log_dir) / "metrics.csv", infer_schema_length=None)
    values = logged.filter(polars.col("midlayer/curvature/layer_00").is_not_null())
    assert values["step"].to_list() == [1, 5, 6, 7]


def test_checkpoint_contains_the_last_measurement(gate: threading.Event, tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                threading.Timer(0.2, gate.set).start()
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    callback = LayerMetricsCallback(TEXTS, TOKENIZER, metrics="curvature", every_n_steps=[2], figures=False)
    fit(Boring(neox()), tmp_path, [callback, Saves()], max_steps=3)
    state = torch.load(tmp_path / "saved.ckpt", weights_only=False)["callbacks"][callback.state_key]
    assert list(state["steps"]) == [2]


def test_interrupted_run_records_its_last_measurement(gate: threading.Event, tmp_path: Path) -> None:
    class Stops(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            gate.set()
            raise RuntimeError("interrupted")

    callback = LayerMetricsCallback(TEXTS, TOKENIZER, metrics="curvature", dirpath=tmp_path, figures=False)
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(Boring(neox()), tmp_path, [callback, Stops()])
    assert list(read_state(tmp_path / "history.parquet")["steps"]) == [0]


def test_trainer_saves_a_checkpoint_after_the_file_of_its_step(later: None, tmp_path: Path) -> None:
    saved: dict[int, list[int]] = {}

    class Saved(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved[state.global_step] = sorted(read_state(tmp_path / "midlayer" / "history.parquet")["steps"])

    callback = LayerMetricsTrainerCallback(TEXTS, metrics="curvature", every_n_steps=2, figures=False)
    hf_trainer = make_trainer(tmp_path, [callback, Saved()], max_steps=4, save_strategy="steps", save_steps=2)
    hf_trainer.train()
    assert saved == {2: [0, 2], 4: [0, 2, 4]}
    logged = [log["step"] for log in hf_trainer.state.log_history if "midlayer/curvature/layer_00" in log]
    assert logged == [0, 2, 4]


def test_trainer_values_have_their_own_step(gate: threading.Event, tmp_path: Path) -> None:
    measured: dict[int, list[int]] = {}

    class Watches(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert callback._measurement is not None
            measured[state.global_step] = sorted(callback._steps)
            if state.global_step == 3:
                gate.set()

    callback = LayerMetricsTrainerCallback(TEXTS, metrics="curvature", every_n_steps=[1], figures=False)
    hf_trainer = make_trainer(tmp_path, [callback, Watches()], max_steps=5)
    hf_trainer.train()
    assert measured[3] == []
    logged = [log["step"] for log in hf_trainer.state.log_history if "midlayer/curvature/layer_00" in log]
    assert logged == [1, 5]


@pytest.mark.parametrize("strict", [False, True])
def test_error_in_the_thread_is_that_of_the_measurement(
    strict: bool, later: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(_measurement, "compute_metrics", fail)
    callback = LayerMetricsCallback(TEXTS, TOKENIZER, metrics="curvature", figures=False, strict=strict)
    if strict:
        with pytest.raises(MemoryError, match="no memory"):
            fit(Boring(neox()), tmp_path, [callback])
        return
    with caplog.at_level(logging.ERROR, "midlayer_encoders"):
        fit(Boring(neox()), tmp_path, [callback])
    assert [record.message.split(";")[0] for record in caplog.records] == ["LayerMetricsCallback failed at step 0"]


def test_callback_that_reacts_waits_for_its_values(later: None, tmp_path: Path) -> None:
    callback = LastLayerDecline(TEXTS, TOKENIZER, every_n_steps=1, figures=False)
    opens = Opens(threading.Event(), 0, callback)
    fit(Boring(neox()), tmp_path, [callback, opens], max_steps=3)
    assert opens.measured == {1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("limits", "expected"), [({}, True), ({"_MAX_COPIED_BYTES": 2**10}, False), ({"_MAX_CPU_SPECTRA": 2**10}, False)]
)
def test_few_texts_of_a_model_on_a_gpu_are_computed_later(
    limits: dict[str, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in limits.items():
        monkeypatch.setattr(_measurement, name, limit)
    settings = LayerMetricsCallback(TEXTS, TOKENIZER)
    model = neox()
    measurement = Measurement(settings, model)
    assert not measurement._computes_on_cpu(model)  # on a CPU, training would wait for the thread

    class Parameter:
        device = torch.device("cuda", 0)

    monkeypatch.setattr(type(model), "parameters", lambda _: [Parameter(), Parameter()])
    assert measurement._computes_on_cpu(model) == expected
