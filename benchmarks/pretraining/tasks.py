"""The six tasks scored for all layers at once, by the package's own scoring: a second for 13 layers on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.pretraining.corpus import PAD
from benchmarks.pretraining.models import evaluating
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.recipes import PLAIN, RECIPES, Recipe
from midlayer_encoders.tasks.sources import task_sources

TOKEN_BUDGET = 16_384
ASKED = (PLAIN, "one-word")


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
    from midlayer_encoders.sweeping.scoring.recording import record

    made = []
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    for source in task_sources(folders) if folders else ():
        with isolated_random():
            task = source.make()
            (asked,) = record(task, _texts)
        name = source.name.rpartition("-")[0]
        made.append(Task(name, str(task.metadata.main_score), list(asked.keys), partial(_scores, asked.scorer)))
    return made


def _scores(scorer: Any, vectors: Tensor) -> Tensor:
    scores: Tensor = scorer.bootstrap(vectors)[0]
    return scores


def _texts(inputs: Any, **_: Any) -> list[str]:
    return [text for batch in inputs for text in batch["text"]]


def _numbered(texts: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Return the texts without repeats, and each one's place."""
    unique = list(dict.fromkeys(texts))
    return unique, {text: place for place, text in enumerate(unique)}


class Evaluation:
    """Scores every layer of a model on every task, plain and asked for one word; texts are tokenized once.

    Args:
        tasks: what to score.
        tokenizer: of the models to come.
        recipes: how to ask: plain, or for one word too.
        longest: tokens that are read, those of a template included.
    """

    def __init__(
        self, tasks: Sequence[Task], tokenizer: Any, *, recipes: Sequence[str] = ASKED, longest: int = 128
    ) -> None:
        self.tasks = list(tasks)
        self.texts, self.places = _numbered([text for task in tasks for text in task.texts])
        asked = recipes if self.texts else ()
        self.ids = {name: _asked(self.texts, tokenizer, RECIPES[name], longest) for name in asked}

    def __call__(self, backbone: Any) -> dict[tuple[str, str], tuple[str, list[float]]]:
        """Return for each recipe and task the name of its score and the score of each layer."""
        made = {}
        for recipe in self.ids:
            vectors = self.embed(backbone, recipe)
            for task in self.tasks:
                rows = torch.tensor([self.places[text] for text in task.texts], device=vectors.device)
                made[recipe, task.name] = (task.score_name, task.score(vectors[:, rows]).tolist())
        return made

    def embed(self, backbone: Any, recipe: str = PLAIN) -> Tensor:
        """Return each text's vector at every layer, normed and pooled as the recipe says, ``(L, N, D)``."""
        from midlayer_encoders.models.anatomy import find_anatomy
        from midlayer_encoders.reading.batches import plan_batches
        from midlayer_encoders.reading.reader import LayerReader

        device, anatomy, ids = next(backbone.parameters()).device, find_anatomy(backbone), self.ids[recipe]
        reader = LayerReader(
            backbone, lambda some: padded(some, device), anatomy, range(anatomy.num_layers + 1),
            pooling=RECIPES[recipe].pooling or "mean",
        )  # fmt: skip
        made = torch.empty(anatomy.num_layers + 1, 0)
        batches = plan_batches(list(map(len, ids)), token_budget=TOKEN_BUDGET)
        with evaluating(backbone):
            for positions, vectors in reader.embed(ids, batches):
                if not made.numel():
                    made = vectors.new_empty(len(vectors), len(ids), vectors.shape[2])
                made[:, positions] = vectors
        return made.to(device)


def _asked(texts: list[str], tokenizer: Any, recipe: Recipe, longest: int) -> list[list[int]]:
    """Return the ids of each text inside the recipe's template, the text cut where all would be too long."""
    before, after = str(recipe.template or "{text}").split("{text}")
    front = tokenizer(before)["input_ids"]  # with [BOS] where the tokenizer has it
    back = tokenizer(after, add_special_tokens=False)["input_ids"]
    own = tokenizer(texts, add_special_tokens=False)["input_ids"]
    room = longest - len(front) - len(back)
    return [(front + ids[:room] + back) or [PAD] for ids in own]


def padded(ids: Sequence[list[int]], device: torch.device) -> dict[str, Tensor]:
    """Return ids and mask as wide as the longest."""
    longest = max(map(len, ids))
    rows = torch.tensor([one + [PAD] * (longest - len(one)) for one in ids])
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in ids])
    return {"input_ids": rows.to(device), "attention_mask": mask.to(device)}
