"""The cost of the callback: the same training run with and without it, alternating, at its default steps.

``python -m benchmarks.callback_overhead`` trains a tiny model on a CPU and counts CPU time, which other programs on the
machine hardly change. ``--device cuda --blocks 12 --width 512 --batch 256 --length 256 --steps 2048`` is the 38M model of the first training record, by the
clock; ``--width 1024`` has 151M parameters in its blocks, for the memory. Writes ``benchmarks/results/callbacks_<device>.md``.

The added time is computed from the parts of the callback (preparation, first measurement, later ones, end) and the step
time of the run without it, so a short run (``--steps 96``) gives it for any number of steps.
"""

from __future__ import annotations

import argparse
import logging
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from midlayer_encoders.callbacks._settings import is_due

from benchmarks.pretraining.corpus import Windows, train_tokenizer
from benchmarks.pretraining.models import VARIANTS, Pretraining, Size, language_model, pl
from midlayer_encoders.callbacks import LayerMetricsCallback

RESULTS = Path(__file__).parent / "results"


def probe_texts(number: int, words: int = 60) -> list[str]:
    """Return different texts of made-up words."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (number, words, 6), generator=generator)
    return [" ".join("".join(map(chr, word)) for word in text) for text in letters.tolist()]


class Counted(LayerMetricsCallback):
    """The callback, with the time of each of its parts."""

    clock = staticmethod(time.process_time)
    drawn = 0.0

    def _begin(self) -> None:
        super()._begin()
        self.preparing, self.recording, self.ending = 0.0, 0.0, 0.0
        self.visits: list[float] = []
        self._is_timed = False  # inside another part

    def _timed(self, part: Callable[..., None], *given: Any) -> float:
        _wait()  # for the step before
        start = self.clock()
        was_timed, self._is_timed = self._is_timed, True
        part(*given)
        self._is_timed = was_timed
        _wait()
        return self.clock() - start

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
    clock = staticmethod(time.process_time)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.first:
            _wait()
            self.start = self.clock()

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        _wait()
        self.seconds = (self.clock() - self.start) / (trainer.global_step - self.first)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(given: argparse.Namespace, steps: int, callbacks: list[Any]) -> dict[str, float]:
    """Train once, and return the seconds and the peak memory."""
    size = Size(given.blocks, given.width, length=given.length)
    variant = replace(VARIANTS["first-causal"], steps=steps)
    model = language_model(variant, size)
    module = Pretraining(model, variant, compiled=given.device == "cuda")
    tokens = torch.randint(3, size.vocab, (1_000_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    cuda = given.device == "cuda"
    trainer = pl.Trainer(
        max_steps=steps, max_epochs=1, callbacks=callbacks, logger=False, devices=1, accelerator="gpu" if cuda else "cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        precision="bf16-mixed" if cuda else "32-true",
    )  # fmt: skip
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = time.perf_counter if cuda else time.process_time
    timed = Steps()
    timed.clock = clock  # type: ignore[method-assign]
    trainer.callbacks.insert(0, timed)
    start = clock()
    trainer.fit(module, Windows(tokens.to(given.device), steps, given.batch, given.length))
    if cuda:
        torch.cuda.synchronize()
    return {
        "seconds": clock() - start,
        "step": timed.seconds,
        # Of a process the peak can only grow, so the run without the callback comes first.
        "peak": torch.cuda.max_memory_allocated() / 1e9
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "loss": float(module.losses[-1]),
    }


def losses_in_words(one: float, other: float, *, promised: bool) -> str:
    """Return a sentence on whether the last losses of both runs are bitwise equal; required if ``promised``."""
    if one == other:
        return "The last losses of both runs are bitwise equal."
    if promised:
        raise RuntimeError(f"The losses with and without the callback differ: {one!r} and {other!r}.")
    return (
        f"The last losses of both runs differ by {abs(one - other):.1e}: a compiled run repeats bitwise only under "
        "`torch.use_deterministic_algorithms(True)` (see callback_equality.py)."
    )


def table(
    given: argparse.Namespace, plain: list[dict[str, float]], watched: list[dict[str, float]], look: Counted
) -> str:
    cuda = given.device == "cuda"
    shape = f"--blocks {given.blocks} --width {given.width} --length {given.length} --batch {given.batch} --texts {given.texts}"
    lines = [
        f"# A training run with and without the callback ({given.device})",
        "",
        f"`python -m benchmarks.callback_overhead --device {given.device} {shape} --steps {given.steps}`: torch {torch.__version__}, "
        f"{plain[0]['parameters']:.1f}M parameters, the callback's default options ({len(look.visits)} measurements of {given.texts} texts), alternating runs. "
        + ("Wall-clock seconds." if cuda else "CPU seconds."),
        "",
        "| round | without | with | added | peak GB without | with |",
        "|---|---|---|---|---|---|",
    ]
    for number, (one, two) in enumerate(zip(plain, watched, strict=True), start=1):
        added = 100 * (two["seconds"] / one["seconds"] - 1)
        lines.append(
            f"| {number} | {one['seconds']:.1f} | {two['seconds']:.1f} | {added:+.2f} % | {one['peak']:.2f} | {two['peak']:.2f} |"
        )
    step = min(one["step"] for one in plain)
    lines += [
        "",
        "The parts of the last run with the callback, each with an idle device before and after:",
        "",
        "| step | preparation | first measurement | later measurements (median) | recording all values | end of the run, without figures | a later measurement, in steps |",
        "|---|---|---|---|---|---|---|",
        f"| {1e3 * step:.1f} ms | {1e3 * look.preparing:.0f} ms | {1e3 * look.visits[0]:.0f} ms | {1e3 * look.each:.1f} ms | "
        f"{1e3 * look.recording:.0f} ms | {1e3 * look.ending:.0f} ms | **{look.each / step:.2f}** |",
        "",
        "On a GPU a thread computes the metrics between these parts, while training continues; the end of the run waits for "
        f"the last ones. By the clock, the steps after step {Steps.first} took {1e3 * (given.steps - Steps.first) * (watched[-1]['step'] - step):.0f} ms "
        "longer than those of the run without the callback, measurements included.",
        "",
        "Computed from these parts, with measurements at steps 0, 8, 16, 32 … and the last:",
        "",
        "| steps | added time |",
        "|---|---|",
        *(f"| {n} | **{100 * look.added(n) / (n * step):.2f} %** |" for n in (1024, 8192, 16384)),
        "",
        f"Peak memory is {watched[-1]['peak'] / plain[-1]['peak']:.3f} times that of the run without the callback. "
        "The difference between two runs also contains compilation and other load on the machine. A background thread draws the "
        f"figures; it ended {look.drawn:.1f} s after the run. "
        + losses_in_words(plain[-1]["loss"], watched[-1]["loss"], promised=promised(given)),
    ]
    return "\n".join(lines) + "\n"


def promised(given: argparse.Namespace) -> bool:
    """Return whether torch repeats these runs bitwise; those on a GPU are compiled."""
    return given.device == "cpu" or torch.are_deterministic_algorithms_enabled()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="by default benchmarks/results/callbacks_DEVICE.md")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")  # Lightning's, about a loader without workers
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    texts = probe_texts(given.texts)
    tokenizer = train_tokenizer(texts, 2000)
    run(given, 2 * Steps.first, [])  # compile, and warm up
    plain, watched = [], []
    for _ in range(given.rounds):
        plain.append(run(given, given.steps, []))
        look = Counted(texts, tokenizer, dirpath=Path("runs/callback_overhead"))
        look.clock = time.perf_counter if given.device == "cuda" else time.process_time  # type: ignore[method-assign]
        watched.append(run(given, given.steps, [look]))
        start = time.perf_counter()
        if look._drawing is not None:
            look._drawing.join()
        look.drawn = time.perf_counter() - start
        assert not look._warned, "a measurement failed"
        losses_in_words(plain[-1]["loss"], watched[-1]["loss"], promised=promised(given))
        print(plain[-1], watched[-1], look.preparing, look.visits, look.recording, look.ending, flush=True)
    text = table(given, plain, watched, look)
    (given.out or RESULTS / f"callbacks_{given.device}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
