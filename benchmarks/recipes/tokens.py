"""Three ways to tokenize a text inside a template, at depth 0.95: what each scores on real tasks.

    python -m benchmarks.recipes.tokens TASKS --models FOLDER … --out benchmarks/results [--rows 1000] [--device cuda]

TASKS is a folder with a folder for each task. `whole` tokenizes the formatted string, `parts` the text and the words
around it separately, and `parts, no space` does so without the space that SentencePiece tokenizers add before a text.
Writes ``recipe_tokens_MODEL.md`` and ``recipe_tokens_MODEL.csv`` for each model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from tokenizers import Tokenizer

from midlayer_encoders import LayerEncoder
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.recipes import RECIPES, Recipe
from midlayer_encoders.sweeping.scoring.recording import Recorded, record
from midlayer_encoders.tasks import task_label
from midlayer_encoders.tasks.sources import task_sources

DEPTH = 0.95
NAMES = ("one-word", "echo")
WAYS = ("whole", "parts", "parts, no space")
MAX_TOKENS = 96  # of a text: two copies fit into TinyStories' 256 positions

Tokens = tuple[list[int], list[bool]]
"""The ids of a formatted text, and which of them are pooled."""


def spread_rows(tasks: Path, rows: int, out: Path) -> list[Path]:
    """Write evenly spread lines of every task, ``rows`` to test and five times as many to train, and return the folders."""
    folders = sorted(path for path in tasks.iterdir() if path.is_dir())
    for folder in folders:
        (out / folder.name).mkdir()
        for name, count in (("test", rows), ("train", 5 * rows)):
            file = folder / f"{name}.jsonl"
            if file.is_file():
                lines = file.read_text(encoding="utf8").splitlines(keepends=True)
                places = np.linspace(0, len(lines) - 1, min(count, len(lines))).astype(int)
                (out / folder.name / file.name).write_text("".join(lines[place] for place in places), encoding="utf8")
    return [out / folder.name for folder in folders]


def recorded_tasks(folders: Sequence[Path]) -> dict[str, Recorded]:
    """Return the scorer of each task; the keys of its rows are the texts."""

    def texts(inputs: Any, **_: Any) -> list[str]:
        return [text for batch in inputs for text in batch["text"]]

    recorded = {}
    for source in task_sources(folders):
        with isolated_random():
            recorded[task_label(source.name)] = record(source.make(), texts)[0]
    return recorded


def without_added_space(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer that adds no space before a text."""
    settings = json.loads(tokenizer.to_str())
    normalizer = settings["normalizer"] or {}
    steps = normalizer.get("normalizers", [])
    normalizer["normalizers"] = [step for step in steps if step != {"type": "Prepend", "prepend": "▁"}]
    if "prepend_scheme" in (settings["pre_tokenizer"] or {}):
        settings["pre_tokenizer"]["prepend_scheme"] = "never"
    return Tokenizer.from_str(json.dumps(settings))


def shortened(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Return texts cut after their first tokens, so that all ways read the same characters."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [
        text[: encoding.offsets[MAX_TOKENS - 1][1]] if len(encoding) > MAX_TOKENS else text
        for text, encoding in zip(texts, encodings, strict=True)
    ]


def formatted(tokenizer: Tokenizer, recipe: Recipe, way: str, texts: Sequence[str]) -> list[Tokens]:
    """Return the tokens of texts in a recipe's template."""
    words = str(recipe.template).split("{text}")
    if way == "whole":
        strings = [text.join(words) for text in texts]
        tokens = []
        for text, string, encoding in zip(texts, strings, tokenizer.encode_batch(strings), strict=True):
            end = len(string) - len(words[-1])
            tokens.append((encoding.ids, [low < end and high > end - len(text) for low, high in encoding.offsets]))
    else:
        bare = without_added_space(tokenizer)
        inside = bare if way == "parts, no space" else tokenizer
        first = tokenizer.encode(words[0]).ids
        following = [bare.encode(part, add_special_tokens=False).ids for part in words[1:]]
        tokens = []
        for encoding in inside.encode_batch(list(texts), add_special_tokens=False):
            ids = first
            for part in following:
                before = len(ids)
                ids = ids + encoding.ids + part
            pooled = [before <= place < before + len(encoding.ids) for place in range(len(ids))]
            tokens.append((ids, pooled))
    return tokens if recipe.template_tokens is False else [(ids, [True] * len(ids)) for ids, _ in tokens]


