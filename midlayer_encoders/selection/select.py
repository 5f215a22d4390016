"""Select a layer of an encoder, and a recipe, from texts and labels, or from a frame of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders import validation
from midlayer_encoders._types import Progress, Stage
from midlayer_encoders.errors import OptionError, pluralize
from midlayer_encoders.frame.curves import Curves, check_blocks, curves
from midlayer_encoders.frame.schema import NamedSubject, tidy_frame, tidy_rows
from midlayer_encoders.metrics.label_accuracy import (
    all_alike,
    check_labels,
    class_numbers,
    equal_steps,
    gain_in_points,
    gain_interval,
    label_list,
    resampled_means,
    ridge_correct,
)
from midlayer_encoders.metrics.measuring import measure_layers
from midlayer_encoders.metrics.sample_metrics import LEAST_TOKENS
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.reading.batches import LayerSource, batches_of, count_steps, count_tokens, input_sizes
from midlayer_encoders.reading.media_inputs import medium_of
from midlayer_encoders.reading.pooled_spans import join_spans, split_spans
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.recipes import (
    PLAIN,
    RECIPES,
    SMALLEST_SAMPLE,
    Recipe,
    centering_offset,
    fitting_recipes,
    has_name,
    recipe_of,
    recipes_of,
    split_template,
    try_recipe,
)
from midlayer_encoders.selection import rules
from midlayer_encoders.selection.kind import KIND_NAMES, DetectedKind, ModelKind, detect_kind
from midlayer_encoders.selection.selection_result import LabelEvidence, Selection, make_selection

#: Name of the labels in the frame; the score is cross-validated accuracy.
LABELS = "your labels"

#: Fewer texts than this are not measured.
MIN_TEXTS = 16

_MAX_CENTER_TEXTS = 256  # of which a mean is near that of all; the encoder that is created reads them again
_LABELS_TIMES_REPEATS = 300  # with few labels, the accuracy depends on the folds

#: Recipes in order of preference and their depths, for every kind; see benchmarks/zoo and benchmarks/selection.
DEFAULTS: Mapping[ModelKind, Mapping[str, float]] = {
    "tuned": {PLAIN: 1.0},
    "causal": {"word-echo": 0.95, "one-word": 0.95, "echo": 0.95, PLAIN: rules.DEPTH},
    "bidirectional": {PLAIN: rules.DEPTH},
    "media": {PLAIN: rules.DEPTH},
}

_TEMPLATE_RECIPE = "one-word"  # its depth applies to other prompts


def select(
    source: LayerSource | pl.DataFrame,
    texts: Sequence[str] | None = None,
    labels: Sequence[int | str | None] | None = None,
    *,
    rule: str = "auto",
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    all_rules: bool = False,
    max_texts: int = 500,
    seed: int = 0,
    progress: Progress | None = None,
) -> Selection:
    """Return the layer that a rule chooses, with the choices of all other rules.

    ``auto`` follows the kind of the model, which its files usually tell, and labels, which need a pass over the labeled
    texts for each recipe. Only the metrics of the requested rule are measured.

    Args:
        source: the encoder of a whole model, ``LayerEncoder(model, -1)``, or a tidy frame of one model and recipe:
            metrics, scores or both.
        texts: a few hundred typical texts; without them, only rules without metrics apply.
        labels: the class of each text, ``None`` for unlabeled ones; a handful per class is enough.
        rule: a name in ``RULES``.
        recipes: candidates, as in :func:`~midlayer_encoders.sweep`. With labels, every layer of each recipe is scored,
            in one pass each; without them, recipe and layer are the defaults for the kind of model. By default
            ``word-echo`` and the plain text for a causal model that was not tuned for embeddings, unless the encoder's
            own options say how to read texts; with 16 different texts or more, ``word-echo+center``, centered on them.
            ``"plain"`` chooses a layer only.
        all_rules: measure the metrics of every rule, in three passes.
        max_texts: maximum number of texts to measure, at equal steps through the list.
        seed: for augmented views, folds and resamples.
        progress: called after each batch, in tokens, with the stages ``"measuring"`` and ``"labels"``, and for each
            fold with ``"scoring"``.

    Raises:
        CannotChooseError: if the rule lacks its input.
    """
    requested = rules.metrics_of(rule)  # rejects an unknown rule first
    seed = validation.check_seed(seed)
    max_texts = validation.check_count("max_texts", max_texts)
    validation.check_progress(progress)
    if validation.check_flag("all_rules", all_rules):
        requested = tuple(dict.fromkeys(metric for each in rules.RULES for metric in rules.metrics_of(each)))
    if isinstance(source, pl.DataFrame):
        options = {"all_rules": all_rules, "max_texts": max_texts, "recipes": recipes}
        validation.check_effect(select, "with a frame, of which nothing is measured", **options)
        if texts is not None or labels is not None:
            raise OptionError("`texts` and `labels` must be None with a frame: give the model to measure them on.")
        return make_selection(curves(source), source, rule=rule)
    inputs = SelectionInputs(
        _check_texts(source, texts), *_labeled_texts(texts, labels, max_texts), max_texts, seed, progress
    )
    plain, own = RECIPES[PLAIN], source.own_recipe
    encoders: dict[Recipe, LayerSource] = {}
    if recipes is not None:
        reason = "with `recipes`, of which one is chosen by labels, or by the model's kind"
        validation.check_effect(select, reason, rule=rule, all_rules=all_rules)
        candidates = fitting_recipes(source, recipes_of("recipes", recipes))
        _check_center(candidates, inputs)
        encoders = {each: source if each == plain else source.with_recipe(each.apart()) for each in candidates}
    kind = detect_kind(source) if rule == "auto" else None
    if kind is not None and not encoders and source.reads_plainly:
        best = _best_recipe(kind, inputs)
        if best != plain and (encoder := try_recipe(source, best)) is not None:
            encoders = {best: encoder, plain: source}
    measured = _measure_metrics(source, inputs, requested)
    accuracies = label_accuracies(encoders or {plain: source}, inputs)
    parts = {}
    for recipe, encoder in (encoders or {plain: source}).items():
        layer_recipe = recipe if encoders else own or plain
        default = None if kind is None else _default_layer(source.num_layers, layer_recipe, kind.name)
        metrics, unmeasured = measured if recipe == plain else (tidy_frame(()), "is measured on the plain text alone")
        accuracy = accuracies.get(recipe)
        parts[recipe] = _select_by_curves(encoder, inputs, metrics, unmeasured, accuracy, rule=rule, default=default)
    if kind is None or not encoders:
        return replace(parts[plain], kind=kind, recipe=own.name if own else PLAIN, label=source.name)
    tokens = {recipe.name: _mean_tokens(encoder, inputs.sample) for recipe, encoder in encoders.items()}
    selection = _select_recipe(parts, accuracies, inputs, kind.name)
    return replace(selection, kind=kind, label=source.name, tokens=tokens if inputs.texts else {})


def _check_texts(source: LayerSource, texts: Sequence[Any] | None) -> list[Any]:
    """Return the texts, or raise unless there are some, and an encoder of a whole model with several layers."""
    check_blocks(source.num_layers, source.name)
    source.check_one_stack("select")
    if source.layer != source.num_layers:
        raise OptionError(
            f"`model` must be an encoder of the whole model to choose between its layers, but got one cut at layer "
            f"{source.layer} of {source.num_layers}. Make it with layer=-1."
        )
    check = validation.check_texts if source.media == ["text"] else validation.check_list
    return [] if texts is None else check("texts", texts)


def _labeled_texts(
    texts: Sequence[Any] | None, labels: Sequence[int | str | None] | None, max_texts: int
) -> tuple[list[Any], Tensor | None]:
    """Return the labeled texts, at equal steps if there are more than ``max_texts``, and their classes."""
    if labels is None:
        return [], None
    labels = label_list("labels", labels)
    num_texts = len(texts or ())
    if num_texts != len(labels):
        raise OptionError(
            f"`labels` must be one for each text, None for a text without, but got {pluralize(len(labels), 'label')} "
            f"and {pluralize(num_texts, 'text')}."
        )
    pairs = [(text, str(label)) for text, label in zip(texts or (), labels, strict=True) if label is not None]
    pairs = _sample(pairs, max_texts)
    classes, _ = class_numbers([label for _, label in pairs])
    check_labels(classes)
    return [text for text, _ in pairs], classes


def _sample(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` items, at equal steps."""
    return [items[position] for position in equal_steps(len(items), most)]


