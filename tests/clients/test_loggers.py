"""W&B (offline) and MLflow (files) get every value at its step from both kinds of trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders.callbacks import LayerMetricsCallback, LayerMetricsTrainerCallback
from tests.callbacks.oracles import TEXTS
from tests.callbacks.test_trainer import make_trainer
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, fit, neox
from tests.clients.installed import CLIENTS, client
from tests.clients.offline_runs import mlflow_run, wandb_history

pytestmark = [*CLIENTS, *ADVICE]

OPTIONS: dict[str, Any] = {"metrics": ["curvature"], "every_n_steps": 3, "strict": True}
SCORES = {2: 3.0, 4: 2.0, 6: 1.0, 7: 0.0}


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {"MODE": "offline", "SILENT": "true", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    result = client("wandb")
    yield result
    result.teardown()


@pytest.fixture
def tracking_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return where MLflow keeps its runs, as files."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # refused from 3.17 on where it is not asked for
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = client("mlflow")
    uri = (tmp_path / "mlruns").as_uri()
    mlflow.set_tracking_uri(uri)
    yield uri
    mlflow.end_run()
    mlflow.set_tracking_uri(None)


def train_lightning(logger: Any, folder: Path) -> LayerMetricsCallback:
    recorded = LayerMetricsCallback(TEXTS, TOKENIZER, dirpath=folder / "run" / "midlayer", **OPTIONS)
    fit(Boring(neox()), folder, [recorded], logger=logger, max_steps=7)
    return recorded


def train_transformers(name: str, folder: Path) -> LayerMetricsTrainerCallback:
    """Train a run that ends with the weights of step 2: its last measurement is of a step before the last."""
    recorded = LayerMetricsTrainerCallback(TEXTS, **OPTIONS)
    trainer = make_trainer(
        folder / "run", [recorded], report_to=[name], max_steps=7, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="score",
        greater_is_better=True,
    )  # fmt: skip
    trainer.compute_metrics = lambda _: {"score": SCORES[trainer.state.global_step]}
    recorded.attach(trainer)
    trainer.train()
    return recorded


def values_of(recorded: Any, prefix: str = "") -> dict[str, dict[int, float]]:
    """Return by name under which it is logged, then by step, each value of a callback's frame."""
    actual: dict[str, dict[int, float]] = {}
    for row in recorded.history:
        by_step = actual.setdefault(f"{prefix}midlayer/{row['name']}/layer_{row['layer']:02d}", {})
        by_step[int(row["revision"].removeprefix("step"))] = row["value"]
    return actual


def steps_of(recorded: Any) -> list[int]:
    return list(next(iter(values_of(recorded).values())))


def assert_wandb_has(recorded: Any, folder: Path, prefix: str, step: str) -> None:
    rows = wandb_history(folder)
    for name, values in values_of(recorded, prefix).items():
        assert {row[step]: row[name] for row in rows if name in row} == pytest.approx(values)


def assert_mlflow_has(recorded: Any, uri: str) -> None:
    tracking, run = mlflow_run(uri)
    assert run.info.status == "FINISHED"
    for name, values in values_of(recorded).items():
        actual = {each.step: each.value for each in tracking.get_metric_history(run.info.run_id, name)}
        assert actual == pytest.approx(values)


def test_wandb_through_lightning(wandb: Any, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import WandbLogger

    recorded = train_lightning(WandbLogger(save_dir=tmp_path, offline=True), tmp_path)
    wandb.teardown()  # its service has written everything when it has ended
    assert steps_of(recorded) == [0, 3, 6, 7]
    assert_wandb_has(recorded, tmp_path, "", "trainer/global_step")


def test_wandb_through_transformers(wandb: Any, tmp_path: Path) -> None:
    wandb.init(mode="offline", dir=tmp_path)  # the integration logs to the run that there is
    recorded = train_transformers("wandb", tmp_path)
    wandb.teardown()  # its service has written everything when it has ended
    assert steps_of(recorded) == [0, 2, 3, 6, 7]
    assert_wandb_has(recorded, tmp_path, "train/", "train/global_step")


def test_mlflow_through_lightning(tracking_uri: str, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import MLFlowLogger

    recorded = train_lightning(MLFlowLogger(tracking_uri=tracking_uri), tmp_path)
    assert steps_of(recorded) == [0, 3, 6, 7]
    assert_mlflow_has(recorded, tracking_uri)


def test_mlflow_through_transformers(tracking_uri: str, tmp_path: Path) -> None:
    recorded = train_transformers("mlflow", tmp_path)
    assert steps_of(recorded) == [0, 2, 3, 6, 7]
    assert_mlflow_has(recorded, tracking_uri)
