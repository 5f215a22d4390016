"""Sweep many models as jobs of submitit: units of one model, recipe and task, then each model's whole sweep."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from midlayer_encoders._types import Stage, content_digest
from midlayer_encoders.encoder.whole_model import load_encoder
from midlayer_encoders.errors import MidlayerError, OptionError, counted
from midlayer_encoders.files import check_output_folder, make_folder
from midlayer_encoders.models.hub import name_and_revision
from midlayer_encoders.processes.cluster import Cluster, ClusterJob, Queue
from midlayer_encoders.processes.group import Group
from midlayer_encoders.report.results import versions
from midlayer_encoders.sweeping.layer_sweep import run_sweep, single_sweeps
from midlayer_encoders.sweeping.request import Sweep
from midlayer_encoders.sweeping.sweep_result import SweepResult
from midlayer_encoders.tasks.sources import Tasks, TaskSource

_PACKAGES = ("midlayer-encoders", "torch", "transformers", "sentence-transformers", "mteb")
_FOLDER = "units"  # in the folder of a sweep


@dataclass(frozen=True)
class Unit(ClusterJob):
    """A job: one task under one recipe, or the whole sweep of a model, which finds the scores of its tasks.

    Attributes:
        request: the sweep of the model, whose tasks have been read.
        source: the task; ``None`` for the whole sweep.
        recipe: name of the recipe; ``None`` without recipes.
    """

    request: Sweep
    source: TaskSource | None = None
    recipe: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of the sweep's results."""
        assert self.request.out is not None  # of each model
        return self.request.out

    @cached_property
    def outcome(self) -> Path:
        """The file that the job writes at its end: its error, or none."""
        request = self.request
        sources = request.sources if self.source is None else [self.source]
        tasks = [[getattr(source, name, None) for name in ("name", "hf_subsets", "eval_splits")] for source in sources]
        names = ("layers", "compressions", "metrics", "baselines", "settings")
        arguments = {name: getattr(request, name) for name in names}
        recipes: Any = request.recipes
        if request.recipes is not None and self.recipe is not None:
            matching = [recipe for recipe in request.recipes if recipe.name == self.recipe]
            recipes = matching, matching[0] == request.recipes[0]  # the first one scores the baselines
        model = [request.model, request.options, _file_times(Path(str(request.model))), versions(_PACKAGES)]
        identity = [model, tasks, arguments, recipes]
        return self.folder / _FOLDER / f"{content_digest(json.dumps(identity, default=repr))}.json"

    @property
    def label(self) -> str:
        """The model, the recipe and the task."""
        place = [self.request.model, self.recipe, None if self.source is None else self.source.name]
        return ", ".join(str(part) for part in place if part)

    @property
    def is_done(self) -> bool:
        """Whether the job has ended without an error, and a whole sweep has its result."""
        has_result = self.source is not None or (self.folder / "sweep.json").is_file()
        return has_result and super().is_done

    def run(self) -> str | None:
        """Do the work and return the error, if any."""
        request = self.request
        if self.source is None:
            return "; ".join(f"{task}: {error}" for task, error in run_sweep(request).failures.items()) or None
        encoder = load_encoder(request.model, request.options)
        sweeps = single_sweeps(request, encoder, Group(), self.recipe)
        errors = [error for single in sweeps for error in single.score_task(self.source).values()]
        return errors[0] if errors else None


def sweep_many(
    models: Sequence[str],
    tasks: Tasks,
    *,
    executor: Cluster | Any = None,
    out: Path | str = "midlayer-results",
    attempts: int = 3,
    parameters: Mapping[str, Any] | None = None,
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
        out: folder that every node can write to; each model has a folder in it.
        attempts: number of times that a job which ends without a result is started.
        parameters: of submitit's ``update_parameters``, such as ``{"slurm_partition": "gpu", "gpus_per_node": 1,
            "timeout_min": 120, "slurm_array_parallelism": 16, "slurm_setup": ["module load cuda"]}``; on this machine
            ``parallel`` is the number of jobs at once, 1 by default. A job may take a day by default.
        arguments: of :func:`~midlayer_encoders.sweep`; ``recipes``, ``limit``, ``settings`` and the options of the
            encoders are among them. With an executor, ``progress`` is called with the stage ``"units"`` and the number
            of jobs.

    Raises:
        OptionError: an argument is wrong.
        MidlayerError: jobs failed; the message has the first error. The results of the others are on disk.
    """
    return sweep_models(Sweep("", tasks, **arguments), models, Path(out), executor, parameters, attempts)


def sweep_models(
    request: Sweep,
    models: Sequence[str],
    out: Path,
    executor: Cluster | Any = None,
    parameters: Mapping[str, Any] | None = None,
    attempts: int = 3,
) -> dict[str, SweepResult]:
    """Run a request for each of several models, as :func:`sweep_many`; its own model is not used."""
    named = _named(models)
    sources = request.labeled  # read once for all models
    requests: dict[str, Sweep] = {}
    for name, (model, revision) in named.items():
        options = request.options if revision is None else {**request.options, "revision": revision}
        requests[name] = request.change(model=model, options=options, out=out.absolute() / name)
    if executor is None:
        return {name: run_sweep(each) for name, each in requests.items()}
    if request.settings.devices * request.settings.num_nodes > 1:
        raise OptionError("`devices` and `num_nodes` must be 1 with an executor: each job is one process.")
    names = [None] if request.recipes is None else [recipe.name for recipe in request.recipes]
    wholes = {name: Unit(each.change(tasks=(), progress=None)) for name, each in requests.items()}
    units = [Unit(whole.request, source, recipe) for whole in wholes.values() for recipe in names for source in sources]
    for whole in wholes.values():
        check_output_folder(whole.folder)
        make_folder(whole.outcome.parent)  # before the jobs, which all check the folder
    queue = Queue(executor, out.absolute() / "jobs", parameters, attempts)
    if errors := queue.run(units, list(wholes.values()), stage=Stage(request.progress, "units")):
        first, error = next(iter(errors.items()))
        raise MidlayerError(
            f"{counted(len(errors), 'job')} failed, such as {first}: {error} Run the same call again to repeat them; "
            "the others are done."
        )
    return {name: SweepResult.load(whole.folder) for name, whole in wholes.items()}


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
