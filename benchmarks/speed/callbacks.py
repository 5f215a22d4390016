"""Training runs with and without the callback: what it costs, and whether they are bitwise equal.

    python -m benchmarks.speed.callbacks cost                      # a tiny model on a CPU
    python -m benchmarks.speed.callbacks cost --device cuda --blocks 12 --width 512 --batch 256 --length 256 --steps 2048
    python -m benchmarks.speed.callbacks cost --sharded --device cuda …    # FSDP2, in one process
    python -m benchmarks.speed.callbacks equality [--device cuda] [--sharded]

``cost`` computes the added time from the parts of the callback (preparation, first measurement, later ones, end) and the
step time of the run without it, so a short run (``--steps 96``) gives it for any number of steps. ``equality`` trains
three times in each case (twice without the callback, once with it), eager and compiled, with default and deterministic
algorithms, and compares every loss and every weight. They write ``results/callbacks_DEVICE.md`` and
``results/callback_equality_DEVICE.md``, for sharded models ``results/callbacks_sharded_DEVICE.md`` and so on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from midlayer_encoders.callbacks._settings import is_due
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from benchmarks.data import RESULTS
from benchmarks.pretraining.corpus import Windows, train_tokenizer
from benchmarks.pretraining.models import VARIANTS, Pretraining, Size, language_model, pl
from benchmarks.timing import device_name, host_memory, peak, timed, usual_clock, wait
from midlayer_encoders.callbacks import LayerMetricsCallback

ALGORITHMS = ("default", "deterministic")
SHAPES = {  # blocks, width, batch, length, steps
    ("cost", "cpu"): (4, 128, 16, 128, 4096),
    ("cost", "cuda"): (12, 512, 256, 256, 2048),
    ("equality", "cpu"): (2, 64, 4, 32, 6),
    ("equality", "cuda"): (6, 512, 64, 256, 24),
}


def probe_texts(number: int, words: int = 60) -> list[str]:
    """Return different texts of made-up words."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (number, words, 6), generator=generator)
    return [" ".join("".join(map(chr, word)) for word in text) for text in letters.tolist()]


