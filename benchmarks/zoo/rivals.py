"""Other methods without training, each with what it costs: does one of them beat ``word-echo`` at equal tokens?

    python -m benchmarks.zoo.rivals TASKS --models built-in Gemma-3-270M … --out FOLDER [--device cuda] [--dtype bfloat16]

Each variant is also scored centered: with the mean over the texts of the task subtracted. After each task it writes
``MODEL-TASK-rivals.csv``, and ``MODEL-TASK-rivals.npz``, whose ``draws`` has for each row of the former the scores on
resampled examples, the same ones for all. Tasks that are there are not read again.

Texts are read as they are: some authors end them with a full stop and replace quotation marks. All states pass the
final norm. Tokens are those that pass all blocks; a pass that ends early counts in part.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from benchmarks.paper.sites import capture_sites
from benchmarks.zoo.run import recorded_tasks
from benchmarks.zoo.variants import PREPENDED_UP_TO, prepended_states
from benchmarks.zoo.weights import open_model
from midlayer_encoders import LayerEncoder, Recipe
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.reading.batches import batches_of, tokens_that_fit
from midlayer_encoders.reading.capture import capture
from midlayer_encoders.reading.fused import fused_blocks
from midlayer_encoders.reading.pooled_spans import join_spans, split_spans
from midlayer_encoders.recipes import RECIPES, centering_offset
from midlayer_encoders.sweeping.scoring import resampled_scores
from midlayer_encoders.sweeping.scoring.recording import Recorded

DEPTHS = (0.6, 0.8, 0.9, 0.95, 1.0)
STEERED, TIMES = 6 / 32, 2  # Contrastive Prompting: the sixth of 32 blocks and the scale of its authors for PromptEOL
REROUTED = {"the middle third": (1 / 3, 2 / 3), "the second half": (0.5, 1.0), "all blocks": (0.0, 1.0)}
AGGREGATED_FROM = (0.0, 0.5)
_META = """
presented with a text excerpt. Your task is to categorize the excerpt into a broad category such as 'Education', \
'Technology', 'Health', 'Business', 'Environment', 'Politics', or 'Culture'. These categories help in organizing \
content for better accessibility and targeting. For|should be classified under one general category
given a statement and you need to determine whether it's presenting an 'Opinion' or a 'Fact'. This distinction is \
vital for information verification, educational purposes, and content analysis. For|discriminates between opinion and fact
given a review from an online platform. Your task is to generate a rating for the product based on the review on a \
scale of 1-5, where 1 means 'extremely negative' and 5 means 'extremely positive'. For|reflects the sentiment
reading a personal diary entry. Your task is to identify the predominant emotion expressed, such as joy, sadness, \
anger, fear, or love. For|conveys the emotion
presented with two sentences. Your task is to assess whether the sentences convey the same meaning. Use 'identical', \
'similar', 'different', or 'unrelated' to describe the relationship. To enhance the performance of|means
given a sentence and a phrase. Your task is to determine if the phrase can be a contextual synonym within the given \
sentence. Options include 'yes', 'no', or 'partially'. To enhance the performance of|means
examining a news article. Your task is to extract the most critical fact from the article. For|encapsulates the key fact
reviewing a scientific abstract. Your task is to identify the main entities (e.g., proteins, diseases) and their \
relations (e.g., causes, treats). For|highlights the primary entity or relation"""
META_TASKS = [
    f'In this task, you\'re {task} this task, this sentence : "{{text}}" {asked} in one word:"'
    for task, _, asked in (line.partition("|") for line in _META.split("\n")[1:])
]
IRRELEVANT = 'The irrelevant information of this sentence : "{text}" means in one word:"'
COMPRESS = "Context: {text}\nCompress the Context in one word:"
OWN_PROMPT = "word-echo+center, prompt in the language"
TRANSLATED = {
    "de": 'Dieser Satz : "{text}" bedeutet in einem Wort:"{read}". Der umformulierte Satz: "{text}',
    "fr": 'Cette phrase : "{text}" signifie en un mot :"{read}". La phrase reformulée : "{text}',
    "zh": '这句话："{text}"用一个词概括是："{read}"。改写后的句子："{text}',
}

Vectors = Iterator[tuple[str, int, Tensor]]  # variant, layer, and vectors of the texts, shape (N, D)
Method = Callable[[LayerEncoder, list[str], Sequence[int]], Vectors]


class Batch(NamedTuple):
    """The texts of a batch, the mask of their tokens ``(B, T)``, padded at the right, and where each text ends."""

    rows: Tensor
    mask: Tensor
    last: tuple[Tensor, Tensor]


def last_token(states: Tensor, batch: Batch) -> Tensor:
    """Return the states of the last tokens, shape ``(B, D)``."""
    return states[batch.last].float()


def mean_and_last(states: Tensor, batch: Batch) -> Tensor:
    """Return half the sum of the mean over all tokens and the last token, shape ``(B, D)``."""
    mask = batch.mask[..., None]
    return (torch.where(mask, states.float(), 0).sum(dim=1) / mask.sum(dim=1) + last_token(states, batch)) / 2


@torch.inference_mode()
def read(
    encoder: LayerEncoder, texts: list[str], layers: Sequence[int], site: str | None = None, *,
    pool: Callable[[Tensor, Batch], Tensor] = last_token, change: Callable[[Batch], Any] = nullcontext,
) -> dict[int, Tensor]:  # fmt: skip
    """Return pooled states of layers, shape ``(N, D)`` each, from passes inside the ``with`` block of ``change``."""
    vectors: dict[int, Tensor] = {}

    def receive(layer: int, *site_and_states: Any) -> None:
        states = site_and_states[-1]
        pooled = pool(states, batch)
        vectors.setdefault(layer, pooled.new_empty(len(texts), pooled.shape[1]))[batch.rows] = pooled

    model, how = encoder.transformer, {"anatomy": encoder.anatomy, "layers": layers}
    for rows in batches_of(encoder, texts, token_budget=tokens_that_fit(encoder)):
        inputs = encoder.model_inputs([texts[row] for row in rows])
        mask = inputs.pop("attention_mask").bool()  # no token sees the padding at the right
        numbers = torch.arange(len(rows), device=mask.device)
        batch = Batch(torch.tensor(rows, device=mask.device), mask, (numbers, mask.sum(dim=1) - 1))
        with change(batch), fused_blocks(model):
            if site is None:
                capture(model, inputs | {"use_cache": False}, receive, norm="final", **how)
            else:
                capture_sites(model, inputs | {"use_cache": False}, receive, sites=[site], **how)
    return vectors


def recipe(name: str, encoder: LayerEncoder, texts: list[str], layers: Sequence[int]) -> Vectors:
    """Yield the vectors of a named recipe."""
    layers = range(max(layers) + 1) if name == "plain" else layers
    rows = encoder.with_recipe(name).encode_layers(texts, layers, convert_to_tensor=True)
    yield from ((name, layer, vectors) for layer, vectors in zip(layers, rows, strict=True))


def word_echo(encoder: LayerEncoder, texts: list[str], layers: Sequence[int]) -> Vectors:
    """Yield the vectors of ``word-echo`` at every layer, and with other weights of the first copy, from one pass."""
    reader, every = encoder.with_recipe(RECIPES["word-echo"].apart()), range(max(layers) + 1)
    for layer, rows in zip(every, reader.encode_layers(texts, every, convert_to_tensor=True), strict=True):
        spans, share = split_spans(rows)
        yield "word-echo", layer, join_spans(spans, share)
        offsets = centering_offset(spans)
        weights = {"": share, ", no first copy": 0 * share, ", half": share / 2, ", always 1": torch.ones_like(share)}
        for name, weight in weights.items() if layer in layers else [("", share)]:
            yield f"word-echo+center{name}", layer, join_spans(spans, weight, "sum", offsets)


def translated(language: str, encoder: LayerEncoder, texts: list[str], layers: Sequence[int]) -> Vectors:
    """Yield the vectors of ``word-echo`` with a prompt in the language of the texts, centered."""
    reader = encoder.with_recipe(Recipe(name="translated", template=TRANSLATED[language], norm="final", join="none"))
    for layer, rows in zip(layers, reader.encode_layers(texts, layers, convert_to_tensor=True), strict=True):
        spans, share = split_spans(rows)
        yield OWN_PROMPT, layer, join_spans(spans, share, "sum", centering_offset(spans))


def meta_eol(encoder: LayerEncoder, texts: list[str], layers: Sequence[int]) -> Vectors:
    """Yield MetaEOL (Lei et al., 2024, arXiv 2402.18458): the mean of the last tokens of eight prompts, eight passes."""
    readers = [encoder.with_recipe(Recipe(name="meta", template=task, pooling="last")) for task in META_TASKS]
    total = sum(reader.encode_layers(texts, layers, convert_to_tensor=True) for reader in readers)
    yield from (("MetaEOL", layer, rows / len(readers)) for layer, rows in zip(layers, total, strict=True))


def contrastive_prompting(times: int | None, encoder: LayerEncoder, texts: list[str], layers: Sequence[int]) -> Vectors:
    """Yield Contrastive Prompting (Cheng et al., 2025, arXiv 2505.12831) of ``one-word``.

    In one block, from what the heads gather for the last token of ``one-word``, the same with a prompt for the
    irrelevant, read up to there, is subtracted, before the output projection. The difference gets the length from
    before, or ``times`` its own. The authors chose block and ``times`` for Llama 2; no validation data is searched here.
    """
    block = resolve_layer(STEERED, encoder.num_layers) or 1
    parts = dict(encoder.anatomy.block(encoder.transformer, block).named_modules())
    projection = next(parts[path] for path in parts if path.endswith(("attn.o_proj", "attn.out_proj", "attn.c_proj")))
    gathered: dict[int, Tensor] = {}

    def keep(batch: Batch, states: Tensor) -> None:
        gathered.update(zip(batch.rows.tolist(), states[batch.last].unbind(), strict=True))

    def steer(batch: Batch, states: Tensor) -> Tensor:
        before, states = states[batch.last], states.clone()
        difference = before - torch.stack([gathered[row] for row in batch.rows.tolist()])
        lengths = before.norm(dim=1, keepdim=True) / difference.norm(dim=1, keepdim=True)
        states[batch.last] = difference * (lengths if times is None else times)
        return states

    def hooked(change: Callable[[Batch, Tensor], Tensor | None]) -> Callable[[Batch], Any]:
        return lambda batch: projection.register_forward_pre_hook(lambda _, states: change(batch, *states))

    irrelevant = encoder.with_recipe(Recipe(name="irrelevant", template=IRRELEVANT, pooling="last"))
    read(irrelevant, texts, [block], change=hooked(keep))
    name = "Contrastive Prompting, " + (f"{times} times" if times else "the same length")
    for layer, rows in read(encoder.with_recipe("one-word"), texts, layers, change=hooked(steer)).items():
        yield name, layer, rows


def kv_embedding(where: str, encoder: LayerEncoder, texts: list[str], layers: Sequence[int]) -> Vectors:
    """Yield KV-Embedding (Tang and Yang, 2026, arXiv 2601.01046): all tokens attend to the last one, in some blocks.

    In one pass, the key and the value of the last token, as the attention gets them (normalized, rotated to their own
    position), are put before those of the text, where every token sees them, sliding window or not. The authors find
    the blocks by intrinsic dimension, and can weigh the first key; here it is three ranges, and no weight.
    """
    first, last = (resolve_layer(end, encoder.num_layers) if end else 0 for end in REROUTED[where])
    reader = encoder.with_recipe(Recipe(name="compress", template=COMPRESS))
    change = partial(rerouted, encoder.transformer, range(first + 1, last + 1))
    for layer, rows in read(reader, texts, layers, pool=mean_and_last, change=change).items():
        yield f"KV-Embedding, {where}", layer, rows


@contextmanager
def rerouted(model: Any, blocks: range, batch: Batch) -> Iterator[None]:
    """Put the last token's key and value before the others in blocks, numbered from 1, inside a ``with`` block."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Any:
        if module.layer_idx + 1 in blocks:
            rows, ends = batch.last
            key, value = (torch.cat([heads[rows, :, ends][:, :, None], heads], dim=2) for heads in (key, value))
            mask = nn.functional.pad(mask, (1, 0), value=True)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("rerouted", attend)
    always = {"allow_is_causal_skip": False}  # a mask also where sdpa could do without
    AttentionMaskInterface.register("rerouted", lambda *each, **options: sdpa_mask(*each, **options | always))
    before = model.config._attn_implementation
    try:
        yield model.set_attn_implementation("rerouted")
    finally:
        model.set_attn_implementation(before)


