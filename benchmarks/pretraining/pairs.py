"""What the fine-tunings pull together: two crops of one passage, or two texts of one group, and the batches of both.

A group is a list of texts that mean the same: an intent of Banking77, a pair of STSBenchmark, two adjacent sentences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.pretraining.tasks import padded
from benchmarks.pretraining.vocabulary import BOS, PAD

__all__ = ["CROP", "Crops", "Pairs", "adjacent_sentences", "labeled_groups", "without"]

# Of a passage's 64 tokens. A bag of words weighted by rarity finds the right one of 256 crops of 50 to 90 % in every case
# (loss 0.01), of 25 to 50 % in 76 of 100 (loss 1.5): such crops share a few words, or none.
CROP = (0.25, 0.5)
SIMILAR = 4.0  # of STSBenchmark's five points
WORDS = range(5, 41)  # in a sentence that is paired with the next one
BETWEEN = re.compile(r"""(?<!\bMr\.|\bDr\.|\bSt\.)(?<!\bMrs\.)(?:(?<=[.!?])|(?<=[.!?]["'”’]))\s+""")
SHARES = {"adjacent": 0.45, "Banking77": 0.45, "STSBenchmark": 0.1}  # of the batches; STSBenchmark has 241 pairs

Groups = list[list[str]]


@dataclass(frozen=True)
class Crops:
    """Batches of two different crops of each passage, padded to one width, whatever was drawn.

    Attributes:
        tokens: all ids to train on.
        steps: number of batches.
        batch: passages in a batch.
        length: ids in a passage.
        bos: whether ``[BOS]`` stands before each crop.
        seed: of the draws.
    """

    tokens: Tensor
    steps: int
    batch: int = 256
    length: int = 64
    bos: bool = True
    seed: int = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        shortest, longest = (round(share * self.length) for share in CROP)
        for _ in range(self.steps):
            passages = torch.randint(len(self.tokens) - self.length + 1, (self.batch,), generator=generator).repeat(2)
            sizes = torch.randint(shortest, longest + 1, (2 * self.batch,), generator=generator)
            places = self.length - sizes + 1  # where a crop of that size may begin
            starts = (torch.rand(2 * self.batch, generator=generator) * places).long()
            first, second = torch.stack([starts, sizes]).chunk(2, dim=1)
            starts[self.batch :] = torch.where(
                (first == second).all(dim=0), (second[0] + 1) % places[self.batch :], second[0]
            )
            yield self._cut(passages + starts, sizes, longest)

    def _cut(self, starts: Tensor, sizes: Tensor, longest: int) -> dict[str, Tensor]:
        device, within = self.tokens.device, torch.arange(longest)
        mask = (within < sizes[:, None]).to(device)
        places = (starts[:, None] + within).clamp(max=len(self.tokens) - 1).to(device)
        ids = self.tokens[places].long().masked_fill(~mask, PAD)
        if self.bos:
            ids, mask = pad(ids, (1, 0), value=BOS), pad(mask, (1, 0), value=True)
        return {"input_ids": ids, "attention_mask": mask.long()}


@dataclass(frozen=True)
class Pairs:
    """Batches of one kind each: a pair of texts out of each of some groups, never two pairs out of one.

    Attributes:
        ids: of each text of each group, by kind.
        steps: number of batches.
        device: where they go.
        batch: pairs in a batch, or as many as a kind has groups.
        width: that every batch is padded to.
        shares: of the batches, by kind.
        seed: of the draws.
    """

    ids: Mapping[str, list[list[list[int]]]]
    steps: int
    device: torch.device
    batch: int = 256
    width: int = 64
    shares: Mapping[str, float] | None = None
    seed: int = 0

    @property
    def kinds(self) -> list[str]:
        """The kind of each batch, in order."""
        names = list(self.ids)
        weights = torch.tensor([(self.shares or SHARES)[name] for name in names])
        generator = torch.Generator().manual_seed(self.seed)
        return [names[k] for k in torch.multinomial(weights, self.steps, replacement=True, generator=generator)]

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for kind in self.kinds:
            groups = self.ids[kind]
            chosen = [groups[k] for k in torch.randperm(len(groups), generator=generator)[: self.batch]]
            pairs = [torch.randperm(len(group), generator=generator)[:2].tolist() for group in chosen]
            firsts, seconds = (
                [group[pair[side]] for group, pair in zip(chosen, pairs, strict=True)] for side in (0, 1)
            )
            yield padded(firsts + seconds, self.device, width=self.width)


def labeled_groups(tasks: Path) -> dict[str, Groups]:
    """Return the groups in the training parts of Banking77 and STSBenchmark, which has a validation part for it.

    Args:
        tasks: folder of the whole tasks; no text of a test part is kept.
    """
    banking, sts = tasks / "Banking77Classification", tasks / "STSBenchmark"
    intents: dict[int, list[str]] = {}
    for row in _rows(banking / "train.jsonl"):
        intents.setdefault(row["label"], []).append(row["text"])
    similar = [
        [row["sentence1"], row["sentence2"]] for row in _rows(sts / "validation.jsonl") if row["score"] >= SIMILAR
    ]
    return {
        "Banking77": without(intents.values(), [row["text"] for row in _rows(banking / "test.jsonl")]),
        "STSBenchmark": without(
            similar, [row[side] for row in _rows(sts / "test.jsonl") for side in ("sentence1", "sentence2")]
        ),
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


def without(groups: Iterable[list[str]], texts: Iterable[str]) -> Groups:
    """Return the groups without some texts and without repeats, by their words alone; groups of one text are left out.

    A text in two groups would be a negative of itself.

    Example:
        >>> without([["Where is it?", "where is it", "Is it here?"], ["No.", "Never."]], ["never"])
        [['Where is it?', 'Is it here?']]
    """
    seen, kept = {_words(text) for text in texts}, []
    for group in groups:
        new: dict[str, str] = {}
        for text in group:
            if _words(text) not in seen:
                new.setdefault(_words(text), text)
        if len(new) > 1:
            seen.update(new)
            kept.append(list(new.values()))
    return kept


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def adjacent_sentences(
    tokens: Tensor, tokenizer: Any, *, number: int = 20_000, window: int = 128, seed: int = 0
) -> Groups:
    """Return pairs of a sentence and the next one, one pair from each of ``number`` windows that has such a pair."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - window + 1, (min(number, len(tokens)), 1), generator=generator)
    windows = tokens.cpu()[starts + torch.arange(window)]
    pairs = (_first_pair(text) for text in tokenizer.backend_tokenizer.decode_batch(windows.tolist()))
    return without((pair for pair in pairs if pair), [])


def _first_pair(text: str) -> list[str]:
    sentences = [" ".join(sentence.split()) for sentence in BETWEEN.split(text)[1:-1]]  # the window cuts both ends
    for first, second in pairwise(sentences):
        if len(first.split()) in WORDS and len(second.split()) in WORDS:
            return [first, second]
    return []