def different_texts(texts: Sequence[Any]) -> list[Any]:
    """Return the inputs without repeated texts; images and audio cannot be compared and all stay.

    Example:
        >>> different_texts(["a", "b", "a"])
        ['a', 'b']
    """
    return list(dict.fromkeys(texts)) if all(isinstance(text, str) for text in texts) else list(texts)


@dataclass(frozen=True)
class SelectionInputs:
    """Validated inputs of a selection.

    Attributes:
        texts: all texts; may be empty.
        labeled: texts with a label, at most ``max_texts``.
        classes: of the labeled texts, shape ``(N,)``; ``None`` without labels.
        max_texts: maximum number of texts to measure.
        seed: for views, folds and resamples.
        progress: called after each batch.
    """

    texts: list[Any]
    labeled: list[Any]
    classes: Tensor | None
    max_texts: int
    seed: int
    progress: Progress | None

    @property
    def sample(self) -> list[Any]:
        """The texts to measure."""
        return _sample(self.texts, self.max_texts)

    @property
    def center(self) -> list[Any]:
        """The different texts that recipes center on."""
        return _sample(_sample(different_texts(self.texts), self.max_texts), _MAX_CENTER_TEXTS)


# --- defaults ---------------------------------------------------------------------------------------------------------


def _default_layer(num_layers: int, recipe: Recipe, kind: ModelKind) -> tuple[int, str]:
    """Return layer and reason of ``auto`` without labels."""
    if kind == "tuned":
        return num_layers, "the last layer of an embedding model"
    depth = default_depth(recipe, kind)
    return resolve_layer(depth, num_layers), f"{depth} of {num_layers} blocks, the default depth"


