"""Write the vectors of many inputs at many layers to files, from one pass over each input.

The vectors go to the same kind of store that a sweep fills, so an interrupted run resumes.
"""

import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from midlayer_encoders._types import EncoderSpec, Layer, Progress, Stage, content_digest
from midlayer_encoders.arguments import TokenBudget, check_budget
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.whole_model import load_encoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.scaling.units import Planner, Unit, embed_block, run_jobs, write_job
from midlayer_encoders.extras.settings import check_out
from midlayer_encoders.extras.vectors.vector_file import Blocks, write_vectors
from midlayer_encoders.files import folder_lock, write_file
from midlayer_encoders.reading.media_inputs import check_taken, medium_of, read_image
from midlayer_encoders.report.results import versions
from midlayer_encoders.sweeping.embedder import Embedder, item_key, open_store, store_key
from midlayer_encoders.validation import check_list, check_progress, check_texts

CHUNK = 1 << 16  # inputs per store: the index of a single store would grow with the number of inputs
_BLOCK_BYTES = 128 * 2**20  # of vectors that are written at a time
_SPEC_FIELDS = (
    *("model", "revision", "weights", "tower", "num_layers", "norm", "pooling", "asked", "max_length"),
    *("truncate_dim", "dtype"),
)  # of the description


def embed(
    model: str | LayerEncoder,
    inputs: Sequence[Any],
    out: Path | str,
    *,
    layers: Sequence[Layer] | str = "all",
    prompt_name: str | None = None,
    prompt: str | None = None,
    token_budget: TokenBudget = "auto",
    executor: Any = None,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Write the vectors of inputs at many layers to a file, from one pass over each input, and return its path.

    Vectors are first stored in ``<out>.part``, so that the same call resumes after an interruption. The folder is
    removed when the file is complete; until then the disk holds the vectors twice.

    Args:
        model: a folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        inputs: texts, or images or audio for a model that takes them.
        out: ``.npy`` of shape ``(L, N, D)`` with a ``.json`` next to it, ``.safetensors`` or ``.parquet``.
            Its parent folder must exist.
        layers: ``"all"``, or some layers; they are written in ascending order.
        prompt_name: name of the encoder's prompt for each text; its default prompt by default.
        prompt: text of the prompt.
        token_budget: tokens per batch; ``"auto"`` chooses the fastest size for the device.
        executor: where blocks of inputs are embedded: anything with ``submit(function, *arguments)`` that returns
            something with ``result()`` (``docs/scale.md``); ``None`` for this process. ``model`` is then a name, and
            ``out`` is in a folder that all machines share.
        progress: called with the stages ``"embedding"`` (inputs) and ``"writing"`` (vectors); with an executor, with
            ``"units"``.
        options: as in :class:`~midlayer_encoders.EncoderOptions` if ``model`` is a name; with an encoder they must
            match its own.
    """
    budget = check_budget(token_budget)
    check_progress(progress)
    path = check_out(out)
    items = check_list("inputs", inputs, "inputs")
    job = EmbedJob(model, options, path.absolute(), layers, prompt_name, prompt, budget)
    if executor is None:
        job.write(items, progress)
    else:
        job.run_on(executor, items, progress)
    return path


@dataclass
class EmbedJob:
    """A call of :func:`embed`: one process does it with :meth:`write`, several do it in steps."""

    model: str | LayerEncoder
    options: Mapping[str, Any]
    out: Path
    requested_layers: Sequence[Layer] | str
    prompt_name: str | None
    prompt: str | None
    budget: TokenBudget

    @cached_property
    def encoder(self) -> LayerEncoder:
        """The encoder of the whole model."""
        return load_encoder(self.model, self.options)

    @cached_property
    def spec(self) -> EncoderSpec:
        """What identifies the encoder."""
        return self.encoder.spec

    @cached_property
    def layers(self) -> list[int]:
        """The layers of the file."""
        return list(self.encoder.vector_reader(self.requested_layers).layers)

    @property
    def part(self) -> Path:
        """The folder of the stores."""
        return self.out.with_name(f"{self.out.name}.part")

    def run_on(self, executor: Any, inputs: Sequence[Any], progress: Progress | None) -> None:
        """Do the steps on an executor."""
        path = write_job(self.part / "units", self.model, self)
        units: list[Unit] = []
        for start in range(0, len(inputs), CHUNK):
            chunk = pickle.dumps(inputs[start : start + CHUNK])
            digest = content_digest(chunk, 8)
            write_file(path.with_name(digest), chunk)
            outcome = path.with_name(f"plan-{path.stem}-{digest}.json")
            units.append(Unit(path, "plan", f"inputs from {start}", outcome, (len(units), digest)))
        digests = tuple(unit.items[1] for unit in units)
        finish = Unit(path, "finish", "the file", path.with_name("finish"), digests)
        run_jobs([*units, finish], executor, progress)
        shutil.rmtree(self.part, ignore_errors=True)

    def plan(self, folder: Path, chunk: int, digest: str) -> list[tuple[int, str]]:
        """Write blocks of the batches of a chunk, and return the chunk and name of each."""
        inputs = _read_inputs(folder / digest)
        planner = Planner(self._embedder(chunk, Stage(None, "embedding")), folder)
        planner(inputs, *self._keys_and_prompt(inputs))
        return [(chunk, block) for block in planner.flush()]

    def embed(self, folder: Path, chunk: int, block: str) -> None:
        """Embed a block of a chunk."""
        embed_block(folder / block, self._embedder(chunk, Stage(None, "embedding")))

    def finish(self, folder: Path, *digests: str) -> None:
        """Write the file, with the vectors of the blocks, and remove the folder of the job."""
        self.write([item for digest in digests for item in _read_inputs(folder / digest)])

    def write(self, inputs: Sequence[Any], progress: Progress | None = None) -> None:
        """Embed the inputs that are not stored into stores next to the file, and write the file."""
        keys, prompt = self._keys_and_prompt(inputs)
        dim = self.encoder.get_embedding_dimension() or 0
        metadata = self._metadata(keys, prompt)
        names = [str(item) if isinstance(item, str | Path) else None for item in inputs]
        if self.part.is_symlink():
            raise OptionError(
                f"`out` must not be next to a link {self.part.name}, which this run would write through: remove it."
            )
        stage = Stage(progress, "embedding")
        with folder_lock(self.part):
            for start in range(0, len(inputs), CHUNK):
                chunk = slice(start, start + CHUNK)
                self._embedder(start // CHUNK, stage)(inputs[chunk], keys[chunk], prompt)
            write_vectors(self.out, self.layers, names, dim, self._blocks(keys, dim, progress), metadata)
            shutil.rmtree(self.part, ignore_errors=True)

    def _embedder(self, chunk: int, stage: Stage) -> Embedder:
        """Return what embeds the inputs of a chunk."""
        store = open_store(self.part / str(chunk), self.spec, self.layers, self.encoder, "float32")
        return Embedder(self.encoder, store, self.budget, stage)

    def _keys_and_prompt(self, inputs: Sequence[Any]) -> tuple[list[str], str]:
        """Return the keys of inputs, and their prompt. An image has the key of its pixels, even if it is a file."""
        encoder = self.encoder
        prompt = encoder.prompt_text(self.prompt_name, self.prompt, inputs)
        medium = medium_of(inputs[0], encoder.media)
        check_taken(medium, encoder.media, inputs[0], model=encoder.name)
        if medium == "text":
            check_texts("inputs", inputs)
        if medium == "image":
            return [item_key(read_image(item, max_pixels=encoder.max_pixels)) for item in inputs], prompt
        is_path = medium == "audio"
        return [item_key(Path(item) if is_path and isinstance(item, str) else item, prompt) for item in inputs], prompt

    def _blocks(self, keys: Sequence[str], dim: int, progress: Progress | None) -> Blocks:
        """Yield the first input of each block, and its vectors at each layer."""
        stage = Stage(progress, "writing", len(self.layers) * len(keys))
        num_rows = max(1, _BLOCK_BYTES // (4 * dim * len(self.layers)))
        for first in range(0, len(keys), CHUNK):
            store = self._embedder(first // CHUNK, stage).store
            for start in range(first, min(first + CHUNK, len(keys)), num_rows):
                block = keys[start : min(start + num_rows, first + CHUNK)]
                yield start, [store.read(layer, block) for layer in self.layers]
                stage.step(len(block) * len(self.layers))

    def _metadata(self, keys: Sequence[str], prompt: str) -> dict[str, Any]:
        """Return the description of the file."""
        return {
            "format": "midlayer vectors 1",
            **{name: value for name, value in self.spec.to_dict().items() if name in _SPEC_FIELDS},
            "commit": getattr(getattr(self.encoder.transformer, "config", None), "_commit_hash", None),
            "layers": self.layers,
            "recipe": self.encoder.options.recipe,
            "prompt": prompt,
            "spec": store_key(self.spec),
            "inputs": len(keys),
            "inputs_digest": content_digest("".join(keys), 16),
            "versions": versions(),
        }


def _read_inputs(path: Path) -> list[Any]:
    inputs: list[Any] = pickle.loads(path.read_bytes())
    return inputs
