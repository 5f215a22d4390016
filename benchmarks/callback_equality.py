"""Compare runs with and without the callback bitwise: eager and compiled, default and deterministic algorithms.

``python -m benchmarks.callback_equality`` trains a small model on the available device three times in each case (twice without the callback, once
with it), compares every loss and every weight, and writes ``benchmarks/results/callback_equality_<device>.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
ALGORITHMS = ("default", "deterministic")
SIZES = {"cpu": (2, 64, 4, 32, 6), "cuda": (6, 512, 64, 256, 24)}  # blocks, width, batch, length, steps


@dataclass(frozen=True)
class Run:
    """What two equal runs share."""

    losses: Tensor
    weights: dict[str, Tensor]


def difference(one: Run, other: Run) -> str:
    """Return in words whether two runs are bitwise equal, or by how much they differ.

    Example:
        >>> run = Run(torch.tensor([2.0, 1.0]), {"w": torch.ones(3)})
        >>> difference(run, run)
        'bitwise equal'
        >>> difference(run, Run(torch.tensor([2.0, 1.5]), {"w": torch.ones(3)}))
        'loss 5.0e-01, weights 0.0e+00, from step 2 on'
    """
    if torch.equal(one.losses, other.losses) and all(torch.equal(w, other.weights[n]) for n, w in one.weights.items()):
        return "bitwise equal"
    losses = (one.losses - other.losses).abs()
    weights = max(float((weight - other.weights[name]).abs().max()) for name, weight in one.weights.items())
    first = int((losses > 0).int().argmax()) + 1 if bool(losses.any()) else len(losses)
    return f"loss {float(losses.max()):.1e}, weights {weights:.1e}, from step {first} on"


def train(given: argparse.Namespace, *, compiled: bool, watched: bool) -> Run:
    """Train once from fixed seeds, with dropout, in bfloat16 on a GPU."""
    from benchmarks.callback_overhead import probe_texts
    from benchmarks.pretraining.corpus import Windows, train_tokenizer
    from benchmarks.pretraining.models import VARIANTS, Pretraining, Size, language_model, pl
    from midlayer_encoders.callbacks import LayerMetricsCallback

    torch.compiler.reset()  # each run compiles for itself, as in a process of its own
    pl.seed_everything(0, verbose=False)
    size = Size(given.blocks, given.width, length=given.length)
    variant = replace(VARIANTS["first-causal"], steps=given.steps)
    model = language_model(variant, size, dropout=0.1)
    module = Pretraining(model, variant, compiled=compiled)
    texts = probe_texts(32)
    callback = LayerMetricsCallback(
        texts, train_tokenizer(texts, 2000), metrics=given.metrics, every_n_steps=2, figures=False,
        dirpath=given.runs,
    )  # fmt: skip
    tokens = torch.randint(3, size.vocab, (200_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    cuda = given.device == "cuda"
    trainer = pl.Trainer(
        max_steps=given.steps, max_epochs=1, callbacks=[callback] if watched else [], logger=False, devices=1,
        accelerator="gpu" if cuda else "cpu", precision="bf16-mixed" if cuda else "32-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, Windows(tokens.to(given.device), given.steps, given.batch, given.length))
    assert not callback._warned, "a measurement failed"  # `strict` would wait for each of them
    weights = {name: weight.detach().float().cpu() for name, weight in module.named_parameters()}
    return Run(torch.stack(module.losses).float().cpu(), weights)


def cases(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what was found under the algorithms of this process, eager and compiled."""
    torch.use_deterministic_algorithms(given.algorithms == "deterministic")
    rows = []
    for compiled in (False, True):
        row = {"compiled": compiled, "algorithms": given.algorithms}
        try:
            plain = train(given, compiled=compiled, watched=False)
            again = difference(plain, train(given, compiled=compiled, watched=False))
            found = difference(plain, train(given, compiled=compiled, watched=True))
        except (
            RuntimeError
        ) as error:  # an operation of torch's that has no deterministic implementation, or no compiler
            again = found = f"failed: {str(error).splitlines()[0][:200]}"
        rows.append({**row, "again": again, "with": found})
    return rows


def in_processes() -> list[dict[str, Any]]:
    """Return all cases, each kind of algorithms in a process of its own: cuBLAS reads its setting when it starts."""
    rows: list[dict[str, Any]] = []
    for algorithms in ALGORITHMS:
        # What torch asks for under deterministic algorithms on a GPU.
        extra = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if algorithms == "deterministic" else {}
        command = [sys.executable, "-m", "benchmarks.callback_equality", *sys.argv[1:], "--algorithms", algorithms]
        done = subprocess.run(command, env={**os.environ, **extra}, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    return rows


def table(given: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    device = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    shape = (
        f"{given.blocks} blocks of width {given.width}, {given.steps} steps of {given.batch} x {given.length} tokens"
    )
    lines = [
        f"# Bitwise equality of training runs with and without the callback ({'GPU' if given.device == 'cuda' else 'CPU'})",
        "",
        f"`python -m benchmarks.callback_equality`: {device}, torch {torch.__version__}, a GPTNeoX with {shape}, dropout 0.1, "
        f"{'bfloat16 autocast' if given.device == 'cuda' else 'float32'}, a measurement every 2 steps. Every loss and every weight is compared; "
        "runs that differ show their largest differences.",
        "",
        "| run | algorithms | two runs without the callback | a run with and one without it |",
        "|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["compiled"]):
        kind = "compiled" if row["compiled"] else "eager"
        lines.append(f"| {kind} | {row['algorithms']} | {row['again']} | {row['with']} |")
    return "\n".join(lines) + "\n"


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("blocks", "width", "batch", "length", "steps"):
        parser.add_argument(f"--{name}", type=int, default=None)
    parser.add_argument("--metrics", default="paper")
    parser.add_argument("--runs", type=Path, default=Path("runs/callback_equality"))
    parser.add_argument(
        "--out", type=Path, default=None, help="by default benchmarks/results/callback_equality_DEVICE.md"
    )
    parser.add_argument("--algorithms", choices=ALGORITHMS, default=None, help="these alone, as a line of JSON")
    given = parser.parse_args(arguments)
    for name, size in zip(("blocks", "width", "batch", "length", "steps"), SIZES[given.device], strict=True):
        setattr(given, name, getattr(given, name) or size)
    return given


def main() -> None:
    given = parsed()
    if given.algorithms is not None:
        warnings.filterwarnings("ignore")  # Lightning's, about a loader without workers
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        print(json.dumps(cases(given)))
        return
    text = table(given, in_processes())
    (given.out or RESULTS / f"callback_equality_{given.device}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
