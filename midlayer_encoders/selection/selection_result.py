"""The result of a selection: the layer, the reason, the choices of the other rules, and the confidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

#: What is known about the default for causal models.
RECORD = (
    "`docs/selection.md` lists what it gains: much on short texts and passages, nothing on long documents. "
    "Do not use it for authorship or style without labels."
)

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
        if self.labels is not None and (self.parts or self.rule in ("auto", "few-labels")):
            is_last = not self.parts and self.layer == self.num_layers
            comparison = "the last layer itself" if is_last else self.labels.comparison()
            first, last = self.labels.layers
            others = "" if self.parts else f"; other samples of as many texts choose layers {first} to {last}"
            return f"On {self.labels.count} labeled texts it is {comparison}{others}."
        if self.parts:
            is_causal = self.kind is not None and self.kind.name == "causal"
            is_known = is_causal and self.recipe.partition("+")[0] == "word-echo"
            record = f" {RECORD}" if is_known else ""
            return f"Without labels, this is the default for a model of its kind.{record} A few labels would decide."
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
    def cost(self) -> str:
        """A sentence on the tokens that the recipe costs; empty without texts."""
        if self.recipe not in self.tokens:
            return ""
        tokens, plain = self.tokens[self.recipe], self.tokens.get(PLAIN)
        ratio = f", {tokens / plain:.1f} times as many as the plain text" if plain else ""
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
        schema: dict[str, Any] = {"layer": pl.Int64}
        rows: list[tuple[Any, ...]]
        if self.parts:
            key, chosen = "recipe", self.recipe
            scores = self.frame.filter(kind="score")
            schema |= {"score": pl.Float64, "tokens": pl.Float64}
            means = {
                name: scores.filter(recipe=name, layer=part.layer)["value"].mean() for name, part in self.parts.items()
            }
            rows = [
                (name, part.layer, means[name], self.tokens.get(name), part.reason) for name, part in self.parts.items()
            ]
        else:
            key, chosen = "rule", self.rule
            rows = [(choice.rule, choice.layer, choice.reason) for choice in self.choices]
        table = pl.DataFrame(rows, schema={key: pl.String, **schema, "reason": pl.String}, orient="row")
        depth, is_chosen = pl.col("layer") / self.num_layers, pl.col(key) == chosen
        columns = ["model", "revision", key, "layer", "depth", *list(schema)[1:], "chosen", "reason"]
        model = {"model": pl.lit(self.model), "revision": pl.lit(self.revision)}
        return table.with_columns(**model, depth=depth, chosen=is_chosen).select(columns)

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
        key = "recipe" if self.parts else "rule"
        how = f"recipe {self.recipe}" if self.parts else self.rule
        rows = self.to_frame().select("chosen", key, pl.col("layer").cast(pl.String).fill_null("–"), "reason").rows()
        width = max(len(name) for _, name, _, _ in rows)
        lines = [f"{'*' if chosen else ' '} {name:<{width}}  {layer:>3}  {why}" for chosen, name, layer, why in rows]
        return "\n".join([f"{self.title}, by {how}: {self.reason}.", *self.notes, *lines])


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
