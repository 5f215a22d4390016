"""What a selection says: the layer, why, what every other rule would have chosen, and how sure that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

from midlayer_encoders.frame import Curves
from midlayer_encoders.recipes import PLAIN, Recipe, has_name
from midlayer_encoders.selection.mixture import Mixture
from midlayer_encoders.selection.rules import RULES, CannotChooseError, Choice, choose, metrics_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LabelEvidence", "RecipeSelection", "Selection", "answer", "with_recipes"]

_NEAR = 0.1  # of the depth: layers within it are about as good (benchmarks/selection/README.md)


@dataclass(frozen=True)
class LabelEvidence:
    """How far a handful of labels carries, from resampled texts.

    Attributes:
        count: number of labeled texts.
        layers: lowest and highest layer of the 95 % of resamples in the middle.
        gain: points of accuracy of the chosen layer over the last, or over what ``against`` names.
        low: lower end of its 95 % interval; the layer was chosen on these texts, which flatters it.
        high: upper end.
        against: what the gain is over, in words.
    """

    count: int
    layers: tuple[int, int]
    gain: float
    low: float
    high: float
    against: str = "the last layer"


@dataclass(frozen=True)
class Selection:
    """A layer, and what speaks for it.

    Attributes:
        model: the model's name.
        revision: of the model.
        layer: the chosen layer, ``0`` to ``num_layers``.
        num_layers: number of blocks of the model.
        rule: the rule that was asked for.
        reason: why this layer, in words.
        choices: what every rule says, or why it cannot.
        frame: the tidy frame that the rules read.
        labels: what labels tell about the choice; ``None`` without labels.
        mixture: several layers and weights learned from labels; ``None`` unless it was asked for.
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
    mixture: Mixture | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """What ``LayerEncoder(model, **keywords)`` takes: the layer, or a mixture that is surely better than any."""
        if self.mixture is not None and self.mixture.better:
            return {"layer": list(self.mixture.layers), "layer_weights": list(self.mixture.weights)}
        return {"layer": self.layer}

    @property
    def spread(self) -> tuple[int, int]:
        """The lowest and the highest layer that any rule chooses; ``last``, which always chooses the last, aside."""
        layers = [choice.layer for choice in self.choices if choice.layer is not None and choice.rule != "last"]
        return min([*layers, self.layer]), max([*layers, self.layer])

    @property
    def agreement(self) -> tuple[int, int]:
        """How many of the other rules that answer choose a layer within a tenth of the depth, and of how many."""
        others = [
            choice.layer
            for choice in self.choices
            if choice.layer is not None and choice.rule not in (self.rule, "auto")
        ]
        near = [layer for layer in others if abs(layer - self.layer) <= _NEAR * self.num_layers]
        return len(near), len(others)

    @property
    def confidence(self) -> str:
        """How sure the choice is, in a sentence."""
        near, others = self.agreement
        low, high = self.spread
        if self.labels is not None and self.rule in ("auto", "few-labels"):
            seen = self.labels
            return (
                f"On {seen.count} labeled texts it {_against_last(self, seen)}; "
                f"other draws of as many texts choose layers {seen.layers[0]} to {seen.layers[1]}."
            )
        if self.frame.is_empty():
            return (
                "No text was looked at, or too few: this was best for other models, and nothing was seen of this one."
            )
        if high - low <= 2 * _NEAR * self.num_layers:
            return f"The rules agree: all that answer choose layers {low} to {high}."
        return (
            f"The rules disagree, from layer {low} to layer {high}: {near} of {others} others lie within a tenth of "
            "the depth. A few labels would settle it."
        )

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each rule: its layer, the depth, whether it was the rule asked for, and its reason."""
        rows = [
            {
                "model": self.model,
                "revision": self.revision,
                "rule": choice.rule,
                "layer": choice.layer,
                "depth": None if choice.layer is None else choice.layer / self.num_layers,
                "chosen": choice.rule == self.rule,
                "reason": choice.reason,
            }
            for choice in self.choices
        ]
        strings = dict.fromkeys(("model", "revision", "rule", "reason"), pl.String())
        return pl.DataFrame(rows, schema_overrides={**strings, "layer": pl.Int64(), "depth": pl.Float64()})

    def plot(self) -> Figure:
        """Return a figure of what the rules read, by layer, with the chosen layer and every other choice marked."""
        from midlayer_encoders.report.layer_charts import plot_selection

        marks = {choice.rule: choice.layer for choice in self.choices if choice.layer is not None}
        return plot_selection(self.frame, layer=self.layer, rule=self.rule, choices=marks, num_layers=self.num_layers)

    def __str__(self) -> str:
        lines = [
            f"Layer {self.layer} of {self.num_layers} of {self.model}, by {self.rule}: {self.reason}.",
            self.confidence,
        ]
        width = max(len(choice.rule) for choice in self.choices)
        for choice in self.choices:
            layer = "–" if choice.layer is None else str(choice.layer)
            mark = "*" if choice.rule == self.rule else " "
            lines.append(f"{mark} {choice.rule:<{width}}  {layer:>3}  {choice.reason}")
        lines += [self.mixture.verdict()] if self.mixture is not None else []
        return "\n".join(lines)


@dataclass(frozen=True)
class RecipeSelection(Selection):
    """A recipe and a layer, and what speaks for them; what it says of one recipe is about the chosen one.

    Attributes:
        frame: as of a :class:`Selection`, with the column ``recipe``.
        labels: against the plain text at the last layer, where that was among the recipes.
        recipe: name of the chosen one.
        parts: the selection of each recipe, by its name.
        asked: the recipe itself, where a name alone does not make it.
        center: the texts that it centers on; ``None`` where it does not.
    """

    recipe: str = field(kw_only=True)
    parts: Mapping[str, Selection] = field(kw_only=True)
    asked: Recipe | None = None
    center: tuple[str, ...] | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """What ``LayerEncoder(model, **keywords)`` takes: the layer, the recipe, and the texts that it centers on."""
        recipe = {} if self.recipe == PLAIN else {"recipe": self.asked or self.recipe}
        center = {} if self.center is None else {"center": list(self.center)}
        return {"layer": self.layer, **recipe, **center}

    @property
    def confidence(self) -> str:
        """How sure the choice is, in a sentence."""
        if self.labels is None and self.frame.filter(kind="score").is_empty():
            return "No label was looked at: this was best for another model of its kind. A few labels would settle it."
        if self.labels is None:
            return self.parts[self.recipe].confidence
        seen, sure = self.labels, "surely better" if self.labels.low > 0 else "not surely better"
        return (
            f"On {seen.count} labeled texts it is {sure} than {seen.against} "
            f"({seen.gain:+.1f} points, {seen.low:+.1f} to {seen.high:+.1f})."
        )

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each recipe: its layer, the depth, the score, whether it was chosen, and why."""
        scores = self.frame.filter(kind="score")
        rows = [
            {
                "model": self.model,
                "revision": self.revision,
                "recipe": name,
                "layer": part.layer,
                "depth": part.layer / self.num_layers,
                "score": scores.filter(recipe=name, layer=part.layer)["value"].mean(),
                "chosen": name == self.recipe,
                "reason": part.reason,
            }
            for name, part in self.parts.items()
        ]
        return pl.DataFrame(rows, schema_overrides={"score": pl.Float64()})

    def plot(self) -> Figure:
        """Return the figure of the chosen recipe."""
        return self.parts[self.recipe].plot()

    def __str__(self) -> str:
        lines = [
            f"The recipe {self.recipe} at layer {self.layer} of {self.num_layers} of {self.model}: {self.reason}.",
            self.confidence,
        ]
        width = max(map(len, self.parts))
        for name, part in self.parts.items():
            mark = "*" if name == self.recipe else " "
            lines.append(f"{mark} {name:<{width}}  {part.layer:>3}  {part.reason}")
        return "\n".join(lines)


