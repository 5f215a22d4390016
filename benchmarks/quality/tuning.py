"""Cut first, then tune: two models cut at several depths and tuned the same way, scored before and after.

    python -m benchmarks.quality.tuning whole built-in runs/smollm2                 # the GGUF file once, as a folder
    python -m benchmarks.quality.tuning run TASKS --model runs/smollm2 --task STSBenchmark --out runs/tuning.csv [--device cuda]
    python -m benchmarks.quality.tuning speed TASKS --model runs/smollm2 --out runs/speed.csv [--device cuda]
    python -m benchmarks.quality.tuning table runs/*.csv                            # benchmarks/results/tuning.{md,csv}

TASKS contains Banking77Classification (train, test) and STSBenchmark, whose validation pairs are used for training and
whose test pairs are scored. Banking77 is scored as mteb does: logistic regressions on 8 examples per class, ten draws; STSBenchmark by
Spearman's correlation of cosines. The earlier layers of the deepest tuned encoder are scored too, as the result of cutting
after tuning. Seeds run one after another, so a stopped run has complete ones.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from scipy.stats import spearmanr

from benchmarks.data import RESULTS
from benchmarks.pages import table
from midlayer_encoders import LayerEncoder, tune
from midlayer_encoders.extras.training import TuneSettings
from midlayer_encoders.sweeping.scoring.classification import ClassifierData, Classifiers

TRAIN = {"Banking77Classification": "train.jsonl", "STSBenchmark": "validation.jsonl"}
LAYERS = {6: [1, 2, 3, 4, 5, 6], 30: [6, 12, 18, 24, 30]}
HEAD = """# Cut first, then tune

Scores of models that were cut at several depths and then tuned, all with the same steps on the same pairs. `python -m
benchmarks.quality.tuning`, whose docstring describes the training data and the scoring. Score x 100 on test sets, mean over seeds,
± the standard deviation for two or more. *vs. whole*: the difference from the whole model tuned the same way, over the seeds
that both have. *cut after*: the whole model is tuned first and then cut at this layer.
"""
COLUMNS = ("model", "task", "layer", "seed", "when", "score", "parameters", "texts_per_second", "seconds", "device")
SHOTS, DRAWS, MAX_LENGTH = 8, 10, 128


class Test:
    """A task's test set, and how vectors are scored on it."""

    def __init__(self, folder: Path, rows: int | None) -> None:
        self.task = folder.name
        test = read(folder / "test.jsonl")[:rows]
        if self.task == "STSBenchmark":
            self.texts = [row["sentence1"] for row in test] + [row["sentence2"] for row in test]
            self.wanted = [row["score"] for row in test]
            return
        train, draw = read(folder / "train.jsonl"), np.random.default_rng(0)
        by_label: dict[int, list[int]] = defaultdict(list)
        for place, row in enumerate(train):
            by_label[row["label"]].append(place)
        drawn = [
            [draw.choice(by_label[label], SHOTS, replace=False) for label in sorted(by_label)] for _ in range(DRAWS)
        ]
        self.texts = [row["text"] for row in train] + [row["text"] for row in test]
        labels = torch.tensor([row["label"] for row in train + test])
        asked = torch.arange(len(train), len(self.texts))
        self.experiments = [
            ClassifierData(rows := torch.from_numpy(np.concatenate(one)), labels[rows], asked, labels[asked])
            for one in drawn
        ]
        used = torch.unique(torch.cat([torch.cat([one.train, one.test]) for one in self.experiments]))
        self.experiments = [
            ClassifierData(torch.searchsorted(used, one.train), one.train_labels, torch.searchsorted(used, one.test), one.test_labels)
            for one in self.experiments
        ]  # fmt: skip
        self.texts = [self.texts[place] for place in used.tolist()]

    def score(self, vectors: torch.Tensor) -> float:
        """Return the score x 100 of vectors ``(N, D)``."""
        if self.task == "STSBenchmark":
            near = torch.nn.functional.cosine_similarity(*vectors.chunk(2)).cpu()
            return 100 * float(spearmanr(near, self.wanted).statistic)
        return 100 * float(Classifiers(tuple(self.experiments)).bootstrap(vectors[None].clone())[0])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


def encoded(encoder: LayerEncoder, texts: list[str]) -> torch.Tensor:
    return encoder.encode(texts, convert_to_tensor=True, batch_size=256, show_progress_bar=False).float()


def depths(model: str, given: argparse.Namespace) -> list[int]:
    whole = LayerEncoder(model, -1, device="cpu")
    return given.layers or LAYERS[whole.num_layers]


