"""Other ways to get one vector from a causal model, on the tasks of the zoo: is ``word-echo`` the best of them?

    python -m benchmarks.zoo.variants TASKS --models built-in Gemma-3-270M … --out benchmarks/zoo/results [--device cuda]
    python -m benchmarks.zoo.variants … --part attention     # outputs of the attention, at every layer
    python -m benchmarks.zoo.variants … --part prepending    # Token Prepending, at eight depths

Writes ``MODEL-PART.csv``, the score of every variant, layer and task, on the texts that mteb evaluates. Token
Prepending (Fu et al., 2024, arXiv 2412.11556) and its hierarchical form (Ding et al., 2025, arXiv 2511.14868) are
implemented here only: they change states between blocks, which a plain folder cannot do.
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

from benchmarks.paper.sites import capture_sites
from benchmarks.zoo.run import recorded_tasks
from benchmarks.zoo.weights import open_model
from midlayer_encoders import LayerEncoder, Recipe
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.reading.capture import final_norm
from midlayer_encoders.reading.pooled_spans import split_spans
from midlayer_encoders.recipes import RECIPES
from midlayer_encoders.sweeping.scoring.recording import Recorded

DEPTH = 0.95
DEPTHS = (0.85, 0.9, DEPTH, 1.0)
MIDDLE = (0.4, 0.5, 0.6, 0.7)
SEVERAL = (0.85, 0.9, 0.95)
WEIGHTS = {"1:2": (1, 2), "2:1": (2, 1)}
PREPENDED_UP_TO = (0.15, 0.25)
"""Depths up to which Token Prepending replaces the state of its token; its authors use the first quarter or less."""
HIERARCHICAL_UP_TO = (0.25, 1.0)
PARTS = (2, 4)
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
        first, second = unit(split_spans(read(recipe))[0])[..., 1:, :].unbind(dim=-2)
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
        parts = [_attention_outputs(encoder.with_recipe(name), texts[at : at + 64]) for at in range(0, len(texts), 64)]
        yield from ((f"attention, {name}", layer, rows) for layer, rows in enumerate(torch.cat(parts, dim=1), 1))


@torch.inference_mode()
def _attention_outputs(encoder: LayerEncoder, texts: list[str]) -> Tensor:
    """Return the pooled outputs of the attention of each block, shape ``(L, N, D)``."""
    norm = final_norm(encoder.transformer, encoder.anatomy, encoder.norm)
    inputs = encoder.model_inputs(texts)
    mask = inputs["attention_mask"]
    is_last = (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True)) & mask.bool()
    weights = (is_last if encoder.pooling == "last" else mask).float()
    vectors: list[Tensor] = []

    def receive(_: int, __: str, states: Tensor) -> None:
        shares = weights / weights.sum(dim=1, keepdim=True)
        vectors.append(torch.einsum("bt,btd->bd", shares, norm(states).float()))

    layers = list(range(1, encoder.num_layers + 1))
    capture_sites(encoder.transformer, inputs, receive, anatomy=encoder.anatomy, layers=layers, sites=["attention"])
    return torch.stack(vectors)


def stock_vectors(model: str, texts: list[str], layers: Sequence[int], device: str | None) -> Iterator[Any]:
    """Yield the vectors of the stock folder of ``word-echo``."""
    for layer in layers:
        with tempfile.TemporaryDirectory() as folder:
            open_model(model, layer, device=device, recipe="word-echo").save_pretrained(folder, stock=True)
            plain = SentenceTransformer(folder, device=device)
            yield "stock folder", layer, plain.encode(texts, batch_size=256, convert_to_tensor=True)


@torch.inference_mode()
def prepended_states(
    encoder: LayerEncoder, texts: list[str], layers: Sequence[int], *, depth: float, parts: int = 1
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each layer, the states of the last token, and the means over the text, of Token Prepending with ``encoder``.

    One token before the text for each of its ``parts`` takes the state of that part's last token after each block up to
    ``depth``, so that the text sees what the model made of later parts in the block before. With one part, this is
    Token Prepending; several are its hierarchical form.
    """
    model: Any = encoder.transformer
    blocks = list(model.get_submodule(encoder.anatomy.blocks))
    front = encoder.counting.placed.front
    final = torch.nn.Sequential(*map(model.get_submodule, encoder.anatomy.final))
    last_replaced = resolve_layer(depth, encoder.num_layers)
    found: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))

    def replace_state(number: int) -> Callable[..., Any]:
        def hook(_: Any, __: Any, output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            if number <= last_replaced:
                states = states.clone()
                states[:, front : front + parts] = states[rows[:, None], ends]
            if number in found:
                normed = final(states).float()
                mean = (normed * read[..., None]).sum(dim=1) / read.sum(dim=1, keepdim=True)
                found[number].append((normed[rows, ends[:, -1]], mean))
            return (states, *output[1:]) if isinstance(output, tuple) else states

        return hook

    handles = [block.register_forward_hook(replace_state(number)) for number, block in enumerate(blocks, 1)]
    token = encoder.tokenizer.eos_token_id or 0
    try:
        for start in range(0, len(order), 256):
            inputs = encoder.model_inputs([texts[index] for index in order[start : start + 256]])
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            columns = ids.new_full((len(ids), parts), token)
            ids = torch.cat([ids[:, :front], columns, ids[:, front:]], dim=1)
            mask = torch.cat([mask.new_ones(len(ids), parts), mask], dim=1)
            rows = torch.arange(len(ids), device=ids.device)
            length = mask.sum(dim=1) - front - parts
            shares = torch.arange(1, parts + 1, device=ids.device) / parts
            ends = front + parts - 1 + (length[:, None] * shares).ceil().long()
            read = mask.float()
            read[:, : front + parts] = 0
            model(input_ids=ids, attention_mask=mask)
    finally:
        for handle in handles:
            handle.remove()
    places = torch.tensor(order, device=encoder.device).argsort()
    for layer in layers:
        last, mean = (torch.cat(batches)[places] for batches in zip(*found[layer], strict=True))
        yield layer, last, mean


def prepending_vectors(
    encoder: LayerEncoder, texts: list[str], layers: Sequence[int]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the vectors of Token Prepending with ``one-word``, and of its hierarchical form, read as its authors do."""
    for depth in PREPENDED_UP_TO:
        for layer, last, _ in prepended_states(encoder.with_recipe("one-word"), texts, layers, depth=depth):
            yield f"Token Prepending up to {depth}", layer, last
    for depth in HIERARCHICAL_UP_TO:
        for parts in PARTS:
            name = f"{parts} parts up to {depth}"
            for layer, last, _ in prepended_states(
                encoder.with_recipe("one-word"), texts, layers, depth=depth, parts=parts
            ):
                yield f"Hierarchical Token Prepending, {name}", layer, last
            for layer, _, mean in prepended_states(
                encoder.with_recipe("plain"), texts, layers, depth=depth, parts=parts
            ):
                yield f"Hierarchical Token Prepending, {name}, mean", layer, mean


def score(tasks: dict[str, Recorded], texts: dict[str, int], vectors: Tensor) -> dict[str, float]:
    """Return the score of vectors ``(N, D)`` on each task."""
    return {
        name: 100 * float(task.scorer.bootstrap(vectors[[texts[text] for text in task.keys]][None])[0][0])
        for name, task in tasks.items()
    }


def variants(part: str, encoder: LayerEncoder, texts: list[str], model: str) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the vectors of each variant of a part at each of its layers."""

    def layers(*depths: float) -> list[int]:
        return sorted({resolve_layer(depth, encoder.num_layers) for depth in depths})

    if part == "attention":
        yield from attention_vectors(encoder, texts)
    elif part == "prepending":
        yield from prepending_vectors(encoder, texts, layers(*MIDDLE, *DEPTHS))
    else:
        yield from recipe_vectors(encoder, texts, layers(*DEPTHS))
        yield from stock_vectors(model, texts, layers(*DEPTHS), str(encoder.device))


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device")
    parser.add_argument("--max-length", type=int, help="tokens of a text; the model's maximum by default")
    parser.add_argument("--part", choices=("variants", "attention", "prepending"), default="variants")
    arguments = parser.parse_args()
    tasks = recorded_tasks(sorted(path for path in arguments.tasks.iterdir() if path.is_dir()))
    texts = {text: row for row, text in enumerate(dict.fromkeys(key for task in tasks.values() for key in task.keys))}
    for model in arguments.models:
        encoder, rows = open_model(model, device=arguments.device, max_length=arguments.max_length), []
        for variant, layer, vectors in variants(arguments.part, encoder, list(texts), model):
            scores = score(tasks, texts, vectors.to(encoder.device).float())
            rows += [(variant, layer, name, round(value, 3)) for name, value in scores.items()]
            print(f"{Path(model).name} {variant} at {layer}: {sum(scores.values()) / len(scores):.1f}", flush=True)
            table = pl.DataFrame(rows, schema=["variant", "layer", "task", "score"], orient="row")
            table.write_csv(arguments.out / f"{Path(model).name}-{arguments.part}.csv")


if __name__ == "__main__":
    main()
