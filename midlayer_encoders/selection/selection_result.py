"""The result of a selection: the layer, the reason, the choices of the other rules, and the confidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.curves import Curves
from midlayer_encoders.frame.tidy_result import TidyResult
from midlayer_encoders.recipes import PLAIN, Recipe
from midlayer_encoders.selection.kind import DetectedKind
from midlayer_encoders.selection.rules import RULES, CannotChooseError, Choice, choose, metrics_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEAR = 0.1  # of the depth: layers within it are about as good (benchmarks/selection/README.md)


@dataclass(frozen=True)
class LabelEvidence:
    """How much a few labels support a choice, by resampling the texts.

    Attributes:
        count: number of labeled texts.
        layers: lowest and highest layer of the central 95 % of resamples.
        gain: points of accuracy of the chosen layer over the last, or over ``against``.
        low: lower end of its 95 % interval; optimistic, because the layer was chosen on these texts.
        high: upper end.
        against: the baseline of the gain.
    """

    count: int
    layers: tuple[int, int]
    gain: float
    low: float
    high: float
    against: str = "the last layer"

    def comparison(self) -> str:
        """Return the clause that compares the choice with the baseline."""
        verdict = "significantly better" if self.low > 0 else "not significantly better"
        return f"{verdict} than {self.against} ({self.gain:+.1f} points, {self.low:+.1f} to {self.high:+.1f})"


@dataclass(frozen=True)
class Selection(TidyResult):
    """A layer, and a recipe if there are several, with the evidence for them.

    With several recipes, the other attributes describe the chosen one.

    Attributes:
        model: name of the model.
        revision: of the model.
        layer: the chosen layer, ``0`` to ``num_layers``.
        num_layers: number of blocks of the model.
        rule: the rule that chose the layer.
        reason: why this layer.
        choices: the choice of every rule, or why it cannot choose.
        frame: the tidy frame that the rules read; of several recipes, with the column ``recipe``.
        labels: the evidence of labels; ``None`` without labels. With several recipes, it compares with the plain text
            at the last layer, if that is one of them.
        options: options of the encoder that was measured; ``None`` for a frame or a module in memory.
        make_encoder: creates the encoder of a selection; ``None`` for a frame or a module in memory.
        recipe: name of the recipe; ``"plain"`` unless another was selected or belongs to the encoder.
        kind: the kind of the model and what shows it, if ``auto`` needed it.
        label: the model's name as it was given, for titles.
        parts: the selection of each recipe, by its name; empty if the recipe was not chosen among several.
        custom_recipe: the recipe itself, if its name does not identify it.
        center: the texts that the recipe centers on, if it does.
        tokens: mean number of tokens that the model reads for a text, by recipe; empty without texts.
        record: how the default did on other models, if it is known.
    """

    model: str
    revision: str
    layer: int
    num_layers: int
    rule: str
    reason: str
    choices: tuple[Choice, ...]
    frame: pl.DataFrame
    labels: LabelEvidence | None = None
    options: Mapping[str, Any] | None = field(default=None, repr=False)
    make_encoder: Callable[..., Any] | None = field(default=None, repr=False)
    recipe: str = field(default=PLAIN, kw_only=True)
    kind: DetectedKind | None = field(default=None, kw_only=True)
    label: str = field(default="", kw_only=True)
    parts: Mapping[str, Selection] = field(default_factory=dict, kw_only=True)
    custom_recipe: Recipe | None = field(default=None, kw_only=True)
    center: tuple[str, ...] | None = field(default=None, kw_only=True)
    tokens: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    record: str = field(default="", kw_only=True)

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords for ``LayerEncoder(model, **keywords)``: the layer, a chosen recipe, the texts it centers on."""
        chosen = self.parts and self.recipe != PLAIN
        recipe = {"recipe": self.custom_recipe or self.recipe} if chosen else {}
        center = {} if self.center is None else {"center": list(self.center)}
        return {"layer": self.layer, **recipe, **center}

    def encoder(self, **options: Any) -> Any:
        """Return the :class:`~midlayer_encoders.LayerEncoder` of the selected layer and recipe, from the model's files.

        Args:
            options: ``device`` and others of :class:`~midlayer_encoders.EncoderOptions` that do not contradict those
                of the encoder that was measured, which apply, too.
        """
        if self.make_encoder is None:
            raise OptionError(
                f"The selection must be of a model's files to create their encoder, but it is of a frame of results or "
                f"a module in memory, {self.model}. Pass it: LayerEncoder(model, selection), or "
                "LayerEncoder.from_module(module, selection.layer, processor=…)."
            )
        return self.make_encoder(self, **options)

    @property
    def _layers_by_rule(self) -> dict[str, int]:
        return {choice.rule: choice.layer for choice in self.choices if choice.layer is not None}

    @property
    def spread(self) -> tuple[int, int]:
        """The lowest and the highest layer that any rule chooses, except ``last``."""
        layers = [self.layer, *(layer for rule, layer in self._layers_by_rule.items() if rule != "last")]
        return min(layers), max(layers)

    @property
    def agreement(self) -> tuple[int, int]:
        """How many of the other rules choose a layer within a tenth of the depth, and the number of other rules."""
        other_layers = [layer for rule, layer in self._layers_by_rule.items() if rule not in (self.rule, "auto")]
        return sum(abs(layer - self.layer) <= _NEAR * self.num_layers for layer in other_layers), len(other_layers)

    @property
    def confidence(self) -> str:
        """A sentence on how reliable the choice is."""
        if self.parts:
            return self._recipe_confidence
        if self.labels is not None and self.rule in ("auto", "few-labels"):
            is_last = self.layer == self.num_layers
            first, last = self.labels.layers
            return (
                f"On {self.labels.count} labeled texts it is "
                f"{'the last layer itself' if is_last else self.labels.comparison()}; "
                f"other samples of as many texts choose layers {first} to {last}."
            )
        if self.frame.is_empty():
            return "No layer was measured: the choice was best for other models. A few labels would decide."
        low, high = self.spread
        if high - low <= 2 * _NEAR * self.num_layers:
            return f"The rules agree: all that apply choose layers {low} to {high}."
        near, num_other_rules = self.agreement
        return (
            f"The rules disagree, from layer {low} to layer {high}: {near} of {num_other_rules} other rules are within "
            "a tenth of the depth. A few labels would decide."
        )

    @property
    def _recipe_confidence(self) -> str:
        if self.labels is not None:
            return f"On {self.labels.count} labeled texts it is {self.labels.comparison()}."
        if self.frame.filter(kind="score").is_empty():
            record = f" {self.record}" if self.record else ""
            return f"Without labels, this is the default for a model of its kind.{record} A few labels would decide."
        return self.parts[self.recipe].confidence

    @property
    def cost(self) -> str:
        """A sentence on the tokens that the recipe costs; empty without texts."""
        if self.recipe not in self.tokens:
            return ""
        tokens = self.tokens[self.recipe]
        ratio = f", {tokens / self.tokens[PLAIN]:.1f} times as many as the plain text" if PLAIN in self.tokens else ""
        return f"The model reads {tokens:.1f} tokens per text{ratio}."

    @property
    def notes(self) -> list[str]:
        """Sentences on the kind of the model, how reliable the choice is, and what it costs."""
        kind = "" if self.kind is None else str(self.kind)
        return [*filter(None, [kind, self.confidence, self.cost])]

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each rule, or for each recipe: layer, depth, whether it was chosen, and the reason.

        Rows of recipes also have the score and the tokens per text.
        """
        if self.parts:
            return self._recipes_frame()
        schema = {"rule": pl.String(), "layer": pl.Int64(), "reason": pl.String()}
        choices = pl.DataFrame([vars(choice) for choice in self.choices], schema=schema)
        return _with_model(choices, self, chosen=pl.col("rule") == self.rule)

    def _recipes_frame(self) -> pl.DataFrame:
        scores = self.frame.filter(kind="score")
        rows = [
            {
                "recipe": name,
                "layer": part.layer,
                "score": scores.filter(recipe=name, layer=part.layer)["value"].mean(),
                "tokens": self.tokens.get(name),
                "reason": part.reason,
            }
            for name, part in self.parts.items()
        ]
        numbers = {"layer": pl.Int64(), "score": pl.Float64(), "tokens": pl.Float64()}
        recipes = pl.DataFrame(rows, schema={"recipe": pl.String(), **numbers, "reason": pl.String()})
        return _with_model(recipes, self, chosen=pl.col("recipe") == self.recipe)

    def plot(self) -> Figure:
        """Return a figure of the curves that the rules read, with the chosen layer and every other choice marked."""
        if self.parts:
            return self.parts[self.recipe].plot()
        from midlayer_encoders.report.layer_charts import plot_selection

        choices = self._layers_by_rule
        return plot_selection(self.frame, layer=self.layer, rule=self.rule, choices=choices, num_layers=self.num_layers)

    def _repr_html_(self) -> str:
        """Return the choice of each rule or recipe and the figure, as a notebook shows them."""
        from midlayer_encoders.report.pages import notebook_html

        return notebook_html(self.verdict, self.choices_table(), self.plot(), self.notes)

    @property
    def title(self) -> str:
        """The layer and the model, without the reason."""
        return f"Layer {self.layer} of {self.num_layers} of {self.label or self.model.removeprefix('local/')}"

    def choices_table(self) -> list[list[str]]:
        """Return :meth:`to_frame` as texts, headings first, without what all rows share."""
        table = self.to_frame().drop("model", "revision", "depth", "chosen")
        numbers = pl.selectors.float().map_elements("{:.3g}".format, pl.String)
        rows = table.with_columns(numbers).cast(pl.String).fill_null("").rows()
        return [table.columns, *map(list, rows)]

    @property
    def verdict(self) -> str:
        """The layer and the reason, in a sentence."""
        return str(self).partition("\n")[0]

    def __str__(self) -> str:
        choices = [(choice.rule, choice.layer, choice.reason) for choice in self.choices]
        rows = [(name, part.layer, part.reason) for name, part in self.parts.items()] or choices
        chosen, how = (self.recipe, f"recipe {self.recipe}") if self.parts else (self.rule, self.rule)
        title = f"{self.title}, by {how}: {self.reason}."
        return "\n".join([title, *self.notes, *_table_lines(rows, chosen)])


def _with_model(rows: pl.DataFrame, selection: Selection, *, chosen: pl.Expr) -> pl.DataFrame:
    """Return rows with the columns of the model, the depth, and whether a row was chosen."""
    name, layer, *score, reason = rows.columns
    depth = (pl.col("layer") / selection.num_layers).alias("depth")
    model = pl.lit(selection.model).alias("model")
    revision = pl.lit(selection.revision).alias("revision")
    return rows.select(model, revision, name, layer, depth, *score, chosen.alias("chosen"), reason)


def _table_lines(rows: Sequence[tuple[str, int | None, str]], chosen: str) -> list[str]:
    """Return a line for each row of name, layer and reason, the chosen one marked with an asterisk."""
    width = max(len(name) for name, _, _ in rows)
    return [
        f"{'*' if name == chosen else ' '} {name:<{width}}  {'–' if layer is None else layer:>3}  {reason}"
        for name, layer, reason in rows
    ]


def make_selection(
    curves: Curves,
    frame: pl.DataFrame,
    *,
    rule: str = "auto",
    labels: LabelEvidence | None = None,
    unmeasured: str = "",
    auto: tuple[int, str] | None = None,
) -> Selection:
    """Return the selection of one rule, with the choices of all others.

    Args:
        curves: of ``frame``.
        frame: the tidy frame itself.
        rule: that chooses the layer.
        labels: the evidence of labels, if there are any.
        unmeasured: why nothing was measured, for the reasons of the rules that need metrics.
        auto: layer and reason of ``auto``, if it is based on more than the curves.

    Raises:
        CannotChooseError: if the rule lacks its input.
    """
    choices = {name: _choice(curves, name, unmeasured) for name in dict.fromkeys([*RULES, rule])}
    if auto is not None:
        choices["auto"] = Choice("auto", *auto)
    chosen = choices[rule]
    if chosen.layer is None:
        raise CannotChooseError(f"`rule` {rule!r} cannot choose a layer: it {chosen.reason}.")
    return Selection(
        model=curves.model,
        revision=curves.revision,
        layer=chosen.layer,
        num_layers=curves.num_layers,
        rule=rule,
        reason=chosen.reason,
        choices=tuple(choices.values()),
        frame=frame,
        labels=labels,
    )


def _choice(curves: Curves, rule: str, unmeasured: str) -> Choice:
    try:
        layer, reason = choose(curves, rule)
    except CannotChooseError as error:
        lacks_metrics = unmeasured and not set(metrics_of(rule)) <= set(curves.metrics)
        return Choice(rule, None, unmeasured if lacks_metrics else str(error))
    return Choice(rule, layer, reason)