def _best_recipe(kind: DetectedKind, inputs: SelectionInputs) -> Recipe:
    """Return the recipe for a kind of model, which is centered on the texts if there are enough different ones."""
    name = next(iter(DEFAULTS[kind.name]))
    is_text = all(isinstance(text, str) for text in inputs.texts)
    is_centered = name != PLAIN and is_text and len(different_texts(inputs.texts)) >= SMALLEST_SAMPLE
    return recipe_of("recipes", f"{name}+center") if is_centered else RECIPES[name]


def default_recipe(recipes: Sequence[Recipe], kind: ModelKind) -> Recipe:
    """Return the preferred recipe for a kind of model, or the first if none is in the table.

    Recipes that differ only in what they do to vectors are equal, and the first of them is returned.

    Example:
        >>> from midlayer_encoders.recipes import recipes_of
        >>> default_recipe(recipes_of("recipes", ["plain", "one-word+center"]), "causal").name
        'one-word+center'
        >>> default_recipe(recipes_of("recipes", "all"), "tuned").name
        'plain'
    """
    ranks = {name: rank for rank, name in enumerate(DEFAULTS[kind])}
    return min(recipes, key=lambda recipe: ranks.get(recipe.before_vectors().name, len(ranks)))


def default_depth(recipe: Recipe, kind: ModelKind) -> float:
    """Return the default depth of a recipe; any template that repeats the text or reads its last token has a prompt's.

    Example:
        >>> from midlayer_encoders.recipes import RECIPES
        >>> default_depth(RECIPES["plain"], "causal"), default_depth(RECIPES["one-word"], "tuned")
        (0.8, 1.0)
    """
    depths = DEFAULTS[kind]
    name = recipe.before_vectors().name
    is_prompt = recipe.pooling == "last" or split_template(recipe.template)["text"].between is not None
    if name not in depths and recipe.template is not None and is_prompt:
        name = _TEMPLATE_RECIPE
    return depths.get(name, depths[PLAIN])


def _check_center(recipes: Sequence[Recipe], inputs: SelectionInputs) -> None:
    """Raise an :class:`OptionError` if a recipe centers on too few texts."""
    count = len(different_texts(inputs.texts))
    if count < SMALLEST_SAMPLE and (centered := [recipe.name for recipe in recipes if recipe.center]):
        raise OptionError(
            f"`texts` must hold {SMALLEST_SAMPLE} different texts or more, a few hundred better, for {centered[0]!r}, "
            f"which centers on them, but got {count}. Give more, or leave that recipe out."
        )


# --- between recipes --------------------------------------------------------------------------------------------------


