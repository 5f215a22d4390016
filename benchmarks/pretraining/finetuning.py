"""Two contrastive fine-tunings of a trained model: without labels (SimCSE, dropout makes the pair) and with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from benchmarks.pretraining.models import LanguageModel
from benchmarks.pretraining.module import adamw, pl
from benchmarks.pretraining.tasks import padded
from midlayer_encoders.reading.pooling import pool

TEMPERATURE = 0.05  # SimCSE's


@dataclass(frozen=True)
class SamePassages:
    """Batches of pairs that are the same passage twice, drawn from the ids to train on.

    Attributes:
        tokens: all ids.
        steps: number of batches.
        batch: passages in a batch.
        length: ids in a passage.
        seed: of the draws.
    """

    tokens: Tensor
    steps: int
    batch: int = 256
    length: int = 32
    seed: int = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        within = torch.arange(self.length, device=self.tokens.device)
        for _ in range(self.steps):
            starts = torch.randint(len(self.tokens) - self.length, (self.batch, 1), generator=generator)
            ids = self.tokens[starts.to(self.tokens.device) + within].long()
            yield {"input_ids": ids.repeat(2, 1), "attention_mask": torch.ones_like(ids).repeat(2, 1)}


@dataclass(frozen=True)
class SameLabel:
    """Batches of one pair of texts for each label, so that no two pairs of a batch mean the same.

    Attributes:
        ids: of each text.
        labels: of each text; those with one text are left out.
        steps: number of batches.
        device: where they go.
        seed: of the draws.
    """

    ids: list[list[int]]
    labels: list[int]
    steps: int
    device: torch.device
    seed: int = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        every = [[i for i, label in enumerate(self.labels) if label == one] for one in sorted(set(self.labels))]
        of_label = [rows for rows in every if len(rows) > 1]
        for _ in range(self.steps):
            pairs = [torch.tensor(rows)[torch.randperm(len(rows), generator=generator)[:2]] for rows in of_label]
            chosen = torch.stack(pairs).T.flatten().tolist()  # all first texts, then all second ones
            yield padded([self.ids[row] for row in chosen], self.device)


def labelled_texts(folder: Path, tokenizer: Any) -> tuple[list[list[int]], list[int]]:
    """Return the ids and labels of a task's training texts."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf8").splitlines()]
    ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=64)["input_ids"]
    return ids, [row["label"] for row in rows]


class Contrastive(pl.LightningModule):
    """Pulls the two texts of a pair together and the pairs of a batch apart, at the last layer, mean pooled and normed.

    Args:
        model: trained.
        steps: of the whole run.
        peak: learning rate after the warm-up.
    """

    def __init__(self, model: LanguageModel, *, steps: int, peak: float = 1e-4) -> None:
        super().__init__()
        self.model = model
        self.steps, self.peak = steps, peak
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.model.backbone(**batch, use_cache=False).last_hidden_state
        first, second = normalize(pool(states, batch["attention_mask"].bool()), dim=-1).chunk(2)
        similarity = first @ second.T / TEMPERATURE
        target = torch.arange(len(similarity), device=similarity.device)
        loss = (cross_entropy(similarity, target) + cross_entropy(similarity.T, target)) / 2
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self.model.backbone, peak=self.peak, steps=self.steps, warmup=max(1, self.steps // 10))

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.backbone.parameters(), 1.0)
