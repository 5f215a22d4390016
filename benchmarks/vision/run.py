"""Trains one trunk under four objectives on CIFAR-10, with the callback attached, and probes every layer of each.

Run on a CUDA machine: ``python -m benchmarks.vision.run OUT --data FOLDER_OF_ZIPS``. Writes into OUT, after every phase:
``metrics.csv`` and ``training.csv`` (the tidy frame, at the end and during training), ``probes.csv``, ``gains.csv`` and ``runs.csv``.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.vision.images import ImageBatches, augmented, normalised, read_zip
from benchmarks.vision.model import PatchTransformer
from benchmarks.vision.objectives import OBJECTIVES, Objective
from midlayer_encoders.callbacks import LayerMetricsCallback
from midlayer_encoders.extras.probing import LiveTokens, ProbeResult, ProbeSettings, Split, probe_tokens, wilson
from midlayer_encoders.extras.probing.token_states import read_tokens, read_vectors
from midlayer_encoders.metrics import make_metrics
from midlayer_encoders.metrics.feeding import num_views, token_receiver, update_views
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.reader import LayerReader

try:
    from lightning.pytorch import Trainer
except ImportError:  # the same under its other name
    from pytorch_lightning import Trainer

FRAME = ("model", "revision", "layer", "depth", "kind", "dataset", "name", "value")
PROBES = ("model", "probe", "layer", "accuracy", "low", "high", "validation", "epoch", "test_examples")
GAINS = ("model", "probe", "best_layer", "best", "last", "gain", "low", "high")
RUNS = ("model", "steps", "images", "parameters", "first_loss", "last_loss", "train_seconds")
WATCHED = ["prompt_entropy", "dataset_entropy", "effective_rank", "curvature", "infonce"]


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Append rows to a CSV file, which gets its columns with the first of them."""
    new = not path.exists()
    with path.open("a", newline="") as opened:
        writer = csv.writer(opened)
        if new:
            writer.writerow(columns)
        writer.writerows(rows)


def reader_of(trunk: PatchTransformer, images: Tensor, *, causal: bool, norm: str) -> LayerReader:
    """Return what reads every layer of images on the device; the inputs are their positions."""
    anatomy = find_anatomy(trunk, blocks="blocks")

    def preprocess(positions: list[int]) -> Mapping[str, Any]:
        index = torch.tensor(positions, device=images.device)
        return {"pixel_values": normalised(images[index]), "causal": causal}

    return LayerReader(trunk, preprocess, anatomy, range(anatomy.num_layers + 1), norm)  # type: ignore[arg-type]


def measure(trunk: PatchTransformer, images: Tensor, *, causal: bool, views: int = 8) -> dict[str, list[float]]:
    """Return the paper's metrics of every layer, on raw states, mean-pooled; views are random crops and flips."""
    reader = reader_of(trunk, images, causal=causal, norm="none")
    made = make_metrics("paper", reader.layers, views=views)
    generator = torch.Generator().manual_seed(0)
    batches = [part.tolist() for part in torch.arange(len(images)).split(250)]
    for view in range(-1, num_views(made)):
        seen = normalised(images) if view < 0 else augmented(images, generator=generator)
        inputs = LayerReader(reader.model, lambda p, s=seen: {"pixel_values": s[torch.tensor(p)], "causal": causal},
                             reader.anatomy, reader.layers, "none")  # fmt: skip
        tokens = token_receiver(made, len(images)) if view < 0 else None
        for positions, vectors in inputs.embed(range(len(images)), batches, tokens=tokens):
            places = [(view + 1) * len(images) + position for position in positions]
            update_views(made, reader.layers, vectors, places, len(images))
    return {name: metric.compute().tolist() for name, metric in made.items()}


def probe_trunk(
    trunk: PatchTransformer,
    images: Tensor,
    labels: Tensor,
    split: Split,
    *,
    name: str,
    causal: bool,
    epochs: int,
    out: Path,
) -> None:
    """Probe every layer two ways and write the rows."""
    device = images.device
    live = LiveTokens(reader_of(trunk, images, causal=causal, norm="final"), range(len(images)), "final")
    batches = [part.tolist() for part in torch.arange(len(images)).split(1000)]
    for kind in ("attentive", "linear"):
        start = time.perf_counter()
        source = read_tokens(live, batches, keep_gb=60) if kind == "attentive" else read_vectors(live, batches)
        right, validation, best = probe_tokens(
            source,
            labels.cpu(),
            split,
            kind=kind,  # type: ignore[arg-type]
            settings=ProbeSettings(epochs=epochs, batch_size=512),
            device=device,
        )
        count = right.shape[1]
        found = ProbeResult(
            model=name, revision="last", num_layers=len(right) - 1, layers=tuple(range(len(right))), kind=kind,  # type: ignore[arg-type]
            dataset="cifar10", classes=[str(number) for number in range(10)], right=right, validation=validation,
            epochs=best, chance=0.1, num_train=len(split.train),
        )  # fmt: skip
        rows = []
        for layer, one in enumerate(right):
            low, high = wilson(int(one.sum()), count)
            cells = (float(found.accuracy[layer]), low, high, float(validation[layer]))
            rows.append((name, kind, layer, *(f"{cell:.4f}" for cell in cells), int(best[layer]), count))
        ends = (found.accuracy[found.best_layer], found.accuracy[-1], *found.gain())
        gains = [(name, kind, found.best_layer, *(f"{float(cell):.4f}" for cell in ends))]
        write_rows(out / "gains.csv", GAINS, gains)
        write_rows(out / "probes.csv", PROBES, rows)
        accuracy = " ".join(f"{100 * float(one.double().mean()):.1f}" for one in right)
        print(f"  {name} {kind}: {accuracy} ({time.perf_counter() - start:.1f} s)", flush=True)


