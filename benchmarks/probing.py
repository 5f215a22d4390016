"""Compare probes of all 13 layers trained together with one layer at a time, with the same examples and steps.

A trunk of 12 blocks has random weights and inputs, which do not change the cost of a step. Three variants:
``together`` (all layers in one run), ``one at a time`` (a run for each layer, whose forward pass ends at that layer) and
``published, one at a time`` (the same with AIM's own module, which projects every token). Each runs with tokens stored in half
precision after one pass, and with a forward pass in every step.
Run: ``python -m benchmarks.probing OUT``; writes ``probing.md``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.vision.model import PatchTransformer
from benchmarks.vision.run import reader_of
from midlayer_encoders.extras.probing import AttentiveProbes, LiveTokens, ProbeSettings, Split
from midlayer_encoders.extras.probing.classifiers import num_heads
from midlayer_encoders.extras.probing.probe import train_probes
from midlayer_encoders.extras.probing.token_states import TokenSource, read_tokens

CLASSES = 10


class PublishedProbe(nn.Module):
    """The attentive probe as AIM publishes it, which projects every token; for one layer, under the shapes used here."""

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.heads = num_heads(width)
        shapes = {"key": (width, width), "value": (width, width), "weight": (classes, width)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter((torch.rand(1, *shape) * 2 - 1) / math.sqrt(width)))
        self.query = nn.Parameter(torch.randn(1, width) * 0.02)
        self.bias = nn.Parameter(torch.zeros(1, classes))
        self.register_buffer("mean", torch.zeros(1, width))
        self.register_buffer("variance", torch.ones(1, width))

    def forward(self, states: Tensor, _: Tensor) -> Tensor:
        B, T, D = states[0].shape
        flat = states[0].float().flatten(0, 1)
        normed = nn.functional.batch_norm(flat, self.mean[0], self.variance[0], training=self.training, eps=1e-6)
        shape = (B, T, self.heads, D // self.heads)
        key, value = ((normed @ matrix[0].mT).view(shape).transpose(1, 2) for matrix in (self.key, self.value))
        query = self.query.view(1, self.heads, 1, D // self.heads) / math.sqrt(D // self.heads)
        mixed = (query @ key.mT).softmax(dim=-1) @ value
        return (mixed.reshape(B, D) @ self.weight[0].mT + self.bias[0])[None]


def seconds(run: Any, device: torch.device) -> float:
    """Return the seconds of a run, synchronized with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Bench:
    """The examples, the trunk, and the three ways."""

    def __init__(self, given: argparse.Namespace, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.given, self.device = given, device
        self.trunk = PatchTransformer(width=given.width, blocks=given.blocks, heads=given.width // 64).to(device).eval()
        self.trunk.requires_grad_(False)
        self.images = torch.randint(0, 256, (given.examples, 3, 32, 32), dtype=torch.uint8, generator=generator).to(
            device
        )
        self.labels = torch.randint(0, CLASSES, (given.examples,), generator=generator)
        self.train = torch.arange(given.examples - given.batch_size)
        self.validation = torch.arange(given.examples - given.batch_size, given.examples)

    def source(self, layers: Sequence[int], kept: bool) -> TokenSource:
        reader = reader_of(self.trunk, self.images, causal=False, norm="final")
        reader = type(reader)(reader.model, reader.preprocess, reader.anatomy, layers, "final")
        live = LiveTokens(reader, range(len(self.images)))
        batches = [part.tolist() for part in torch.arange(len(self.images)).split(self.given.batch_size)]
        return read_tokens(live, batches, keep_gb=60 if kept else 0)

    def run(self, layers: Sequence[int], *, kept: bool, published: bool = False) -> None:
        head: nn.Module = AttentiveProbes(len(layers), self.given.width, CLASSES)
        if published:
            head = PublishedProbe(self.given.width, CLASSES)
        train_probes(
            head.to(self.device), self.source(layers, kept), self.labels, Split(self.train, self.validation, self.validation),
            settings=ProbeSettings(
                epochs=self.given.epochs, patience=self.given.epochs, batch_size=self.given.batch_size
            ),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--examples", type=int, default=10240)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    bench = Bench(given, device)
    everything, alone = list(range(given.blocks + 1)), [[layer] for layer in range(given.blocks + 1)]
    bench.run(everything, kept=True)  # warm up
    bench.run([0], kept=False, published=True)
    lines = ["# Probes of all layers, trained together and one at a time", ""]
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    lines += [
        f"`python -m benchmarks.probing OUT --epochs {given.epochs} --examples {given.examples} --batch-size {given.batch_size}`: {name}, torch "
        f"{torch.__version__}; {given.blocks} blocks, width {given.width}, 64 tokens, {given.examples} images,",
        f"{given.epochs} epochs of {math.ceil(len(bench.train) / given.batch_size)} steps. One run each, including the "
        "forward passes; the run of a single layer skips the blocks after it.", "",
        "| tokens | together, s | one at a time, s | ratio | published probe, one at a time, s | ratio |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kept, words in ((True, "stored after one pass"), (False, "a pass in every step")):
        together = seconds(lambda k=kept: bench.run(everything, kept=k), device)
        single = seconds(lambda k=kept: [bench.run(layers, kept=k) for layers in alone], device)
        plain = seconds(lambda k=kept: [bench.run(layers, kept=k, published=True) for layers in alone], device)
        lines.append(
            f"| {words} | {together:.2f} | {single:.2f} | **{single / together:.1f}** | {plain:.2f} | {plain / together:.1f} |"
        )
        print(lines[-1], flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "probing.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
