"""The notes of a sweep, and the best layer with the encoder that they describe."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import polars as pl

from midlayer_encoders._types import Precision
from midlayer_encoders.encoder.options import EncoderOptions, python_line, shell_line
from midlayer_encoders.files import read_with_checksum, shell_path
from midlayer_encoders.frame.summaries import Curve, Gain, Summary, score_interval
from midlayer_encoders.report.labels import gain_text, number, significant
from midlayer_encoders.tasks.text_lists import read_texts

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

_TIMED_TEXTS = 16  # before sweeps noted the number


@dataclass(frozen=True)
class Notes:
    """How a sweep was measured, what each layer costs, and what failed.

    ``seconds`` is the time until a pass over a batch reaches each layer; ``timing`` describes the batch and the device.
    ``dimensions`` is 0 in sweeps before 0.2. ``layers`` holds the argument ``layer`` of an encoder where it is not the
    number: joint models have a layer for texts and one for images. ``tokens`` is the mean number of tokens that the
    model reads for a text of each task whose layers were scored together. ``rows`` holds, for each split of a task that
    was limited to a sample, its rows, the whole task's rows, and the texts of a row. ``compression`` holds the recipe,
    ``dims`` and ``precision`` in a sweep over these. ``resamples`` holds the scores of each baseline on the
    resampled test items of each task, ``hint`` what to sweep next.
    """

    title: str
    model: str
    how: dict[str, str]
    parameters: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    scoring: dict[str, str] = field(default_factory=dict)
    vectors: dict[str, Any] = field(default_factory=dict)
    recipes: dict[str, str] = field(default_factory=dict)
    dimensions: int = 0
    timing: dict[str, Any] = field(default_factory=dict)
    layers: dict[int, Any] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    rows: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    compression: dict[str, Any] = field(default_factory=dict)
    resamples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    hint: str = ""

    @property
    def name(self) -> str:
        """The model's name as it was given, or the name of its folder."""
        return EncoderOptions(**self.options).shown_name(self.model)

    @property
    def precision(self) -> Precision:
        """The precision of the vectors."""
        return cast(Precision, self.compression.get("precision", "float32"))

    @property
    def milliseconds(self) -> dict[int, float]:
        """Milliseconds per text up to each layer."""
        texts = self.timing.get("texts", _TIMED_TEXTS)
        return {layer: 1e3 * seconds / texts for layer, seconds in self.seconds.items()}


@dataclass(frozen=True, eq=False)
class BestLayer(int):
    """The number of the best layer, with its score and the encoder that has it.

    It is the number itself, too: ``encoder.encode_layers(texts)[best]``. ``LayerEncoder(model, best)`` has the layer
    and the recipe.

    Attributes:
        layer: the number.
        num_layers: number of blocks of the model.
        recipe: name of the recipe.
        score: in points, on one task or as the mean of several.
        gain: points above the last layer; in a sweep over recipes, above the plain text's if that is one of them.
        model: name of the model.
        revision: of the model.
        notes: how the sweep was measured.
    """

    layer: int
    num_layers: int = field(kw_only=True)
    recipe: str = field(kw_only=True)
    score: float = field(kw_only=True)
    gain: Gain = field(kw_only=True)
    model: str = field(kw_only=True)
    revision: str = field(kw_only=True)
    notes: Notes = field(kw_only=True, repr=False)

    def __new__(cls, layer: int, **_: Any) -> Self:
        """Return the number; the dataclass adds the fields."""
        return super().__new__(cls, layer)

    @classmethod
    def of(cls, scores: Summary, layer: int, *, recipe: str, gain: Gain, notes: Notes) -> Self:
        """Return a layer with its score in a summary that has an average."""
        score = cast(Curve, scores.average).points[layer]
        of_model: dict[str, Any] = {"num_layers": scores.num_layers, "model": scores.model, "revision": scores.revision}
        recipe = notes.compression.get("recipe", recipe)
        return cls(layer, recipe=recipe, score=score, gain=gain, notes=notes, **of_model)

    def __str__(self) -> str:
        return str(self.layer)

    @property
    def dims(self) -> int | None:
        """Number of dimensions in a sweep over ``dims`` or ``precisions``; ``None`` in others."""
        return self.notes.compression.get("dims")

    @property
    def precision(self) -> Precision:
        """Precision of the vectors."""
        return self.notes.precision

    def cells(self) -> list[str]:
        """Return recipe, layer, score, the score of the last layer, and the gain as texts of a table."""
        scores = self.score, self.score - self.gain.points
        recipe = self.recipe if self.dims is None else f"{self.recipe}, {self.dims} dims, {self.precision}"
        return [recipe, f"{self.layer} of {self.num_layers}", *map(number, scores), gain_text(self.gain)]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the encoder, without the layer."""
        options = {**self.notes.options, **self.notes.vectors}
        return options | ({"center": read_texts(options["center"])} if "center" in options else {})

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords for ``LayerEncoder(model, **keywords)``."""
        return {"layer": self.notes.layers.get(self.layer, self.layer), **self.options}

    def encoder(self, **options: Any) -> LayerEncoder:
        """Return the encoder; options such as ``device`` must not contradict those that were scored.

        Its vectors are truncated; ``encode(texts, precision=best.precision)`` also quantizes them.
        """
        from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder  # it imports torch

        encoder = LayerEncoder(self.notes.model, self, **options)
        cast(Any, encoder.model_card_data).precision = self.precision
        return encoder


