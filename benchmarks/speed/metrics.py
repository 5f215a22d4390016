"""The cost of prompt entropy and curvature, and of prompt effective rank, of all 25 layers on a GPU.

Prompt entropy and curvature are compared with the forward pass, prompt effective rank with prompt entropy.

A 24-block, 1024-wide GPTNeoX of random weights in bf16, prompts of 128, 256 and 512 tokens, 32768 tokens per batch.
Run on a CUDA machine with Triton: ``python -m benchmarks.speed.metrics OUT_FOLDER``; writes ``metrics_h200.md``.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import device_name, fastest, peak
from midlayer_encoders.metrics import Curvature, LayerMetric, PromptEffectiveRank, PromptEntropy, prompt_entropy
from midlayer_encoders.metrics.feeding import compute_metrics
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.capture import capture

BLOCKS = 24
COLUMNS = (
    "tokens per prompt", "prompts", "forward, ms", "pass with metrics, ms", "added, relative to the forward pass",
    "added by the plain implementation", "peak memory, relative to the forward pass", "with output_hidden_states",
    "largest error, nats", "added by prompt entropy alone, ms", "added by prompt effective rank alone, ms",
    "the latter relative to the former",
)  # fmt: skip


def make_model(width: int, device: str) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXModel

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=50304, hidden_size=width, num_hidden_layers=BLOCKS, num_attention_heads=16,
        intermediate_size=4 * width, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return GPTNeoXModel(config).to(device, torch.bfloat16).eval()


def obvious(model: Any, inputs: dict[str, Tensor], prompts: int) -> None:
    """Measure with a plain implementation: all hidden states kept, then float64 eigvalsh of each layer's Gram matrices."""
    for states in model(
        **{key: value[:prompts] for key, value in inputs.items()}, output_hidden_states=True
    ).hidden_states:
        centred = states.float() - states.float().mean(dim=1, keepdim=True)
        rows = torch.nn.functional.normalize(centred, dim=-1).double()
        gram = rows @ rows.mT
        p = torch.linalg.eigvalsh(gram).clamp(min=0)
        p = p / p.sum(dim=-1, keepdim=True)
        -(torch.xlogy(p, p)).sum(dim=-1)
        steps = torch.nn.functional.normalize(states.float().diff(dim=1), dim=-1)
        torch.arccos((steps[:, 1:] * steps[:, :-1]).sum(dim=-1).clamp(-1, 1)).mean(dim=1)


def largest_error(model: Any, inputs: dict[str, Tensor], anatomy: Any) -> float:
    """Return the largest difference in nats between the fast method and float64 over 8 prompts of every layer."""
    worst = 0.0

    def compare(_: int, states: Tensor) -> None:
        nonlocal worst
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        fast = prompt_entropy(states, mask, method="fast").double()
        exact = prompt_entropy(states.double(), mask, method="exact").double()
        worst = max(worst, float((fast - exact).abs().max()))

    small = {key: value[:8] for key, value in inputs.items()}
    capture(model, small, compare, anatomy=anatomy, layers=range(BLOCKS + 1))
    return worst


@torch.inference_mode()
def row(model: Any, length: int, tokens: int, rounds: int, device: str) -> str:
    anatomy = find_anatomy(model)
    prompts = tokens // length
    ids = torch.randint(
        0, 50000, (prompts, length), device=device, generator=torch.Generator(device).manual_seed(length)
    )
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    mask = torch.ones(prompts, length, dtype=torch.bool, device=device)
    layers = list(range(BLOCKS + 1))

    def plain() -> None:
        model(**inputs)

    entropy, curvature, rank = PromptEntropy(layers), Curvature(layers), PromptEffectiveRank(layers)

    def measured(**metrics: LayerMetric) -> None:
        def receive(layer: int, states: Tensor) -> None:
            for metric in metrics.values():
                metric.update(states, mask, layer=layer)

        for metric in metrics.values():
            metric.to(device)
        capture(model, inputs, receive, anatomy=anatomy, layers=layers)
        compute_metrics(metrics)
        for metric in metrics.values():
            metric.reset()

    both = partial(measured, prompt_entropy=entropy, curvature=curvature)
    alone = [partial(measured, prompt_entropy=entropy), partial(measured, prompt_effective_rank=rank)]
    few = max(2, 1024 // length)
    for run in (plain, both, *alone, lambda: obvious(model, inputs, few)):
        run()
    forward, whole = fastest(plain, rounds), fastest(both, rounds)
    entropy_added, rank_added = (fastest(run, rounds) - forward for run in alone)
    naive = fastest(lambda: obvious(model, inputs, few), 1) - fastest(
        lambda: model(**{k: v[:few] for k, v in inputs.items()}), 3
    )
    added, naive_added = (whole - forward) / forward, naive / few * prompts / forward
    memory, watched = peak(plain), peak(both)
    kept = peak(lambda: model(**inputs, output_hidden_states=True))
    cells = (
        length, prompts, f"{1e3 * forward:.1f}", f"{1e3 * whole:.1f}", f"**{added:.2f}**", f"{naive_added:.0f}",
        f"**{watched / memory:.2f}**", f"{kept / memory:.2f}", f"{largest_error(model, inputs, anatomy):.1e}",
        f"{1e3 * entropy_added:.1f}", f"{1e3 * rank_added:.1f}", f"**{rank_added / entropy_added:.2f}**",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(given.width, device)
    command = f"python -m benchmarks.speed.metrics OUT --width {given.width} --tokens {given.tokens}"
    lines = [
        "# Prompt entropy and curvature of 25 layers, compared with the forward pass", "",
        f"`{command}`: {device_name(device)}, torch {torch.__version__}, bf16, {BLOCKS} blocks,",
        f"fastest of {given.rounds} rounds; the plain implementation was timed on 1024 tokens.", "",
        "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|",
    ]  # fmt: skip
    lines += [row(model, length, given.tokens, given.rounds, device) for length in (128, 256, 512)]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "metrics_h200.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