def aligned_wva(encoder: LayerEncoder, texts: list[str], layers: Sequence[int]) -> Vectors:
    """Yield AlignedWVA (Zhang et al., 2026, arXiv 2602.01572): values, weighted, projected, and averaged over blocks.

    Values, weighted by the attention of the last token of ``one-word`` and projected, are what the attention adds to
    the state of that token. The mean is over the blocks from a depth on up to the layer.
    """
    outputs = read(encoder.with_recipe("one-word"), texts, range(1, max(layers) + 1), "attention")
    for start in AGGREGATED_FROM:
        first = resolve_layer(start, encoder.num_layers) if start else 0
        for layer in (layer for layer in layers if layer > first):
            blocks = [outputs[block] for block in range(first + 1, layer + 1)]
            yield f"AlignedWVA from {start}", layer, torch.stack(blocks).mean(dim=0)


def token_prepending(depth: float, encoder: LayerEncoder, texts: list[str], layers: Sequence[int]) -> Vectors:
    """Yield Token Prepending (Fu et al., 2024, arXiv 2412.11556) of ``one-word``."""
    vectors = prepended_states(encoder.with_recipe("one-word"), texts, layers, depth=depth)
    yield from ((f"Token Prepending up to {depth}", layer, last) for layer, last, _ in vectors)


