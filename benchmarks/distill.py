"""Distill models into cut ones, and compare with the cut alone, with tuning on pairs, and with the teacher.

    python -m benchmarks.distill texts CORPORA OUT      # OUT/texts.txt, 50,000 sentences; pairs.jsonl; paragraphs.txt
    python -m benchmarks.distill run TASKS OUT --model FOLDER --layer 3 --methods cut distill --out runs/a.csv
    python -m benchmarks.distill table runs/*.csv       # benchmarks/results/distill.{md,csv}

CORPORA has WikiText-2 and the fiction corpus; TASKS a folder for each task, none of whose texts are trained on. Methods:
``teacher``; ``cut``, the encoder without training; ``distill``; ``pairs``, tuning on pairs of neighboring sentences;
``sts``, tuning on the scored pairs of STSBenchmark's validation set; ``mntp``, with bidirectional attention, before and
after training on masked paragraphs. A row of the CSV file is a score of a method on a task.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import lzma
import random
import re
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from midlayer_encoders import LayerEncoder, distill, sweep, tune
from midlayer_encoders.extras.training import DistillSettings, TuneSettings
from midlayer_encoders.sweeping import SweepSettings
from midlayer_encoders.tasks import task_label

RESULTS = Path(__file__).parent / "results"
NUM_TEXTS = 50_000
COLUMNS = ("model", "method", "layer", "recipe", "details", "seconds", "task", "score")
UNTRAINED = ("teacher", "cut", "cut-bidirectional")
SENTENCE = re.compile(r"(?<=[.!?])[\"”’]?\s+")
MAX_LENGTH = 256  # tokens of a text, which word-echo reads twice


def paragraphs(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the sentences of each paragraph; paragraphs are separated by blank lines, and may be wrapped."""
    for blank, group in itertools.groupby(lines, key=lambda line: not line.strip()):
        if not blank:
            text = " ".join(" ".join(group).split())
            found = [part.strip() for part in SENTENCE.split(text)]
            yield [sentence for sentence in found if 30 <= len(sentence) <= 300]


def write_texts(corpora: Path, out: Path) -> None:
    """Write sentences, pairs of neighbors and paragraphs: those of WikiText, and random ones of the novels."""
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    wikitext = (corpora / "wikitext2_raw_test.txt").read_text(encoding="utf8")
    wikitext = re.sub(r" ([,.;:!?)])", r"\1", wikitext.replace(" @-@ ", "-").replace("( ", "("))
    articles = list(paragraphs(wikitext.splitlines()))
    with lzma.open(corpora / "fiction_en.txt.xz", "rt", encoding="utf8") as file:
        novels = list(paragraphs(file))
    draw.shuffle(novels)
    everything = [paragraph for paragraph in (*articles, *novels) if paragraph]
    several = [paragraph for paragraph in everything if len(paragraph) > 1][:NUM_TEXTS]
    texts = [sentence for paragraph in articles for sentence in paragraph]
    texts += [draw.choice(paragraph) for paragraph in novels if paragraph]
    texts = list(dict.fromkeys(texts))[:NUM_TEXTS]
    pairs = [json.dumps({"anchor": paragraph[0], "positive": paragraph[1]}) for paragraph in several]
    for name, lines in {
        "texts.txt": texts,
        "pairs.jsonl": pairs,
        "paragraphs.txt": [" ".join(paragraph) for paragraph in several],
    }.items():
        (out / name).write_text("\n".join(lines), encoding="utf8")
    print(f"{len(texts)} sentences, {len(pairs)} pairs and paragraphs, of {len(everything)} paragraphs")


def scores(encoder: LayerEncoder, tasks: Path) -> dict[str, float]:
    """Return the score x 100 of an encoder on each task."""
    folders = sorted(path for path in tasks.iterdir() if path.is_dir())
    with tempfile.TemporaryDirectory() as folder:
        settings = SweepSettings(workers=1)
        result = sweep(encoder, folders, layers=[encoder.layer], baselines=False, out=folder, settings=settings)
    rows = result.frame.filter(kind="score").iter_rows(named=True)
    return {task_label(row["dataset"]): 100 * row["value"] for row in rows}


def trained(method: str, args: argparse.Namespace, out: Path) -> tuple[LayerEncoder, str]:
    """Train with a method, and return the encoder and the settings that matter."""
    options: dict[str, Any] = {"device": args.device, "max_length": MAX_LENGTH, "dtype": "float32"}
    if args.recipe:
        options["recipe"] = args.recipe
    if args.bidirectional or method == "mntp":
        options["bidirectional"] = True
    lora = args.lora or False
    if method == "distill":
        distilling = DistillSettings(
            epochs=args.epochs, learning_rate=args.learning_rate, match=args.match, lora=lora, patience=5
        )
        result: Any = distill(
            args.model, args.layer, args.texts / "texts.txt", out=out, tasks=(), settings=distilling,
            teacher_layer=args.teacher_layer, teacher_recipe=args.teacher_recipe, **options,
        )  # fmt: skip
    elif method == "mntp":
        masking = TuneSettings(objective="mntp", max_steps=1000, lora=lora or 16, held_out=0.02)
        paragraphs = args.texts / "paragraphs.txt"
        result = tune(args.model, args.layer, texts=paragraphs, out=out, tasks=(), settings=masking, **options)
    else:
        scored = args.tasks / "STSBenchmark" / "validation.jsonl"
        pairs = args.texts / "pairs.jsonl" if method == "pairs" else scored
        tuning = TuneSettings(
            batch_size=128 if method == "pairs" else 32, epochs=1 if method == "pairs" else 4, lora=lora,
            learning_rate=args.learning_rate,
        )  # fmt: skip
        result = tune(args.model, args.layer, pairs, out=out, tasks=(), settings=tuning, **options)
    how = result.how
    details = [f"{result.trained.steps} steps", f"learning rate {how['Learning rate']}"]
    if method == "distill":
        details = [args.match, f"{args.epochs:g} epochs", *details[1:]]
    if lora or method == "mntp":
        details.append(f"LoRA {args.lora or 16}")
    if options.get("bidirectional"):
        details.append("bidirectional")
    return result.encoder, ", ".join(details)


