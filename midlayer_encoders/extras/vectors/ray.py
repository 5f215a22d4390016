"""Embed texts at many layers with Ray Data: a class for ``map_batches``, and a job from parquet to parquet.

In the job, a worker reads the rows of a part, embeds them and writes them to a file of their own. Vectors do not pass
through Ray's object store or the driver. Only :func:`embed_parquet` imports Ray.
"""

import logging
import os
import pickle
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Unpack
from uuid import uuid4

from midlayer_encoders._isolation import quiet_loggers
from midlayer_encoders._types import Layer, Progress, Stage
from midlayer_encoders.arguments import SUFFIXES, TokenBudget, check_budget, check_parent
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.whole_model import load_encoder
from midlayer_encoders.errors import FolderError, OptionError
from midlayer_encoders.extras.vectors.embedding import describe_vectors, vector_column
from midlayer_encoders.extras.vectors.parquet_parts import Part, PartWriter, check_columns, plan_digest, plan_parts
from midlayer_encoders.files import check_links, explain_full_disk, folder_lock
from midlayer_encoders.processes.group import ProcessLostError
from midlayer_encoders.reading.media_inputs import check_taken
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.validation import check_count, check_progress, check_text, check_texts

_log = logging.getLogger(__name__)
_CONNECT_SECONDS = 10.0


