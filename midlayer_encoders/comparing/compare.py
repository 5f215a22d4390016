"""Compare the layers of models: metrics side by side, and differences with intervals."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, cast

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders import metrics as metric_functions
from midlayer_encoders import validation
from midlayer_encoders._types import EncoderSpec, Layer, Progress, Stage
from midlayer_encoders.arguments import COMPARABLE, IntervalSettings, metric_names
from midlayer_encoders.encoder.choosing import check_own, complete_encoder
from midlayer_encoders.encoder.options import EncoderOptions, make_options
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.files import check_output_folder
from midlayer_encoders.frame.schema import NamedSubject, tidy_frame, tidy_rows
from midlayer_encoders.metrics import METRICS, Kind, TooFewTextsError
from midlayer_encoders.metrics.feeding import extra_passes
from midlayer_encoders.metrics.text_views import augment, drop_words
from midlayer_encoders.models.hub import name_and_revision
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.report import comparison_page, plot_metrics
from midlayer_encoders.report.results import Result, versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIN_TEXTS = 10  # half of the texts must still be informative
_MAX_TEXTS = 2000  # the vectors of all layers and views are in memory
_TWO_TOKEN_METRICS = ("prompt_entropy", "prompt_effective_rank")  # like their classes, they leave out shorter texts


@dataclass(frozen=True)
class CompareResult(Result):
    """A base model and one or more others, layer by layer.

    Attributes:
        frame: tidy, the metrics of every model.
        folder: output folder; ``None`` if nothing was written.
        differences: ``base, model, base_layer, layer, depth, dataset, name, difference, low, high``: the other model
            minus the base, and the ends of its interval over texts.
        how: settings of the comparison.
        notes: caveats, such as different tokenizers.
    """

    differences: pl.DataFrame
    how: Mapping[str, str]
    notes: Sequence[str] = field(default_factory=tuple)

    def words(self) -> list[str]:
        """Return a one-sentence summary for each model."""
        return comparison_page.comparisons_words(without_local(self.differences))

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``metrics`` and ``differences``."""
        return {"metrics": plot_metrics(self.frame), "differences": comparison_page.plot_differences(self.differences)}

    def html(self) -> str:
        """Return the self-contained page."""
        frame, differences = without_local(self.frame), without_local(self.differences)
        return comparison_page.comparisons_html(frame, differences, how=self.how, notes=self.notes)

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return both frames by file name, each as parquet and CSV."""
        frames = {"frame": self.frame, "differences": self.differences}
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
    **options: Any,
) -> CompareResult:
    """Return how other models differ from a base model, layer by layer, as in the paper's Figure 13.

    Every model reads the same texts and the same views of them, through its own tokenizer; models given by name are in
    memory one at a time. The intervals are over texts: all models are measured again on the same random halves of them,
    see :func:`~midlayer_encoders.comparing.compare.half_width`. Models of different depth are compared at the
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
            default, as in the paper, and applies to encoders too. Other options must match the encoders'.

    Raises:
        OptionError: no other model, the same model twice, too few texts or too many.
    """
    intervals = intervals or IntervalSettings()
    encoder_options = make_options(options, norm="none")
    names = comparable(metrics)
    models = (base, *tuned)
    if encoder_options.revision is not None:
        raise OptionError(
            f"`revision` must be None, because each model has its own, but got {encoder_options.revision!r}. "
            "Write `name@revision`."
        )
    if not tuned:
        raise OptionError("`tuned` must be one or more models to compare with `base`, but got none.")
    for model in models:
        if isinstance(model, LayerEncoder):
            check_own(model, {name: value for name, value in options.items() if name != "norm"})
        elif not isinstance(model, str):
            raise OptionError(f"`base` and `tuned` must be names, paths or LayerEncoders, but got {short_repr(model)}.")
    texts = validation.check_texts("texts", texts, minimum=0)
    if not _MIN_TEXTS <= len(texts) <= _MAX_TEXTS:
        raise OptionError(
            f"`texts` must be a list of {_MIN_TEXTS} to {_MAX_TEXTS} texts, because half of them must be informative "
            f"and the vectors of all layers are in memory, but got {len(texts)}."
        )
    seed = validation.check_seed(seed)
    validation.check_text("dataset", dataset)
    validation.check_path("out", out)
    if out is not None:
        check_output_folder(Path(out))
    validation.check_progress(progress)
    num_copies, num_views = extra_passes(names, views=views)
    copies = [drop_words(texts, seed=seed)] if num_copies else []
    text_views = augment(texts, views=num_views, seed=seed) if num_views else []
    halves = random_halves(len(texts), intervals.resamples, seed=seed)
    inputs = _Inputs(texts, copies, text_views, names, layers, encoder_options, halves, progress)
    measured: list[_MeasuredModel] = []
    for model in models:
        gc.collect()  # an encoder and its model card refer to each other, so the previous one is still in memory
        encoder = model if isinstance(model, LayerEncoder) else _load_whole(model, encoder_options)
        measured.append(_measure_model(encoder, inputs, measured))
        del encoder
    first, *others = measured
    result = CompareResult(
        pl.concat([_metric_rows(model, dataset) for model in measured]),
        Path(out) if out is not None else None,
        pl.concat([_difference_frame(first, other, len(texts), intervals.confidence, dataset) for other in others]),
        {
            "texts": f"{len(texts)} ({dataset})",
            "views": f"{len(inputs.views)}, seed {seed}",
            "intervals": f"{100 * intervals.confidence:g} %, over texts: all models measured on the same "
            f"{intervals.resamples} random halves of {len(texts) // 2} texts, drawn without replacement, seed {seed}; "
            "token metrics average the values of the texts, the others are recomputed from the texts' vectors",
            "norm": encoder_options.norm,
            "pooling": ", ".join(dict.fromkeys(model.spec.pooling for model in measured)),
            **versions(),
        },
        [note for other in others for note in _compare_structure(first, other)],
    )
    if result.folder is not None:
        result.save()
    return result


def _load_whole(model: str, options: EncoderOptions) -> LayerEncoder:
    name, revision = name_and_revision(model)
    return cast(LayerEncoder, complete_encoder(LayerEncoder, name, {**options.non_defaults(), "revision": revision}))


def random_halves(count: int, resamples: int, *, seed: int = 0) -> Tensor:
    """Return positions of random halves of ``count`` texts, without replacement, shape ``(R, count // 2)``.

    A bootstrap with replacement would repeat texts, and a repeated text is its own nearest neighbor and a false
    negative: it moves InfoNCE by 12 and DiME by 29 of their standard errors, effective rank by 3
    (benchmarks/results/halves.md).

    Example:
        >>> random_halves(6, 2).shape, len(set(random_halves(6, 2)[0].tolist()))
        (torch.Size([2, 3]), 3)
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=generator)[: count // 2] for _ in range(resamples)])


def half_width(values: Tensor, count: int, *, confidence: float = 0.95) -> Tensor:
    r"""Return half the width of the interval of a statistic, from its values on random halves of the texts.

    .. math::
        z \sqrt{\frac{m}{n - m}} \operatorname{sd}_r \theta_r, \qquad m = \lfloor n / 2 \rfloor

    This is the standard error by half-sampling (McCarthy, 1969; Shao & Wu, 1989): a half differs from the whole as much
    as the whole differs from the population. For a mean it equals the usual standard error.

    Args:
        values: on R halves, shape ``(R, *)``.
        count: number n of texts.
        confidence: of the interval, in ``(0, 1)``; z is its normal quantile.

    Returns:
        Shape ``(*)``.

    Example:
        >>> half_width(torch.tensor([1.0, 2.0, 3.0]), 10)
        tensor(1.9600)
    """
    half = count // 2
    scale = NormalDist().inv_cdf((1 + confidence) / 2) * sqrt(half / (count - half))
    return values.std(dim=0) * scale


@dataclass(frozen=True)
class _Inputs:
    """The inputs and options with which every model is measured."""

    texts: Sequence[str]
    copies: Sequence[Sequence[str]]  # none, or one list
    views: Sequence[Sequence[str]]
    metrics: tuple[str, ...]
    layers: Sequence[Layer] | str
    options: EncoderOptions
    halves: Tensor
    progress: Progress | None


@dataclass(frozen=True)
class _MeasuredModel:
    """A model's metrics: ``(1 + R, L)`` for each, over all texts and over R halves of them."""

    label: str
    spec: EncoderSpec
    vocabulary_hash: int
    layers: tuple[int, ...]
    values: dict[str, Tensor]


def _measure_model(encoder: LayerEncoder, inputs: _Inputs, previous: Sequence[_MeasuredModel]) -> _MeasuredModel:
    """Return the metrics of a model over all texts and over their halves, from one pass for each view of the texts.

    The encoder's pooling and default prompt apply.
    """
    spec = encoder.spec
    validation.check_matches_encoder("pooling", inputs.options.pooling, encoder.pooling)
    for model in previous:
        if replace(spec, model="", revision=None) == replace(model.spec, model="", revision=None):
            raise OptionError(
                f"`tuned` must differ from `base` and from each other, but {encoder.name} has the same weights and "
                f"settings as {model.label.removeprefix('local/')}."
            )
    label = _unique_label(encoder, [model.label for model in previous])
    shown = label.removeprefix("local/")
    prompt = encoder.default_prompt
    reader = layer_reader(encoder, layers=inputs.layers, norm=inputs.options.norm, prompt=prompt, normalize=False)
    rows = {layer: row for row, layer in enumerate(reader.layers)}
    shape = (len(rows), len(inputs.texts))
    token_metrics = [name for name in inputs.metrics if METRICS[name].kind == "tokens"]
    text_values = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in token_metrics}

    def measure_tokens(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        for name, values in text_values.items():
            of_batch = getattr(metric_functions, name)(states, mask).double().cpu()
            if name in _TWO_TOKEN_METRICS:
                of_batch = torch.where(mask.sum(dim=1).cpu() >= 2, of_batch, torch.nan)
            values[rows[layer], positions] = of_batch

    passes = (inputs.texts, *inputs.copies, *inputs.views)
    stage = Stage(inputs.progress, f"texts of {shown}", len(inputs.texts) * len(passes))
    vectors = []
    for view, view_texts in enumerate(passes):
        receive = measure_tokens if token_metrics and view == 0 else None
        batches = batches_of(encoder, view_texts, prompt=prompt)
        vectors.append(reader.vectors(view_texts, batches, tokens=receive, done=stage.step))
    for name, values in text_values.items():
        if bool(values.isnan().all(dim=1).any()):
            raise TooFewTextsError(f"There is no text long enough for {name}: give longer texts.")
    views: dict[Kind, Sequence[Tensor]]
    views = {"pooled": vectors[:1], "copies": vectors[:2], "views": vectors[1 + len(inputs.copies) :]}
    samples = [torch.arange(len(inputs.texts)), *inputs.halves]
    stage = Stage(inputs.progress, f"halves of {shown}", len(samples) * len(inputs.metrics))
    measured: dict[str, list[Tensor]] = {name: [] for name in inputs.metrics}
    for name, sample_values in measured.items():
        for sample in samples:
            if name in text_values:
                sample_values.append(text_values[name][:, sample].nanmean(dim=1))
            else:
                sample_values.append(_measure_vectors(name, views[METRICS[name].kind], sample))
            stage.step()
    vocabulary_hash = hash(frozenset(encoder.tokenizer.get_vocab().items()))
    stacked = {name: torch.stack(sample_values) for name, sample_values in measured.items()}
    return _MeasuredModel(label, spec, vocabulary_hash, tuple(reader.layers), stacked)


def _measure_vectors(metric: str, views: Sequence[Tensor], sample: Tensor) -> Tensor:
    """Return a metric of every layer from vectors ``(L, N, D)`` of each view, of a sample of texts, shape ``(L,)``."""
    function = getattr(metric_functions, metric)
    by_layer = zip(*(vectors[:, sample].double() for vectors in views), strict=True)
    if metric == "lidar":
        return torch.stack([function(torch.stack(layer_views)) for layer_views in by_layer])
    return torch.stack([function(*layer_views[:2]) for layer_views in by_layer])


def without_local(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a frame whose names of folders have no prefix."""
    names = [name for name in ("base", "model") if name in frame.columns]
    return frame.with_columns(pl.col(names).str.strip_prefix("local/"))


def _unique_label(encoder: LayerEncoder, labels: Sequence[str]) -> str:
    """Return a label that is not in ``labels``: the model's name, with its revision or parent folder if needed."""
    spec, folder = encoder.spec, Path(encoder.source).expanduser().resolve()
    name = f"{spec.model}@{spec.revision}" if spec.revision else spec.model
    if name in labels and folder.is_dir():
        name = f"local/{folder.parent.name}/{name.removeprefix('local/')}"
    numbered = [name, *(f"{name} ({number})" for number in range(2, len(labels) + 2))]
    return next(label for label in numbered if label not in labels)


def _metric_rows(model: _MeasuredModel, dataset: str) -> pl.DataFrame:
    """Return the tidy frame of a model's metrics."""
    spec = model.spec
    name = spec.model if spec.revision else model.label  # the frame has a column for the revision
    subject = NamedSubject(name, spec.revision, spec.num_layers)
    rows = []
    for metric, values in model.values.items():
        by_layer = dict(zip(model.layers, values[0].tolist(), strict=True))
        rows += tidy_rows(by_layer, subject, kind="metric", dataset=dataset, name=metric)
    return tidy_frame(rows)


def _paired_layers(base: _MeasuredModel, other: _MeasuredModel) -> list[tuple[int, int]]:
    """Return the measured layers of two models at the relative depths that both have."""
    depths = base.spec.num_layers, other.spec.num_layers
    steps = gcd(*depths)
    pairs = [(step * depths[0] // steps, step * depths[1] // steps) for step in range(steps + 1)]
    return [(base_layer, layer) for base_layer, layer in pairs if base_layer in base.layers and layer in other.layers]


def _difference_frame(
    base: _MeasuredModel, other: _MeasuredModel, count: int, confidence: float, dataset: str
) -> pl.DataFrame:
    """Return the other model's metrics minus the base's at equal relative depths, each with its interval."""
    rows = []
    for name, base_values in base.values.items():
        for base_layer, layer in _paired_layers(base, other):
            base_row = base.layers.index(base_layer)
            row = other.layers.index(layer)
            changes = other.values[name][:, row] - base_values[:, base_row]
            change = float(changes[0])
            margin = float(half_width(changes[1:], count, confidence=confidence))
            depth = base_layer / base.spec.num_layers
            values = (change, change - margin, change + margin)
            rows.append((base.label, other.label, base_layer, layer, depth, dataset, name, *values))
    return pl.DataFrame(rows, schema=comparison_page.DIFFERENCES, orient="row")


def _compare_structure(base: _MeasuredModel, other: _MeasuredModel) -> list[str]:
    """Return caveats about comparing two models."""
    base_depth = base.spec.num_layers
    depth = other.spec.num_layers
    base_name, name = (model.label.removeprefix("local/") for model in (base, other))
    notes = []
    if base_depth != depth:
        shared = len(_paired_layers(base, other))
        notes.append(
            f"{name} has {depth} blocks and {base_name} {base_depth}: differences are taken at the {shared} "
            "depths that both have, curves are over relative depth."
        )
    if base.vocabulary_hash != other.vocabulary_hash:
        notes.append(f"{name} and {base_name} have different tokenizers, so token metrics differ for that reason too.")
    return notes


def comparable(metrics: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the requested metrics, or raise if models cannot be compared by one of them.

    Example:
        >>> comparable("paper")
        ('prompt_entropy', 'dataset_entropy', 'effective_rank', 'curvature', 'infonce', 'lidar', 'dime')
    """
    return metric_names(metrics, COMPARABLE, aliases=())