def train(
    name: str, given: argparse.Namespace, images: Tensor, labels: Tensor, watched: Tensor, classes: int
) -> Objective:
    """Return a trained objective; the history of its layers is written."""
    torch.manual_seed(given.seed)
    trunk = PatchTransformer(width=given.width, blocks=given.blocks, heads=given.width // 64)
    module = OBJECTIVES[name](trunk, classes=classes, learning_rate=given.learning_rate, compiled=given.compiled)
    batches = ImageBatches(images, labels, given.batch_size, torch.Generator().manual_seed(given.seed))
    generator = torch.Generator().manual_seed(0)
    callback = LayerMetricsCallback(
        [{"pixel_values": normalised(watched)}], metrics=WATCHED, module="trunk", blocks="blocks",
        every_n_steps=[0, *(2**power for power in range(12))],
        views=[[{"pixel_values": augmented(watched, generator=generator)}] for _ in range(2)], figures=False,
        dirpath=given.out / "history" / name,
    )  # fmt: skip
    trainer = Trainer(
        accelerator=images.device.type, devices=1, max_epochs=given.epochs, precision="bf16-mixed", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        gradient_clip_val=1.0,
    )  # fmt: skip
    start = time.perf_counter()
    trainer.fit(module, batches)
    if images.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    steps = trainer.global_step
    losses = torch.stack(module.losses).float().cpu()
    many = max(1, len(batches))
    parameters = sum(parameter.numel() for parameter in trunk.parameters())
    ends = (f"{losses[:many].mean():.4f}", f"{losses[-many:].mean():.4f}")
    write_rows(
        given.out / "runs.csv", RUNS,
        [(model_name(given, name), steps, steps * given.batch_size, parameters, *ends, f"{seconds:.1f}")],
    )  # fmt: skip
    if not any(row["revision"] == f"step{steps}" for row in callback.history):
        raise RuntimeError(f"The callback saw nothing at the last step of {name}; its log says why.")
    rows = [{**row, "model": model_name(given, name), "dataset": "cifar10"} for row in callback.history]
    write_rows(given.out / "training.csv", FRAME, [[row[column] for column in FRAME] for row in rows])
    speed = steps * given.batch_size / seconds
    print(f"{name}: {steps} steps, {seconds:.0f} s, {speed:.0f} images/s, loss {ends[0]} to {ends[1]}", flush=True)
    module.to(images.device).eval()
    return module


def model_name(given: argparse.Namespace, objective: str) -> str:
    return f"vit-{given.blocks}x{given.width}-{objective}"


def evaluate(
    trunk: PatchTransformer, name: str, given: argparse.Namespace, everything: Tensor, labels: Tensor, split: Split,
    *, causal: bool = False,
) -> None:  # fmt: skip
    """Write metrics and probes of every layer."""
    trunk.requires_grad_(False)
    called = model_name(given, name) + ("-causal" if causal else "")
    start = time.perf_counter()
    sample = everything[
        split.test[:: max(1, len(split.test) // given.measured)][: given.measured].to(everything.device)
    ]
    values = measure(trunk, sample, causal=causal)
    rows = [
        (called, "last", layer, layer / given.blocks, "metric", "cifar10", metric, f"{value:.6g}")
        for metric, many in values.items()
        for layer, value in enumerate(many)
    ]
    write_rows(given.out / "metrics.csv", FRAME, rows)
    print(f"  {called}: metrics {time.perf_counter() - start:.1f} s; dataset entropy "
          + " ".join(f"{value:.2f}" for value in values["dataset_entropy"]), flush=True)  # fmt: skip
    probe_trunk(
        trunk, everything, labels, split, name=called, causal=causal, epochs=given.probe_epochs, out=given.out
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--objectives", default=",".join(OBJECTIVES))
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--probe-epochs", type=int, default=15)
    parser.add_argument("--measured", type=int, default=1000, help="test images that the metrics see")
    parser.add_argument("--limit", type=int, help="images of each file, for a try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--untrained", action="store_true", help="also probe the trunk as it starts")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    start = time.perf_counter()
    train_images, train_labels, classes = read_zip(given.data / "cifar10_train.zip", limit=given.limit)
    test_images, test_labels, _ = read_zip(given.data / "cifar10_test.zip", limit=given.limit)
    images, labels = train_images.to(device), train_labels.to(device)
    everything, every_label = torch.cat([train_images, test_images]).to(device), torch.cat([train_labels, test_labels])
    place = torch.arange(len(images))
    split = Split(place[place % 10 != 0], place[::10], torch.arange(len(images), len(everything)))
    watched = test_images[:: max(1, len(test_images) // 256)][:256].to(device)
    print(f"{len(images)} + {len(test_images)} images read in {time.perf_counter() - start:.1f} s", flush=True)
    if given.untrained:
        torch.manual_seed(given.seed)
        trunk = PatchTransformer(width=given.width, blocks=given.blocks, heads=given.width // 64).to(device).eval()
        evaluate(trunk, "untrained", given, everything, every_label, split)
    for name in given.objectives.split(","):
        module = train(name, given, images, labels, watched, len(classes))
        evaluate(module.trunk, name, given, everything, every_label, split)
        if name == "autoregressive":
            evaluate(module.trunk, name, given, everything, every_label, split, causal=True)
        del module
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
