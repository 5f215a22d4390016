"""Compare the layers of models: metrics side by side, differences with intervals, CKA between layers."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

import polars as pl

from midlayer_encoders._deprecated import take_deprecated
from midlayer_encoders._types import Layer, Progress
from midlayer_encoders.comparing.differences import (
    ComparisonInputs,
    IntervalSettings,
    MeasuredModel,
    difference_frame,
    measure_model,
    metric_rows,
    pair_notes,
    random_halves,
    similarity_frame,
)
from midlayer_encoders.comparing.text_metrics import comparable
from midlayer_encoders.encoder.options import EncoderKeywords, make_options
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.files import exists, expand_home
from midlayer_encoders.measuring import num_passes
from midlayer_encoders.report import plot_metrics
from midlayer_encoders.report.comparison_page import (
    comparisons_html,
    comparisons_words,
    plot_differences,
    plot_similarity,
)
from midlayer_encoders.report.results import Result
from midlayer_encoders.report.versions import versions
from midlayer_encoders.validation import check_path, check_progress, check_seed, check_text, check_texts
from midlayer_encoders.views.text_views import augment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIN_TEXTS = 10  # half of the texts must still be informative
_MAX_TEXTS = 2000  # the vectors of all layers and views are in memory


@dataclass(frozen=True)
class CompareResult(Result):
    """A base model and one or more others, layer by layer.

    Attributes:
        frame: tidy, the metrics of every model.
        folder: output folder; ``None`` if nothing was written.
        differences: ``base, model, base_layer, layer, depth, dataset, name, difference, low, high``: the other model
            minus the base, and the ends of its interval over texts.
        similarity: ``base, model, base_layer, layer, cka``: unbiased linear CKA of every layer with every other.
        how: settings of the comparison.
        notes: caveats, such as different tokenizers.
    """

    differences: pl.DataFrame
    similarity: pl.DataFrame
    how: Mapping[str, str]
    notes: Sequence[str] = field(default_factory=tuple)

    made_by: ClassVar[str] = "compare"

    def words(self) -> list[str]:
        """Return a one- or two-sentence summary for each model."""
        return comparisons_words(self.differences, self.similarity)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``metrics``, ``differences`` and ``cka``."""
        return {
            "metrics": plot_metrics(self.frame),
            "differences": plot_differences(self.differences),
            "cka": plot_similarity(self.similarity),
        }

    def html(self) -> str:
        """Return the self-contained page."""
        return comparisons_html(self.frame, self.differences, self.similarity, how=self.how, notes=self.notes)

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return the three frames by file name, each as parquet and CSV."""
        frames = {"frame": self.frame, "differences": self.differences, "cka": self.similarity}
        return {f"{name}.{suffix}": frame for name, frame in frames.items() for suffix in ("parquet", "csv")}


def compare(
    base: str | LayerEncoder,
    *tuned: str | LayerEncoder,
    texts: Sequence[str],
    metrics: str | Sequence[str] = "paper",
    layers: Sequence[Layer] | str = "all",
    views: int = 16,
    seed: int = 0,
    intervals: IntervalSettings | None = None,
    dataset: str = "texts",
    out: Path | str | None = None,
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> CompareResult:
    """Return how other models differ from a base model, layer by layer, as in the paper's Figure 13.

    Every model reads the same texts and the same views of them, through its own tokenizer; models given by name are in
    memory one at a time. The intervals are over texts: all models are measured again on the same random halves of them,
    see :func:`~midlayer_encoders.comparing.differences.half_width`. Models of different depth are compared at the
    depths that both have (layer 6 of 12 with layer 12 of 24).

    Args:
        base: folder, name on the hub, ``name@revision``, or a ``LayerEncoder`` of the whole model.
        tuned: one or more models to compare with it.
        texts: 10 to 2000 texts; a few hundred are good.
        metrics: ``"paper"``, ``"all"`` that can be compared, one name or several.
        layers: ``"all"`` or a list.
        views: number of views of each text for LiDAR.
        seed: for views and halves.
        intervals: number of random halves, and confidence.
        dataset: name of the texts in the frame.
        out: folder for frames, figures and page; ``None`` writes nothing.
        progress: called after each batch and each half; the stages name the model.
        options: as in :class:`~midlayer_encoders.EncoderOptions`, for models given by name; ``norm`` is ``"none"`` by
            default, as in the paper, and applies to encoders too. Other options must match those of the encoders.

    Raises:
        OptionError: no other model, the same model twice, too few texts or too many.
    """
    old_keywords = {"resamples": "intervals.resamples", "confidence": "intervals.confidence"}
    replaced = take_deprecated(cast(dict[str, Any], options), old_keywords)
    intervals = replace(intervals or IntervalSettings(), **replaced.get("intervals", {}))
    encoder_options = make_options(options, norm="none")
    names = comparable(metrics)
    models = (base, *tuned)
    _check_models(models, encoder_options.revision)
    for model in models:
        if isinstance(model, LayerEncoder):
            model.check_own({name: value for name, value in options.items() if name != "norm"})
    texts = _checked_texts(texts)
    seed = check_seed(seed)
    check_text("dataset", dataset)
    check_path("out", out)
    check_progress(progress)
    num_views = num_passes(names, views=views) - 1
    text_views = augment(texts, views=num_views, seed=seed) if num_views else []
    halves = random_halves(len(texts), intervals.resamples, seed=seed)
    inputs = ComparisonInputs(texts, text_views, names, layers, encoder_options, halves, progress)
    measured = _measure_all(models, inputs)
    first, *others = measured
    result = CompareResult(
        pl.concat([metric_rows(model, dataset) for model in measured]),
        Path(out) if out is not None else None,
        pl.concat([difference_frame(first, other, intervals.confidence, dataset) for other in others]),
        pl.concat([similarity_frame(first, other) for other in others]),
        {
            "texts": f"{len(texts)} ({dataset})",
            "views": f"{len(inputs.views)}, seed {seed}",
            "intervals": f"{100 * intervals.confidence:g} %, over texts: all models measured on the same "
            f"{intervals.resamples} random halves of {len(texts) // 2} texts, drawn without replacement, seed {seed}; "
            "token metrics average the values of the texts, the others are recomputed from the texts' vectors",
            "CKA": "linear, unbiased, of one vector per text",
            "norm": encoder_options.norm,
            "pooling": ", ".join(dict.fromkeys(model.spec.pooling for model in measured)),
            **versions(),
        },
        [note for other in others for note in pair_notes(first, other)],
    )
    if result.folder is not None:
        result.save()
    return result


def _measure_all(models: Sequence[str | LayerEncoder], inputs: ComparisonInputs) -> list[MeasuredModel]:
    """Measure each model; models given by name are loaded one at a time."""
    measured: list[MeasuredModel] = []
    for model in models:
        if isinstance(model, LayerEncoder):
            measured.append(measure_model(model, inputs, measured))
        else:
            name, revision = _name_and_revision(model)
            gc.collect()  # an encoder and its model card refer to each other, so the previous one is still in memory
            keywords = {**inputs.options.changed(), "revision": revision}
            # A variable would keep the encoder in memory while the next one loads.
            measured.append(measure_model(LayerEncoder(name, -1, **keywords), inputs, measured))
    return measured


def _check_models(models: Sequence[str | LayerEncoder], revision: str | None) -> None:
    if revision is not None:
        raise OptionError(
            f"`revision` must be left out, because each model has its own, but got {revision!r}. Write `name@revision`."
        )
    if len(models) < 2:
        raise OptionError("`tuned` must be one or more models to compare with `base`, but got none.")
    keys: set[object] = set()
    for model in models:
        if not isinstance(model, str | LayerEncoder):
            raise OptionError(
                f"`base` and `tuned` must be names, folders or LayerEncoders, but got {short_repr(model)}."
            )
        key: object = id(model)
        if isinstance(model, str):
            key = str(expand_home(model).resolve()) if _is_folder(model) else model
        if key in keys:
            raise OptionError(f"`tuned` must differ from `base` and from each other, but {model!s} is there twice.")
        keys.add(key)


def _is_folder(model: str) -> bool:
    return exists(expand_home(model)) and expand_home(model).is_dir()


def _checked_texts(texts: Sequence[str]) -> list[str]:
    checked = check_texts("texts", texts, minimum=0)
    if not _MIN_TEXTS <= len(checked) <= _MAX_TEXTS:
        raise OptionError(
            f"`texts` must be a list of {_MIN_TEXTS} to {_MAX_TEXTS} texts, because half of them must be informative "
            f"and the vectors of all layers are in memory, but got {len(checked)}."
        )
    return checked


def _name_and_revision(model: str) -> tuple[str, str | None]:
    """Return a model's name and revision from ``name@revision``.

    Example:
        >>> _name_and_revision("EleutherAI/pythia-410m@step512"), _name_and_revision("bert-base-uncased")
        (('EleutherAI/pythia-410m', 'step512'), ('bert-base-uncased', None))
    """
    if _is_folder(model) or "@" not in model:
        return model, None
    name, _, revision = model.rpartition("@")
    return name, revision
