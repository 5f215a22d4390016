"""The six tasks of part 3 scored for all layers at once, by mteb's mathematics in batched tensors.

mteb scores one layer at a time on the CPU, 20 s a layer and stage; these take a second for 13 layers on a GPU.
``python -m benchmarks.pretraining.check_tasks`` compares them with ``sweep``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.pretraining.corpus import PAD
from benchmarks.pretraining.scorers import accuracy, best_average_precision, mean_average_precision, spearman, v_measure

DRAWS, PER_LABEL, SEED = 10, 8, 42  # mteb's
TOKEN_BUDGET = 16_384


@dataclass(frozen=True)
class Task:
    """A task: what to embed, and how the vectors of all layers ``(L, N, D)`` become a score each ``(L,)``.

    Attributes:
        name: of its folder.
        score_name: of what is scored.
        texts: N texts, without repeats.
        score: from vectors to scores, fractions.
    """

    name: str
    score_name: str
    texts: list[str]
    score: Callable[[Tensor], Tensor]


def read_tasks(folder: Path) -> list[Task]:
    """Return the tasks in a folder, each a folder of JSONL files."""
    return [_MAKERS[path.name](path) for path in sorted(folder.iterdir()) if path.name in _MAKERS]


def _rows(folder: Path, split: str = "test") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf8").splitlines()]


def _numbered(texts: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Return the texts without repeats, and each one's place."""
    unique = list(dict.fromkeys(texts))
    return unique, {text: place for place, text in enumerate(unique)}


def _pairs(rows: Sequence[dict[str, Any]]) -> tuple[list[str], Tensor]:
    texts, place = _numbered([row[side] for row in rows for side in ("sentence1", "sentence2")])
    return texts, torch.tensor([[place[row["sentence1"]], place[row["sentence2"]]] for row in rows])


def _sts(folder: Path) -> Task:
    rows = _rows(folder)
    texts, pairs = _pairs(rows)
    wanted = torch.tensor([row["score"] for row in rows])
    return Task(folder.name, "cosine_spearman", texts, lambda vectors: spearman(vectors, pairs, wanted))


def _pair_classification(folder: Path) -> Task:
    rows = _rows(folder)
    texts, pairs = _pairs(rows)
    labels = torch.tensor([row["labels"] for row in rows])
    return Task(folder.name, "max_ap", texts, lambda vectors: best_average_precision(vectors, pairs, labels))


def draws(labels: Sequence[int]) -> list[list[int]]:
    """Return ten draws of eight rows a label, the ones that mteb draws."""
    order = list(range(len(labels)))
    drawn = []
    for _ in range(DRAWS):
        np.random.RandomState(SEED).shuffle(order)  # mteb shuffles the same list again, by a new generator of one seed
        seen: dict[int, int] = {}
        chosen = []
        for row in order:
            seen[labels[row]] = seen.get(labels[row], 0) + 1
            if seen[labels[row]] <= PER_LABEL:
                chosen.append(row)
        drawn.append(chosen)
    return drawn


def _classification(folder: Path) -> Task:
    train, test = _rows(folder, "train"), _rows(folder)
    drawn = draws([row["label"] for row in train])
    texts, place = _numbered([train[i]["text"] for one in drawn for i in one] + [row["text"] for row in test])
    shots = [torch.tensor([(place[train[i]["text"]], train[i]["label"]) for i in one]) for one in drawn]
    asked = torch.tensor([(place[row["text"]], row["label"]) for row in test])
    return Task(folder.name, "accuracy", texts, lambda vectors: accuracy(vectors, shots, asked))


def _clustering(folder: Path) -> Task:
    rows = _rows(folder)
    texts, place = _numbered([row["sentences"] for row in rows])
    labelled = torch.tensor([(place[row["sentences"]], row["labels"]) for row in rows])
    return Task(folder.name, "v_measure", texts, lambda vectors: v_measure(vectors, labelled, rounds=DRAWS, seed=SEED))


def _reranking(folder: Path) -> Task:
    rows = _rows(folder)
    texts, place = _numbered([text for row in rows for text in (row["query"], *row["positive"], *row["negative"])])
    queries = []
    for row in rows:
        right = {place[text] for text in row["positive"]}
        found = sorted(right | {place[text] for text in row["negative"]})
        queries.append((place[row["query"]], torch.tensor(found), torch.tensor([one in right for one in found])))
    return Task(folder.name, "map_at_1000", texts, lambda vectors: mean_average_precision(vectors, queries))


_MAKERS: dict[str, Callable[[Path], Task]] = {
    "Banking77Classification": _classification,
    "EmotionClassification": _classification,
    "STSBenchmark": _sts,
    "StackOverflowTitlesClustering": _clustering,
    "TrecQAReranking": _reranking,
    "TwitterURLCorpus": _pair_classification,
}


class Evaluation:
    """Scores every layer of a model on every task; texts are tokenized once.

    Args:
        tasks: what to score.
        tokenizer: of the models to come.
        longest: tokens of a text that are read.
    """

    def __init__(self, tasks: Sequence[Task], tokenizer: Any, *, longest: int = 128) -> None:
        self.tasks = list(tasks)
        self.texts, self.places = _numbered([text for task in tasks for text in task.texts])
        self.ids = [ids or [PAD] for ids in tokenizer(self.texts, truncation=True, max_length=longest)["input_ids"]]

    def __call__(self, backbone: Any) -> dict[str, tuple[str, list[float]]]:
        """Return for each task the name of its score and the score of each layer."""
        vectors = self.embed(backbone)
        made = {}
        for task in self.tasks:
            rows = torch.tensor([self.places[text] for text in task.texts], device=vectors.device)
            made[task.name] = (task.score_name, task.score(vectors[:, rows]).tolist())
        return made

    def embed(self, backbone: Any) -> Tensor:
        """Return the mean of each text's normed states at every layer, ``(L, N, D)``, on the model's device."""
        from midlayer_encoders.models.anatomy import find_anatomy
        from midlayer_encoders.reading.batches import plan_batches
        from midlayer_encoders.reading.reader import LayerReader

        device, modes = next(backbone.parameters()).device, {m: m.training for m in backbone.modules()}
        anatomy = find_anatomy(backbone)
        reader = LayerReader(backbone, lambda ids: padded(ids, device), anatomy, range(anatomy.num_layers + 1))
        made = torch.empty(anatomy.num_layers + 1, 0)
        backbone.eval()
        for positions, vectors in reader.embed(
            self.ids, plan_batches(list(map(len, self.ids)), token_budget=TOKEN_BUDGET)
        ):
            if not made.numel():
                made = vectors.new_empty(len(vectors), len(self.ids), vectors.shape[2])
            made[:, positions] = vectors
        for module, mode in modes.items():
            module.training = mode
        return made.to(device)


def padded(ids: Sequence[list[int]], device: torch.device) -> dict[str, Tensor]:
    longest = max(map(len, ids))
    rows = torch.tensor([one + [PAD] * (longest - len(one)) for one in ids])
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in ids])
    return {"input_ids": rows.to(device), "attention_mask": mask.to(device)}
