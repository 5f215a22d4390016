"""Every layer of Whisper's encoder in three sizes: which word is spoken, and which voice speaks it.

    python -m benchmarks.zoo.weights ZOO --only Whisper-tiny-int8 Whisper-base-int8 Whisper-small-int8
    python -m benchmarks.quality.whisper_sizes ZOO [--sizes tiny]      # needs espeak-ng, a Debian package
    python -m benchmarks.quality.whisper_sizes --draw                  # the figure, from the scores

espeak-ng speaks each word once in each voice, at a random speed and pitch. A linear probe reads the mean of the states. Five
folds test every recording once: words on voices, and voices on words, that did not train. The window is 3 s instead of 30,
as the time of a pass grows with it; ``--sizes tiny --window 30`` is the control. The scores of other sizes and windows stay,
and vectors are cached in ``--out``.
"""

from __future__ import annotations

import argparse
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from transformers import WhisperFeatureExtractor, WhisperModel

from benchmarks.data import RESULTS
from midlayer_encoders import LayerEncoder
from midlayer_encoders.extras.probing import CachedTokens, ProbeSettings, Split, probe_tokens, wilson
from midlayer_encoders.metrics.label_accuracy import gain_interval
from midlayer_encoders.report import drawing

SCORES = RESULTS / "whisper_sizes.csv"
FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "whisper_sizes.png"
SIZES = ("tiny", "base", "small")
WORDS = (  # each differs from nine others in its first consonant only
    "bat", "cat", "chat", "fat", "hat", "mat", "pat", "rat", "sat", "vat",
    "bin", "chin", "din", "fin", "kin", "pin", "sin", "thin", "tin", "win",
)  # fmt: skip
VOICES = ("f1", "f2", "f3", "f4", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "Andy", "Annie", "croak")
TASKS = {"words": "Which word is spoken?", "voices": "Which voice speaks?"}
FOLDS, SECONDS, WHOLE_WINDOW, FRAMES_PER_SECOND = 5, 3, 30, 50
SETTINGS = ProbeSettings(batch_size=32, epochs=100, patience=20)


def synthesize(out: Path) -> list[str]:
    """Return the path of each word in each voice, spoken by espeak-ng unless the file exists."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for word in WORDS:
        for voice in VOICES:
            path = out / f"{word}-{voice}.wav"
            draw = random.Random(f"{word} {voice}")
            options = ["-v", f"en-us+{voice}", "-s", str(draw.randint(120, 200)), "-p", str(draw.randint(30, 70))]
            if not path.exists():
                subprocess.run(["espeak-ng", *options, "-w", str(path), word], check=True)
            paths.append(str(path))
    return paths


def shorten_window(folder: Path, out: Path, seconds: int) -> None:
    """Save an encoder whose window has the first positions only."""
    model, frames = WhisperModel.from_pretrained(folder), seconds * FRAMES_PER_SECOND
    positions = torch.nn.Embedding.from_pretrained(model.encoder.embed_positions.weight[:frames].clone())
    model.encoder.embed_positions, model.config.max_source_positions = positions, frames
    model.save_pretrained(out)
    WhisperFeatureExtractor.from_pretrained(folder, chunk_length=seconds).save_pretrained(out)


def read_layers(folder: Path, paths: list[str], out: Path, seconds: int) -> torch.Tensor:
    """Return the mean states of every layer and recording, ``(L, N, D)``, from the cache or the model."""
    cache = out / f"{folder.name}-{seconds}.npy"
    if not cache.exists():
        if seconds < WHOLE_WINDOW:
            shorten_window(folder, folder := out / f"{folder.name}-{seconds}", seconds)
        np.save(cache, LayerEncoder(str(folder), -1).encode_layers(paths, show_progress_bar=True))
    return torch.from_numpy(np.load(cache))


def probe_folds(vectors: torch.Tensor, labels: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return which recordings each layer has right, ``(L, N)``, with each group tested by probes that did not see it."""
    tokens = CachedTokens(vectors[:, :, None], torch.ones(len(labels), 1, dtype=torch.bool))
    right = torch.zeros(vectors.shape[:2], dtype=torch.bool)
    for fold in range(FOLDS):
        test, validation = (groups % FOLDS == number % FOLDS for number in (fold, fold + 1))
        split = Split(*(rows.nonzero()[:, 0] for rows in (~test & ~validation, validation, test)))
        right[:, split.test] = probe_tokens(tokens, labels, split, kind="linear", settings=SETTINGS)[0]
    return right


def rows_of(size: str, seconds: int, vectors: torch.Tensor) -> list[dict[str, Any]]:
    """Return accuracy (Wilson interval) and gain over the last layer (bootstrap interval) of each layer, in percent."""
    words = torch.arange(len(WORDS)).repeat_interleave(len(VOICES))
    voices = torch.arange(len(VOICES)).repeat(len(WORDS))
    rows = []
    for task, labels, groups in (("words", words, voices), ("voices", voices, words)):
        right = probe_folds(vectors, labels, groups)
        for layer, hits in enumerate(right):
            last = right[-1].double()
            accuracy = float(hits.double().mean()), *wilson(int(hits.sum()), len(hits))
            gain = accuracy[0] - float(last.mean()), *gain_interval(hits.double(), last)
            names = ("accuracy", "low", "high", "gain", "gain_low", "gain_high")
            scores = {name: round(100 * number, 4) for name, number in zip(names, (*accuracy, *gain), strict=True)}
            rows.append({"size": size, "window": seconds, "task": task, "layer": layer} | scores)
    return rows


def draw(scores: pl.DataFrame) -> None:
    """Draw a panel for each task, with a curve over relative depth and its interval for each size."""
    figure, panels = drawing.panel_grid(len(TASKS), size=(3.6, 2.8))
    for axes, (task, question) in zip(panels, TASKS.items(), strict=True):
        for style, size in enumerate(SIZES):
            rows = scores.filter(task=task, size=size, window=SECONDS).sort("layer")
            if rows.is_empty():
                continue
            depth = (rows["layer"] / rows["layer"].max()).to_list()
            band = rows["low"].to_list(), rows["high"].to_list()
            label = f"{size}, {rows['layer'].max()} blocks"
            drawing.draw_points(axes, depth, rows["accuracy"].to_list(), label=label, style=style, band=band)
        drawing.draw_level(axes, 100 / len(WORDS if task == "words" else VOICES), "guessing")
        drawing.layer_axis(axes, 1, relative=True)
        axes.set_ylim(0, 102)
        axes.set_ylabel("accuracy, %")
        drawing.set_title(axes, question)
    drawing.finish(figure).savefig(FIGURE, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", nargs="?", type=Path, help="folder of the converted models")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--window", type=int, default=SECONDS, help="seconds that the encoder reads, up to 30")
    parser.add_argument("--out", type=Path, default=Path("runs/whisper_sizes"), help="recordings, models and vectors")
    parser.add_argument("--draw", action="store_true", help="only draw the figure")
    args = parser.parse_args()
    if not args.draw:
        if args.zoo is None:
            parser.error("pass the folder of the models, or --draw")
        paths = synthesize(args.out / "recordings")
        for size in args.sizes:
            vectors = read_layers(args.zoo / f"Whisper-{size}-int8", paths, args.out, args.window)
            new = pl.DataFrame(rows_of(size, args.window, vectors))
            if SCORES.exists():
                old = pl.read_csv(SCORES).filter((pl.col("size") != size) | (pl.col("window") != args.window))
                new = pl.concat([old, new])
            new.write_csv(SCORES)
    draw(pl.read_csv(SCORES))


if __name__ == "__main__":
    main()