def keep(path: Path, **row: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(*row.values(), flush=True)


def whole(given: argparse.Namespace) -> None:
    LayerEncoder(given.model, -1, dtype="float32", device="cpu").save_pretrained(str(given.folder))


def run(given: argparse.Namespace) -> None:
    start, layers = time.monotonic(), depths(given.model, given)
    test, device = Test(given.tasks / given.task, given.rows), given.device
    same = {"model": (given.name or Path(given.model).name), "task": given.task, "device": device}
    for layer in layers:
        encoder = LayerEncoder(given.model, layer, dtype="float32", device=device, max_length=MAX_LENGTH)
        parameters = sum(one.numel() for one in encoder.parameters())
        score = test.score(encoded(encoder, test.texts))
        keep(given.out, **same, layer=layer, when="before", score=score, parameters=parameters)
    for seed in given.seeds:
        for layer in reversed(layers):  # the whole model first: the others are compared with it
            if time.monotonic() - start > given.seconds:
                return
            with tempfile.TemporaryDirectory() as folder:
                made = tune(
                    given.model, layer, given.tasks / given.task / TRAIN[given.task], out=Path(folder) / "run", tasks=(),
                    settings=TuneSettings(
                        max_steps=given.steps, batch_size=given.batch, held_out=0, checkpoints=0, seed=seed,
                        lora=given.lora or False, learning_rate=given.rate,
                    ),
                    device=device, max_length=MAX_LENGTH,
                )  # fmt: skip
                seconds = made.trained.seconds
                score = test.score(encoded(made.encoder, test.texts))
                row = same | {"seed": seed, "seconds": round(seconds, 1)}
                keep(given.out, **row, layer=layer, when="after", score=score)
                if layer == made.encoder.num_layers and len(layers) > 1:  # the whole model alone is cut after
                    early = [one for one in layers if one < layer]
                    every = made.encoder.encode_layers(test.texts, layers=early, convert_to_tensor=True)
                    for one, vectors in zip(early, every, strict=True):
                        keep(given.out, **row, layer=one, when="cut after", score=test.score(vectors.float()))
            shutil.rmtree(folder, ignore_errors=True)


def speed(given: argparse.Namespace) -> None:
    texts = [row["text"] for row in read(given.tasks / "Banking77Classification" / "test.jsonl")][: given.rows]
    for layer in depths(given.model, given):
        encoder = LayerEncoder(given.model, layer, dtype=given.dtype, device=given.device, max_length=MAX_LENGTH)
        encoded(encoder, texts[:256])
        times = []
        clock = time.process_time if given.device == "cpu" else time.perf_counter  # others may use the machine
        for _ in range(3):
            start = clock()
            encoded(encoder, texts).cpu()
            times.append(clock() - start)
        rate = round(len(texts) / min(times))
        row = {"model": (given.name or Path(given.model).name), "layer": layer, "when": "speed", "device": given.device}
        keep(given.out, **row, texts_per_second=rate)


def write_page(given: argparse.Namespace) -> None:
    """Write the rows of all files, and a table for each model and task."""
    frame = pl.concat([pl.read_csv(path) for path in given.files], how="vertical_relaxed")
    text = HEAD + (f"\n{given.note}\n" if given.note else "")
    for (model, task), rows in frame.drop_nulls("task").group_by("model", "task", maintain_order=True):
        speeds = dict(frame.filter(model=model, when="speed").select("layer", "texts_per_second").iter_rows())
        text += f"\n## {model}, {task}\n\n{task_table(rows, speeds)}"
    (RESULTS / "tuning.md").write_text(text, encoding="utf8")
    frame.write_csv(RESULTS / "tuning.csv")
    print(text)


def task_table(rows: pl.DataFrame, speeds: dict[int, float]) -> str:
    """Return a row for each layer of a model: its size, and its scores before tuning, after it, and cut after it."""
    sizes = dict(rows.filter(when="before").sort("layer").select("layer", "parameters").iter_rows())
    last, lines = max(sizes), []
    for layer, count in sizes.items():
        mine = rows.filter(layer=layer)
        after, cut_after = (mine.filter(when=when)["score"].to_list() for when in ("after", "cut after"))
        both = mine.filter(when="after").join(rows.filter(layer=last, when="after"), on="seed")
        against = [] if layer == last else (both["score"] - both["score_right"]).to_list()
        gain = f"{statistics.mean(after) - mine.filter(when='before')['score'].item():+.1f}" if after else ""
        lines.append([
            layer, f"{count / 1e6:.1f}M", f"{100 * count / sizes[last]:.0f} %", speeds.get(layer, ""),
            f"{mine.filter(when='before')['score'].item():.1f}", _spread(after), len(after), gain,
            _spread(against, sign="+"), _spread(cut_after),
        ])  # fmt: skip
    head = "layer, parameters, share, texts per second, before, after, seeds, gain, vs. whole, cut after"
    return table(head.split(", "), lines)


def _spread(values: list[float], sign: str = "") -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.1f}{spread}"


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("whole")
    making.add_argument("model")
    making.add_argument("folder", type=Path)
    making.set_defaults(call=whole)
    for name, call in (("run", run), ("speed", speed)):
        one = commands.add_parser(name)
        one.add_argument("tasks", type=Path)
        one.add_argument("--model", required=True)
        one.add_argument("--name", help="of the model in the table; that of its folder by default")
        one.add_argument("--device", default="cpu")
        one.add_argument("--out", type=Path, required=True)
        one.add_argument("--layers", type=int, nargs="+")
        one.add_argument("--rows", type=int, help="of the test set; all by default")
        one.add_argument("--dtype", default="float32", help="of speed")
        one.set_defaults(call=call)
    running = commands.choices["run"]
    running.add_argument("--task", choices=TRAIN, required=True)
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    running.add_argument("--steps", type=int, default=150)
    running.add_argument("--batch", type=int, default=64)
    running.add_argument("--rate", type=float)
    running.add_argument("--lora", type=int, default=0)
    running.add_argument("--seconds", type=float, default=1e9, help="after which no further run begins")
    showing = commands.add_parser("table")
    showing.add_argument("files", type=Path, nargs="+")
    showing.add_argument("--note", default="")
    showing.set_defaults(call=write_page)
    given = parser.parse_args()
    given.call(given)


if __name__ == "__main__":
    main()
