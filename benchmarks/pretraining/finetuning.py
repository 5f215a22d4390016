"""Fine-tune a trained variant by contrast, without labels or with them, the callback attached; everything measured is written.

    python -m benchmarks.pretraining.finetuning DATA OUT --tuning simcse                # of OUT/long.pt
    python -m benchmarks.pretraining.finetuning DATA OUT --tuning supervised
    python -m benchmarks.pretraining.finetuning DATA OUT --variant base --tuning simcse --steps 20 --batch 8     # a try

``simcse`` pairs two crops of a passage of the novels, ``supervised`` two texts that people say mean the same (Banking77,
STSBenchmark) or that stand side by side. DATA is the folder that ``corpus.py`` made, OUT the one with the weights that
``run.py`` wrote. Writes ``OUT/VARIANT-TUNING.parquet``, ``.json`` and ``.pt`` as ``run.py`` does.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, normalize

from benchmarks.pretraining.corpus import read_tokenizer
from benchmarks.pretraining.models import LanguageModel, Size, language_model
from benchmarks.pretraining.module import adamw, pl
from benchmarks.pretraining.pairs import Crops, Pairs, adjacent_sentences, without
from benchmarks.pretraining.run import begin, count, make_trainer, read_parts, record, shared_arguments, watch
from benchmarks.pretraining.variants import VARIANTS, Variant
from midlayer_encoders.reading.pooling import pool

TEMPERATURE = 0.05  # SimCSE's
DROPOUT = 0.1  # SimCSE's too
LONGEST = 64  # tokens of a labeled text
TUNINGS = ("simcse", "supervised")


def steps_to_measure(steps: int) -> list[int]:
    """Return the first step, some that double, and the last.

    Example:
        >>> steps_to_measure(600)
        [0, 4, 8, 16, 32, 64, 128, 256, 512, 600]
    """
    return sorted(step for step in {0, *(2**k for k in range(2, 10)), steps} if step <= steps)


def steps_to_score(steps: int) -> list[int]:
    """Return when to run the tasks: all of them steps to measure at."""
    return sorted(step for step in {0, 64, 256, steps} if step <= steps)


def contrastive_loss(states: Tensor, mask: Tensor) -> Tensor:
    r"""Return how hard each text's partner is to tell from the other texts of its side, both ways, in nats.

    .. math::
        \ell = \frac{1}{2N} \sum_{i=1}^N \left(
        -\log \frac{e^{s_{ii}}}{\sum_j e^{s_{ij}}} - \log \frac{e^{s_{ii}}}{\sum_j e^{s_{ji}}} \right), \qquad
        s_{ij} = \cos(u_i, v_j) / 0.05

    Args:
        states: of N first texts, then of their partners, shape ``(2 N, T, D)``.
        mask: true at real tokens, shape ``(2 N, T)``.
    """
    with torch.autocast(states.device.type, enabled=False):  # a bfloat16 rounds 20 to the next eighth
        first, second = normalize(pool(states.float(), mask.bool()), dim=-1).chunk(2)
        similarity = first @ second.T / TEMPERATURE
        target = torch.arange(len(similarity), device=similarity.device)
        return (cross_entropy(similarity, target) + cross_entropy(similarity.T, target)) / 2


class Contrastive(pl.LightningModule):
    """Pulls the two texts of a pair together and the pairs of a batch apart, at the last layer, normed and mean pooled.

    Args:
        model: trained.
        steps: of the whole run.
        peak: learning rate after the warm-up.
        compiled: whether to compile the blocks.
    """

    def __init__(self, model: LanguageModel, *, steps: int, peak: float, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        if compiled:
            model.compile_training()
        self.steps, self.peak = steps, peak
        self.losses: list[Tensor] = []
        self.tokens: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.model.backbone(**batch, use_cache=False).last_hidden_state
        loss = contrastive_loss(states, batch["attention_mask"])
        self.losses.append(loss.detach())
        self.tokens.append(batch["attention_mask"].sum())
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self.model.backbone, peak=self.peak, steps=self.steps, warmup=max(1, self.steps // 10))

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        # As in pretraining: Lightning does not clip for a fused optimizer.
        torch.nn.utils.clip_grad_norm_(self.model.backbone.parameters(), 1.0)


def _dropped(states: Tensor) -> Tensor:
    # All but the first token: it sees itself alone, so it says nothing of the text, and a few of its dimensions carry the
    # sink. Without one of them every later layer reads another model, and that would be measured, not the tuning.
    return torch.cat([states[:, :1], dropout(states[:, 1:], DROPOUT)], dim=1)


class _DroppingLinear(nn.Linear):
    def forward(self, states: Tensor) -> Tensor:
        made = super().forward(states)
        return _dropped(made) if self.training else made


class _DroppingEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        made = super().forward(ids)
        return _dropped(made) if self.training else made


def add_dropout(model: LanguageModel) -> LanguageModel:
    """Return a Llama with dropout where BERT has it: the embeddings, and what each block adds to the states twice.

    Llama itself has it on the attention weights alone, where it would take the first token's one weight, on itself, away. The
    parts change their class, not their names: the weights load as ever, and the compiler takes the blocks for one program,
    which hooks with a number each would keep it from.
    """
    model.backbone.embed_tokens.__class__ = _DroppingEmbedding
    for block in model.backbone.layers:
        block.self_attn.o_proj.__class__ = block.mlp.down_proj.__class__ = _DroppingLinear
    return model


def size_of(weights: Mapping[str, Tensor]) -> Size:
    """Return the size of the model that weights are of."""
    vocab, width = weights["head.weight"].shape
    numbers = [int(found[1]) for name in weights if (found := re.match(r"backbone\.layers\.(\d+)\.", name))]
    return Size(blocks=max(numbers) + 1, width=width, vocab=vocab)


def trained_model(given: argparse.Namespace, variant: Variant) -> LanguageModel:
    """Return the model that ``run.py`` trained, with dropout."""
    path = given.out / f"{given.variant}.pt"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there: `python -m benchmarks.pretraining.run` with `--variant {given.variant}` writes it."
        )
    weights = torch.load(path, map_location="cpu", weights_only=True)
    model = language_model(variant, size_of(weights))
    model.load_state_dict(weights)
    return add_dropout(model).train()


def supervised_pairs(given: argparse.Namespace, variant: Variant, tokens: Tensor, scored: list[str]) -> Pairs:
    """Return batches of pairs without any text of the tasks, those that a classifier is fitted on included."""
    path = given.data / "pairs.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: `python -m benchmarks.pretraining.corpus` writes it.")
    tokenizer = read_tokenizer(given.data, bos=variant.bos > 0)
    groups = {"adjacent": adjacent_sentences(tokens, tokenizer), **json.loads(path.read_text())}
    groups = {kind: without(some, scored) for kind, some in groups.items()}
    if few := [kind for kind, some in groups.items() if len(some) < 2]:
        raise ValueError(
            f"{path} must hold two groups or more that the tasks do not, but of {', '.join(few)} it holds fewer: make DATA again."
        )
    ids = {
        kind: [tokenizer(group, truncation=True, max_length=LONGEST)["input_ids"] for group in some]
        for kind, some in groups.items()
    }
    return Pairs(ids, given.steps, tokens.device, given.batch, LONGEST)


def tune(given: argparse.Namespace) -> None:
    """Fine-tune a variant in one way."""
    name, variant = f"{given.variant}-{given.tuning}", VARIANTS[given.variant]
    module = Contrastive(trained_model(given, variant), steps=given.steps, peak=given.peak, compiled=given.compile)
    watched = watch(given, variant, name, looks=steps_to_measure(given.steps), stages=steps_to_score(given.steps))
    tokens, _ = read_parts(given)
    batches = (
        Crops(tokens, given.steps, given.batch, bos=variant.bos > 0)
        if given.tuning == "simcse"
        else supervised_pairs(given, variant, tokens, watched.stage.evaluation.texts)
    )
    start = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(0)  # dropout's
        make_trainer(given.steps, list(watched)).fit(module, batches)
    about = {
        "variant": asdict(variant), "tuning": given.tuning, "tokens": int(torch.stack(module.tokens).sum()),
        "sessions": [{"to": given.steps, "seconds": time.perf_counter() - start}],
        "kinds": batches.kinds if isinstance(batches, Pairs) else None,
    }  # fmt: skip
    record(given, name, module, watched, about)


def arguments() -> argparse.ArgumentParser:
    parser = shared_arguments(__doc__, [name for name, one in VARIANTS.items() if one.blocks == "llama"], "long")
    parser.add_argument("--tuning", choices=TUNINGS, required=True)
    parser.add_argument("--steps", type=count, default=600)
    parser.add_argument("--peak", type=float, default=1e-4, help="learning rate; a model of width 64 needs 2e-3")
    return parser


def main(words: list[str] | None = None) -> None:
    tune(begin(arguments(), "benchmarks.pretraining.finetuning", words))


if __name__ == "__main__":
    main()
