"""What stands beside a sweep's frame: how it was measured, what each layer costs, and baselines."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from midlayer_encoders._types import EncoderSpec, Norm
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.frame import Baselines
from midlayer_encoders.models.cut import plan_cut
from midlayer_encoders.models.hub import BUILT_IN, BUILT_IN_MINILM
from midlayer_encoders.reading.capture import capture
from midlayer_encoders.report.versions import versions
from midlayer_encoders.sweeping.baselines import Baseline, lacks_bm25
from midlayer_encoders.sweeping.jobs import Score, quiet_mteb
from midlayer_encoders.sweeping.stored_layer import num_dims
from midlayer_encoders.sweeping.sweep_result import Notes, scored_alone
from midlayer_encoders.tasks import STS_GRADES, TaskSource, TextsSource, task_label

__all__ = ["TOGETHER", "Scored", "sweep_notes"]

_PACKAGES = ("midlayer-encoders", "torch", "transformers", "sentence-transformers", "mteb", "scikit-learn")
_ROUNDS = 9  # passes that are timed
_TIMED = ["The quick brown fox jumps over the lazy dog near the river bank."] * 16
TOGETHER = "all layers together"
_APART = 0.01  # a score further than this from mteb's is worth a remark


@dataclass(frozen=True)
class Scored:
    """What came of scoring: each layer on each task, those that mteb confirmed, how, and baselines on some tasks."""

    scores: Sequence[Score]
    confirmed: Sequence[Score]
    ways: Mapping[str, str]
    baselines: Mapping[str, Mapping[str, float]]


def sweep_notes(
    encoder: LayerEncoder,
    spec: EncoderSpec,
    sources: Sequence[TaskSource],
    found: Scored,
    layers: Sequence[int],
    *,
    baselines: Sequence[Baseline],
    seconds: float,
    tokens: int,
) -> Notes:
    """Return the notes of a sweep; ``baselines`` are scored on the tasks that did not fail, unless they were."""
    scores, timed = found.scores, spec.site == "block" and "text" in encoder.media
    scored = [source for source in sources if not isinstance(source, TextsSource)]
    reached, tokens_each = _pass_seconds(encoder, layers) if timed else ({}, 0)
    timing = {"texts": len(_TIMED), "tokens": tokens_each, "device": _device_words(encoder)} if timed else {}
    failed = {score.task: f"layer {score.layer}: {score.error}" for score in reversed(scores) if score.error}
    compared = {
        one.name: _compared(one, [source for source in scored if source.name not in failed], found.baselines)
        for one in baselines
    }
    return Notes(
        title=f"Every layer of {spec.model}" + ("" if spec.site == "block" else f": its {spec.site}"),
        model=_from_anywhere(encoder.source),
        how=_how(encoder, spec, sources, seconds, tokens) | _scoring(found.ways) | _timing(timing),
        parameters=_parameters(encoder, layers, spec.norm) if spec.site == "block" else {},
        seconds=reached,
        baselines=scored_alone(compared),
        missing=lacks_bm25(source.make() for source in scored) if baselines else [],
        remarks=[*_remarks(sources), *_undefined(scores), *_undefined_baselines(compared), *_apart(found)],
        failures=failed,
        options=encoder.options.recreating(),
        scoring=dict(found.ways),
        site=spec.site,
        dimensions=num_dims(encoder, spec.norm) if spec.site == "block" else 0,
        timing=timing,
    )


def _from_anywhere(source: str) -> str:
    """Return the path of a local model from any folder: the lines that make an encoder may be run in another one."""
    local = source not in ("", BUILT_IN, BUILT_IN_MINILM) and Path(source).is_dir()
    return str(Path(source).absolute()) if local else source


def _compared(
    baseline: Baseline, sources: Sequence[TaskSource], known: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return the score of a baseline on each task that it applies to, as it is known or computed now; NaN for none."""
    found = {}
    for source in sources:
        score = known.get(source.name, {}).get(baseline.name)
        if score is None and baseline.applies(task := source.make()):
            with quiet_mteb():
                score = baseline.score(task)
        if score is not None:
            found[source.name] = score
    return found


def _how(
    encoder: LayerEncoder, spec: EncoderSpec, sources: Sequence[TaskSource], seconds: float, tokens: int
) -> dict[str, str]:
    return {
        "model": spec.model,
        "revision": spec.revision or "default",
        "norm": spec.norm,
        "pooling": spec.pooling,
        **({} if spec.site == "block" else {"site": f"{spec.site}: what it adds in each block, before any norm on it"}),
        "longest text": f"{spec.max_length} tokens" if spec.max_length else "as the model takes",
        "dtype": spec.dtype,
        "weights": spec.weights_digest,
        "tasks": ", ".join(task_label(source.name) for source in sources) or "none",
        "seconds": f"{seconds:.0f}",
        "tokens in a batch": str(tokens),
        "device": str(encoder.device),
        **versions(_PACKAGES),
    }


