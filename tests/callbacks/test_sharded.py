"""Two gloo processes whose weights FSDP2 shards log the values of one process, and the run does not change."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import polars
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from midlayer_encoders.callbacks import LastLayerDecline, LayerMetricsCallback, LayerMetricsTrainerCallback
from midlayer_encoders.errors import MidlayerError
from tests.callbacks.test_trainer import llama, make_trainer
from tests.callbacks.training import ADVICE, INPUTS, TOKENIZER, Boring, neox

pytestmark = [*ADVICE, pytest.mark.long]

LABELS = [0, 1] * 6
TEXTS = [f"{'good' if label else 'bad'} text {number}" for number, label in enumerate(LABELS)]
METRICS = ["prompt_entropy", "curvature", "matrix_entropy", "infonce", "lidar", "dime", "alignment", "half_match"]


class Sharded(Boring):
    """Shards its blocks and itself (``"module"``) or its transformer; all processes get the same rows."""

    def __init__(self, kind: str) -> None:
        super().__init__(neox(dropout=0.0))
        self.kind = kind

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.kind != "one":
            mesh = self.device_mesh["data_parallel"]
            for module in (*self.backbone.gpt_neox.layers, self if self.kind == "module" else self.backbone):
                fully_shard(module, mesh=mesh)

    def forward(self, batch: Tensor) -> Any:
        return self.backbone(input_ids=batch, labels=batch)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self(batch).loss
        self.losses.append(float(loss.detach()))
        return loss


class FailsInOneProcess(LayerMetricsCallback):
    """At step 2, the second pass fails in the second process, after some of its weights were gathered."""

    def _measure(self, root: Any, step: int, *given: Any) -> None:
        calls = []

        def fail(*_: Any) -> None:
            calls.append(step)
            if step == 2 and os.environ["RANK"] == "1" and len(calls) == 2:
                raise ValueError("only here")

        hook = root.backbone.gpt_neox.layers[1].mlp.register_forward_hook(fail)
        super()._measure(root, step, *given)
        hook.remove()


def make_callbacks(kind: str, folder: Path) -> list[Any]:
    common: dict[str, Any] = {"every_n_steps": 2, "figures": False, "strict": kind != "fails"}
    metrics = {"dirpath": folder / "metrics", "metrics": METRICS, "norm": "final", "token_budget": 64, **common}
    metrics_class = FailsInOneProcess if kind == "fails" else LayerMetricsCallback
    watch = LastLayerDecline(TEXTS, TOKENIZER, labels=LABELS, dirpath=folder / "watch", **common)
    return [metrics_class(INPUTS, TOKENIZER, **metrics), watch]


def train_with_lightning(kind: str, folder: Path) -> list[float]:
    strategy: Any = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_steps=4, accelerator="cpu", devices=1 if kind == "one" else 2,
        strategy="auto" if kind == "one" else strategy, logger=False, enable_progress_bar=False,
        callbacks=[] if kind == "without" else make_callbacks(kind, folder), enable_model_summary=False,
        enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    module = Sharded(kind)
    trainer.fit(module, DataLoader(torch.randint(4, 90, (16, 12)), 4))
    return module.losses


def train_with_trainer(kind: str, folder: Path) -> list[float]:
    model: Any = llama()
    if kind != "one":
        from transformers.distributed import DistributedConfig

        model.save_pretrained(folder / "model")  # writes in the first process
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(folder / "model", distributed_config=DistributedConfig(fsdp_size=2))
    callback = LayerMetricsTrainerCallback(
        INPUTS, TOKENIZER, every_n_steps=2, metrics=METRICS, norm="final", token_budget=64, figures=False, strict=True,
        dirpath=folder / "metrics",
    )  # fmt: skip
    hf_trainer = make_trainer(folder, [] if kind == "without" else [callback], model, max_steps=4)
    hf_trainer.train()
    return [entry["loss"] for entry in hf_trainer.state.log_history if "loss" in entry]


def refusal(model: nn.Module, folder: Path) -> str:
    """Return the error of the callback for a model whose weights are split."""
    arguments: Any = SimpleNamespace(output_dir=str(folder))
    callback: Any = LayerMetricsTrainerCallback(INPUTS, TOKENIZER, figures=False)
    with pytest.raises(MidlayerError) as error:
        callback.on_train_begin(arguments, SimpleNamespace(global_step=0), None, model=model)
    return str(error.value)


def split_by_tensor_parallelism() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (2,))
    return parallelize_module(neox(), mesh, {"gpt_neox.layers.*.mlp.dense_h_to_4h": ColwiseParallel()})


def split_by_fsdp1() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(neox(), device_id=torch.device("cpu"))


def run_all(folder: Path) -> None:
    """Run in two processes whatever the tests check."""
    found: dict[str, Any] = {}
    for kind in ("without", "transformer", "module", "fails"):
        found[f"lightning-{kind}"] = train_with_lightning(kind, folder / f"lightning-{kind}")
    for kind in ("without", "transformer"):
        found[f"trainer-{kind}"] = train_with_trainer(kind, folder / f"trainer-{kind}")
    found["tensor parallelism"] = refusal(split_by_tensor_parallelism(), folder)
    found["FSDP1"] = refusal(split_by_fsdp1(), folder)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a job of two processes."""
    found = tmp_path_factory.mktemp("sharded")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "tests.callbacks.test_sharded", str(found)],
        capture_output=True, text=True, timeout=500, cwd=root,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    (found / "stderr").write_text(process.stderr)
    return found


