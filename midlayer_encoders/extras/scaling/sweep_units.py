"""The units of sweeps: plan the batches of all recipes, embed a block of them, score a task, and make the result.

The last step of a model is its sweep in one process, which finds the vectors and scores of the others.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock

from midlayer_encoders._types import content_digest
from midlayer_encoders.comparing.checkpoints import files_fingerprint
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.whole_model import load_encoder
from midlayer_encoders.extras.scaling.units import Planner, Unit, embed_block, run_jobs, write_job
from midlayer_encoders.files import check_output_folder
from midlayer_encoders.report.results import versions
from midlayer_encoders.sweeping.layer_sweep import run_sweep, single_sweeps
from midlayer_encoders.sweeping.request import SweepArguments
from midlayer_encoders.sweeping.sweep_result import SweepResult

_ARGUMENTS = ("layers", "compressions", "metrics", "baselines", "settings", "store")


@dataclass
class SweepJob:
    """The sweep of one model, whose tasks have been read."""

    request: SweepArguments

    @cached_property
    def encoder(self) -> LayerEncoder:
        """The encoder of the whole model."""
        return load_encoder(self.request.model, self.request.options)

    def plan(self, folder: Path) -> list[tuple[str, str]]:
        """Write blocks of the batches under all recipes, and return the recipe and name of each."""
        blocks: list[tuple[str, str]] = []
        seen: dict[Path, set[str]] = {}  # recipes that differ after the pass only share their vectors
        for single in single_sweeps(self.request, self.encoder):
            embedder = single.embedder()
            planner = Planner(embedder, folder, seen.setdefault(embedder.store.folder, set()))
            single.plan(embedder.store, planner)
            blocks += [(single.recipe.name, name) for name in planner.flush()]
        return blocks

    def embed(self, folder: Path, recipe: str, block: str) -> None:
        """Embed a block."""
        for single in single_sweeps(self.request, self.encoder, recipe):
            embed_block(folder / block, single.embedder())

    def score(self, _: Path, recipe: str | None, number: int) -> list[str] | None:
        """Score a task under a recipe; the step is not done if that failed."""
        singles = single_sweeps(self.request, self.encoder, recipe)
        return None if any(single.score_task(self.request.labeled[number]) for single in singles) else []

    def finish(self, folder: Path) -> list[str] | None:
        """Run the whole sweep; the step is not done if a task failed, so that the same call tries again."""
        with FileLock(folder / "finish.lock"):  # another call may finish the same sweep
            return None if run_sweep(self.request).failures else []


def run_requests(requests: Mapping[str, SweepArguments]) -> dict[str, SweepResult]:
    """Run sweeps of several models as units of their executor, and return their results by name.

    Raises:
        MidlayerError: a model could not be swept; the message has the first error. The results of the others are on
            disk.
    """
    first = next(iter(requests.values()))
    units = [unit for name, request in requests.items() for unit in sweep_units(name, request)]
    # The whole sweep reports a task that failed, and repeats it.
    run_jobs(units, first.executor, first.progress, repeated=("embed", "score"))
    return {name: SweepResult.load(request.out or Path()) for name, request in requests.items()}


def sweep_units(name: str, request: SweepArguments) -> list[Unit]:
    """Write the sweep of a model to its folder, and return its units; the blocks are not planned yet."""
    out = request.out or Path()
    check_output_folder(out)
    sources = request.labeled  # read once, here
    request = request.change(tasks=(), progress=None, executor=None)
    path = write_job(out / "units", request.model, SweepJob(request))
    model = [request.model, request.options, files_fingerprint(str(request.model)), versions()]
    arguments = [getattr(request, key) for key in _ARGUMENTS]

    def unit(step: str, recipes: Any, chosen: Sequence[Any], *items: Any) -> Unit:
        tasks = [[getattr(source, key, None) for key in ("name", "hf_subsets", "eval_splits")] for source in chosen]
        identity = content_digest(json.dumps([model, arguments, recipes, tasks], default=repr), 8)
        label = f"{name}, {tasks[0][0] if step == 'score' else step}"
        return Unit(path, step, label, path.with_name(f"{step}-{identity}.json"), items)

    plan = unit("plan", request.recipes, sources)
    finish = unit("finish", request.recipes, request.sources)
    if not (out / "sweep.json").is_file():
        finish.outcome.unlink(missing_ok=True)
    scores = []
    for position, recipe in enumerate(request.recipes or [None]):
        chosen = recipe, position == 0  # the first recipe scores the baselines
        recipe_name = recipe and recipe.name
        scores += [unit("score", chosen, [source], recipe_name, number) for number, source in enumerate(sources)]
    return [plan, *scores, finish]