def sample_words(notes: Notes, scores: Summary, resamples: pl.DataFrame) -> list[str]:
    """Return sentences: what a sample saved, and the interval of the best score on it; none for all rows."""
    parts = [(counts, notes.tokens.get(task, 0.0)) for task, splits in notes.rows.items() for counts in splits.values()]
    rows, whole = (sum(counts[column] for counts, _ in parts) for column in (0, 1))
    if rows == whole:
        return []
    sentence = f"Scored on a sample of {rows:,} of {whole:,} rows ({rows / whole:.0%})"
    read, tokens = (sum(counts[column] * counts[2] * tokens for counts, tokens in parts) for column in (0, 1))
    if tokens > read:
        unread = int(float(significant(tokens - read, 2)))
        sentence += f"; about {unread:,} tokens ({1 - read / tokens:.0%}) were not read"
    if scores.average is None:
        return [f"{sentence}."]
    best = scores.average.best_layer
    interval = score_interval(scores, resamples, best)
    words = "no interval" if interval is None else f"95 % interval {number(interval[0])} to {number(interval[1])}"
    return [f"{sentence}.", f"Layer {best} has {number(scores.average.best)} points on it ({words})."]


def read_notes(path: Path) -> Notes:
    """Return the notes of a sweep from its ``sweep.json``."""
    values = read_with_checksum(path)
    for name in ("parameters", "seconds", "layers"):
        values[name] = {int(layer): value for layer, value in values.get(name, {}).items()}
    types = {"dimensions": int, "hint": str, "model": str, "remarks": list, "title": str}
    names = [each.name for each in fields(Notes)]
    for name in names:
        expected = types.get(name, dict)
        if not isinstance(values.get(name, expected()), expected):
            raise TypeError(f"{name} is not a {expected.__name__}")
    return Notes(**{name: values[name] for name in names if name in values})


def export_lines(notes: Notes, layer: int) -> dict[str, str]:
    """Return the lines that create the encoder of a layer, in Python and in a shell."""
    requested = notes.layers.get(layer, int(layer))
    transforms = dict(notes.vectors)
    center = transforms.pop("center", "")
    options = EncoderOptions(**notes.options, **transforms)
    out = f"layer-{layer}"
    python = python_line(notes.model, requested, options)
    shell = shell_line(notes.model, requested, options, out=out)
    if center:
        python = f"{python.removesuffix(')')}, center=read_texts({center!r}))"
        shell, _, name = shell.rpartition(" --out ")  # a template may contain it too
        shell = f"{shell} --center {shell_path(center)} --out {name}"
    python = f'{python}.save_pretrained("{out}")'
    if notes.precision != "float32":  # `encode` quantizes, a folder does not
        python = f'{python}  # then encode(texts, precision="{notes.precision}")'
        shell = f"{shell} --precision {notes.precision}"
    return {"Python": python, "shell": shell}
