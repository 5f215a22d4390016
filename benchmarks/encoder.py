"""The cost of a cut encoder: time by depth, compared with the uncut model and sentence-transformers; loading; import.

Writes ``benchmarks/results/encoder.md``. Every figure is a ratio within one run: rounds alternate between the
encoders, and the fastest round of each counts, so that other programs on the machine slow all of them equally.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCKS, DEPTHS = 24, (0, 6, 12, 17, 24)
RESULTS = Path(__file__).parent / "results" / "encoder.md"


def write_model(folder: Path, width: int, blocks: int = BLOCKS) -> None:
    """Write a random Llama and a tokenizer of single characters."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=width, num_hidden_layers=blocks, num_attention_heads=8,
        intermediate_size=width * 8 // 3, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    LlamaModel(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", *string.printable[:95]]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def texts(count: int) -> list[str]:
    import random

    draw = random.Random(0)
    return ["".join(draw.choices(string.ascii_lowercase + " ", k=128)) for _ in range(count)]


def time_encoders(encoders: dict[str, Any], inputs: list[str], rounds: int) -> dict[str, float]:
    """Return the processor seconds of the fastest round of each encoder, the rounds alternating."""
    best = dict.fromkeys(encoders, float("inf"))
    for encoder in encoders.values():
        encoder.encode(inputs[:8], show_progress_bar=False)
    for _ in range(rounds):
        for name, encoder in encoders.items():
            start = time.process_time()
            encoder.encode(inputs, batch_size=16, show_progress_bar=False)
            best[name] = min(best[name], time.process_time() - start)
    return best


def encoding_table(folder: Path, rounds: int) -> list[str]:
    import torch
    from sentence_transformers import SentenceTransformer

    from midlayer_encoders import LayerEncoder

    torch.set_num_threads(1)  # and processor time: whatever else the machine does counts least
    encoders: dict[str, Any] = {}
    for depth in DEPTHS:
        encoders[f"ours {depth}"] = LayerEncoder(str(folder), depth, device="cpu")
        encoders[f"ours {depth}"].save_pretrained(str(folder / f"cut{depth}"))
        encoders[f"plain {depth}"] = SentenceTransformer(str(folder / f"cut{depth}"), device="cpu")
    best = time_encoders(encoders, texts(64), rounds)
    base, whole = best["ours 0"], best[f"ours {BLOCKS}"]
    lines = [
        "| layer | k/L | time relative to the uncut model, without embeddings | difference from k/L | time relative to plain sentence-transformers |"
    ]
    lines += ["|---|---|---|---|---|"]
    for depth in DEPTHS:
        share, ratio = depth / BLOCKS, (best[f"ours {depth}"] - base) / (whole - base)
        off = f"{100 * (ratio / share - 1):+.1f} %" if depth else ""
        plain = best[f"ours {depth}"] / best[f"plain {depth}"]
        lines.append(f"| {depth} | {share:.3f} | {ratio:.3f} | {off} | {plain:.3f} |")
    return lines


def loading_table(folder: Path) -> list[str]:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
    lines = [f"The model file has {size:.0f} MB.", ""]
    lines += [
        "| layer | share of the blocks | MB read from disk | peak memory above that of layer 0, MB |",
        "|---|---|---|---|",
    ]
    base = None
    for depth in DEPTHS:
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        command = [sys.executable, __file__, "--load", str(folder), "--layer", str(depth)]
        done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        base = done["peak"] if base is None else base
        lines.append(f"| {depth} | {depth / BLOCKS:.2f} | {done['read']:.0f} | {done['peak'] - base:.0f} |")
    return lines


def load_once(folder: str, layer: int) -> None:
    """Print bytes read and peak memory of one load and encode, in a process of its own."""
    from midlayer_encoders import LayerEncoder

    def read_bytes() -> float:
        return next(
            int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "read_bytes" in line
        )

    import sentence_transformers  # noqa: F401  (its own files are not the model's)

    before = read_bytes()
    LayerEncoder(folder, layer, device="cpu").encode(texts(4), show_progress_bar=False)
    # Not `ru_maxrss`, which a child inherits from the process that started it.
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3
    print(json.dumps({"read": (read_bytes() - before) / 1e6, "peak": peak}))


def import_seconds() -> float:
    code = "import time; t = time.perf_counter(); import midlayer_encoders; print(time.perf_counter() - t)"
    return min(
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(5)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--load-width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--load", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--layer", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write is not None:
        write_model(Path(given.write), given.width)
        return
    if given.load is not None:
        load_once(given.load, given.layer)
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        # In a separate process, because files that this process maps would stay in the cache.
        for name, width in (("speed", given.width), ("loading", given.load_width)):
            command = [sys.executable, __file__, "--write", f"{folder}/{name}", "--width", str(width)]
            subprocess.run(command, check=True)
        loading = loading_table(Path(folder, "loading"))
        encoding = encoding_table(Path(folder, "speed"), given.rounds)
    RESULTS.parent.mkdir(exist_ok=True)
    lines = ["# A cut encoder: time by depth, loading, import", ""]
    command = f"python benchmarks/encoder.py --width {given.width} --rounds {given.rounds}"
    lines += [f"`{command}`: a random Llama with {BLOCKS} blocks, float32, 64 texts of 128 tokens, one thread."]
    lines += [f"CPU time, the fastest of {given.rounds} alternating rounds.", ""]
    lines += ["## Encoding", "", *encoding, "", "## Loading", "", *loading, ""]
    lines += ["## Import", "", f"`import midlayer_encoders`: {import_seconds():.3f} s."]
    RESULTS.write_text("\n".join(lines) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
