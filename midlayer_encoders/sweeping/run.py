"""Every layer on every task: each text passes through the model once, all layers are scored from the store."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, cast, get_args

import joblib
import polars as pl
import torch

from midlayer_encoders._types import READ_SITES, EncoderSpec, Layer, Norm, Progress, ReadSite, Stage
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.spec import result_name, result_revision
from midlayer_encoders.errors import (
    DiskFullError,
    OptionError,
    check_choice,
    check_count,
    check_effect,
    check_flag,
    check_path,
    check_progress,
)
from midlayer_encoders.files import check_links, folder_lock
from midlayer_encoders.frame import at_site, tidy_frame, tidy_rows
from midlayer_encoders.measuring import measure_layers
from midlayer_encoders.metrics import make_metrics
from midlayer_encoders.reading.batches import TokenBudget, check_budget
from midlayer_encoders.reading.reader import layer_reader, site_layers
from midlayer_encoders.store import EmbeddingStore, StoreDtype, text_key
from midlayer_encoders.sweeping.items import item_key, task_media
from midlayer_encoders.sweeping.jobs import Job, Score, Workers, run_job
from midlayer_encoders.sweeping.notes import TOGETHER, Scored, sweep_notes
from midlayer_encoders.sweeping.result import SweepResult
from midlayer_encoders.sweeping.stored_layer import Embedder, Prompts
from midlayer_encoders.sweeping.together import MOST_CONFIRMED, Together, layers_to_confirm, why_not_together
from midlayer_encoders.tasks import TaskSource, task_sources, task_texts

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

__all__ = ["Scoring", "sweep"]

Scoring: TypeAlias = Literal["together", "mteb"]
"""How layers are scored: all of a task at once, with some confirmed by mteb, or one by one by mteb."""

_PLURALS = {"text": "texts", "image": "images", "audio": "waveforms"}


@dataclass(frozen=True)
class _Group:
    """The processes that share a sweep, and the device of this one (``None``: the encoder's own)."""

    rank: int = 0
    world: int = 1
    barrier: Callable[[], None] = lambda: None
    device: torch.device | None = None


def sweep(
    model: str | LayerEncoder,
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask] = (),
    *,
    layers: Sequence[Layer] | str = "all",
    site: ReadSite = "block",
    metrics: str | Sequence[str] = (),
    metric_texts: int = 64,
    views: int = 16,
    out: Path | str | None = None,
    store: Path | str | None = None,
    store_dtype: StoreDtype = "float32",
    scoring: Scoring = "together",
    workers: int | None = None,
    token_budget: TokenBudget = "auto",
    compile: bool = False,  # noqa: A002  (as torch and Lightning name it)
    baselines: bool = True,
    devices: int = 1,
    num_nodes: int = 1,
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> SweepResult:
    """Return the scores, and metrics, of every layer from one forward pass over each text.

    Args:
        model: folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        tasks: names of mteb tasks or benchmarks, ``"paper"``, ``"builtin"``, paths of your own data, task objects.
        layers: ``"all"`` or some, each as ``layer`` of :class:`LayerEncoder`.
        site: ``"block"``, or ``"attention"`` or ``"mlp"``: what these add in each block, from layer 1 up. The frame's
            revision names it, as ``"default:mlp"``; an encoder of it cannot be had.
        metrics: ``"paper"``, ``"all"``, or names; none by default. They read raw states, as the paper's do, with the
            encoder's pooling and default prompt.
        metric_texts: number of the tasks' texts that the metrics are measured on, drawn by their content.
        views: of each text for LiDAR.
        out: folder for frame, result files and page; ``midlayer-results/<model>`` by default.
        store: folder of embeddings; inside ``out`` by default. Sweeps may share it.
        store_dtype: ``"float32"``, or ``"float16"`` for half the room.
        scoring: ``"together"`` scores all layers of a task at once, on the encoder's device, as mteb would one by one;
            the best layer, the second best and the last are then scored by mteb too, as rows of the kind
            ``"confirmed"``. A task that is unusual in some way is scored by mteb. ``"mteb"`` scores everything by mteb.
        workers: processes that score layers by mteb; as many as there are cores by default.
        token_budget: tokens in a batch; ``"auto"`` for as many as the device runs best with, which the page names.
        compile: run the model's blocks through ``torch.compile``; it pays for many texts (``benchmarks/sweep_gpu.py``).
        baselines: also score TF-IDF on tasks of text, for comparison.
        devices: processes on this machine that share the embedding, on Lightning Fabric.
        num_nodes: machines that do.
        progress: called with the stages ``"embedding"``, ``"scoring"``, ``"confirming"`` and ``"measuring"``.
        options: as in :class:`~midlayer_encoders.EncoderOptions`, when ``model`` is a name; beside an encoder they must
            be its own.

    A sweep that was stopped goes on where it was when it is called again with the same ``out``. A task that fails is
    in ``result.failures``, and the others go on. While one sweep writes to ``out`` another is refused.
    """
    metric_texts, views = check_count("metric_texts", metric_texts, "texts"), check_count("views", views)
    token_budget, devices = check_budget(token_budget), check_count("devices", devices)
    compile = check_flag("compile", compile)  # noqa: A001
    num_nodes, baselines = check_count("num_nodes", num_nodes), check_flag("baselines", baselines)
    workers = int(joblib.cpu_count()) if workers is None else check_count("workers", workers, "processes")
    check_choice("store_dtype", store_dtype, ("float32", "float16"))
    check_choice("scoring", scoring, get_args(Scoring))
    check_choice("site", site, READ_SITES)
    if compile and site != "block":
        raise OptionError(f"`compile` must be False with site={site!r}: inside a compiled block nothing can be read.")
    check_path("out", out)
    check_path("store", store)
    check_progress(progress)
    if metrics is None or (isinstance(metrics, list | tuple) and not metrics):
        check_effect(sweep, "without `metrics`, which it is about", metric_texts=metric_texts, views=views)
    else:
        make_metrics(metrics, [0])  # a wrong name is refused before a task is run
    sources = task_sources(tasks) if not isinstance(tasks, tuple) or tasks else []
    group = _launch(devices, num_nodes, cpu=_device(model, options) == "cpu")
    encoder = _encoder(model, options)
    if group.device is not None:
        encoder.to(group.device)
    wanted = site_layers(layers, encoder.layer, site, name=encoder.name)
    layer_reader(encoder, layers=wanted, site=site)  # refuses what cannot be read, before a task is run
    spec = replace(encoder.spec, site=site)
    name = re.sub(r"[^\w.-]+", "_", spec.model) + ("" if site == "block" else f"-{site}")
    folder = Path(out) if out is not None else Path("midlayer-results") / name
    check_links(folder, [folder / "mteb", folder / "together", *([] if store else [folder / "embeddings"])])
    with nullcontext() if group.rank else folder_lock(folder):
        start = time.perf_counter()
        kept = _open_store(store or folder / "embeddings", spec, wanted, encoder, store_dtype)
        embedder = Embedder(
            encoder,
            kept,
            token_budget,
            Stage(progress, "embedding"),
            group.rank,
            group.world,
            group.barrier,
            compile,
            site,
        )
        jobs = [_jobs(source, wanted, spec, embedder, folder) for source in sources]
        together = Together(
            embedder, folder / "together", Stage(progress, "scoring"), group.rank, group.world, group.barrier,
            baselines=baselines and "text" in encoder.media,
        )  # fmt: skip
        found = _score(jobs, together if scoring == "together" else None, embedder, workers, progress, group)
        frame = pl.concat([_score_frame(spec, found.scores, "score"), _score_frame(spec, found.confirmed, "confirmed")])
        if metrics:
            sample = _sample(sources, encoder.media[0], metric_texts)
            dataset = f"{len(sample)} {_PLURALS[encoder.media[0]]} of the tasks"
            how: dict[str, Any] = {"metrics": metrics, "layers": wanted, "views": views, "progress": progress}
            how["site"] = site
            frame = pl.concat([frame, measure_layers(encoder, sample, dataset=dataset, **how)])
        scored = [source for source in sources if baselines and "text" in encoder.media]
        notes = sweep_notes(
            encoder, spec, sources, found, wanted, baselines=scored, seconds=time.perf_counter() - start,
            tokens=embedder.tokens,
        )  # fmt: skip
        result = SweepResult(frame, folder, notes)
        if group.rank == 0:
            result.save()
        group.barrier()
        return result


def _encoder(model: str | LayerEncoder, options: Mapping[str, Any]) -> LayerEncoder:
    """Return the encoder of a named model, or the one given, whose own options those beside it must be."""
    if not isinstance(model, LayerEncoder):
        return LayerEncoder(model, -1, **options)
    model.check_own(options)
    return model


def _device(model: str | LayerEncoder, options: Mapping[str, Any]) -> str | None:
    return model.device.type if isinstance(model, LayerEncoder) else options.get("device")


def _launch(devices: int, num_nodes: int, *, cpu: bool) -> _Group:
    """Join the other processes, started by Fabric itself, torchrun or SLURM, when there are to be several."""
    if devices * num_nodes <= 1:
        return _Group()
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu" if cpu else "auto", devices=devices, num_nodes=num_nodes, strategy="ddp")
    fabric.launch()
    return _Group(fabric.global_rank, fabric.world_size, fabric.barrier, fabric.device)


def _open_store(
    root: Path | str, spec: EncoderSpec, layers: Sequence[int], encoder: LayerEncoder, dtype: StoreDtype
) -> EmbeddingStore:
    """Open the store of everything that changes a vector but the layer and the text."""
    whole = replace(spec, layer=-1, similarity="cosine")  # which changes scores, not vectors
    description = {name: value for name, value in asdict(whole).items() if name not in ("layer", "similarity")}
    key = whole.digest + ("-half" if dtype == "float16" else "")
    return EmbeddingStore(
        root, key=key, layers=layers, dim=_num_dims(encoder, spec.norm), dtype=dtype, description=description
    )


def _num_dims(encoder: LayerEncoder, norm: Norm) -> int:
    """Return the number of dimensions of a vector, after what follows the last block and after `truncate_dim`."""
    model, pool = cast(Any, encoder[0]).model, cast(Any, encoder[1])
    final = encoder.anatomy.final if norm == "final" else ()
    last = model.get_submodule(final[-1]) if final else None
    width = int(getattr(last, "out_features", pool.embedding_dimension))  # OPT-350m ends in a projection, not a norm
    return min(width, encoder.truncate_dim or width)


def _jobs(source: TaskSource, layers: Sequence[int], spec: EncoderSpec, embedder: Embedder, folder: Path) -> list[Job]:
    """Return a task's jobs, one for each layer."""
    encoder = embedder.encoder
    prompts = Prompts(tuple((name, text or "") for name, text in encoder.prompts.items()), encoder.default_prompt_name)
    taken = tuple(encoder.media)
    specs = [replace(spec, layer=layer) for layer in layers]
    return [
        Job(
            source, one.layer, embedder.store, result_name(one), result_revision(one), prompts, taken, folder / "mteb",
            one.similarity,
        )
        for one in specs
    ]  # fmt: skip


def _score(
    jobs_of_tasks: Sequence[Sequence[Job]],
    together: Together | None,
    embedder: Embedder,
    workers: int,
    progress: Progress | None,
    group: _Group,
) -> Scored:
    """Score every layer on every task, and have mteb confirm some of what was scored together."""
    stage = Stage(progress, "scoring") if together is None else together.stage
    stage.expect(sum(map(len, jobs_of_tasks)))
    confirming = Workers(workers, MOST_CONFIRMED * len(jobs_of_tasks))
    if together is not None:
        confirming.start()
    scores: list[Score] = []
    to_confirm: list[Job] = []
    ways: dict[str, str] = {}
    baselines: dict[str, float] = {}
    for jobs in jobs_of_tasks:
        made, why = ([], "it was asked to") if together is None else _by_all(jobs, together)
        if why is not None:
            ways[jobs[0].task.name] = f"by mteb, because {why}"
            scores += _by_mteb(jobs, embedder, workers, stage, group)
            continue
        ways[jobs[0].task.name] = TOGETHER
        scores += made
        if together is not None and (baseline := together.baseline(jobs[0])) is not None:
            baselines[jobs[0].task.name] = baseline
        layers = layers_to_confirm(made)
        to_confirm += [job for job in jobs if job.layer in layers]
    confirmed = _confirmed(to_confirm, embedder, confirming, Stage(progress, "confirming"), group)
    return Scored(scores, confirmed, ways, baselines)


def _by_all(jobs: Sequence[Job], together: Together) -> tuple[list[Score], str | None]:
    """Return the scores of all layers together, or none and why they are left to mteb."""
    done = together.stage.done
    try:
        why = why_not_together(jobs[0])
        return (together.scores(jobs), None) if why is None else ([], why)
    except DiskFullError:  # the next task would fail for it too
        raise
    except Exception as error:  # mteb tells what is wrong with a task, or scores it all the same
        together.stage.step(done - together.stage.done)
        return [], f"{type(error).__name__}: {error}"


def _by_mteb(jobs: Sequence[Job], embedder: Embedder, workers: int, stage: Stage, group: _Group) -> list[Score]:
    """Score the layers one by one: the first asks for the texts, which embeds them; the others run in workers."""
    made = [run_job(jobs[0], embedder)]
    stage.step()
    group.barrier()
    if made[0].error is None:
        mine = jobs[1:][group.rank :: group.world]
        for score in Workers(workers, len(mine)).run(mine):
            stage.step()
            made.append(score)
        group.barrier()
        # What another process scored is in mteb's files; a text that a worker missed (its shard was damaged or
        # pruned) is embedded now.
        done = {score.layer for score in made if not score.lacked_a_text}
        rest = [run_job(job, embedder) for job in jobs if job.layer not in done]
        made = [score for score in made if score.layer in done] + rest
    return sorted(made, key=lambda score: score.layer)


def _confirmed(jobs: Sequence[Job], embedder: Embedder, workers: Workers, stage: Stage, group: _Group) -> list[Score]:
    """Have mteb score some layers of all tasks side by side, from what is stored."""
    if not jobs:
        return []
    stage.expect(len(jobs))
    found: dict[tuple[str, int], Score] = {}
    for score in workers.run(jobs[group.rank :: group.world]):
        stage.step()
        found[score.task, score.layer] = score
    group.barrier()
    for job in jobs:  # what another process scored, or what was not stored any more
        known = found.get((job.task.name, job.layer))
        if known is None or known.lacked_a_text:
            found[job.task.name, job.layer] = run_job(job, embedder)
    return [found[job.task.name, job.layer] for job in jobs]


def _score_frame(spec: EncoderSpec, scores: Sequence[Score], kind: Literal["score", "confirmed"]) -> pl.DataFrame:
    of = at_site(spec, spec.site)
    return tidy_frame(
        row
        for score in scores
        if score.error is None
        for row in tidy_rows({score.layer: score.value}, of, kind=kind, dataset=score.task, name=score.metric)
    )


def _sample(sources: Sequence[TaskSource], medium: str, count: int) -> list[Any]:
    """Return some of the tasks' texts, images or waveforms, the same for the same tasks in whatever order."""
    if medium == "text":
        texts = {text for source in sources for text in task_texts(source.make()) if text.strip()}
        return sorted(texts, key=text_key)[:count]
    found = {item_key(item): item for source in sources for item in task_media(source.make(), medium)}
    return [found[key] for key in sorted(found)[:count]]
