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
from midlayer_encoders.errors import OptionError, counted
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
from midlayer_encoders.selection.kind import KIND_NAMES, MIN_TEXTS, DetectedKind, ModelKind, detect_kind
from midlayer_encoders.selection.selection_result import LabelEvidence, Selection, make_selection

#: Name of the labels in the frame; the score is cross-validated accuracy.
LABELS = "your labels"

_MAX_CENTER_TEXTS = 256  # of which a mean is near that of all; the encoder that is created reads them again
_LABELS_TIMES_REPEATS = 300  # with few labels, the accuracy depends on the folds

#: Recipes in order of preference and their depths, for every kind; see benchmarks/zoo and benchmarks/selection.
DEFAULTS: Mapping[ModelKind, Mapping[str, float]] = {
    "tuned": {PLAIN: 1.0},
    "causal": {"word-echo": 0.95, "one-word": 0.95, "echo": 0.95, PLAIN: rules.DEPTH},
    "bidirectional": {PLAIN: rules.DEPTH},
    "media": {PLAIN: rules.DEPTH},
}

#: What is known about the default for causal models.
RECORD = (
    "`docs/selection.md` lists what it gains: much on short texts and passages, nothing on long documents. "
    "Do not use it for authorship or style without labels."
)

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
    token_budget: int = 4096,
    progress: Progress | None = None,
) -> Selection:
    """Return the layer that a rule chooses, with the choices of all other rules.

    ``auto`` follows the kind of the model, which its files usually tell, and labels, which need a pass over the labeled
    texts for each recipe. Only the metrics of the requested rule are measured.

    Args:
        source: the encoder of a whole model, ``LayerEncoder(model, -1)``, or a tidy frame of one model: metrics, scores
            or both.
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
        token_budget: tokens in a batch.
        progress: called after each batch, in tokens, with the stages ``"kind"``, ``"measuring"``
            and ``"labels"``, and for each fold with ``"scoring"``.

    Raises:
        CannotChooseError: if the rule lacks its input.
    """
    requested = rules.metrics_of(rule)  # rejects an unknown rule first
    seed = validation.check_seed(seed)
    max_texts = validation.check_count("max_texts", max_texts)
    token_budget = validation.check_count("token_budget", token_budget)
    all_rules = validation.check_flag("all_rules", all_rules)
    validation.check_progress(progress)
    if isinstance(source, pl.DataFrame):
        options = {"all_rules": all_rules, "max_texts": max_texts, "token_budget": token_budget, "recipes": recipes}
        validation.check_effect(select, "with a frame, of which nothing is measured", **options)
        if texts is not None or labels is not None:
            raise OptionError("`texts` and `labels` must be None with a frame: give the model to measure them on.")
        return select_in_frame(source, rule)
    _check_whole(source)
    plain = RECIPES[PLAIN]
    if texts is not None:
        check = validation.check_texts if source.media == ["text"] else validation.check_list
        texts = check("texts", texts, minimum=0)
        if not texts:
            raise OptionError(
                "`texts` must hold at least one text, but got none. Pass a few hundred of your own, or leave it out to "
                "get the default for the model's kind."
            )
    labeled, classes = _labeled_texts(texts, labels, max_texts)
    inputs = SelectionInputs(texts, labeled, classes, max_texts, seed, token_budget, progress)
    encoders: dict[Recipe, Any] = {}
    if recipes is not None:
        reason = "with `recipes`, of which one is chosen by labels, or by the model's kind"
        validation.check_effect(select, reason, rule=rule, all_rules=all_rules)
        candidates = fitting_recipes(source, recipes_of("recipes", recipes))
        _check_center(candidates, inputs)
        encoders = {each: source if each == plain else source.with_recipe(each.apart()) for each in candidates}
    measured = metrics, unmeasured = measure_metrics(source, inputs, requested, all_rules=all_rules)
    kind = default = None
    if rule == "auto":
        settings: dict[str, Any] = {"seed": seed, "token_budget": token_budget, "progress": progress}
        kind = detect_kind(source, inputs.sample, **settings)
        if not encoders and source.reads_plainly:
            best = _best_recipe(kind, inputs)
            if best != plain and (encoder := try_recipe(source, best)) is not None:
                encoders = {best: encoder, plain: source}
        if encoders:
            return replace(select_recipe(source, inputs, encoders, measured, kind), label=source.name)
        default = _default_layer(source, kind)
    accuracy = None
    if classes is not None:
        (accuracy,) = label_accuracies([source], [plain], inputs)
    selection = select_from_scores(source, inputs, metrics, accuracy, rule=rule, unmeasured=unmeasured, default=default)
    own = source.own_recipe
    recipe = PLAIN if own is None else own.name
    return replace(selection, kind=kind, recipe=recipe, label=source.name)


