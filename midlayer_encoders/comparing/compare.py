"""What fine-tuning does to a model's layers: metrics side by side, differences with intervals, CKA between layers."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Unpack

import polars as pl

from midlayer_encoders._types import Layer, Progress
from midlayer_encoders.comparing.differences import (
    Reading,
    ReadModel,
    difference_frame,
    metric_rows,
    pair_notes,
    read_model,
    similarity_frame,
)
from midlayer_encoders.comparing.halves import check_confidence, random_halves
from midlayer_encoders.comparing.text_metrics import comparable
from midlayer_encoders.encoder.options import EncoderKeywords, EncoderOptions, make_options
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

__all__ = ["CompareResult", "compare"]

_LEAST, _MOST = 10, 2000  # texts: halves of five; vectors of all layers and views in memory


@dataclass(frozen=True)
class CompareResult(Result):
    """A base model and one or more others, layer by layer.

    Attributes:
        frame: tidy, the metrics of every model.
        folder: where everything was written; ``None`` where nothing was.
        differences: ``base, model, base_layer, layer, depth, dataset, name, difference, low, high``: the other model
            minus the base, and the ends of its interval over texts.
        similarity: ``base, model, base_layer, layer, cka``: unbiased linear CKA of every layer with every other.
        how: how it was measured.
        notes: what a reader should know, such as different tokenizers.
    """

    differences: pl.DataFrame
    similarity: pl.DataFrame
    how: Mapping[str, str]
    notes: Sequence[str] = field(default_factory=tuple)

    made_by: ClassVar[str] = "compare"

    def words(self) -> list[str]:
        """Return the finding of each model in a sentence or two."""
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
        return {f"{name}.{kind}": frame for name, frame in frames.items() for kind in ("parquet", "csv")}


def compare(
    base: str | LayerEncoder,
    *tuned: str | LayerEncoder,
    texts: Sequence[str],
    metrics: str | Sequence[str] = "paper",
    layers: Sequence[Layer] | str = "all",
    views: int = 16,
    seed: int = 0,
    resamples: int = 50,
    confidence: float = 0.95,
    dataset: str = "texts",
    out: Path | str | None = None,
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> CompareResult:
    """Return how other models differ from a base model, layer by layer, as the paper's Figure 13 shows it.

    Every model sees the same texts and the same views of them, through its own tokenizer; named models are in memory
    one at a time. The intervals are over texts: all models are measured again on the same random halves of them, see
    :func:`~midlayer_encoders.comparing.halves.half_width`. Models of different depth are compared at the
    depths that both have (layer 6 of 12 with layer 12 of 24), models of different width as they are.

    Args:
        base: folder or name on the hub, ``name@revision`` for one of its revisions, or a whole ``LayerEncoder``.
        tuned: one or more others.
        texts: what to pass through the models, 10 to 2000; a few hundred are good.
        metrics: ``"paper"``, ``"all"`` that can be compared, one name or several.
        layers: ``"all"`` or some.
        views: number of views of each text for LiDAR.
        seed: of the views and of the halves.
        resamples: number of random halves.
        confidence: of the intervals.
        dataset: what the frame calls the texts.
        out: folder for frames, figures and page; ``None`` writes nothing.
        progress: called after each batch and each half; the stages name the model.
        options: as in :class:`~midlayer_encoders.EncoderOptions`, of the models that are named; ``norm`` is ``"none"``
            here, as in the paper, and holds for encoders that are given too. Other options must be those encoders' own.

    Raises:
        OptionError: no other model, the same model twice, too few texts or too many.
    """
    given = make_options(options, norm="none")
    confidence = check_confidence(confidence)
    names = comparable(metrics)
    _check_models(base, *tuned, revision=given.revision)
    for model in (base, *tuned):
        if isinstance(model, LayerEncoder):
            model.check_own({name: value for name, value in options.items() if name != "norm"})
    texts, seed = _checked_texts(texts), check_seed(seed)
    check_text("dataset", dataset)
    check_path("out", out)
    check_progress(progress)
    passes = num_passes(names, views=views)
    reading = Reading(
        texts, augment(texts, views=passes - 1, seed=seed) if passes > 1 else [], names, layers, given.norm,
        given.pooling, random_halves(len(texts), resamples, seed=seed), progress,
    )  # fmt: skip
    first, *others = _read_all((base, *tuned), reading, given)
    folder = Path(out) if out is not None else None
    result = CompareResult(
        pl.concat([metric_rows(read, dataset) for read in (first, *others)]),
        folder,
        pl.concat([difference_frame(first, other, reading, confidence, dataset) for other in others]),
        pl.concat([similarity_frame(first, other) for other in others]),
        _how(reading, (first, *others), seed=seed, confidence=confidence, dataset=dataset),
        [note for other in others for note in pair_notes(first, other)],
    )
    if folder is not None:
        result.save()
    return result


def _read_all(models: Sequence[str | LayerEncoder], reading: Reading, options: EncoderOptions) -> list[ReadModel]:
    """Return what is kept of each model; those that are named are loaded, with ``options``, one at a time."""
    reads: list[ReadModel] = []
    for model in models:
        if isinstance(model, LayerEncoder):
            reads.append(read_model(model, reading, reads))
        else:
            name, revision = _name_and_revision(model)
            gc.collect()  # an encoder and its card hold each other, so the one before is still there
            own = {**options.changed(), "revision": revision}
            reads.append(read_model(LayerEncoder(name, -1, **own), reading, reads))  # a name would keep it in memory
    return reads


def _check_models(*models: str | LayerEncoder, revision: str | None) -> None:
    if revision is not None:
        raise OptionError(
            f"`revision` must be left out, since each model has its own, but got {revision!r}. Write `name@revision`."
        )
    if len(models) < 2:
        raise OptionError("`tuned` must be one or more models to compare with `base`, but got none.")
    seen: set[object] = set()
    for model in models:
        if not isinstance(model, str | LayerEncoder):
            raise OptionError(
                f"`base` and `tuned` must be names, folders or LayerEncoders, but got {short_repr(model)}."
            )
        one = str(expand_home(model).resolve()) if isinstance(model, str) and _is_folder(model) else model
        key = one if isinstance(one, str) else id(one)
        if key in seen:
            raise OptionError(f"`tuned` must differ from `base` and from each other, but {one!s} is there twice.")
        seen.add(key)


def _is_folder(model: str) -> bool:
    return exists(expand_home(model)) and expand_home(model).is_dir()


def _checked_texts(texts: Sequence[str]) -> list[str]:
    found = check_texts("texts", texts, minimum=0)
    if not _LEAST <= len(found) <= _MOST:
        raise OptionError(
            f"`texts` must be a list of {_LEAST} to {_MOST} texts, as half of them must still say something and the "
            f"vectors of all layers are kept in memory, but got {len(found)}."
        )
    return found


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


def _how(reading: Reading, reads: Sequence[ReadModel], *, seed: int, confidence: float, dataset: str) -> dict[str, str]:
    halves = reading.halves
    return {
        "texts": f"{len(reading.texts)} ({dataset})",
        "views": f"{len(reading.views)}, seed {seed}",
        "intervals": f"{100 * confidence:g} %, over texts: all models measured on the same {len(halves)} random halves "
        f"of {halves.shape[1]} texts, drawn without replacement, seed {seed}; for metrics of tokens each text's own "
        "number, for the others the metric anew from the texts' vectors",
        "CKA": "linear, unbiased, of one vector per text",
        "norm": reading.norm,
        "pooling": ", ".join(dict.fromkeys(read.spec.pooling for read in reads)),
        **versions(),
    }