def with_recipes(
    parts: Mapping[str, Selection],
    recipe: str,
    reason: str,
    *,
    labels: LabelEvidence | None = None,
    asked: Recipe | None = None,
    center: tuple[str, ...] | None = None,
) -> RecipeSelection:
    """Return the selection of one recipe beside what was chosen for all others.

    Args:
        parts: the selection of each recipe, by its name.
        recipe: name of the chosen one.
        reason: why.
        labels: what labels tell, where there are any.
        asked: the recipe itself, where it is known.
        center: texts that it centers on, where it does.
    """
    chosen = parts[recipe]
    frames = [part.frame.with_columns(pl.lit(name).alias("recipe")) for name, part in parts.items()]
    kept = {name: getattr(chosen, name) for name in ("model", "revision", "layer", "num_layers", "rule", "choices")}
    made = None if asked is None or has_name(asked) else asked
    return RecipeSelection(
        **kept, reason=reason, frame=pl.concat(frames), labels=labels, recipe=recipe, parts=parts, asked=made,
        center=center,
    )  # fmt: skip


def answer(
    found: Curves,
    frame: pl.DataFrame,
    *,
    rule: str = "auto",
    labels: LabelEvidence | None = None,
    lacking: str = "",
    auto: tuple[int, str] | None = None,
    mixture: Mixture | None = None,
) -> Selection:
    """Return the selection of one rule beside what all others say.

    Args:
        found: the curves of ``frame``.
        frame: the tidy frame itself.
        rule: whose layer is taken.
        labels: what labels tell, where there are any.
        lacking: why nothing was measured, where nothing was; said by the rules that need it.
        auto: what ``auto`` chose and why, where it weighed more than the curves show.
        mixture: what was learned from labels, where it was asked for.

    Raises:
        CannotChooseError: when the rule asked for has not what it needs.
    """
    choices = [
        Choice("auto", *auto) if auto is not None and name == "auto" else _said(found, name, lacking)
        for name in dict.fromkeys([*RULES, rule])
    ]
    chosen = next(choice for choice in choices if choice.rule == rule)
    if chosen.layer is None:
        raise CannotChooseError(f"`rule` {rule!r} cannot choose a layer of {found.model}: it {chosen.reason}.")
    return Selection(
        model=found.model,
        revision=found.revision,
        layer=chosen.layer,
        num_layers=found.num_layers,
        rule=rule,
        reason=chosen.reason,
        choices=tuple(choices),
        frame=frame,
        labels=labels,
        mixture=mixture,
    )


def _against_last(made: Selection, seen: LabelEvidence) -> str:
    if made.layer == made.num_layers:
        return "is the last layer itself"
    sure = "is surely better" if seen.low > 0 else "is not surely better"
    return f"{sure} than the last layer ({seen.gain:+.1f} points, {seen.low:+.1f} to {seen.high:+.1f})"


def _said(found: Curves, rule: str, lacking: str) -> Choice:
    try:
        layer, reason = choose(found, rule)
    except CannotChooseError as error:
        unmeasured = lacking and not set(metrics_of(rule)) <= set(found.metrics)
        return Choice(rule, None, lacking if unmeasured else str(error))
    if lacking:
        reason = reason.replace("half match was not measured", f"half match {lacking}")
    return Choice(rule, layer, reason)