def _check_whole(source: LayerSource) -> None:
    """Raise an :class:`OptionError` unless an encoder is of a whole model with several layers."""
    check_blocks(source.num_layers, source.name)
    source.check_one_stack("select")
    if source.layer != source.num_layers:
        raise OptionError(
            f"`model` must be an encoder of the whole model to choose between its layers, but got one cut at layer "
            f"{source.layer} of {source.num_layers}. Make it with layer=-1."
        )


def _labeled_texts(
    texts: Sequence[str] | None, labels: Sequence[int | str | None] | None, max_texts: int
) -> tuple[list[str], Tensor | None]:
    """Return the labeled texts, at equal steps if there are more than ``max_texts``, and their classes."""
    if labels is None:
        return [], None
    labels = label_list("labels", labels)
    num_texts = len(texts or ())
    if texts is None or num_texts != len(labels):
        raise OptionError(
            f"`labels` must be one for each text, None for those without, but got {counted(len(labels), 'label')} and "
            f"{counted(num_texts, 'text')}."
        )
    pairs = [(text, str(label)) for text, label in zip(texts, labels, strict=True) if label is not None]
    pairs = [pairs[position] for position in equal_steps(len(pairs), max_texts)]
    classes, _ = class_numbers([label for _, label in pairs])
    check_labels(classes)
    return [text for text, _ in pairs], classes


def _default_layer(source: LayerSource, kind: DetectedKind) -> tuple[int, str]:
    """Return layer and reason of ``auto`` without labels."""
    if kind.name == "tuned":
        return source.num_layers, "the last layer of an embedding model"
    depth = default_depth(source.own_recipe or RECIPES[PLAIN], kind.name)
    return resolve_layer(depth, source.num_layers), f"{depth} of {source.num_layers} blocks, the default depth"


def _best_recipe(kind: DetectedKind, inputs: SelectionInputs) -> Recipe:
    """Return the recipe for a kind of model, which is centered on the texts if there are enough different ones."""
    name = next(iter(DEFAULTS[kind.name]))
    texts = inputs.texts or []
    is_text = all(isinstance(text, str) for text in texts)
    is_centered = name != PLAIN and is_text and len(different_texts(texts)) >= SMALLEST_SAMPLE
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


def select_in_frame(frame: pl.DataFrame, rule: str) -> Selection:
    """Return the selection from a tidy frame; with several recipes, of the one with the best score."""
    names = frame["recipe"].unique(maintain_order=True).to_list() if "recipe" in frame.columns else []
    if len(names) < 2:
        return make_selection(curves(frame), frame, rule=rule)
    parts = {}
    scores = {}
    for name in names:
        rows = frame.filter(recipe=name)
        recipe_curves = curves(rows)
        parts[name] = make_selection(recipe_curves, rows.drop("recipe"), rule=rule)
        if parts[name].layer not in recipe_curves.score:
            raise rules.CannotChooseError(
                f"`frame` must hold scores of every recipe to choose between them, but {name!r} has none at layer "
                f"{parts[name].layer}. Filter it first, or sweep with `tasks`."
            )
        scores[name] = recipe_curves.score[parts[name].layer]
    best = max(scores, key=scores.__getitem__)
    reason = f"the highest score of {len(names)} recipes, {100 * scores[best]:.1f}; {parts[best].reason}"
    return _combine_recipes(parts, best, reason)