def _select_recipe(
    parts: Mapping[Recipe, Selection], accuracies: Mapping[Recipe, Tensor], inputs: SelectionInputs, kind: ModelKind
) -> Selection:
    """Return the selection of the default recipe for a kind of model, or of a recipe that the labels clearly prefer."""
    chosen = default_recipe(list(parts), kind)
    reason = f"the default for {KIND_NAMES[kind]}"
    labels = None
    if accuracies:
        accuracy = {recipe: accuracies[recipe][part.layer] for recipe, part in parts.items()}
        best = max(parts, key=lambda recipe: (float(accuracy[recipe].mean()), recipe == chosen))
        if best == chosen:
            reason += ", with the highest accuracy on the labels too"
        elif gain_interval(accuracy[best], accuracy[chosen], seed=inputs.seed)[0] > 0:
            points = 100 * float(accuracy[best].mean())
            reason = f"its accuracy on the labels, {points:.1f}, is significantly more than with {chosen.name}"
            chosen = best
        else:
            count = len(inputs.labeled)
            reason += f"; {best.name} is more accurate on the labels, but {count} labels are not enough"
        labels, plain = parts[chosen].labels, RECIPES[PLAIN]
        if labels is not None and plain in accuracies and chosen != plain:
            gain = gain_in_points(accuracy[chosen], accuracies[plain][-1], seed=inputs.seed)
            labels = replace(labels, **gain, against="the plain text at the last layer")
    return replace(
        parts[chosen],
        reason=f"{reason}; {parts[chosen].reason}",
        frame=pl.concat(part.frame.with_columns(recipe=pl.lit(recipe.name)) for recipe, part in parts.items()),
        labels=labels,
        recipe=chosen.name,
        parts={recipe.name: part for recipe, part in parts.items()},
        custom_recipe=None if has_name(chosen) else chosen,
        center=tuple(inputs.center) if chosen.center else None,
    )


def _mean_tokens(source: LayerSource, texts: Sequence[str]) -> float:
    """Return the mean number of tokens that the model reads for a text."""
    counts = count_tokens(source, [f"{source.default_prompt}{text}" for text in texts])
    return sum(counts) / max(len(counts), 1)


# --- measurements -----------------------------------------------------------------------------------------------------


def _measure_metrics(source: LayerSource, inputs: SelectionInputs, names: Sequence[str]) -> tuple[pl.DataFrame, str]:
    """Return metrics of every layer on the texts, and why they could not be measured, if so."""
    unmeasured = ""
    distinct = len(different_texts(inputs.texts))
    if names and distinct < MIN_TEXTS:
        names, unmeasured = [], f"needs {MIN_TEXTS} different texts or more, but got {distinct or 'none'}"
    texts = inputs.sample
    if names and medium_of(texts[0], source.media) == "text":
        num_long_texts = sum(count >= LEAST_TOKENS for count in count_tokens(source, texts))
        if num_long_texts < MIN_TEXTS:
            names = [name for name in names if name not in ("half_match", "prompt_entropy")]
            unmeasured = f"needs {MIN_TEXTS} texts of {LEAST_TOKENS} tokens or more, but got {num_long_texts}"
    if not names:
        return tidy_frame(()), unmeasured
    return measure_layers(source, texts, metrics=names, seed=inputs.seed, progress=inputs.progress), ""


