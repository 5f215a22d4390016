"""Build the notes of a sweep: how it was measured, what each layer costs, and baselines."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self
from unittest import mock

import polars as pl
import torch

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import EncoderSpec
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import pluralize
from midlayer_encoders.frame.schema import tidy_frame, tidy_rows
from midlayer_encoders.frame.summaries import Baselines
from midlayer_encoders.models.hub import BUILT_IN, BUILT_IN_MINILM
from midlayer_encoders.reading.batches import count_tokens
from midlayer_encoders.reading.capture import capture
from midlayer_encoders.reading.causal import looks_ahead
from midlayer_encoders.recipes import RECIPES
from midlayer_encoders.report.results import versions
from midlayer_encoders.sweeping.baselines import Baseline
from midlayer_encoders.sweeping.best_layer import Notes
from midlayer_encoders.sweeping.compression import Compression
from midlayer_encoders.sweeping.mteb_jobs import Score, quiet_mteb, with_data
from midlayer_encoders.tasks import STS_GRADES, task_label
from midlayer_encoders.tasks.sampled_tasks import sampled_rows
from midlayer_encoders.tasks.sources import SampledSource, TaskSource, TextsSource

TOGETHER = "all layers together"
_PACKAGES = ("midlayer-encoders", "torch", "transformers", "sentence-transformers", "mteb", "scikit-learn")
_TIMED_PASSES = 9
_MAX_TIMED_SECONDS = 1.0  # a pass that ends later is the last one
_TIMED_TEXTS = ["The quick brown fox jumps over the lazy dog near the river bank."] * 16
_UNDEFINED = "all vectors are the same or not finite there, or the task's labels do not differ."
_MAX_DIFFERENCE = 0.01  # from mteb's score; a larger one is reported


@dataclass
class ScoringResult:
    """The scores of each layer on each task, those that mteb confirmed, how tasks were scored, baselines and tokens.

    A baseline has its score on a task, followed by its scores on resampled test items.
    """

    scores: list[Score] = field(default_factory=list)
    confirmed: list[Score] = field(default_factory=list)
    methods: dict[str, str] = field(default_factory=dict)
    baselines: dict[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)

    def of(self, compression: Compression) -> Self:
        """Return the scores of vectors with a compression."""
        scores, confirmed = (
            [score for score in scores if score.compression == compression] for scores in (self.scores, self.confirmed)
        )
        return replace(self, scores=scores, confirmed=confirmed)

    def frame(self, kind: Literal["score", "confirmed"], spec: EncoderSpec) -> pl.DataFrame:
        """Return tidy rows of the scores, or of those that mteb confirmed."""
        scores = self.scores if kind == "score" else self.confirmed
        return tidy_frame(
            row
            for score in scores
            if score.error is None
            for row in tidy_rows({score.layer: score.value}, spec, kind=kind, dataset=score.task, name=score.metric)
        )

    @property
    def failures(self) -> dict[str, str]:
        """The error of each task that failed, at its first layer, and why a task has a score at no layer."""
        failed = {score.task: f"layer {score.layer}: {score.error}" for score in reversed(self.scores) if score.error}
        scored = {score.task for score in self.scores if not math.isnan(score.value)}
        return {
            score.task: f"no layer has a score: {_UNDEFINED}" for score in self.scores if score.task not in scored
        } | failed


def sweep_notes(
    encoder: LayerEncoder,
    sources: Sequence[TaskSource],
    scoring: ScoringResult,
    layers: Sequence[int],
    baselines: Sequence[Baseline],
    run: dict[str, str],
) -> Notes:
    """Return the notes of a sweep; baselines without a score are scored on the tasks that did not fail.

    ``run`` tells its time and batches.
    """
    labeled = [source for source in sources if not isinstance(source, TextsSource)]
    how = _how(encoder.spec, sources, scoring.methods, run | {"device": str(encoder.device)})
    if encoder.options.dense == "drop":
        how["left out"] = f"{', '.join(encoder.saved.trained)}, trained for the last layer"
    timing: dict[str, Any] = {}
    pass_seconds: dict[int, float] = {}
    if encoder.media == ["text"]:
        pass_seconds, num_tokens, num_passes = _time_passes(encoder, layers)
        timing = {"texts": len(_TIMED_TEXTS), "tokens": num_tokens, "device": _device_name(encoder)}
        batch = "{texts} texts of {tokens} tokens at once on {device}".format(**timing)
        how["time per text"] = f"the pass up to the layer, {batch}, fastest of {num_passes}; without tokenization"
    hint = _recipe_hint(encoder, scoring.tokens, run) if encoder.media == ["text"] else ""
    succeeded = [source for source in labeled if source.name not in scoring.failures]
    resampled = {each.name: _baseline_scores(each, succeeded, scoring.baselines) for each in baselines}
    baseline_scores = {name: {task: values[0] for task, values in tasks.items()} for name, tasks in resampled.items()}
    # The frame has no row for a layer without a score either.
    finite = {
        name: {task: score for task, score in scores.items() if not math.isnan(score)}
        for name, scores in baseline_scores.items()
    }
    finite = {name: scores for name, scores in finite.items() if scores}
    path = Path(encoder.source)
    is_local = encoder.source not in ("", BUILT_IN, BUILT_IN_MINILM) and path.exists()
    return Notes(
        title=f"Every layer of {encoder.name}",
        model=str(path.absolute()) if is_local else encoder.source,
        how=how,
        parameters=_parameters(encoder, layers),
        seconds=pass_seconds,
        baselines=finite,
        resamples={name: {task: list(resampled[name][task][1:]) for task in tasks} for name, tasks in finite.items()},
        remarks=score_remarks(sources, scoring, baseline_scores),
        failures=scoring.failures,
        scoring=dict(scoring.methods),
        timing=timing,
        layers={layer: requested for layer in layers if (requested := encoder.layer_argument(layer)) != layer},
        tokens=dict(scoring.tokens),
        rows=_sampled_rows(succeeded),
        hint=hint,
    )


def _recipe_hint(encoder: LayerEncoder, tokens: Mapping[str, float], run: Mapping[str, str]) -> str:
    """Return the advice to try a prompt, with its cost, if a causal language model read plain texts."""
    if not tokens or encoder.saved.modules or not encoder.reads_plainly:
        return ""
    with mock.patch.object(encoder, "warned", {"truncation"}):  # these are no texts of the user
        inputs = encoder.model_inputs(_TIMED_TEXTS[:1])
    if looks_ahead(encoder.transformer, encoder.anatomy, inputs):
        return ""
    prompt = re.sub(r"\{(text|read)\}", "", str(RECIPES["word-echo"].template))
    mean = fmean(tokens.values())
    prompted = 2 * mean + count_tokens(encoder, [prompt])[0]
    return (
        "Try --recipes plain,word-echo: the prompt of a causal language model can gain more than its layer. It costs "
        f"one more pass, over about {prompted:.0f} tokens per text instead of {mean:.0f}; this sweep took "
        f"{run['seconds']} s."
    )


def _sampled_rows(sources: Sequence[TaskSource]) -> dict[str, dict[str, list[int]]]:
    """Return the rows of each sample; its data is loaded if its scores were not computed in this process."""
    sampled = [source for source in sources if isinstance(source, SampledSource)]
    for source in sampled:
        if not source.rows:
            with isolated_random(), quiet_mteb():
                source.rows.update(sampled_rows(with_data(source).make()))
    return {source.name: {split: list(counts) for split, counts in source.rows.items()} for source in sampled}


def _baseline_scores(
    baseline: Baseline, sources: Sequence[TaskSource], computed: Mapping[str, Mapping[str, Sequence[float]]]
) -> dict[str, Sequence[float]]:
    """Return the score of a baseline on each task that it applies to, NaN if it has none, and its resamples."""
    scores = {}
    for source in sources:
        score = computed.get(source.name, {}).get(baseline.name)
        if score is None and baseline.applies(task := source.make()):
            with quiet_mteb():
                score = [baseline.score(task)]
        if score is not None:
            scores[source.name] = score
    return scores


def _how(
    spec: EncoderSpec, sources: Sequence[TaskSource], methods: Mapping[str, str], run: Mapping[str, str]
) -> dict[str, str]:
    """Return how a sweep was measured, for its page."""
    by_mteb = [f"{task_label(task)} {method}" for task, method in methods.items() if method != TOGETHER]
    if len(by_mteb) < len(methods):
        by_mteb.insert(0, f"{TOGETHER}; the best, the second best and the last confirmed by mteb")
    how = {
        "model": spec.model.removeprefix("local/"),
        "revision": spec.revision or "",
        "norm": spec.norm,
        "pooling": spec.pooling,
        "longest text": f"{spec.max_length} tokens" if spec.max_length else "as the model takes",
        "dtype": spec.dtype,
        "weights": spec.weights_digest,
        "tasks": ", ".join(task_label(source.name) for source in sources) or "none",
        **run,
        **versions(_PACKAGES),
        "scoring": "; ".join(by_mteb),
    }
    return {name: value for name, value in how.items() if value}


def _undefined_scores(scoring: ScoringResult) -> list[str]:
    """Return which layers have no score although their tasks did not fail."""
    failed = {task for task, error in scoring.failures.items() if _UNDEFINED in error}
    layers: dict[str, list[str]] = {}
    for score in scoring.scores:
        if score.error is None and math.isnan(score.value) and score.task not in failed:
            layers.setdefault(score.task, []).append(str(score.layer))
    tasks: dict[str, list[str]] = {}
    for task, numbers in layers.items():
        tasks.setdefault(", ".join(numbers), []).append(task_label(task))
    return [f"No score at layer {numbers} of {', '.join(names)}: {_UNDEFINED}" for numbers, names in tasks.items()]


def score_remarks(sources: Sequence[TaskSource], scoring: ScoringResult, baselines: Baselines) -> list[str]:
    """Return the meaning of grades, and which scores are missing or could not be confirmed by mteb."""
    remarks = []
    if nearness := next((task_label(source.name) for source in sources if "Nearness" in source.name), None):
        grades = "; ".join(f"{grade}: {meaning}" for grade, meaning in enumerate(STS_GRADES))
        remarks.append(f"Grades of {nearness}: {grades}.")
    if unlabeled := [task_label(source.name) for source in sources if isinstance(source, TextsSource)]:
        remarks.append(f"{', '.join(unlabeled)}: texts without labels, which are used for metrics and not scored.")
    remarks += _undefined_scores(scoring)
    for name, scores in baselines.items():
        if tasks := [task_label(task) for task, score in scores.items() if math.isnan(score)]:
            remarks.append(f"No score of {name} on {', '.join(tasks)}: it does not distinguish any two texts there.")
    values = {(score.task, score.layer): score.value for score in scoring.scores}
    for confirmed in scoring.confirmed:
        place = f"{task_label(confirmed.task)} at layer {confirmed.layer}"
        value = values[confirmed.task, confirmed.layer]
        if confirmed.error is not None:
            remarks.append(f"mteb could not score {place}: {confirmed.error}")
        elif not math.isnan(value) and not abs(confirmed.value - value) <= _MAX_DIFFERENCE:
            remarks.append(
                f"mteb scores {place} {100 * confirmed.value:.1f}, but {TOGETHER} gave {100 * value:.1f}: sweep with "
                "scoring='mteb' for scores by mteb only."
            )
    return remarks


def _parameters(encoder: LayerEncoder, layers: Sequence[int]) -> dict[int, int]:
    """Return the number of parameters of a model cut at each layer."""

    def count(*modules: torch.nn.Module) -> int:
        return sum(parameter.numel() for module in modules for parameter in module.parameters())

    model = encoder.transformer
    dropped = {
        layer: [block for stack, kept in encoder.kept_blocks(layer) for block in stack.distinct_blocks(model)[kept:]]
        for layer in layers
    }
    return {layer: count(model) - count(*blocks) for layer, blocks in dropped.items()}


def _device_name(encoder: LayerEncoder) -> str:
    device = encoder.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {pluralize(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else str(device)


@torch.inference_mode()
def _time_passes(encoder: LayerEncoder, layers: Sequence[int]) -> tuple[dict[int, float], int, int]:
    """Return the seconds until a pass reaches each layer, the least of several passes; tokens of a text; passes."""
    model: Any = encoder[0].model
    with mock.patch.object(encoder, "warned", {"truncation"}):  # these are no texts of the user
        features = encoder.preprocess(_TIMED_TEXTS)
    inputs: dict[str, Any] = {
        key: features[key].to(encoder.device) for key in ("input_ids", "attention_mask") if key in features
    }
    devices = {parameter.device for parameter in model.parameters()}
    best = dict.fromkeys(layers, float("inf"))
    start = 0.0

    def now() -> float:
        for device in devices:
            if device.type != "cpu":  # its calls return before the work is done
                torch.accelerator.synchronize(device)
        return time.perf_counter()

    def reached(layer: int, *_: object) -> None:
        best[layer] = min(best[layer], now() - start)

    num_passes, first_start = 0, now()
    while num_passes < _TIMED_PASSES and now() - first_start < _MAX_TIMED_SECONDS:
        start = now()
        capture(model, inputs, reached, anatomy=encoder.anatomy, layers=layers)
        num_passes += 1
    return best, int(features["input_ids"].shape[1]), num_passes