def _check_center(recipes: Sequence[Recipe], inputs: SelectionInputs) -> None:
    """Raise an :class:`OptionError` if a recipe centers on too few texts."""
    count = len(different_texts(inputs.texts or []))
    if count < SMALLEST_SAMPLE and (centered := [recipe.name for recipe in recipes if recipe.center]):
        raise OptionError(
            f"`texts` must hold {SMALLEST_SAMPLE} different texts or more, a few hundred better, for {centered[0]!r}, "
            f"which centers on them, but got {count}. Give more, or leave that recipe out."
        )


def select_recipe(
    source: LayerSource,
    inputs: SelectionInputs,
    encoders: Mapping[Recipe, LayerSource],
    measured: tuple[pl.DataFrame, str],
    kind: DetectedKind,
) -> Selection:
    """Return the chosen recipe and layer, with the selection of every other recipe.

    Args:
        source: the encoder of a whole model, without a template.
        inputs: texts and labels.
        encoders: the encoder under each candidate, its spans side by side.
        measured: of :func:`measure_metrics` on the plain texts.
        kind: of the model.
    """
    plain = RECIPES[PLAIN]
    plain_metrics, unmeasured = measured
    recipes = list(encoders)
    parts: dict[str, Selection] = {}
    accuracies: dict[str, Tensor] = {}
    if inputs.classes is not None:
        normalized = "Normalize" in source.after_pooling
        scored = [replace(each, normalize=each.normalize or (normalized and each.join is not None)) for each in recipes]
        all_accuracies = label_accuracies(list(encoders.values()), scored, inputs)
        accuracies = {recipe.name: accuracy for recipe, accuracy in zip(recipes, all_accuracies, strict=True)}
    for recipe in recipes:
        name = recipe.name
        metrics, reason = plain_metrics, unmeasured
        if recipe != plain:
            metrics, reason = tidy_frame(()), "is measured on the plain text alone"
        depth = default_depth(recipe, kind.name)
        layer = resolve_layer(depth, source.num_layers)
        default = layer, f"{depth} of {source.num_layers} blocks, the default depth"
        parts[name] = select_from_scores(
            encoders[recipe], inputs, metrics, accuracies.get(name), unmeasured=reason, default=default
        )
    chosen = default_recipe(recipes, kind.name)
    reason = f"the default for {KIND_NAMES[kind.name]}"
    is_known = (kind.name, chosen.before_vectors().name) == ("causal", "word-echo")
    labels = None
    if accuracies:
        accuracy = {name: accuracies[name][part.layer] for name, part in parts.items()}
        best = max(recipes, key=lambda recipe: (float(accuracy[recipe.name].mean()), recipe == chosen))
        if best == chosen:
            reason += ", with the highest accuracy on the labels too"
        elif gain_interval(accuracy[best.name], accuracy[chosen.name], seed=inputs.seed)[0] > 0:
            points = 100 * float(accuracy[best.name].mean())
            reason = f"its accuracy on the labels, {points:.1f}, is significantly more than with {chosen.name}"
            chosen = best
        else:
            count = len(inputs.labeled)
            reason += f"; {best.name} is more accurate on the labels, but {count} labels are not enough"
        labels = parts[chosen.name].labels
        if labels is not None and PLAIN in accuracies and chosen.name != PLAIN:
            gain = gain_in_points(accuracy[chosen.name], accuracies[PLAIN][-1], seed=inputs.seed)
            labels = replace(labels, **gain, against="the plain text at the last layer")
    center = tuple(inputs.center) if chosen.center else None
    reason = f"{reason}; {parts[chosen.name].reason}"
    return _combine_recipes(
        parts,
        chosen.name,
        reason,
        labels=labels,
        custom_recipe=None if has_name(chosen) else chosen,
        center=center,
        tokens={each.name: _mean_tokens(encoders[each], inputs.sample) for each in recipes} if inputs.texts else {},
        record=RECORD if is_known else "",
        kind=kind,
    )


