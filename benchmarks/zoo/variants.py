"""Other ways to get one vector from a causal model, on the tasks of the zoo: is ``word-echo`` the best of them?

    python -m benchmarks.zoo.variants TASKS --models built-in Gemma-3-270M … --out benchmarks/zoo/results [--device cuda]

Writes ``MODEL-variants.csv``, the score of every variant, layer and task. Each variant is scored at four depths on the
texts that mteb evaluates, attention outputs at every layer (``--attention``, ``MODEL-attention.csv``). Token Prepending (Fu et al., 2024, arXiv 2412.11556) is implemented here only: it changes
states between blocks, which a plain folder cannot do.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from benchmarks.zoo.run import recorded_tasks
from benchmarks.zoo.weights import open_model
from midlayer_encoders import LayerEncoder, Recipe
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.recipes import RECIPES
from midlayer_encoders.scoring.recording import Recorded

DEPTHS = (0.85, 0.9, 0.95, 1.0)
SEVERAL = (0.85, 0.9, 0.95)
WEIGHTS = {"1:2": (1, 2), "2:1": (2, 1)}
PREPENDED_UP_TO = (0.15, 0.25)
"""Depths up to which Token Prepending replaces the state of its token; its authors use the first quarter or less."""
_KNOWLEDGE = (
    "The essence of a sentence is often captured by its main subjects and actions, while descriptive terms provide "
    "additional but less central details. With this in mind , this sentence : "
)
_ONE_WORD = '"{text}" means in one word:"'
_ECHO = '{read}". The rewritten sentence: "{text}'
SINGLE = {
    "one-word": RECIPES["one-word"],
    "echo": RECIPES["echo"],
    "echo+weightedmean": Recipe(name="echo+weightedmean", template=RECIPES["echo"].template, pooling="weightedmean"),
    "knowledge": Recipe(name="knowledge", template=f"{_KNOWLEDGE}{_ONE_WORD}", pooling="last"),
    "step-by-step": Recipe(
        name="step-by-step", template=f"After thinking step by step , this sentence : {_ONE_WORD}", pooling="last"
    ),
}
"""``knowledge`` and ``step-by-step``: Zhang et al., 'Simple Techniques for Enhancing Sentence Embeddings', 2024."""
TWO_READINGS = {
    "word-echo": RECIPES["word-echo"],
    "knowledge and echo": Recipe(name="knowledge-echo", template=f"{_KNOWLEDGE}{_ONE_WORD}{_ECHO}", norm="final"),
}

Vectors = dict[tuple[str, int], Tensor]
"""Vectors by variant and layer, shape ``(N, D)`` each."""


def unit(vectors: Tensor) -> Tensor:
    """Return unit vectors."""
    return torch.nn.functional.normalize(vectors, dim=-1)


def recipe_vectors(encoder: LayerEncoder, texts: list[str], layers: Sequence[int]) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the vectors of every recipe, and of other ways to join two readings."""

    def read(recipe: Recipe) -> Tensor:
        rows = encoder.with_recipe(recipe.apart()).encode_layers(texts, layers=list(layers))
        return torch.as_tensor(rows).to(encoder.device)

    for name, recipe in SINGLE.items():
        yield from ((name, layer, rows) for layer, rows in zip(layers, read(recipe), strict=True))
    for name, recipe in TWO_READINGS.items():
        first, second = (unit(half) for half in read(recipe).chunk(2, dim=-1))
        joined = {name: first + second}
        if name == "word-echo":
            joined["word-echo, side by side"] = torch.cat([first, second], dim=-1)
            joined |= {f"word-echo, {ratio}": a * first + b * second for ratio, (a, b) in WEIGHTS.items()}
            several = [layers.index(resolve_layer(depth, encoder.num_layers)) for depth in SEVERAL]
            joined["word-echo, mean of three layers"] = unit(first + second)[several].mean(dim=0, keepdim=True)
        for variant, rows in joined.items():
            numbers = layers if len(rows) > 1 else [layers[several[-1]]]
            yield from ((variant, layer, vectors) for layer, vectors in zip(numbers, rows, strict=True))


def attention_vectors(encoder: LayerEncoder, texts: list[str]) -> Iterator[tuple[str, int, Tensor]]:
    """Yield what the attention of each block adds to the states, the nearest to aggregated values (arXiv 2602.01572)."""
    for name in ("plain", "one-word"):
        rows = encoder.with_recipe(name).encode_layers(texts, site="attention", convert_to_tensor=True)
        yield from ((f"attention, {name}", layer, vectors) for layer, vectors in enumerate(rows, 1))


