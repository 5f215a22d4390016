"""The units of sweeps: plan the batches of all recipes, embed a block of them, score a task, and make the result.

A unit is the path of a request and a few words: it finds everything else in the folder of the sweep, which all
machines share. The last unit of a model is its sweep in one process, which finds the vectors and scores of the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import cloudpickle
from filelock import FileLock

from midlayer_encoders._types import Stage, content_digest
from midlayer_encoders.comparing.checkpoints import files_fingerprint
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.whole_model import load_encoder
from midlayer_encoders.errors import MidlayerError, OptionError, counted
from midlayer_encoders.extras.scaling.blocks import Planner, embed_block
from midlayer_encoders.extras.scaling.units import ProcessLostError, Unit, run_units
from midlayer_encoders.files import LOCK, check_output_folder, read_artifact, read_json, write_file
from midlayer_encoders.report.results import versions
from midlayer_encoders.sweeping.layer_sweep import run_sweep, single_sweeps
from midlayer_encoders.sweeping.request import Sweep
from midlayer_encoders.sweeping.sweep_result import SweepResult

_PACKAGES = ("midlayer-encoders", "torch", "transformers", "sentence-transformers", "mteb")


@dataclass(frozen=True)
class SweepUnit:
    """One step of a sweep.

    Attributes:
        request: file with the sweep of one model, whose tasks have been read; its folder holds what the units write.
        step: ``"plan"`` all recipes, ``"embed"`` a block, ``"score"`` a task, or ``"finish"`` the whole sweep.
        identity: digest of everything that changes what the step writes.
        label: what an error is about.
        recipe: of the block or score; ``None`` without recipes.
        item: file of the block, or number of the task.
    """

    request: Path
    step: Literal["plan", "embed", "score", "finish"]
    identity: str
    label: str
    recipe: str | None = None
    item: str = ""

    @property
    def outcome(self) -> Path:
        """The file that the unit writes last; it lists the blocks of a plan."""
        return self.request.with_name(f"{self.step}-{self.identity}.json")

    @property
    def is_done(self) -> bool:
        """Whether that file is there, and the result of a whole sweep."""
        return self.outcome.is_file() and (self.step != "finish" or (self.request.parents[1] / "sweep.json").is_file())

    @property
    def blocks(self) -> list[tuple[str | None, str]]:
        """The blocks of a plan that is done, each with its recipe."""
        return read_artifact(self.outcome, read_json) or []

    def run(self) -> None:
        """Do the step, and write its outcome."""
        if self.is_done:  # another process has done it meanwhile
            return
        request = _request(self.request)
        blocks: list[tuple[str | None, str]] = []
        if self.step == "finish":
            with FileLock(self.request.with_name("finish.lock")):  # another call may finish the same sweep
                failures = run_sweep(request).failures
            if failures:
                return  # the result has them; the same call tries again
        seen: dict[Path, set[str]] = {}  # recipes that differ after the pass only share their vectors
        for single in single_sweeps(request, _encoder(self.request), self.recipe) if self.step != "finish" else ():
            if self.step == "plan":
                embedder = single.embedder()
                planned = seen.setdefault(embedder.store.folder, set())
                planner = Planner.of(embedder, self.request.parent, planned)
                single.plan(planner)
                recipe = None if request.recipes is None else single.recipe.name
                blocks += [(recipe, name) for name in planner.flush()]
            elif self.step == "embed":
                embed_block(self.request.with_name(self.item), single.embedder())
            elif errors := single.score_task(request.labeled[int(self.item)]):
                raise MidlayerError("; ".join(errors.values()))
        write_file(self.outcome, json.dumps(blocks).encode())
        if self.step == "embed":
            self.request.with_name(self.item).unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _request(path: Path) -> Sweep:
    request: Sweep = cloudpickle.loads(path.read_bytes())
    return request


@lru_cache(maxsize=1)  # the next unit of this process is often of the same model
def _encoder(path: Path) -> LayerEncoder:
    request = _request(path)
    return load_encoder(request.model, request.options)


def run_requests(requests: Mapping[str, Sweep]) -> dict[str, SweepResult]:
    """Run sweeps of several models as units of their executor, and return their results by name.

    Raises:
        MidlayerError: a model could not be swept; the message has the first error. The results of the others are on
            disk.
    """
    request = next(iter(requests.values()))
    executor, stage = request.executor, Stage(request.progress, "units")
    errors: dict[Unit, MidlayerError] = {}
    units = [unit for name, request in requests.items() for unit in _units(name, request)]
    broken: set[Path] = set()

    def run(step: str, chosen: Sequence[SweepUnit]) -> None:
        failed = run_units([unit for unit in chosen if unit.request not in broken], executor, stage=stage)
        for unit, error in failed.items():
            # The whole sweep reports a task that failed, and repeats it: not one that ends its process.
            if step in ("plan", "finish") or isinstance(error, ProcessLostError):
                errors[unit] = error
                broken.add(unit.request)  # type: ignore[attr-defined]

    for step in ("plan", "embed", "score", "finish"):
        chosen = [unit for unit in units if unit.step == step]
        run(step, chosen)
        if step == "plan":
            units += [_block_unit(plan, *block) for plan in chosen for block in plan.blocks]
    if errors:
        first, error = next(iter(errors.items()))
        raise MidlayerError(
            f"{counted(len(errors), 'unit')} failed, such as {first.label}: {error} Run the same call again to repeat "
            "them; the others are done."
        )
    return {name: SweepResult.load(request.out) for name, request in requests.items() if request.out is not None}


def _block_unit(plan: SweepUnit, recipe: str | None, name: str) -> SweepUnit:
    return SweepUnit(plan.request, "embed", name.removesuffix(".block"), f"{plan.label}, {name}", recipe, name)


def _units(name: str, request: Sweep) -> list[SweepUnit]:
    """Write the request of a model's sweep to its folder, and return its units without those of blocks."""
    out = request.out or Path()
    if not isinstance(request.model, str):
        raise OptionError("`model` must be a folder or hub name with an executor: each of its processes loads it.")
    check_output_folder(out)
    sources = request.labeled  # read once, here
    request = request.change(tasks=(), progress=None, executor=None)
    content = cloudpickle.dumps(request)
    path = out / "units" / f"request-{content_digest(content, 8)}.pkl"
    write_file(path, content)
    (out / LOCK).touch()  # a folder of results

    def unit(step: Any, recipe: str | None = None, item: str = "", *chosen: Any) -> SweepUnit:
        tasks = [[getattr(source, key, None) for key in ("name", "hf_subsets", "eval_splits")] for source in chosen]
        names = ("layers", "compressions", "metrics", "baselines", "settings", "store")
        arguments = {key: getattr(request, key) for key in names}
        recipes: Any = request.recipes
        if recipes is not None and recipe is not None:
            matching = [each for each in recipes if each.name == recipe]
            recipes = matching, matching[0] == recipes[0]  # the first one scores the baselines
        model = [request.model, request.options, files_fingerprint(str(request.model)), versions(_PACKAGES)]
        identity = content_digest(json.dumps([step, model, tasks, arguments, recipes], default=repr), 8)
        place = [name, recipe, chosen[0].name if item else None if step == "finish" else step]
        return SweepUnit(path, step, identity, ", ".join(filter(None, place)), recipe, item)

    recipes = [None] if request.recipes is None else [recipe.name for recipe in request.recipes]
    plan = unit("plan", None, "", *sources)
    scores = [unit("score", recipe, str(n), source) for recipe in recipes for n, source in enumerate(sources)]
    return [plan, *scores, unit("finish", None, "", *request.sources)]