def _mean_tokens(source: LayerSource, texts: Sequence[str]) -> float:
    """Return the mean number of tokens that the model reads for a text."""
    counts = count_tokens(source, [f"{source.default_prompt}{text}" for text in texts])
    return sum(counts) / len(counts)


def _combine_recipes(parts: Mapping[str, Selection], name: str, reason: str, **evidence: Any) -> Selection:
    """Return the selection of one recipe with all other recipes' selections."""
    frames = [part.frame.with_columns(recipe=pl.lit(recipe)) for recipe, part in parts.items()]
    shared = {key: getattr(parts[name], key) for key in ("model", "revision", "layer", "num_layers", "rule", "choices")}
    return Selection(**shared, reason=reason, frame=pl.concat(frames), recipe=name, parts=parts, **evidence)


def _transform_vectors(vectors: Tensor, recipe: Recipe, sample: Sequence[int]) -> Tensor:
    """Return vectors ``(L, N, D)`` transformed by a recipe, centered on the rows of a sample at each layer."""
    if recipe.join is not None or recipe.center:
        vectors = torch.stack([_transform_layer(rows, recipe, sample) for rows in vectors])
    return torch.nn.functional.normalize(vectors, dim=-1) if recipe.normalize else vectors


def _transform_layer(rows: Tensor, recipe: Recipe, sample: Sequence[int]) -> Tensor:
    if recipe.join is None:
        return rows + centering_offset(rows[sample])
    spans, share = split_spans(rows)
    return join_spans(spans, share, recipe.join, centering_offset(spans[sample]) if recipe.center else None)


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
        texts: all texts, ``None`` for none.
        labeled: texts with a label, at most ``max_texts``.
        classes: of the labeled texts, shape ``(N,)``; ``None`` without labels.
        max_texts: maximum number of texts to measure.
        seed: for views, folds and resamples.
        token_budget: tokens in a batch.
        progress: called after each batch.
    """

    texts: list[Any] | None
    labeled: list[Any]
    classes: Tensor | None
    max_texts: int
    seed: int
    token_budget: int
    progress: Progress | None

    @property
    def sample(self) -> list[Any]:
        """The texts to measure, at equal steps if there are more than ``max_texts``."""
        texts = self.texts or []
        return [texts[position] for position in equal_steps(len(texts), self.max_texts)]

    @property
    def center(self) -> list[Any]:
        """The different texts that recipes center on, at equal steps if more than ``_MAX_CENTER_TEXTS``."""
        texts = different_texts(self.texts or [])
        texts = [texts[position] for position in equal_steps(len(texts), self.max_texts)]
        return [texts[position] for position in equal_steps(len(texts), _MAX_CENTER_TEXTS)]

    @property
    def repeats(self) -> int:
        """Number of random folds."""
        return max(1, min(3, _LABELS_TIMES_REPEATS // len(self.labeled)))


def measure_metrics(
    source: LayerSource, inputs: SelectionInputs, requested: Sequence[str] = (), *, all_rules: bool = False
) -> tuple[pl.DataFrame, str]:
    """Return the requested metrics of every layer on the texts, and why they could not be measured, if so."""
    names = list(requested)
    if all_rules:
        names = list(dict.fromkeys(metric for rule in rules.RULES for metric in rules.metrics_of(rule)))
    if not names:
        return tidy_frame(()), ""
    distinct = len(different_texts(inputs.texts or []))
    if distinct < MIN_TEXTS:
        return tidy_frame(()), f"needs {MIN_TEXTS} different texts or more, but got {distinct or 'none'}"
    texts = inputs.sample
    if medium_of(texts[0], source.media) == "text":
        num_long_texts = sum(count >= LEAST_TOKENS for count in count_tokens(source, texts))
        if num_long_texts < MIN_TEXTS:
            names = [name for name in names if name not in ("half_match", "prompt_entropy")]
            if not names:
                needed = f"needs {MIN_TEXTS} texts of {LEAST_TOKENS} tokens or more"
                return tidy_frame(()), f"{needed}, but got {num_long_texts}"
    settings: dict[str, Any] = {name: getattr(inputs, name) for name in ("seed", "token_budget", "progress")}
    return measure_layers(source, texts, metrics=names, **settings), ""


def label_accuracies(
    sources: Sequence[LayerSource], recipes: Sequence[Recipe], inputs: SelectionInputs
) -> list[Tensor]:
    """Return :func:`label_accuracy` of the labeled texts under each recipe, which may center on other texts, too."""
    labeled = {id(text): row for row, text in enumerate(inputs.labeled)}
    more = [text for text in inputs.center if id(text) not in labeled]
    rows = labeled | {id(text): len(inputs.labeled) + row for row, text in enumerate(more)}
    sample = [rows[id(text)] for text in inputs.center]
    texts = [[*inputs.labeled, *more] if recipe.center else inputs.labeled for recipe in recipes]
    pairs = list(zip(sources, texts, strict=True))
    sizes = [input_sizes(source, each, prompt=source.default_prompt) for source, each in pairs]
    reading = Stage(inputs.progress, "labels", sum(map(sum, sizes)))
    scoring = Stage(inputs.progress, "scoring", inputs.repeats * len(sources))
    accuracies = []
    for (source, each), recipe, tokens in zip(pairs, recipes, sizes, strict=True):
        vectors = label_vectors(source, each, inputs, tokens, reading)
        scoring.step(0)
        vectors = _transform_vectors(vectors, recipe, sample)[:, : len(inputs.labeled), : source.truncate_dim]
        accuracies.append(label_accuracy(vectors, inputs, scoring))
    return accuracies


def label_vectors(
    source: LayerSource, texts: Sequence[Any], inputs: SelectionInputs, sizes: Sequence[int], stage: Stage
) -> Tensor:
    """Return the vectors of texts at every layer, as ``encode`` returns them before truncation, shape ``(L, N, D)``."""
    prompt = source.default_prompt
    reader = replace(layer_reader(source, prompt=prompt), truncate_dim=None)
    batches = batches_of(source, texts, token_budget=inputs.token_budget, prompt=prompt)
    step = count_steps(sizes, batches, stage)
    return reader.vectors(texts, batches, done=step)


def label_accuracy(vectors: Tensor, inputs: SelectionInputs, stage: Stage) -> Tensor:
    """Return how often each layer predicts the label of each text, over several folds, shape ``(L, N)``.

    NaN if all vectors of a layer are equal but other layers' are not, as for a constant last token.
    """
    assert inputs.classes is not None
    draws = []
    for seed in range(inputs.seed, inputs.seed + inputs.repeats):
        draws.append(ridge_correct(vectors, inputs.classes, seed=seed))
        stage.step()
    accuracy = torch.stack(draws).double().mean(dim=0)
    is_constant = all_alike(vectors, list(map(str, inputs.labeled)))
    return torch.where((is_constant & ~is_constant.all())[:, None], torch.nan, accuracy)


def select_from_scores(
    source: LayerSource,
    inputs: SelectionInputs,
    metrics: pl.DataFrame,
    accuracy: Tensor | None,
    *,
    rule: str = "auto",
    unmeasured: str = "",
    default: tuple[int, str] | None = None,
) -> Selection:
    """Return the selection from metrics and from the accuracy on labels.

    Args:
        source: the encoder.
        inputs: texts and labels.
        metrics: tidy frame, may be empty.
        accuracy: of :func:`label_accuracy`; ``None`` without labels.
        rule: that chooses the layer.
        unmeasured: why no metric was measured.
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
    auto = default
    evidence = None
    if accuracy is not None:
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
