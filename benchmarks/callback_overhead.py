"""What the callback costs: the same training run with and without it, in turns, at its default cadence.

``python -m benchmarks.callback_overhead`` trains a tiny model on a CPU and counts processor time, which other programs on the machine
do not change. ``--device cuda --blocks 12 --width 512 --batch 256 --length 256 --steps 2048`` is the 38M model of the training record, by the
clock; ``--width 1024`` has 151M parameters in its blocks, for the memory. Writes ``benchmarks/results/callbacks_<device>.md``.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.pretraining.corpus import Windows, train_tokenizer
from benchmarks.pretraining.models import Size, block_parameters, language_model
from benchmarks.pretraining.module import Pretraining, pl
from midlayer_encoders.callbacks import LayerMetricsCallback

RESULTS = Path(__file__).parent / "results"


def probe_texts(number: int, words: int = 60) -> list[str]:
    """Return texts of made-up words, each another."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (number, words, 6), generator=generator)
    return [" ".join("".join(map(chr, word)) for word in text) for text in letters.tolist()]


class Counted(LayerMetricsCallback):
    """The callback, counting its looks."""

    looks = 0

    def _visit(self, trainer: Any, pl_module: Any) -> None:
        self.looks += 1
        super()._visit(trainer, pl_module)


def run(given: argparse.Namespace, callbacks: list[Any]) -> dict[str, float]:
    """Train once, and return the seconds and the peak memory."""
    size = Size(given.blocks, given.width, length=given.length)
    model = language_model("causal", size)
    module = Pretraining(model, "causal", steps=given.steps, compiled=given.device == "cuda")
    tokens = torch.randint(3, size.vocab, (1_000_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    trainer = pl.Trainer(
        max_steps=given.steps, max_epochs=1, callbacks=callbacks, logger=False, devices=1,
        accelerator="gpu" if given.device == "cuda" else "cpu", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, precision="bf16-mixed" if given.device == "cuda" else "32-true",
    )  # fmt: skip
    if given.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = time.perf_counter if given.device == "cuda" else time.process_time
    start = clock()
    trainer.fit(module, Windows(tokens.to(given.device), given.steps, given.batch, given.length))
    if given.device == "cuda":
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 1e9 if given.device == "cuda" else float("nan")
    return {"seconds": clock() - start, "peak": peak, "parameters": block_parameters(model) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="by default benchmarks/results/callbacks_DEVICE.md")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")  # Lightning's, about a loader without workers
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    texts = probe_texts(given.texts)
    tokenizer = train_tokenizer(texts, 2000)
    plain, watched, looks = [], [], 0
    for number in range(given.rounds + 1):
        without = run(given, [])
        callback = Counted(texts, tokenizer, figures=False, dirpath=Path("runs/callback_overhead"))
        with_it = run(given, [callback])
        if number:  # the first round warms up
            plain.append(without)
            watched.append(with_it)
            looks = callback.looks
        print(number, without, with_it, flush=True)
    seconds = [statistics.median(one["seconds"] for one in many) for many in (plain, watched)]
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(plain, watched, strict=True)]
    peaks = [max(one["peak"] for one in many) for many in (plain, watched)]
    kind = "clock" if given.device == "cuda" else "processor"
    shape = f"--blocks {given.blocks} --width {given.width} --length {given.length} --batch {given.batch}"
    lines = [f"# The callback beside the same run without it ({given.device})", ""]
    lines += [f"`python -m benchmarks.callback_overhead --device {given.device} {shape} --steps {given.steps}`: torch"]
    lines += [
        f"{torch.__version__}, {plain[0]['parameters']:.1f}M parameters in blocks, {given.texts} texts, 4 views, the paper's"
    ]
    lines += [
        f"seven metrics of every layer, cadence `log2` ({looks} looks), {given.rounds} rounds in turns after one to warm up.",
        "",
    ]
    lines += [
        f"| | without | with | with / without, each round |\n|---|---|---|---|\n| {kind} s, median | {seconds[0]:.2f} | "
    ]
    lines[-1] += f"{seconds[1]:.2f} | {', '.join(f'{ratio:.3f}' for ratio in ratios)} |"
    lines += [f"| s a look | | {(seconds[1] - seconds[0]) / looks:.3f} | |"]
    lines += (
        [f"| peak memory, GB | {peaks[0]:.2f} | {peaks[1]:.2f} | {peaks[1] / peaks[0]:.3f} |"]
        if given.device == "cuda"
        else []
    )
    (given.out or RESULTS / f"callbacks_{given.device}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