class LayerEmbedder:
    """Add the vectors of texts at many layers to a batch, one column ``layer_K`` per layer.

    A batch is a dict of arrays, a pandas ``DataFrame`` or a pyarrow ``Table``, and so is the result. The vectors are
    those of :meth:`~midlayer_encoders.LayerEncoder.encode_layers` for the texts of the batch, in float32. The class
    does not use Ray: it fits any pipeline that calls an object with batches.

    Args:
        model: a folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        layers: ``"all"``, or some layers.
        text_column: column of the texts.
        prompt_name: name of the encoder's prompt for each text; its default prompt by default.
        prompt: text of the prompt.
        token_budget: tokens in a pass of the model; ``"auto"`` chooses a number for the device.
        options: as in :class:`~midlayer_encoders.EncoderOptions` if ``model`` is a name.

    Example:
        >>> import ray  # doctest: +SKIP
        >>> ray.data.read_parquet("texts/").map_batches(  # doctest: +SKIP
        ...     LayerEmbedder,
        ...     fn_constructor_kwargs={"model": "HuggingFaceTB/SmolLM2-135M", "layers": [15, -1]},
        ...     batch_size=1024,
        ...     compute=ray.data.ActorPoolStrategy(size=2),
        ... ).write_parquet("vectors/")
    """

    def __init__(
        self,
        model: str | LayerEncoder,
        *,
        layers: Sequence[Layer] | str = "all",
        text_column: str = "text",
        prompt_name: str | None = None,
        prompt: str | None = None,
        token_budget: TokenBudget = "auto",
        **options: Unpack[EncoderKeywords],
    ) -> None:
        self.text_column = check_text("text_column", text_column)
        self.token_budget = check_budget(token_budget)
        self.encoder = encoder = load_encoder(model, options)
        check_taken("text", encoder.media, "a text", model=encoder.name)
        self.prompt = encoder.prompt_text(prompt_name, prompt, [""])
        self.layers = layer_reader(encoder, layers=layers, prompt=self.prompt).layers

    def describe(self, texts: list[str]) -> dict[str, Any]:
        """Return the description that a file of :func:`~midlayer_encoders.embed` with these texts would hold."""
        return describe_vectors(self.encoder, texts, layers=self.layers, prompt=self.prompt)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that a batch gets."""
        return [f"layer_{layer}" for layer in self.layers]

    def __call__(self, batch: Any) -> Any:
        """Return the batch with a column of vectors ``(N, D)`` for each layer."""
        names = list(batch.column_names if hasattr(batch, "column_names") else batch)
        check_columns(names, self.text_column, self.columns, "the batch")
        column = batch[self.text_column]
        cells = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
        cells = [str(cell) if isinstance(cell, str) else cell for cell in cells]  # strings of NumPy
        texts = check_texts(self.text_column, cells, minimum=0)
        vectors = self.encoder.encode_layers(texts, self.layers, prompt=self.prompt, token_budget=self.token_budget)
        columns = dict(zip(self.columns, vectors, strict=True))
        if hasattr(batch, "append_column"):  # pyarrow
            for name, rows in columns.items():
                batch = batch.append_column(name, vector_column(rows))
            return batch
        if hasattr(batch, "assign"):  # pandas
            return batch.assign(**{name: list(rows) for name, rows in columns.items()})
        return {**batch, **columns}


def embed_parquet(
    model: str,
    source: Path | str,
    out: Path | str,
    *,
    layers: Sequence[Layer] | str = "all",
    text_column: str = "text",
    prompt_name: str | None = None,
    prompt: str | None = None,
    token_budget: TokenBudget = "auto",
    batch_size: int = 1024,
    concurrency: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> Path:
    """Write parquet files with the vectors of texts at many layers, embedded by actors of Ray; return their folder.

    The files ``part-000000.parquet``, … hold the columns of the source and a column ``layer_K`` per layer, in the order
    of the source, and a description under ``midlayer`` in their metadata as a file of :func:`~midlayer_encoders.embed`.
    They are written to ``<out>.part``, which becomes ``out`` when all are complete, so that the same call resumes after
    an interruption. Ray repeats the texts of a worker that was killed; after three times, an error names them.

    Args:
        model: a folder or name on the hub.
        source: a parquet file, or a folder of parquet files, which are read in the order of their names. On a cluster,
            every node must see ``source``, ``out`` and ``model`` at the same path.
        out: a new folder, in an existing one.
        layers: ``"all"``, or some layers.
        text_column: column of the texts.
        prompt_name: as in :func:`~midlayer_encoders.embed`.
        prompt: text of the prompt.
        token_budget: tokens in a pass of the model; ``"auto"`` chooses a number for the device.
        batch_size: texts in a call of the encoder and in a file. It changes the last bits of the vectors.
        concurrency: number of actors, each with a copy of the model: by default one per GPU of the cluster, or one per
            CPU if it has none. It does not change the vectors.
        limit: use only the first texts.
        progress: called with the stage ``"embedding"`` (texts).
        options: as in :class:`~midlayer_encoders.EncoderOptions`.
    """
    check_progress(progress)
    if not isinstance(model, str):
        raise OptionError("`model` must be a folder or hub name, which each worker loads.")
    check_budget(token_budget)
    size = check_count("batch_size", batch_size, "texts")
    path = check_folder(out)
    parts = plan_parts(source, check_text("text_column", text_column), size, limit)
    num_actors = None if concurrency is None else check_count("concurrency", concurrency, "actors")
    work = path.with_name(f"{path.name}.part").absolute()
    check_links(work.parent, [work])
    settings: dict[str, Any] = {
        "layers": layers, "text_column": text_column, "prompt_name": prompt_name, "prompt": prompt,
        "token_budget": token_budget, **options,
    }  # fmt: skip
    ray = import_ray()
    with folder_lock(work), quiet_cluster(ray):
        check_folder(path)  # another run may have written it since
        writer = PartWriter(
            partial(LayerEmbedder, model, **settings), work / plan_digest(parts, token_budget), Path.cwd(), uuid4().hex
        )
        folder = _run(ray, writer, parts, device=options.get("device"), concurrency=num_actors, progress=progress)
        _complete(folder, path, parts)
        shutil.rmtree(work, ignore_errors=True)
    return path


def check_folder(out: Path | str) -> Path:
    """Return the folder that :func:`embed_parquet` writes to, or raise unless it is new or empty."""
    path = check_parent(out)
    if path.suffix in SUFFIXES:
        raise OptionError(
            f"`out` must be a new folder with Ray, but got {path.name!r}: its workers write one parquet file for each "
            f"batch. Name it {path.stem!r}."
        )
    if path.is_file() or path.is_symlink() or (path.is_dir() and any(path.iterdir())):
        raise OptionError(f"`out` must be a new or empty folder with Ray, but {path} is not: use another.")
    return path


def _run(
    ray: Any,
    writer: PartWriter,
    parts: Sequence[Part],
    *,
    device: str | None,
    concurrency: int | None,
    progress: Progress | None,
) -> Path:
    """Write the files of all parts in actors, and return their folder."""
    resources = ray.cluster_resources()
    on_gpu = resources.get("GPU", 0) >= 1 and (device is None or str(device).startswith("cuda"))
    num_actors = concurrency or int(resources.get("GPU" if on_gpu else "CPU", 1))
    results = ray.data.from_items([asdict(part) for part in parts], override_num_blocks=len(parts)).map_batches(
        type(writer),
        fn_constructor_args=(writer.load, writer.folder, writer.directory, writer.run),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(num_actors, len(parts))),
        num_gpus=1 if on_gpu else None,
        num_cpus=None if on_gpu else 1,
    )
    stage = Stage(progress, "embedding", sum(part.count for part in parts))
    folders: set[str] = set()
    messages: set[str] = set()
    try:
        for result in results.iter_rows():
            for message in set(result["warnings"].splitlines()) - messages:
                messages.add(message)
                _log.warning("%s", message)
            if result["error"]:
                raise pickle.loads(result["error"])
            folders.add(result["folder"])
            stage.step(result["count"])
    except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
        raise ProcessLostError(
            f"Ray failed: {str(error).strip().splitlines()[-1]} The same call resumes from the files that are complete."
        ) from None
    if len(folders) > 1:
        raise OptionError(
            f"`model` must be the same for every worker, but they loaded {len(folders)} that differ in weights, "
            "tokenizer or type: copy one to a path that all nodes share, and set `dtype`."
        )
    return Path(folders.pop())


def _complete(folder: Path, out: Path, parts: Sequence[Part]) -> None:
    """Move the folder of all files into place, without the files of killed attempts."""
    names = {part.name for part in parts}
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if missing := sorted(names - present):
        raise FolderError(
            f"`out` must be on a disk that all nodes of the cluster share, but {len(missing)} of {len(names)} files "
            f"are not here, such as {missing[0]}."
        )
    with explain_full_disk(out):
        for leftover in present - names:
            (folder / leftover).unlink()
        folder.replace(out)  # replaces an empty folder


# --- the cluster ------------------------------------------------------------------------------------------------------


def import_ray() -> Any:
    """Return the package ``ray`` with Ray Data."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise OptionError("`ray` must be installed with Ray Data: pip install 'midlayer-encoders[ray]'.") from error
    return ray


@contextmanager
def quiet_cluster(ray: Any) -> Iterator[None]:
    """Connect to a cluster, or start one on this machine if there is none; Ray shows neither logs nor progress."""
    is_ours = not ray.is_initialized()
    if is_ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    settings = context.enable_progress_bars, context.print_on_execution_start
    context.enable_progress_bars = context.print_on_execution_start = False
    try:
        with quiet_loggers("ray.data", level=logging.CRITICAL):
            yield
    finally:
        context.enable_progress_bars, context.print_on_execution_start = settings
        if is_ours:
            ray.shutdown()


def _check_address(address: str) -> None:
    """Raise if the cluster of ``RAY_ADDRESS`` does not answer: Ray would try for minutes."""
    match = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)
    if match is None:  # none, "auto" or "local"
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ProcessLostError(
            f"The cluster at RAY_ADDRESS={address} cannot be reached: {error}. Start it with `ray start`, or unset "
            "RAY_ADDRESS to use this machine."
        ) from error