def run(args: argparse.Namespace) -> None:
    """Write the scores of each method."""
    options: dict[str, Any] = {"device": args.device, "max_length": MAX_LENGTH, "dtype": "float32"}
    for method in args.methods:
        start = time.perf_counter()
        details = ""
        recipe = args.recipe or "plain"
        with tempfile.TemporaryDirectory() as folder:
            if method == "teacher":
                recipe = args.teacher_recipe or "plain"
                encoder = LayerEncoder(args.model, args.teacher_layer, **options, recipe=recipe)
            elif method in UNTRAINED:
                bidirectional = method != "cut"
                details = "bidirectional" if bidirectional else ""
                encoder = LayerEncoder(args.model, args.layer, **options, recipe=recipe, bidirectional=bidirectional)
            else:
                encoder, details = trained(method, args, Path(folder, "run"))
            seconds = time.perf_counter() - start
            values = scores(encoder, args.tasks)
        new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(COLUMNS)
            for task, score in values.items():
                writer.writerow(
                    (args.name, method, encoder.layer, recipe, details, round(seconds), task, round(score, 2))
                )
        mean = sum(values.values()) / len(values)
        print(f"{args.name} {method} {encoder.layer} {recipe} {details}: {mean:.2f} in {seconds:.0f} s", flush=True)


def write_table(paths: list[Path]) -> None:
    """Write the page with the mean of each method over the tasks."""
    frame = pl.concat([pl.read_csv(path, schema_overrides={"details": pl.String}) for path in paths])
    frame = frame.with_columns(pl.col("details").fill_null(""))
    frame.write_csv(RESULTS / "distill.csv")
    tasks = frame["task"].unique(maintain_order=True).to_list()
    lines = [
        "# Distilled, tuned or only cut",
        "",
        "`benchmarks/distill.py` on an H200, float32 with bfloat16 autocast in training, texts of at most",
        f"{MAX_LENGTH} tokens. Scores x 100 on six tasks whose texts were not trained on (`sts` trains on the validation",
        "pairs of STSBenchmark). `distill` and `pairs` use 50,000 sentences, and pairs of neighbors, of novels and of",
        "WikiText-2. Seconds include loading, the teacher's vectors and training, with up to eight runs on the GPU at a",
        "time. `word-echo` was measured with two spans, before the first copy was added.",
        "",
        f"| model | method | layer | recipe | settings | mean | {' | '.join(tasks)} | seconds |",
        "|---" * (7 + len(tasks)) + "|",
    ]
    keys = ["model", "method", "layer", "recipe", "details"]
    for names, rows in frame.group_by(keys, maintain_order=True):
        by_task = dict(rows.select("task", "score").iter_rows())
        cells = [f"{by_task[task]:.1f}" for task in tasks]
        mean = sum(by_task.values()) / len(by_task)
        seconds = "" if names[1] in UNTRAINED else str(rows["seconds"][0])
        lines.append(f"| {' | '.join(map(str, names))} | {mean:.1f} | {' | '.join(cells)} | {seconds} |")
    (RESULTS / "distill.md").write_text("\n".join(lines) + "\n", encoding="utf8")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts")
    texts.add_argument("corpora", type=Path)
    texts.add_argument("out", type=Path)
    training = commands.add_parser("run")
    training.add_argument("tasks", type=Path)
    training.add_argument("texts", type=Path)
    training.add_argument("--model", required=True)
    training.add_argument("--name")
    training.add_argument("--layer", type=int, required=True)
    training.add_argument("--methods", nargs="+", required=True)
    training.add_argument("--recipe")
    training.add_argument("--teacher-layer", type=int, default=-1)
    training.add_argument("--teacher-recipe")
    training.add_argument("--epochs", type=float, default=10)
    training.add_argument("--learning-rate", type=float)
    training.add_argument("--match", default="vectors")
    training.add_argument("--lora", type=int, default=0)
    training.add_argument("--bidirectional", action="store_true")
    training.add_argument("--device")
    training.add_argument("--out", type=Path, required=True)
    table = commands.add_parser("table")
    table.add_argument("paths", type=Path, nargs="+")
    args = parser.parse_args()
    if args.command == "texts":
        write_texts(args.corpora, args.out)
    elif args.command == "run":
        args.name = args.name or Path(args.model).name
        run(args)
    else:
        write_table(args.paths)


if __name__ == "__main__":
    main()