def _scoring(ways: Mapping[str, str]) -> dict[str, str]:
    """Return how the tasks were scored, for the page."""
    by_mteb = [f"{task_label(task)} {way}" for task, way in ways.items() if way != TOGETHER]
    confirmed = f"{TOGETHER}; the best, the second best and the last confirmed by mteb"
    if not by_mteb:
        return {"scoring": confirmed} if ways else {}
    return {"scoring": "; ".join(([confirmed] if len(by_mteb) < len(ways) else []) + by_mteb)}


def _undefined(scores: Sequence[Score]) -> list[str]:
    """Return which layers have no score though nothing failed."""
    layers: dict[str, list[str]] = {}
    for score in scores:
        if score.error is None and math.isnan(score.value):
            layers.setdefault(score.task, []).append(str(score.layer))
    tasks: dict[str, list[str]] = {}
    for task, found in layers.items():
        tasks.setdefault(", ".join(found), []).append(task_label(task))
    return [
        f"No score at layer {found} of {', '.join(names)}: vectors are all alike there, or not finite, or the task's "
        "own labels or grades leave nothing to tell apart."
        for found, names in tasks.items()
    ]


def _undefined_baselines(compared: Baselines) -> list[str]:
    """Return on which tasks a baseline has no score."""
    tasks = {
        name: [task_label(task) for task, score in of.items() if math.isnan(score)] for name, of in compared.items()
    }
    return [
        f"No score of {name} on {', '.join(of)}: it tells no two texts apart there." for name, of in tasks.items() if of
    ]


def _apart(found: Scored) -> list[str]:
    """Return where mteb could not confirm a score."""
    ours = {(score.task, score.layer): score.value for score in found.scores}
    remarks = []
    for score in found.confirmed:
        place = f"{task_label(score.task)} at layer {score.layer}"
        if score.error is not None:
            remarks.append(f"mteb could not score {place}: {score.error}")
        elif not math.isnan(own := ours[score.task, score.layer]) and not abs(score.value - own) <= _APART:
            remarks.append(
                f"mteb scores {place} {100 * score.value:.1f}, all layers together gave "
                f"{100 * own:.1f}: sweep with scoring='mteb' for scores by mteb alone."
            )
    return remarks


def _remarks(sources: Sequence[TaskSource]) -> list[str]:
    nearness = next((task_label(source.name) for source in sources if "Nearness" in source.name), None)
    grades = "; ".join(f"{grade}: {words}" for grade, words in enumerate(STS_GRADES))
    texts = [task_label(source.name) for source in sources if isinstance(source, TextsSource)]
    alone = f"{', '.join(texts)}: texts without labels, which the metrics read and nothing is scored on."
    return [f"What the grades of {nearness} mean: {grades}."] * bool(nearness) + [alone] * bool(texts)


def _parameters(encoder: LayerEncoder, layers: Sequence[int], norm: Norm) -> dict[int, int]:
    """Return how many parameters a model cut at each layer has; without the final norm a block more is kept."""
    model: Any = encoder[0].model
    anatomy = encoder.anatomy
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.get_submodule(anatomy.blocks)]
    outside = sum(parameter.numel() for parameter in model.parameters()) - sum(sizes)

    def kept(layer: int) -> int:
        if isinstance(encoder[0], MemoryModule):
            return max(layer, 1)
        keep = plan_cut(anatomy, layer, norm, config=getattr(model, "config", None)).keep
        return min(keep, anatomy.num_blocks) if anatomy.shared else keep

    # A block added after the last is a copy of it.
    return {layer: outside + sum((sizes + sizes[-1:])[: kept(layer)]) for layer in layers}


def _timing(timing: Mapping[str, Any]) -> dict[str, str]:
    """Return how the passes were timed, for the page."""
    if not timing:
        return {}
    each = "{texts} texts of {tokens} tokens at once on {device}".format(**timing)
    return {"time per text": f"of the pass up to the layer, {each}, the fastest of {_ROUNDS}; tokenizing left out"}


def _device_words(encoder: LayerEncoder) -> str:
    """Return what a pass ran on, in the words in which two machines differ."""
    device = encoder.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'' if threads == 1 else 's'}" if device.type == "cpu" else str(device)


@torch.inference_mode()
def _pass_seconds(encoder: LayerEncoder, layers: Sequence[int]) -> tuple[dict[int, float], int]:
    """Return the seconds after which a pass over a batch has reached each layer, and the tokens of a text in it.

    Each is the least of some passes.
    """
    model: Any = encoder[0].model
    features = encoder.preprocess(_TIMED)
    names: tuple[str, ...] = ("input_ids", "attention_mask")
    inputs = {key: features[key].to(encoder.device) for key in names if key in features}
    devices = {parameter.device for parameter in model.parameters()}  # several where a device map spreads them
    best = dict.fromkeys(layers, float("inf"))
    start = 0.0

    def reached(layer: int, *_: object) -> None:
        best[layer] = min(best[layer], _now(devices) - start)

    for _ in range(_ROUNDS):
        start = _now(devices)
        capture(model, inputs, reached, anatomy=encoder.anatomy, layers=layers)
    return best, int(features["input_ids"].shape[1])


def _now(devices: Iterable[torch.device]) -> float:
    """Return the time when devices have done what they were given; their calls return before."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()
    return time.perf_counter()
