"""What the callback costs: the same training run with and without it, alternating, at its default steps.

``python -m benchmarks.callback_overhead`` trains a tiny model on a CPU and counts processor time, which other programs on the machine
do not change. ``--device cuda --blocks 12 --width 512 --batch 256 --length 256 --steps 2048`` is the 38M model of the training record, by the
clock; ``--width 1024`` has 151M parameters in its blocks, for the memory. Writes ``benchmarks/results/callbacks_<device>.md``.
"""

from __future__ import annotations

import argparse
import logging
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.pretraining.corpus import Windows, train_tokenizer
from benchmarks.pretraining.models import Size, language_model
from benchmarks.pretraining.module import Pretraining, pl
from midlayer_encoders.callbacks import LayerMetricsCallback

RESULTS = Path(__file__).parent / "results"


def probe_texts(number: int, words: int = 60) -> list[str]:
    """Return different texts of made-up words."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (number, words, 6), generator=generator)
    return [" ".join("".join(map(chr, word)) for word in text) for text in letters.tolist()]


class Counted(LayerMetricsCallback):
    """The callback, counting its measurements and their time."""

    looks, seconds = 0, 0.0
    clock = staticmethod(time.process_time)

    def _visit(self, *given: Any) -> None:
        start = self.clock()
        super()._visit(*given)
        self.looks += 1
        self.seconds += self.clock() - start


def run(given: argparse.Namespace, steps: int, callbacks: list[Any]) -> dict[str, float]:
    """Train once, and return the seconds and the peak memory."""
    size = Size(given.blocks, given.width, length=given.length)
    model = language_model("causal", size)
    module = Pretraining(model, "causal", steps=steps, compiled=given.device == "cuda")
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
    start = clock()
    trainer.fit(module, Windows(tokens.to(given.device), steps, given.batch, given.length))
    if cuda:
        torch.cuda.synchronize()
    return {
        "seconds": clock() - start,
        # Of a process the peak can only grow, so the run without the callback comes first.
        "peak": torch.cuda.max_memory_allocated() / 1e9
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "loss": float(module.losses[-1]),
    }


def losses_in_words(one: float, other: float, *, promised: bool) -> str:
    """Return whether the last losses of both runs are equal to the bit; they must be where that is ``promised``."""
    if one == other:
        return "The last losses of both runs are equal to the bit."
    if promised:
        raise RuntimeError(f"The losses with and without the callback differ: {one!r} and {other!r}.")
    return (
        f"The last losses of both runs differ by {abs(one - other):.1e}: a compiled run repeats to the bit only under "
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
        f"{plain[0]['parameters']:.1f}M parameters, the callback's default options ({look.looks} measurements of {given.texts} texts), alternating runs. "
        + ("Seconds by the clock." if cuda else "Processor seconds."),
        "",
        "| round | without | with | added | peak GB without | with |",
        "|---|---|---|---|---|---|",
    ]
    for number, (one, two) in enumerate(zip(plain, watched, strict=True), start=1):
        added = 100 * (two["seconds"] / one["seconds"] - 1)
        lines.append(
            f"| {number} | {one['seconds']:.1f} | {two['seconds']:.1f} | {added:+.2f} % | {one['peak']:.2f} | {two['peak']:.2f} |"
        )
    step = min(one["seconds"] for one in [*plain, *watched]) / given.steps
    each = look.seconds / look.looks
    lines += [
        "",
        f"In the last run with it the measurements took {look.seconds:.1f} s, {100 * look.seconds / (watched[-1]['seconds'] - look.seconds):.2f} % "
        "of the rest of that run; the difference between two runs also holds what else the machine did. "
        f"A step takes {1000 * step:.1f} ms, a measurement {1000 * each:.0f} ms. Measurements are at steps 0, 1, 2, 4 …, so that their share falls as a run "
        "grows: by these two numbers "
        + ", ".join(f"{100 * (n.bit_length() + 2) * each / (n * step):.2f} % of {n} steps" for n in (1024, 4096, 16384))
        + ". "
        + losses_in_words(plain[-1]["loss"], watched[-1]["loss"], promised=promised(given)),
    ]
    return "\n".join(lines) + "\n"


def promised(given: argparse.Namespace) -> bool:
    """Return whether torch repeats these runs to the bit: those on a GPU are compiled."""
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
    run(given, 8, [])  # compile, and warm up
    plain, watched = [], []
    for _ in range(given.rounds):
        look = Counted(texts, tokenizer, dirpath=Path("runs/callback_overhead"), strict=True)
        look.clock = time.perf_counter if given.device == "cuda" else time.process_time
        plain.append(run(given, given.steps, []))
        watched.append(run(given, given.steps, [look]))
        losses_in_words(plain[-1]["loss"], watched[-1]["loss"], promised=promised(given))
        print(plain[-1], watched[-1], look.looks, look.seconds, flush=True)
    text = table(given, plain, watched, look)
    (given.out or RESULTS / f"callbacks_{given.device}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
