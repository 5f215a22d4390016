"""Sweep many models as jobs of submitit: units of one model, recipe and task, then each model's whole sweep."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from midlayer_encoders._types import Progress, Stage, content_digest
from midlayer_encoders.encoder.whole_model import load_encoder
from midlayer_encoders.errors import MidlayerError, OptionError, counted
from midlayer_encoders.files import check_output_folder, make_folder
from midlayer_encoders.models.hub import name_and_revision
from midlayer_encoders.processes.cluster import Cluster, ClusterJob, Queue
from midlayer_encoders.processes.group import Group
from midlayer_encoders.recipes import Recipe, fitting_recipes
from midlayer_encoders.report.results import versions
from midlayer_encoders.sweeping.layer_sweep import SingleSweep, recipe_sweeps, sweep
from midlayer_encoders.sweeping.request import SweepRequest, SweepSettings
from midlayer_encoders.sweeping.sweep_result import SweepResult
from midlayer_encoders.tasks.sources import Tasks, TaskSource, TextsSource, limited_sources, task_sources
from midlayer_encoders.tasks.table_files import Columns

_PACKAGES = ("midlayer-encoders", "torch", "transformers", "sentence-transformers", "mteb")
_FOLDER = "units"  # in the folder of a sweep


@dataclass(frozen=True)
class Unit(ClusterJob):
    """A job: one task under one recipe, or the whole sweep of a model, which finds the scores of its tasks.

    Attributes:
        model: folder or name on the hub.
        options: of the encoder, among them the revision.
        sources: all tasks of the sweep.
        arguments: of :class:`~midlayer_encoders.sweeping.layer_sweep.SweepRequest`.
        recipes: all recipes of the sweep; ``None`` if it has none.
        source: the task; ``None`` for the whole sweep.
        recipe: name of the recipe; ``None`` without recipes.
    """

    model: str
    options: Mapping[str, Any]
    sources: Sequence[TaskSource]
    arguments: Mapping[str, Any]
    recipes: tuple[Recipe, ...] | None = None
    source: TaskSource | None = None
    recipe: str | None = None

    @cached_property
    def outcome(self) -> Path:
        """The file that the job writes at its end: its error, or none."""
        sources = self.sources if self.source is None else [self.source]
        tasks = [[getattr(source, name, None) for name in ("name", "hf_subsets", "eval_splits")] for source in sources]
        arguments = {name: value for name, value in self.arguments.items() if name not in ("out", "store", "progress")}
        recipes: Any = self.recipes
        if self.recipes is not None and self.recipe is not None:
            matching = [recipe for recipe in self.recipes if recipe.name == self.recipe]
            recipes = matching, matching[0] == self.recipes[0]  # the first one scores the baselines
        model = [self.model, self.options, _file_times(Path(self.model)), versions(_PACKAGES)]
        identity = [model, tasks, arguments, recipes]
        return Path(self.arguments["out"]) / _FOLDER / f"{content_digest(json.dumps(identity, default=repr))}.json"

    @property
    def label(self) -> str:
        """The model, the recipe and the task."""
        place = [self.model, self.recipe, None if self.source is None else self.source.name]
        return ", ".join(filter(None, place))

    @property
    def is_done(self) -> bool:
        """Whether the job has ended without an error, and a whole sweep has its result."""
        has_result = self.source is not None or (Path(self.arguments["out"]) / "sweep.json").is_file()
        return has_result and super().is_done

    def run(self) -> str | None:
        """Do the work and return the error, if any."""
        if self.source is not None:
            return self._score(self.source)
        recipes = None if self.recipes is None else list(self.recipes)
        result = sweep(self.model, self.sources, recipes=recipes, **self.arguments, **self.options)
        return "; ".join(f"{task}: {error}" for task, error in result.failures.items()) or None

    def _score(self, source: TaskSource) -> str | None:
        encoder = load_encoder(self.model, self.options)
        request = SweepRequest(**self.arguments)
        if self.recipes is None:
            sweeps: Iterator[SingleSweep] = iter([SingleSweep(request, encoder, self.sources, Group())])
        else:
            recipes = fitting_recipes(encoder, self.recipes)
            is_first = bool(recipes) and recipes[0].name == self.recipe
            chosen = [recipe for recipe in recipes if recipe.name == self.recipe]
            request = replace(request, baselines=request.baselines and is_first)
            sweeps = recipe_sweeps(request, encoder, self.sources, Group(), chosen)
        errors = [error for single in sweeps for error in single.score_task(source).values()]
        return errors[0] if errors else None


def sweep_many(
    models: Sequence[str],
    tasks: Tasks,
    *,
    executor: Cluster | Any = None,
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    out: Path | str = "midlayer-results",
    attempts: int = 3,
    parameters: Mapping[str, Any] | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    drop_empty: bool = False,
    limit: int | None = None,
    progress: Progress | None = None,
    **arguments: Any,
) -> dict[str, SweepResult]:
    """Sweep several models, as jobs of a cluster if an executor is given, and return their results by name.

    Each task of each model under each recipe is a job; when all have ended, one more job for each model makes its
    result from their scores. A call with the same ``out`` continues where the last one ended. A job that ends without a
    result, because its node was lost or it was killed, is submitted again; the others are not.

    Args:
        models: folders or names on the hub; ``"name@revision"`` for a revision.
        tasks: as in :func:`~midlayer_encoders.sweep`.
        executor: ``"slurm"``, ``"local"`` for processes of this machine, an executor of submitit, or ``None`` to sweep
            one model after another in this process.
        recipes: as in :func:`~midlayer_encoders.sweep`.
        out: folder that every node can write to; each model has a folder in it.
        attempts: number of times that a job which ends without a result is started.
        parameters: of submitit's ``update_parameters``, such as ``{"slurm_partition": "gpu", "gpus_per_node": 1,
            "timeout_min": 120, "slurm_array_parallelism": 16, "slurm_setup": ["module load cuda"]}``; on this machine
            ``parallel`` is the number of jobs at once, 1 by default. A job may take a day by default.
        text_column: as in :func:`~midlayer_encoders.sweep`.
        label_column: as in :func:`~midlayer_encoders.sweep`.
        drop_empty: as in :func:`~midlayer_encoders.sweep`.
        limit: as in :func:`~midlayer_encoders.sweep`.
        progress: called with the stage ``"units"`` and the number of jobs; without an executor, with the stages of
            :func:`~midlayer_encoders.sweep`.
        arguments: of :func:`~midlayer_encoders.sweep`; ``settings`` and the options of the encoders are among them.

    Raises:
        OptionError: an argument is wrong.
        MidlayerError: jobs failed; the message has the first error. The results of the others are on disk.
    """
    request_names = SweepRequest.__dataclass_fields__
    options = {name: value for name, value in arguments.items() if name not in request_names}
    shared = {name: value for name, value in arguments.items() if name in request_names}
    compressed = {name: shared[name] for name in ("dims", "precisions") if name in shared}
    requested = SweepRequest(**compressed).recipes(recipes)
    candidates = None if requested is None else tuple(requested)
    sources = limited_sources(task_sources(tasks, Columns(text_column, label_column, drop_empty)), limit)
    wholes: dict[str, Unit] = {}
    for name, (model, revision) in _named(models).items():
        model_options = options if revision is None else options | {"revision": revision}
        folder = Path(out).absolute() / name
        wholes[name] = Unit(model, model_options, sources, shared | {"out": folder}, candidates)
    if executor is None:
        return {
            name: sweep(each.model, sources, recipes=recipes, progress=progress, **each.arguments, **each.options)
            for name, each in wholes.items()
        }
    settings = shared.get("settings", SweepSettings())
    if settings.devices * settings.num_nodes > 1:
        raise OptionError("`devices` and `num_nodes` must be 1 with an executor: each job is one process.")
    labeled = [source for source in sources if not isinstance(source, TextsSource)]
    names = [None] if candidates is None else [recipe.name for recipe in candidates]
    units = [
        replace(whole, source=source, recipe=recipe)
        for whole in wholes.values()
        for recipe in names
        for source in labeled
    ]
    for whole in wholes.values():
        check_output_folder(Path(whole.arguments["out"]))
        make_folder(whole.outcome.parent)  # before the jobs, which all check the folder
    queue = Queue(executor, Path(out).absolute() / "jobs", parameters, attempts)
    if errors := queue.run(units, list(wholes.values()), stage=Stage(progress, "units")):
        first, error = next(iter(errors.items()))
        raise MidlayerError(
            f"{counted(len(errors), 'job')} failed, such as {first}: {error} Run the same call again to repeat them; "
            "the others are done."
        )
    return {name: SweepResult.load(Path(whole.arguments["out"])) for name, whole in wholes.items()}


def _named(models: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    """Return models and revisions by the names of their folders.

    Example:
        >>> list(_named(["org/model", "org/model@step1", "./model", "../model.old"]))
        ['org_model', 'org_model@step1', 'model', 'model.old']
    """
    if isinstance(models, str) or not models:
        raise OptionError(f"`models` must be a list of names or folders, but got {models!r}.")
    named: dict[str, tuple[str, str | None]] = {}
    for text in models:
        model, revision = name_and_revision(text)
        folder = re.sub(r"[^\w.@-]+", "_", text).strip("._") or "model"
        if folder in named:
            raise OptionError(f"`models` must have different names, but {text!r} and {named[folder][0]!r} do not.")
        named[folder] = model, revision
    return named


def _file_times(model: Path) -> list[tuple[str, int, int]]:
    """Return the name, size and time of each file of a model's folder, which may be written again under its name."""
    files = sorted(path for path in model.rglob("*") if path.is_file())
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