@torch.inference_mode()
def vectors_of(encoder: LayerEncoder, recipe: Recipe, tokens: Sequence[Tokens]) -> torch.Tensor:
    """Return the pooled states of formatted texts, shape ``(N, D)``."""
    order = sorted(range(len(tokens)), key=lambda place: -len(tokens[place][0]))
    rows: dict[int, torch.Tensor] = {}
    size = 256 if encoder.device.type == "cuda" else 32
    for batch in (order[start : start + size] for start in range(0, len(order), size)):
        longest = len(tokens[batch[0]][0])
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        real, pooled = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, place in enumerate(batch):
            length = len(tokens[place][0])
            ids[row, :length] = torch.tensor(tokens[place][0])
            real[row, :length] = 1
            pooled[row, :length] = torch.tensor(tokens[place][1])
        if recipe.pooling == "last":
            pooled = torch.nn.functional.one_hot(real.sum(dim=1) - 1, longest)
        features = {"input_ids": ids.to(encoder.device), "attention_mask": real.to(encoder.device), "modality": "text"}
        states = encoder[0](features)["token_embeddings"].double()
        weights = pooled.to(states)
        means = torch.einsum("btd,bt->bd", states, weights) / weights.sum(dim=1, keepdim=True).clamp(min=1)
        rows |= dict(zip(batch, means.float(), strict=True))
    return torch.stack([rows[place] for place in range(len(tokens))])


def measured(model: Path, tasks: dict[str, Recorded], device: str | None) -> Iterator[dict[str, Any]]:
    """Yield the score of each recipe, way and task for a model, with the share of texts that have the whole's ids."""
    encoder = LayerEncoder(str(model), DEPTH, device=device)
    texts = list(dict.fromkeys(text for recorded in tasks.values() for text in recorded.keys))
    position = {text: place for place, text in enumerate(texts)}
    tokenizer = encoder.tokenizer.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    strings = shortened(tokenizer, texts)
    for name in NAMES:
        recipe = RECIPES[name]
        whole = formatted(tokenizer, recipe, "whole", strings)
        previous: list[Tokens] = []
        vectors = torch.empty(0)
        for way in WAYS:
            tokens = formatted(tokenizer, recipe, way, strings)
            same = float(np.mean([first[0] == second[0] for first, second in zip(tokens, whole, strict=True)]))
            vectors = vectors if tokens == previous else vectors_of(encoder, recipe, tokens)
            previous = tokens
            for task, recorded in tasks.items():
                places = torch.tensor([position[text] for text in recorded.keys], device=vectors.device)
                score = 100 * float(recorded.scorer.bootstrap(vectors[places][None])[0][0])
                yield {
                    "model": model.name, "layer": encoder.layer, "recipe": name, "ids": way, "same_as_whole": same,
                    "task": task, "score": score,
                }  # fmt: skip
            print(model.name, name, way, f"{same:.3f}", flush=True)


def table(frame: pl.DataFrame) -> list[str]:
    """Return the mean over tasks of each model and recipe, and the share of texts with the ids of the whole string."""
    lines = ["| model | recipe | " + " | ".join(f"`{way}`" for way in WAYS) + " | texts with the ids of `whole` |"]
    lines.append("|---|---|" + "---|" * len(WAYS) + "---|")
    means = frame.group_by("model", "layer", "recipe", "ids", "same_as_whole", maintain_order=True).agg(
        pl.col("score").mean()
    )
    for (model, layer, recipe), group in means.group_by("model", "layer", "recipe", maintain_order=True):
        rows = {row["ids"]: row for row in group.iter_rows(named=True)}
        scores = " | ".join(f"{rows[way]['score']:.2f}" for way in WAYS)
        shares = ", ".join(f"{100 * rows[way]['same_as_whole']:.0f} %" for way in WAYS[1:])
        lines.append(f"| {model}, layer {layer} | `{recipe}` | {scores} | {shares} |")
    return lines


def page(frame: pl.DataFrame, rows: int, where: str) -> str:
    """Return the page of one model's results."""
    tasks = frame["task"].unique(maintain_order=True).to_list()
    lines = [
        "# Tokens of a text inside a template",
        "",
        f"`python -m benchmarks.recipes.tokens TASKS --models {frame['model'][0]} --rows {rows}`, {where}, float32.",
        f"Mean of the main scores x 100 over {', '.join(tasks)}, with at most {rows} test rows each, at depth {DEPTH}.",
        "",
        *table(frame),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--device")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tasks = recorded_tasks(spread_rows(args.tasks, args.rows, Path(scratch)))
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    for model in args.models:
        frame = pl.DataFrame(list(measured(model, tasks, args.device)))
        out = args.out / f"recipe_tokens_{model.name.lower()}"
        frame.write_csv(out.with_name(out.name + ".csv"), float_precision=4)
        out.with_name(out.name + ".md").write_text(page(frame, args.rows, where), encoding="utf8")
        print(page(frame, args.rows, where))


if __name__ == "__main__":
    main()
