"""Every layer on every task: each text passes through the model once, mteb scores each layer from the store."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib
import polars as pl
import torch

from midlayer_encoders._types import EncoderSpec, Layer, Norm, Pooling
from midlayer_encoders.anatomy import find_anatomy, resolve_layers
from midlayer_encoders.capture import capture
from midlayer_encoders.encoder import LayerEncoder
from midlayer_encoders.identity import result_name, result_revision
from midlayer_encoders.measuring import measure
from midlayer_encoders.report import FRAME_SCHEMA
from midlayer_encoders.store import EmbeddingStore
from midlayer_encoders.store.embeddings import StoreDtype
from midlayer_encoders.sweeping.jobs import Job, Score, run_job, run_jobs
from midlayer_encoders.sweeping.result import Notes, SweepResult
from midlayer_encoders.sweeping.view import Embedder, Prompts
from midlayer_encoders.tasks import STS_GRADES, TaskSource, task_label, task_sources, task_texts, tfidf_scores

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

__all__ = ["Progress", "sweep"]

_PACKAGES = ("midlayer-encoders", "torch", "transformers", "sentence-transformers", "mteb", "scikit-learn")


class Progress:
    """Told what a sweep does; the command line draws bars from it. This one is silent."""

    def embedding(self, done: int, more: int) -> None:
        """``done`` texts were embedded, ``more`` are to be."""

    def evaluating(self, done: int, more: int) -> None:
        """``done`` layers were scored on a task, ``more`` are to be."""

    def measuring(self, done: int, more: int) -> None:
        """``done`` texts passed for the metrics, ``more`` are to."""


@dataclass(frozen=True)
class _Group:
    """The processes that share a sweep."""

    rank: int = 0
    world: int = 1
    barrier: Callable[[], None] = lambda: None


def sweep(
    model: str | LayerEncoder,
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask] = (),
    *,
    layers: Sequence[Layer] | str = "all",
    norm: Norm = "final",
    pooling: Pooling = "mean",
    metrics: str | Sequence[str] = (),
    metric_texts: int = 64,
    views: int = 16,
    out: Path | str | None = None,
    store: Path | str | None = None,
    store_dtype: StoreDtype = "float32",
    workers: int | None = None,
    token_budget: int = 4096,
    baselines: bool = True,
    devices: int = 1,
    num_nodes: int = 1,
    progress: Progress | None = None,
    **encoder_options: Any,
) -> SweepResult:
    """Return the scores, and metrics, of every layer from one forward pass over each text.

    Args:
        model: folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        tasks: names of mteb tasks or benchmarks, ``"paper"``, ``"builtin"``, paths of your own data, task objects.
        layers: ``"all"`` or some, each as ``layer`` of :class:`LayerEncoder`.
        norm: ``"final"`` or ``"none"``, for the scores. Metrics read raw states.
        pooling: how token states become one vector.
        metrics: ``"paper"``, ``"all"``, or names; none by default.
        metric_texts: number of the tasks' texts that the metrics are measured on, drawn by their content.
        views: of each text for LiDAR.
        out: folder for frame, result files and page; ``midlayer-results/<model>`` by default.
        store: folder of embeddings; inside ``out`` by default. Sweeps may share it.
        store_dtype: ``"float32"``, or ``"float16"`` for half the room.
        workers: processes that score layers; as many as there are cores by default.
        token_budget: tokens in a batch.
        baselines: also score TF-IDF on tasks of text, for comparison.
        devices: processes on this machine that share the embedding, on Lightning Fabric.
        num_nodes: machines that do.
        progress: told what is done.
        encoder_options: further arguments of :class:`LayerEncoder`, when ``model`` is a name.

    A sweep that was stopped goes on where it was when it is called again with the same ``out``. A task that fails is
    in ``result.failures``, and the others go on.
    """
    sources = task_sources(tasks) if tasks != () else []
    group = _launch(devices, num_nodes)
    encoder = model if isinstance(model, LayerEncoder) else LayerEncoder(model, -1, **encoder_options)
    wanted = resolve_layers(layers, encoder.layer, name=str(encoder.model_card_data.base_model))
    spec = replace(encoder.spec, norm=norm, pooling=pooling)
    folder = Path(out) if out is not None else Path("midlayer-results") / re.sub(r"[^\w.-]+", "_", spec.model)
    told = progress or Progress()
    kept = _open_store(store or folder / "embeddings", spec, wanted, encoder, store_dtype)
    embedder = Embedder(
        encoder, kept, norm, pooling, token_budget, told.embedding, group.rank, group.world, group.barrier
    )
    start = time.perf_counter()
    scores = _score(
        sources, wanted, spec, kept, encoder, embedder, folder, workers or int(joblib.cpu_count()), told, group
    )
    frames = [_score_frame(spec, scores)]
    if metrics:
        frames.append(_metric_frame(encoder, sources, metrics, wanted, metric_texts, views, folder, told))
    frame = pl.concat([frame for frame in frames if not frame.is_empty()] or frames[:1])
    notes = _notes(encoder, spec, sources, scores, wanted, time.perf_counter() - start, baselines)
    result = SweepResult(frame, folder, notes)
    if group.rank == 0:
        result.save()
    group.barrier()
    return result


def _launch(devices: int, num_nodes: int) -> _Group:
    """Join the other processes, started by Fabric itself, torchrun or SLURM, when there are to be several."""
    if devices * num_nodes <= 1:
        return _Group()
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="auto", devices=devices, num_nodes=num_nodes, strategy="ddp")
    fabric.launch()
    return _Group(fabric.global_rank, fabric.world_size, fabric.barrier)


def _open_store(
    root: Path | str, spec: EncoderSpec, layers: Sequence[int], encoder: LayerEncoder, dtype: StoreDtype
) -> EmbeddingStore:
    """Open the store of everything that changes a vector but the layer and the text."""
    whole = replace(spec, layer=-1)
    pool: Any = encoder[1]
    description = {name: value for name, value in asdict(whole).items() if name != "layer"}
    key = whole.digest + ("-half" if dtype == "float16" else "")
    return EmbeddingStore(
        root, key=key, layers=layers, dim=pool.embedding_dimension, dtype=dtype, description=description
    )


def _score(
    sources: Sequence[TaskSource],
    layers: Sequence[int],
    spec: EncoderSpec,
    store: EmbeddingStore,
    encoder: LayerEncoder,
    embedder: Embedder,
    folder: Path,
    workers: int,
    told: Progress,
    group: _Group,
) -> list[Score]:
    """Score every layer on every task: the first asks for the texts, which embeds them; the others run in workers."""
    prompts = Prompts(tuple((name, text or "") for name, text in encoder.prompts.items()), encoder.default_prompt_name)
    told.evaluating(0, len(sources) * len(layers))
    scores: list[Score] = []
    specs = [replace(spec, layer=layer) for layer in layers]
    taken = tuple(map(str, encoder.modalities))
    for source in sources:
        jobs = [
            Job(source, one.layer, store, result_name(one), result_revision(one), prompts, taken, folder / "mteb")
            for one in specs
        ]
        first = run_job(jobs[0], embedder)
        told.evaluating(1, 0)
        made = [first]
        group.barrier()
        if first.error is None:
            mine = jobs[1:][group.rank :: group.world]
            made += [_retried(score, jobs, embedder, told, group) for score in run_jobs(mine, workers=workers)]
            group.barrier()
            if group.world > 1:  # what the others scored is in mteb's files
                made = [first, *map(run_job, jobs[1:])]
        scores += sorted(made, key=lambda score: score.layer)
    return scores


def _retried(score: Score, jobs: Sequence[Job], embedder: Embedder, told: Progress, group: _Group) -> Score:
    """Score again, embedding what is lacking, where a worker missed a text (its shard was damaged or pruned)."""
    told.evaluating(1, 0)
    if score.error is not None and score.error.startswith("TextNotStoredError") and group.world == 1:
        return run_job(next(job for job in jobs if job.layer == score.layer), embedder)
    return score


def _score_frame(spec: EncoderSpec, scores: Sequence[Score]) -> pl.DataFrame:
    rows = [
        (
            spec.model,
            spec.revision or "default",
            s.layer,
            s.layer / max(spec.num_layers, 1),
            "score",
            s.task,
            s.metric,
            s.value,
        )
        for s in scores
        if s.error is None
    ]
    return pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row")


def _metric_frame(
    encoder: LayerEncoder,
    sources: Sequence[TaskSource],
    metrics: str | Sequence[str],
    layers: Sequence[int],
    count: int,
    views: int,
    folder: Path,
    told: Progress,
) -> pl.DataFrame:
    """Measure the metrics on a sample of the tasks' texts, the same for the same tasks."""
    from midlayer_encoders.measuring import num_passes
    from midlayer_encoders.store import text_key

    texts = {text for source in sources for text in task_texts(source.make()) if text.strip()}
    sample = sorted(texts, key=text_key)[:count]
    told.measuring(0, len(sample) * num_passes(metrics, views=views))
    frame = measure(
        encoder, sample, metrics=metrics, layers=list(layers), views=views, dataset=f"{len(sample)} texts of the tasks",
        advance=lambda done: told.measuring(done, 0),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    return frame.cast(FRAME_SCHEMA)


def _notes(
    encoder: LayerEncoder,
    spec: EncoderSpec,
    sources: Sequence[TaskSource],
    scores: Sequence[Score],
    layers: Sequence[int],
    seconds: float,
    baselines: bool,
) -> Notes:
    failed = {
        score.task: f"layer {score.layer}: {score.error}" for score in reversed(scores) if score.error is not None
    }
    how = {
        "model": spec.model,
        "revision": spec.revision or "default",
        "norm": spec.norm,
        "pooling": spec.pooling,
        "longest text": f"{spec.max_length} tokens",
        "dtype": spec.dtype,
        "weights": spec.weights,
        "tasks": ", ".join(task_label(source.name) for source in sources) or "none",
        "seconds": f"{seconds:.0f}",
        "device": str(encoder.device),
        "Python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }
    text_tasks = (
        [source for source in sources if source.name not in failed]
        if baselines and "text" in encoder.modalities
        else []
    )
    grades = "; ".join(f"{grade}: {words}" for grade, words in enumerate(STS_GRADES))
    nearness = next((task_label(source.name) for source in sources if "Nearness" in source.name), None)
    remarks = [f"What the grades of {nearness} mean: {grades}."] if nearness else []
    extra = f" --gguf-file {spec.gguf_file}" if spec.gguf_file and encoder.source != "built-in" else ""
    return Notes(
        title=f"Every layer of {spec.model}",
        model=encoder.source,
        how=how,
        parameters=_parameters(encoder, layers),
        seconds=_pass_seconds(encoder, layers, scores),
        baselines={source.name: tfidf_scores(source.make()) for source in text_tasks},
        remarks=remarks,
        failures=failed,
        export_options=("" if spec.norm == "final" else " --norm none")
        + ("" if spec.pooling == "mean" else f" --pooling {spec.pooling}")
        + extra,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except Exception:  # not installed as a distribution
        return "unknown"


def _parameters(encoder: LayerEncoder, layers: Sequence[int]) -> dict[int, int]:
    """Return how many parameters a model cut at each layer has."""
    model: Any = encoder[0].model
    anatomy = find_anatomy(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    if anatomy.shared:
        return dict.fromkeys(layers, total)
    sizes = [sum(p.numel() for p in anatomy.block(model, k).parameters()) for k in range(1, anatomy.num_layers + 1)]
    return {layer: total - sum(sizes[layer:]) for layer in layers}


@torch.inference_mode()
def _pass_seconds(encoder: LayerEncoder, layers: Sequence[int], scores: Sequence[Score]) -> dict[int, float]:
    """Return the seconds that a batch takes to the best layer and to the last: the fastest of nine rounds."""
    valid = [score for score in scores if score.error is None]
    if not valid or "text" not in encoder.modalities:
        return {}
    means = {layer: sum(s.value for s in valid if s.layer == layer) for layer in layers}
    pair = sorted({max(means, key=lambda layer: means[layer]), layers[-1]})
    model: Any = encoder[0].model
    features = encoder.preprocess(["The quick brown fox jumps over the lazy dog near the river bank."] * 16)
    names: tuple[str, ...] = ("input_ids", "attention_mask")
    inputs = {key: features[key].to(encoder.device) for key in names if key in features}
    best = dict.fromkeys(pair, float("inf"))
    for _ in range(9):
        for layer in pair:
            start = time.perf_counter()
            capture(model, inputs, lambda *_: None, anatomy=find_anatomy(model), layers=[layer])
            if encoder.device.type == "cuda":
                torch.cuda.synchronize()
            best[layer] = min(best[layer], time.perf_counter() - start)
    return best