METHODS: dict[str, list[Method]] = {
    "recipes": [partial(recipe, name) for name in ("plain", "one-word", "echo")],
    "word-echo": [word_echo],
    "meta": [meta_eol],
    "contrastive": [partial(contrastive_prompting, times) for times in (None, TIMES)],
    "kv": [partial(kv_embedding, where) for where in REROUTED],
    "values": [aligned_wva],
    "prepending": [partial(token_prepending, depth) for depth in PREPENDED_UP_TO],
    **{language: [partial(translated, language)] for language in TRANSLATED},  # for tasks in this language alone
}


@contextmanager
def counted(encoder: LayerEncoder) -> Iterator[list[float]]:
    """Count the tokens that pass all blocks inside a ``with`` block, and those of the current pass."""
    counts, padding, num_layers = [0.0, 0.0], encoder.tokenizer.pad_token_id, encoder.num_layers

    def begin(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        real = inputs["input_ids"] != padding  # a mask is not always there
        counts[1] = float((real.cumsum(dim=1).argmax(dim=1) + 1).sum())

    def add(*_: Any) -> None:
        counts[0] += counts[1] / num_layers  # not `encoder.num_layers`: recipes hash all that a hook refers to

    with ExitStack() as hooks, encoder.transformer.register_forward_pre_hook(begin, with_kwargs=True):
        for block in encoder.anatomy.distinct_blocks(encoder.transformer):
            hooks.enter_context(block.register_forward_hook(add))
        yield counts


def measured(method: Method, encoder: LayerEncoder, task: Recorded, layers: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Yield variant, layer, the score followed by those on resampled examples, and tokens and time for a text."""
    texts, start = list(task.keys), time.perf_counter()
    with counted(encoder) as counts:
        found = {(name, layer): rows.float().cpu() for name, layer, rows in method(encoder, texts, layers)}
    cost = counts[0] / len(texts), 1000 * (time.perf_counter() - start) / len(texts)
    if not any("+center" in name for name, _ in found):
        found |= {(f"{name} centered", layer): rows - rows.mean(dim=0) for (name, layer), rows in found.items()}
    places = {text: row for row, text in enumerate(texts)}

    def vectors(variant: str, layer: int, keys: Sequence[str]) -> Any:
        return found[variant, layer][[places[key] for key in keys]].numpy()

    for variant in dict.fromkeys(name for name, _ in found):
        numbers = [layer for name, layer in found if name == variant]
        scores = resampled_scores(task.scorer, texts, numbers, partial(vectors, variant), device=encoder.device)
        yield from ((variant, layer, values, cost) for layer, values in scores.items())


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of tasks; all by default")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--layers", nargs="+", type=float, default=DEPTHS, help="depths in (0, 1]; plain: every layer")
    for option, kind in {"--device": str, "--dtype": str, "--max-length": int}.items():
        parser.add_argument(option, type=kind)
    arguments = parser.parse_args()
    folders = [path for path in sorted(arguments.tasks.iterdir()) if path.is_dir()]
    tasks = recorded_tasks([path for path in folders if path.name in (arguments.only or [path.name])])
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = ["model", "variant", "layer", "task", "score", "low", "high", "tokens", "milliseconds"]
    for model in arguments.models:
        options = {name: getattr(arguments, name) for name in ("device", "dtype", "max_length")}
        encoder, name = open_model(model, **options), Path(model).name
        layers = sorted({resolve_layer(depth, encoder.num_layers) for depth in arguments.layers})
        for label, task in tasks.items():
            path, rows, draws = arguments.out / f"{name}-{label}-rivals.csv", [], []
            names_of_methods = [key for key in arguments.methods if key not in TRANSLATED or label.endswith(f"-{key}")]
            for method in () if path.exists() else [one for key in names_of_methods for one in METHODS[key]]:
                for variant, layer, (score, *resampled), cost in measured(method, encoder, task, layers):
                    bounds = np.quantile(resampled, [0.025, 0.975]) if resampled else (np.nan, np.nan)
                    rows.append((name, variant, layer, label, *(100 * np.array([score, *bounds])).tolist(), *cost))
                    draws.append(resampled)
                print(f"{name} {label} {rows[-1][1]} at {rows[-1][2]}: {rows[-1][4]:.1f}", flush=True)
            if rows:  # the CSV last: its presence says that the task is done
                np.savez_compressed(path.with_suffix(".npz"), draws=100 * np.array(draws, dtype=np.float32))
                pl.DataFrame(rows, schema=names, orient="row").write_csv(path, float_precision=3)


if __name__ == "__main__":
    main()
