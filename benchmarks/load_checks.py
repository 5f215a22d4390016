"""The cost of verification at load time: construct an encoder of a 135M model with and without it.

    python -m benchmarks.load_checks            # benchmarks/results/load_checks.md

The model has the shape and the tokenizer of SmolLM2-135M and random weights. Verification compares the plan of the cut
with the model on the meta device, and the states of two passes with hooks on the layer's block.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers.utils import logging as tf_logging

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder import build
from midlayer_encoders.models import load
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.models.cut import cut_model
from midlayer_encoders.models.hub import built_in_model

RESULTS = Path(__file__).parent / "results" / "load_checks.md"


def save_model(folder: Path) -> None:
    """Write a Llama of 30 blocks of 576, 135M parameters, and SmolLM2's tokenizer."""
    import transformers as tf

    source, gguf_file = built_in_model()

    config = tf.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    tf.LlamaModel(config).save_pretrained(folder)
    tf.AutoTokenizer.from_pretrained(source, gguf_file=gguf_file).save_pretrained(folder)


@contextmanager
def unchecked() -> Iterator[None]:
    """Make encoders without a look at the model."""

    def finish(module: Any, cut: Any, *_: Any) -> None:
        anatomy = find_anatomy(module.model, blocks=cut.anatomy.blocks, final=cut.anatomy.final)
        cut_model(module.model, replace(cut, anatomy=anatomy))

    with mock.patch.object(build, "check_states", finish), mock.patch.object(load, "_compare", return_value=None):
        yield


def timed(folder: str, layer: int) -> tuple[float, float]:
    """Return seconds on the clock and of the processor that one construction takes."""
    start, used = time.perf_counter(), time.process_time()
    LayerEncoder(folder, layer, device="cpu")
    return time.perf_counter() - start, time.process_time() - used


def main() -> None:
    """Measure, print, and write the results."""
    tf_logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for layer in (30, 15):
            timed(folder, layer)  # imports, and the files in memory
            checked: list[tuple[float, float]] = []
            plain: list[tuple[float, float]] = []
            for _ in range(given.repeats):
                with unchecked():
                    plain.append(timed(folder, layer))
                checked.append(timed(folder, layer))
            medians = [statistics.median(one[n] for one in some) for some in (plain, checked) for n in (0, 1)]
            rows.append((layer, *medians))
            print(
                f"layer {layer}: without {medians[0]:.3f} s, with {medians[2]:.3f} s; CPU {medians[1]:.3f}, {medians[3]:.3f}"
            )
    lines = [
        "# The cost of verification at load time\n\n"
        f"Time to construct a `LayerEncoder` of a 135M Llama (30 blocks of width 576, float32, random weights, SmolLM2's tokenizer), "
        "with and without verification. `python -m benchmarks.load_checks`: CPU, "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, median of {given.repeats} alternating rounds.",
        "",
        "| layer | without verification, s | with, s | ratio | CPU s without | with | ratio |",
        "|---|---|---|---|---|---|---|",
        *(f"| {k} | {a:.3f} | {c:.3f} | {c / a:.3f} | {b:.3f} | {d:.3f} | {d / b:.3f} |" for k, a, b, c, d in rows),
    ]
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