def stock_vectors(model: str, texts: list[str], layers: Sequence[int], device: str | None) -> Iterator[Any]:
    """Yield the vectors of the stock folder of ``word-echo``."""
    for layer in layers:
        with tempfile.TemporaryDirectory() as folder:
            open_model(model, layer, device=device, recipe="word-echo").save_pretrained(folder, stock=True)
            plain = SentenceTransformer(folder, device=device)
            yield "stock folder", layer, plain.encode(texts, batch_size=256, convert_to_tensor=True)


@torch.inference_mode()
def prepended_vectors(encoder: LayerEncoder, texts: list[str], layers: Sequence[int], depth: float) -> Iterator[Any]:
    """Yield the vectors of Token Prepending with ``one-word``.

    A token before the text takes the state of the last token after each block up to ``depth``, so that the text sees
    what the model made of the whole sequence in the block before.
    """
    asked = encoder.with_recipe("one-word")
    model: Any = asked.transformer
    blocks = list(model.get_submodule(encoder.anatomy.blocks))
    front = asked.counting.placed.front
    final = torch.nn.Sequential(*map(model.get_submodule, encoder.anatomy.final))
    last_replaced = resolve_layer(depth, encoder.num_layers)
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))

    def replace_state(number: int) -> Callable[..., Any]:
        def hook(_: Any, __: Any, output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            if number <= last_replaced:
                states = states.clone()
                states[:, front] = states[rows, last]
            if number in found:
                found[number].append(final(states[rows, last]).float())
            return (states, *output[1:]) if isinstance(output, tuple) else states

        return hook

    handles = [block.register_forward_hook(replace_state(number)) for number, block in enumerate(blocks, 1)]
    token = encoder.tokenizer.eos_token_id or 0
    try:
        for start in range(0, len(order), 512):
            inputs = asked.model_inputs([texts[index] for index in order[start : start + 512]])
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            column = torch.full_like(ids[:, :1], token)
            ids = torch.cat([ids[:, :front], column, ids[:, front:]], dim=1)
            mask = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
            rows = torch.arange(len(ids), device=ids.device)
            last = mask.sum(dim=1) - 1
            model(input_ids=ids, attention_mask=mask)
    finally:
        for handle in handles:
            handle.remove()
    places = torch.tensor(order, device=encoder.device).argsort()
    for layer in layers:
        yield f"Token Prepending up to {depth}", layer, torch.cat(found[layer])[places]


def score(tasks: dict[str, Recorded], texts: dict[str, int], vectors: Tensor) -> dict[str, float]:
    """Return the score of vectors ``(N, D)`` on each task."""
    return {
        name: 100 * float(task.scorer.scores(vectors[[texts[text] for text in task.keys]][None])[0])
        for name, task in tasks.items()
    }


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device")
    parser.add_argument("--attention", action="store_true", help="only attention outputs, in MODEL-attention.csv")
    arguments = parser.parse_args()
    tasks = recorded_tasks(sorted(path for path in arguments.tasks.iterdir() if path.is_dir()))
    texts = {text: row for row, text in enumerate(dict.fromkeys(key for task in tasks.values() for key in task.keys))}
    for model in arguments.models:
        encoder = open_model(model, device=arguments.device)
        layers = sorted({resolve_layer(depth, encoder.num_layers) for depth in DEPTHS})
        rows = []

        def variants(encoder: LayerEncoder = encoder, layers: list[int] = layers, model: str = model) -> Iterator[Any]:
            if arguments.attention:
                yield from attention_vectors(encoder, list(texts))
                return
            yield from recipe_vectors(encoder, list(texts), layers)
            for depth in PREPENDED_UP_TO:
                yield from prepended_vectors(encoder, list(texts), layers, depth)
            yield from stock_vectors(model, list(texts), layers, arguments.device)

        for variant, layer, vectors in variants():
            scores = score(tasks, texts, vectors.to(encoder.device).float())
            rows += [(variant, layer, name, round(value, 3)) for name, value in scores.items()]
            print(f"{Path(model).name} {variant} at {layer}: {sum(scores.values()) / len(scores):.1f}", flush=True)
            table = pl.DataFrame(rows, schema=["variant", "layer", "task", "score"], orient="row")
            kind = "attention" if arguments.attention else "variants"
            table.write_csv(arguments.out / f"{Path(model).name}-{kind}.csv")


if __name__ == "__main__":
    main()