class Sharded(Pretraining):
    """Shards its blocks and the rest of its model with FSDP2."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for module in (*self.model.backbone.layers, self.model):
            fully_shard(module, mesh=mesh)


def fit(
    given: argparse.Namespace, callbacks: list[Any], *, compiled: bool, steps: int, dropout: float = 0.0
) -> Pretraining:
    """Train once from fixed seeds, in bfloat16 on a GPU."""
    cuda, size = given.device == "cuda", Size(given.blocks, given.width, length=given.length)
    variant = replace(VARIANTS["first-causal"], steps=steps)
    kind: Any = Sharded if given.sharded else Pretraining
    module: Pretraining = kind(language_model(variant, size, dropout=dropout), variant, compiled=compiled)
    tokens = torch.randint(3, size.vocab, (1_000_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    trainer = pl.Trainer(
        max_steps=steps, max_epochs=1, callbacks=callbacks, logger=False, devices=1, accelerator="gpu" if cuda else "cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        precision="bf16-mixed" if cuda else "32-true",
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1) if given.sharded else "auto",
    )  # fmt: skip
    trainer.fit(module, Windows(tokens.to(given.device), steps, given.batch, given.length))
    return module


# --- cost -------------------------------------------------------------------------------------------------------------


class TimedCallback(LayerMetricsCallback):
    """The callback, with the time of each of its parts."""

    def _begin(self) -> None:
        super()._begin()
        self.preparing, self.recording, self.ending = 0.0, 0.0, 0.0
        self.visits: list[float] = []
        self._is_timed = False  # inside another part

    def _timed(self, part: Callable[..., None], *given: Any) -> float:
        was_timed, self._is_timed = self._is_timed, True
        seconds = timed(partial(part, *given), usual_clock)
        self._is_timed = was_timed
        return seconds

    def _prepare(self, *given: Any) -> None:
        self.preparing += self._timed(super()._prepare, *given)

    def _visit(self, *given: Any) -> None:
        self.visits.append(self._timed(super()._visit, *given))

    def _complete(self, *, wait: bool = True) -> None:
        complete = partial(super()._complete, wait=wait)
        if self._pending is None or self._is_timed or not (wait or self._pending[1].done()):
            complete()
        else:
            self.recording += self._timed(complete)

    def on_train_end(self, *given: Any) -> None:
        before = sum(self.visits) + self.recording
        self.ending = self._timed(super().on_train_end, *given) - (sum(self.visits) + self.recording - before)

    @property
    def each(self) -> float:
        """Seconds of a measurement after the first, which also loads kernels and libraries."""
        return median(self.visits[1:])

    def added(self, steps: int) -> float:
        """Return the seconds that a run of so many steps takes longer: measured at 0, 8, 16, 32 … and the last."""
        later = sum(is_due("log2", step) for step in range(1, steps)) + 1
        recording = (1 + later) * self.recording / len(self.visits)
        return self.preparing + self.visits[0] + later * self.each + recording + self.ending


class Steps(pl.Callback):  # type: ignore[misc]
    """The time of the steps alone, after the first few."""

    first, start, seconds = 8, 0.0, 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.first:
            wait()
            self.start = usual_clock()

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        wait()
        self.seconds = (usual_clock() - self.start) / (trainer.global_step - self.first)


def measure(given: argparse.Namespace, steps: int, callbacks: list[Any]) -> dict[str, float]:
    """Train once, and return the seconds, of all and of a step, the peak memory and the last loss."""
    clock, found = Steps(), {}

    def run() -> None:
        found["module"] = fit(given, [clock, *callbacks], compiled=given.device == "cuda", steps=steps)

    start = usual_clock()
    used = peak(
        run
    )  # NaN on a CPU: there, the peak of a process only grows, so the run without the callback comes first
    seconds, module = usual_clock() - start, found["module"]
    return {
        "seconds": seconds, "step": clock.seconds, "peak": host_memory() / 1e3 if used != used else used,
        "parameters": sum(parameter.numel() for parameter in module.model.parameters()) / 1e6,
        "loss": float(module.losses[-1]),
    }  # fmt: skip


def compare_losses(one: float, other: float, *, promised: bool) -> str:
    """Return a sentence on whether the last losses of both runs are bitwise equal; required if ``promised``."""
    if one == other:
        return "The last losses of both runs are bitwise equal."
    if promised:
        raise RuntimeError(f"The losses with and without the callback differ: {one!r} and {other!r}.")
    return (
        f"The last losses of both runs differ by {abs(one - other):.1e}: a compiled run repeats bitwise only under "
        "`torch.use_deterministic_algorithms(True)` (see `equality`)."
    )


def cost(given: argparse.Namespace) -> str:
    """Return the page of two runs."""
    texts = probe_texts(given.texts)
    tokenizer = train_tokenizer(texts, 2000)
    measure(given, 2 * Steps.first, [])  # compile, and warm up
    plain = measure(given, given.steps, [])
    look = TimedCallback(texts, tokenizer, dirpath=given.runs)
    watched = measure(given, given.steps, [look])
    start = time.perf_counter()
    if look._drawing is not None:
        look._drawing.join()
    drawn = time.perf_counter() - start
    assert not look._warned, "a measurement failed"
    promised = given.device == "cpu" or torch.are_deterministic_algorithms_enabled()
    step, words = plain["step"], " ".join(sys.argv[1:])
    parts = [1e3 * seconds for seconds in (look.preparing, look.visits[0], look.each, look.recording, look.ending)]
    return f"""# A training run with and without the callback ({given.device}{", FSDP2" if given.sharded else ""})

`python -m benchmarks.speed.callbacks {words}`: {device_name(given.device)}, torch {torch.__version__}, {plain["parameters"]:.1f}M
parameters, the callback's default options ({len(look.visits)} measurements of {given.texts} texts), {given.steps} steps.
{"Wall-clock" if given.device == "cuda" else "CPU"} seconds.

| without | with | added | peak GB without | with |
|---|---|---|---|---|
| {plain["seconds"]:.1f} | {watched["seconds"]:.1f} | {100 * (watched["seconds"] / plain["seconds"] - 1):+.2f} % | {plain["peak"]:.2f} | {watched["peak"]:.2f} |

The parts of the run with the callback, each with an idle device before and after:

| step | preparation | first measurement | later measurements (median) | recording all values | end of the run, without figures | a later measurement, in steps |
|---|---|---|---|---|---|---|
| {1e3 * step:.1f} ms | {parts[0]:.0f} ms | {parts[1]:.0f} ms | {parts[2]:.1f} ms | {parts[3]:.0f} ms | {parts[4]:.0f} ms | **{look.each / step:.2f}** |

On a GPU a thread computes the metrics between these parts, while training continues; the end of the run waits for the
last ones. By the clock, the steps after step {Steps.first} took {1e3 * (given.steps - Steps.first) * (watched["step"] - step):.0f} ms longer with it, measurements included.

Computed from these parts, with measurements at steps 0, 8, 16, 32 … and the last:

| steps | added time |
|---|---|
{"".join(f"| {n} | **{100 * look.added(n) / (n * step):.2f} %** |{chr(10)}" for n in (1024, 8192, 16384))}
The difference between two runs also contains compilation and other load on the machine. A background thread draws the
figures; it ended {drawn:.1f} s after the run. {compare_losses(plain["loss"], watched["loss"], promised=promised)}
"""


# --- equality ---------------------------------------------------------------------------------------------------------


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
    """Train once with dropout."""
    torch.compiler.reset()  # each run compiles for itself, as in a process of its own
    pl.seed_everything(0, verbose=False)
    texts = probe_texts(32)
    callback = LayerMetricsCallback(
        texts, train_tokenizer(texts, 2000), metrics=given.metrics, every_n_steps=2, figures=False, dirpath=given.runs
    )
    module = fit(given, [callback] if watched else [], compiled=compiled, steps=given.steps, dropout=0.1)
    assert not callback._warned, "a measurement failed"  # `strict` would wait for each of them
    weights = {name: weight.detach().float().cpu() for name, weight in module.named_parameters()}
    return Run(torch.stack(module.losses).float().cpu(), weights)


def cases(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what was found under the algorithms of this process, eager and compiled."""
    torch.use_deterministic_algorithms(given.algorithms == "deterministic")
    rows = []
    for compiled in (False, True):
        try:
            plain = train(given, compiled=compiled, watched=False)
            again, found = (difference(plain, train(given, compiled=compiled, watched=w)) for w in (False, True))
        except RuntimeError as error:  # an operation without a deterministic implementation, or no compiler
            again = found = f"failed: {str(error).splitlines()[0][:200]}"
        rows.append({"compiled": compiled, "algorithms": given.algorithms, "again": again, "with": found})
    return rows


def equality(given: argparse.Namespace) -> str:
    """Return the page of all cases, each kind of algorithms in a process of its own: cuBLAS reads its setting when it starts."""
    rows: list[dict[str, Any]] = []
    for algorithms in ALGORITHMS:
        # What torch asks for under deterministic algorithms on a GPU.
        extra = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if algorithms == "deterministic" else {}
        command = [sys.executable, "-m", "benchmarks.speed.callbacks", *sys.argv[1:], "--algorithms", algorithms]
        done = subprocess.run(command, env={**os.environ, **extra}, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    return equality_page(given, rows)


def equality_page(given: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    cuda = given.device == "cuda"
    shape = (
        f"{given.blocks} blocks of width {given.width}, {given.steps} steps of {given.batch} x {given.length} tokens"
    )
    lines = [
        f"# Bitwise equality of training runs with and without the callback ({'GPU' if cuda else 'CPU'}"
        f"{', FSDP2' if given.sharded else ''})", "",
        f"`python -m benchmarks.speed.callbacks equality{' --sharded' * given.sharded}`: {device_name(given.device)}, torch {torch.__version__}, a GPTNeoX with "
        f"{shape}, dropout 0.1, {'bfloat16 autocast' if cuda else 'float32'}, a measurement every 2 steps. Every loss and every "
        "weight is compared; runs that differ show their largest differences.", "",
        "| run | algorithms | two runs without the callback | a run with and one without it |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: row["compiled"]):
        kind = "compiled" if row["compiled"] else "eager"
        lines.append(f"| {kind} | {row['algorithms']} | {row['again']} | {row['with']} |")
    return "\n".join(lines) + "\n"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "equality"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    names = ("blocks", "width", "batch", "length", "steps")
    for name in names:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--sharded", action="store_true", help="shard the model with FSDP2, in one process")
    parser.add_argument("--texts", type=int, default=64, help="that `cost` measures")
    parser.add_argument("--metrics", default="paper", help="that `equality` measures")
    parser.add_argument("--runs", type=Path, default=Path("runs/callbacks"))
    parser.add_argument("--out", type=Path, help="a file instead of the one in benchmarks/results")
    parser.add_argument("--algorithms", choices=ALGORITHMS, help="`equality` of these alone, as a line of JSON")
    given = parser.parse_args(arguments)
    for name, size in zip(names, SHAPES[given.what, given.device], strict=True):
        setattr(given, name, getattr(given, name) or size)
    return given


def main() -> None:
    given = parse()
    warnings.filterwarnings("ignore")  # Lightning's, about a loader without workers
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if given.algorithms is not None:
        print(json.dumps(cases(given)))
        return
    text = cost(given) if given.what == "cost" else equality(given)
    name = "callbacks" if given.what == "cost" else "callback_equality"
    name += "_sharded" * given.sharded
    (given.out or RESULTS / f"{name}_{given.device}.md").write_text(text, encoding="utf8")
    print(text)


if __name__ == "__main__":
    main()