def results(folder: Path) -> list[dict[str, Any]]:
    """Return what each process found."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def assert_histories_match(actual: polars.DataFrame, expected: polars.DataFrame) -> None:
    assert actual.drop("value").equals(expected.drop("value"))
    torch.testing.assert_close(torch.tensor(actual["value"]), torch.tensor(expected["value"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["transformer", "module"])
def test_sharded_lightning_run_logs_the_values_of_one_process(kind: str, folder: Path, tmp_path: Path) -> None:
    losses = train_with_lightning("one", tmp_path)
    assert results(folder)[0][f"lightning-{kind}"] == pytest.approx(losses, abs=1e-6)
    for name in ("metrics", "watch"):
        expected = polars.read_parquet(tmp_path / name / "history.parquet")
        assert_histories_match(polars.read_parquet(folder / f"lightning-{kind}" / name / "history.parquet"), expected)
        assert expected["revision"].unique(maintain_order=True).to_list() == ["step0", "step2", "step4"]


def test_sharded_trainer_logs_the_values_of_one_process_before_training(folder: Path, tmp_path: Path) -> None:
    train_with_trainer("one", tmp_path)
    actual, expected = (
        polars.read_parquet(path / "metrics" / "history.parquet").filter(revision="step0")
        for path in (folder / "trainer-transformer", tmp_path)
    )
    assert set(expected["name"]) == set(METRICS)
    assert_histories_match(actual.drop("model"), expected.drop("model"))


@pytest.mark.parametrize("library", ["lightning", "trainer"])
def test_sharded_run_is_bitwise_the_same_with_the_callback(library: str, folder: Path) -> None:
    for found in results(folder):
        kinds = [kind for kind in found if kind.startswith(library)]
        assert len(kinds) == (4 if library == "lightning" else 2)
        assert len(found[f"{library}-without"]) == 4
        assert all(found[kind] == found[f"{library}-without"] for kind in kinds)


def test_pass_that_fails_in_one_process_ends_in_all(folder: Path) -> None:
    frames = [
        polars.read_parquet(folder / f"lightning-{kind}" / "metrics" / "history.parquet")
        for kind in ("fails", "transformer")
    ]
    assert frames[0].equals(frames[1].filter(polars.col("revision") != "step2"))
    errors = (folder / "stderr").read_text()
    assert "ValueError: only here" in errors
    assert "OtherProcessError: The measurement failed in another process" in errors


@pytest.mark.parametrize("kind", ["tensor parallelism", "FSDP1"])
def test_weights_split_in_another_way_are_refused(kind: str, folder: Path) -> None:
    for found in results(folder):
        assert (
            f"but {kind} splits the weights in another way. Train with DDP, with DeepSpeed ZeRO-2, or with FSDP2"
            in found[kind]
        )
        assert "midlayer progression" in found[kind]


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(Path(sys.argv[1]))