def label_accuracies(encoders: Mapping[Recipe, LayerSource], inputs: SelectionInputs) -> dict[Recipe, Tensor]:
    """Return how often each layer predicts the label of each text, over several folds, shape ``(L, N)``, by recipe.

    Recipes may center on other texts, too. Empty without labels. NaN if all vectors of a layer are equal but other
    layers' are not, as for a constant last token.
    """
    if inputs.classes is None:
        return {}
    labeled = {id(text): row for row, text in enumerate(inputs.labeled)}
    others = [text for text in inputs.center if id(text) not in labeled]
    rows = labeled | {id(text): len(inputs.labeled) + row for row, text in enumerate(others)}
    center = [rows[id(text)] for text in inputs.center]
    texts = {recipe: [*inputs.labeled, *others] if recipe.center else inputs.labeled for recipe in encoders}
    sizes = {
        recipe: input_sizes(encoder, texts[recipe], prompt=encoder.default_prompt)
        for recipe, encoder in encoders.items()
    }
    repeats = max(1, min(3, _LABELS_TIMES_REPEATS // len(inputs.labeled)))
    reading = Stage(inputs.progress, "labels", sum(map(sum, sizes.values())))
    scoring = Stage(inputs.progress, "scoring", repeats * len(encoders))
    accuracies = {}
    for recipe, encoder in encoders.items():
        prompt = encoder.default_prompt
        reader = replace(layer_reader(encoder, prompt=prompt), truncate_dim=None)
        batches = batches_of(encoder, texts[recipe], prompt=prompt)
        read = reader.vectors(texts[recipe], batches, done=count_steps(sizes[recipe], batches, reading))
        scoring.step(0)
        by_layer = torch.stack([_transform_vectors(vectors, recipe, center) for vectors in read])
        if recipe.normalize or (recipe.join is not None and "Normalize" in encoder.after_pooling):
            by_layer = torch.nn.functional.normalize(by_layer, dim=-1)
        by_layer = by_layer[:, : len(inputs.labeled), : encoder.truncate_dim]
        draws = []
        for seed in range(inputs.seed, inputs.seed + repeats):
            draws.append(ridge_correct(by_layer, inputs.classes, seed=seed))
            scoring.step()
        is_constant = all_alike(by_layer, list(map(str, inputs.labeled)))
        has_no_score = (is_constant & ~is_constant.all())[:, None]
        accuracies[recipe] = torch.where(has_no_score, torch.nan, torch.stack(draws).double().mean(dim=0))
    return accuracies


def _transform_vectors(vectors: Tensor, recipe: Recipe, sample: Sequence[int]) -> Tensor:
    """Return the vectors of a layer, shape ``(N, D)``, joined by a recipe, and centered on the rows of a sample."""
    if recipe.join is None:
        return vectors + centering_offset(vectors[sample]) if recipe.center else vectors
    spans, share = split_spans(vectors)
    return join_spans(spans, share, recipe.join, centering_offset(spans[sample]) if recipe.center else None)


def _select_by_curves(
    source: LayerSource,
    inputs: SelectionInputs,
    metrics: pl.DataFrame,
    unmeasured: str,
    accuracy: Tensor | None,
    *,
    rule: str,
    default: tuple[int, str] | None,
) -> Selection:
    """Return the selection from metrics and from the accuracy on labels.

    Args:
        source: the encoder.
        inputs: texts and labels.
        metrics: tidy frame, may be empty.
        unmeasured: why no metric was measured.
        accuracy: of :func:`label_accuracies`; ``None`` without labels.
        rule: that chooses the layer.
        default: layer and reason of ``auto`` without labels; by default the rule's.
    """
    subject = NamedSubject(source.results_name, source.revision, source.num_layers)  # the spec would read all weights
    frame = metrics
    if accuracy is not None:
        scores = dict(enumerate(accuracy.mean(dim=1).tolist()))
        rows = tidy_rows(scores, subject, kind="score", dataset=LABELS, name="accuracy")
        frame = pl.concat([metrics, tidy_frame(rows)])
    no_curves = Curves(subject.model, subject.revision or "default", subject.num_layers, {}, {}, {})
    model_curves = no_curves if frame.is_empty() else curves(frame)
    if accuracy is None:
        return make_selection(model_curves, frame, rule=rule, unmeasured=unmeasured, auto=default)
    layer, reason = default or rules.choose(replace(model_curves, tasks={}, score={}), "auto")
    auto = layer, f"{reason}; all layers have the same accuracy on the labels"
    if len(set(model_curves.score.values())) > 1:
        labels_layer, labels_reason = rules.choose(model_curves, "few-labels")
        count = len(inputs.labeled)
        auto = layer, f"{reason}; few-labels would choose layer {labels_layer}, but {count} labels are not enough"
        if labels_layer == layer:
            auto = layer, f"few-labels: {labels_reason}, and {reason}"
        elif gain_interval(accuracy[labels_layer], accuracy[layer], seed=inputs.seed)[0] > 0:
            significance = f"significantly more than at layer {layer}, the choice without labels"
            auto = labels_layer, f"few-labels: {labels_reason}, {significance}"
    means = [accuracy.mean(dim=1), *resampled_means(accuracy, seed=inputs.seed)]
    by_layer = [{k: value for k, value in enumerate(values.tolist()) if value == value} for values in means]
    best, *resampled_best = map(rules.best_layer, by_layer)
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
    first, last = torch.quantile(torch.tensor(resampled_best).double(), bounds, interpolation="nearest").tolist()
    gain = gain_in_points(accuracy[auto[0] if rule == "auto" else best], accuracy[-1], seed=inputs.seed)
    evidence = LabelEvidence(accuracy.shape[1], (int(first), int(last)), **gain)
    return make_selection(model_curves, frame, rule=rule, labels=evidence, unmeasured=unmeasured, auto=auto)
