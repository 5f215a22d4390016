"""One layer as an mteb encoder, whose vectors are read from the store or embedded on first use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from sentence_transformers.util import SimilarityFunction

from midlayer_encoders._types import EncoderSpec, Norm, ReadSite, Stage, content_digest
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.files import read_artifact, write_file_once
from midlayer_encoders.media import is_pil, read_audio, read_image
from midlayer_encoders.reading.ahead import Behind
from midlayer_encoders.reading.batches import TokenBudget, batches_of, tokens_that_fit
from midlayer_encoders.reading.compiled import compiled_blocks
from midlayer_encoders.reading.flow import Passed
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.scoring import all_alike
from midlayer_encoders.store import EmbeddingStore, StoreDtype, text_key
from midlayer_encoders.sweeping.processes import Group
from midlayer_encoders.tasks.mteb_internals import prompt_name

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import PromptType
    from torch.utils.data import DataLoader

_SHORT_TEXT = 16  # tokens of a text in a batch with as many texts as possible
_MIN_TEXTS = 256  # that any batch may hold
_BATCH_BYTES = 128 * 2**20  # vectors of a larger batch

# Names under which sentence-transformers looks for the prompt of a query or a document.
_PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


def item_key(item: Any, prompt: str = "") -> str:
    """Return the key of a text under a prompt, of an image by its pixels, or of a waveform by its samples."""
    if isinstance(item, str):
        return text_key(item, prompt)
    if is_pil(item):
        # As the model reads it: palette images with equal bytes can have different colors.
        image = read_image(item, max_pixels=max(item.width * item.height, 1))
        head = f"{image.mode} {image.size} "
        content = image.tobytes()
    else:
        waveform = read_audio(item)
        head = f"{waveform['sampling_rate']} "
        content = waveform["array"].tobytes()
    digest = hashlib.blake2b(head.encode(), digest_size=16)
    digest.update(content)
    return digest.hexdigest()


class Vectors(Protocol):
    """A source of the vectors of every layer."""

    @property
    def key(self) -> str:
        """A digest of everything that changes the vectors, except the layer and the text."""

    @property
    def dim(self) -> int:
        """Number of dimensions."""

    def read(self, layer: int, keys: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the vectors of keys at a layer, shape ``(N, D)``."""

    def refresh(self) -> None:
        """Read which vectors other processes have stored."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of an encoder, chosen as sentence-transformers does inside mteb."""

    named: tuple[tuple[str, str], ...] = ()
    default: str | None = None

    @classmethod
    def of(cls, encoder: LayerEncoder) -> Prompts:
        """Return the prompts of an encoder."""
        return cls(tuple((name, text or "") for name, text in encoder.prompts.items()), encoder.default_prompt_name)

    def choose(self, task: TaskMetadata, prompt_type: PromptType | None) -> str:
        """Return the prompt for a task's queries, documents or plain texts; empty if there is none."""
        prompts = dict(self.named)
        if not any(prompts.values()):
            return ""
        mteb_prompts = {name: text for name, text in prompts.items() if name != "text"}  # mteb would warn about it
        valid, _ = AbsEncoder.validate_task_to_prompt_name(mteb_prompts, raise_for_invalid_keys=False)
        name = prompt_name(valid, task, prompt_type) if valid else None
        if name is not None:
            return prompts[name]
        for fallback in _PROMPT_NAMES.get(prompt_type.value, ()) if prompt_type is not None else ():
            if fallback in prompts:
                return prompts[fallback]
        return prompts.get(self.default or "", "")


class UndefinedScoreError(MidlayerError):
    """A layer has the same vector for all inputs, so a score would be chance or ties."""


class StoredLayer:
    """An mteb encoder of one layer that reads vectors from the store, by the content of each input.

    Args:
        store: holds every layer of every input.
        layer: the layer to read.
        name: model name for mteb's results.
        revision: model revision for mteb's results.
        prompts: prompts of the encoder.
        modalities: modalities of the model.
        similarity: similarity function of the encoder.
        ensure: called first with the items, their keys and the prompt; embeds items that are not stored.
    """

    def __init__(
        self,
        store: Vectors,
        layer: int,
        *,
        name: str,
        revision: str,
        prompts: Prompts,
        modalities: Sequence[str] = ("text",),
        similarity: str = "cosine",
        ensure: Callable[[Sequence[Any], Sequence[str], str], None] | None = None,
    ) -> None:
        self.store = store
        self.layer = layer
        self.prompts = prompts
        self.ensure = ensure
        self.media = tuple(modalities)
        self.similarity = SimilarityFunction.to_similarity_fn(similarity)
        self.similarity_pairwise = SimilarityFunction.to_similarity_pairwise_fn(similarity)
        self.mteb_model_meta = ModelMeta.create_empty(
            overwrites={
                "name": name,
                "revision": revision,
                "modalities": list(modalities),
                "similarity_fn_name": ScoringFunction(similarity),
                "framework": ["PyTorch"],
                "embed_dim": store.dim,
            }
        )

    def encode(
        self, inputs: DataLoader[Any], *, task_metadata: TaskMetadata, prompt_type: PromptType | None = None, **_: Any
    ) -> npt.NDArray[np.float32]:
        """Return one row per input, shape ``(N, D)``."""
        keys = self.keys(inputs, task_metadata=task_metadata, prompt_type=prompt_type)
        vectors = self.store.read(self.layer, keys)
        if all_alike(torch.from_numpy(vectors)[None], keys).item():
            raise UndefinedScoreError(f"All vectors of layer {self.layer} are the same.")
        return vectors

    def keys(
        self, inputs: DataLoader[Any], *, task_metadata: TaskMetadata, prompt_type: PromptType | None
    ) -> list[str]:
        """Return the key of each input, after ``ensure`` has stored them."""
        items: list[Any] = []
        for batch in inputs:  # a task of images may also contain texts
            medium = next((name for name in self.media if name in batch), None)
            if medium is None:
                raise OptionError(f"The task provides {', '.join(batch)}, but the model takes {', '.join(self.media)}.")
            items += batch[medium]
        prompt = self.prompts.choose(task_metadata, prompt_type)
        keys = [item_key(item, prompt) for item in items]
        if self.ensure is not None:
            self.ensure(items, keys, prompt)
        return keys


@dataclass(frozen=True)
class Embedder:
    """Embeds the items that are not stored: every layer from one pass, batch by batch.

    Attributes:
        encoder: encoder with the whole model.
        store: where the vectors are written.
        token_budget: tokens per batch, or ``"auto"`` for the fastest size on the device.
        stage: counts the texts that this process embeds.
        group: the processes that share the batches.
        compile: compile the model's blocks.
        planning: receives a report while batches are planned.
        site: what to read of each layer.
    """

    encoder: LayerEncoder
    store: EmbeddingStore
    token_budget: TokenBudget = "auto"
    stage: Stage = field(default_factory=lambda: Stage(None, "embedding"))
    group: Group = field(default_factory=Group)
    compile: bool = False
    planning: Stage = field(default_factory=lambda: Stage(None, "planning"))
    site: ReadSite = "block"

    @cached_property
    def tokens(self) -> int:
        """Tokens per batch."""
        return tokens_that_fit(self.encoder) if self.token_budget == "auto" else self.token_budget

    def __call__(self, items: Sequence[Any], keys: Sequence[str], prompt: str) -> None:
        """Embed the items whose keys are not stored.

        Batches are planned once and the plan is saved next to the store, so that a resumed run, or one shared among
        processes, computes the same batches and therefore the same vectors.
        """
        distinct: Mapping[str, Any] = dict(zip(keys, items, strict=True))
        names = list(distinct)
        texts = list(distinct.values())
        # The second round plans anew, in case shards were removed or damaged since the plan was made.
        for make_plan in (self._saved_plan, self._plan):
            # The processes must agree on the batches, so an item that one of them lacks is embedded again.
            missing = set[int]().union(*self.group.share(lambda: self.store.missing(names), inside=True))
            if not missing:
                return
            plan = partial(make_plan, names, texts, missing, prompt) if self.group.rank == 0 else list[list[int]]
            self.planning.step(0)
            batches = self.group.share(plan, inside=True)[0]
            self.group.share(partial(self._embed, names, texts, missing, batches, prompt), inside=True)
            self.store.refresh()

    def _plan(self, _: Sequence[str], texts: Sequence[Any], missing: set[int], prompt: str) -> list[list[int]]:
        positions = sorted(missing)
        batches = batches_of(
            self.encoder,
            [texts[n] for n in positions],
            token_budget=self.tokens,
            max_texts=max_batch_texts(self.tokens, len(self.store.layers), self.store.dim),
            prompt=prompt,
        )
        return [[positions[n] for n in batch] for batch in batches]

    def _saved_plan(
        self, names: Sequence[str], texts: Sequence[Any], missing: set[int], prompt: str
    ) -> list[list[int]]:
        """Return the saved batches of these items, or plan and save them."""
        # On a GPU the automatic budget can change between runs and processes; the plan must not.
        budget = self.token_budget if self.encoder.device.type == "cuda" else self.tokens
        digest = content_digest("".join((*names, str(budget))), 12)
        path = self.store.folder / "plans" / f"{digest}.json"
        read = partial(_read_plan, count=len(names))
        while (batches := read_artifact(path, read)) is None:
            write_file_once(path, json.dumps(self._plan(names, texts, missing, prompt)).encode())
        return batches

    def _embed(
        self,
        names: Sequence[str],
        texts: Sequence[Any],
        missing: set[int],
        batches: Sequence[Sequence[int]],
        prompt: str,
    ) -> None:
        """Embed this process's share of the incomplete batches, and store the missing items."""
        reader = layer_reader(self.encoder, layers=self.store.layers, prompt=prompt, site=self.site)
        batches = self.group.part([batch for batch in batches if missing.intersection(batch)])
        self.stage.expect(sum(map(len, batches)))
        blocks = compiled_blocks(reader.model, reader.anatomy) if self.compile else nullcontext()
        with blocks, Behind(done=self.stage.step) as writer, closing(reader.passes(texts, batches)) as passes:
            for passed in passes:
                writer.hand_on(self._write, passed, names, missing)

    def _write(self, passed: Passed, names: Sequence[str], missing: set[int]) -> int:
        """Store the missing items of a batch and return the batch size."""
        rows = [row for row, position in enumerate(passed.positions) if position in missing]
        vectors = passed.vectors()
        if len(rows) < len(passed.positions):
            vectors = vectors[:, rows]
        self.store.write([names[passed.positions[row]] for row in rows], vectors.numpy(), finite=True)
        return len(passed.positions)


def max_batch_texts(tokens: int, num_layers: int, dim: int) -> int:
    """Return the maximum number of texts in a batch, whose vectors of all layers must fit in memory."""
    return max(_MIN_TEXTS, min(tokens // _SHORT_TEXT, _BATCH_BYTES // (4 * num_layers * dim)))


def _read_plan(path: Path, *, count: int) -> list[list[int]]:
    """Return the batches in a file, or raise if they are not indices of ``count`` items."""
    batches: list[list[int]] = json.loads(path.read_bytes())
    if not isinstance(batches, list) or any(index not in range(count) for batch in batches for index in batch):
        raise ValueError(f"it must be lists of numbers below {count}")
    return batches


def open_store(
    root: Path | str, spec: EncoderSpec, layers: Sequence[int], encoder: LayerEncoder, dtype: StoreDtype
) -> EmbeddingStore:
    """Open the store of an encoder's vectors."""
    description = _without_layer(spec).to_dict()
    del description["layer"], description["similarity"]
    return EmbeddingStore(
        root,
        key=store_key(spec, dtype),
        layers=layers,
        dim=num_dims(encoder, spec.norm),
        dtype=dtype,
        description=description,
    )


def store_key(spec: EncoderSpec, dtype: StoreDtype = "float32") -> str:
    """Return the key of the store of an encoder's vectors."""
    return _without_layer(spec).digest + ("-half" if dtype == "float16" else "")


def _without_layer(spec: EncoderSpec) -> EncoderSpec:
    return replace(spec, layer=-1, similarity="cosine")  # the similarity changes scores, not vectors


def num_dims(encoder: LayerEncoder, norm: Norm) -> int:
    """Return the number of dimensions of a vector, after the final norm or projection and `truncate_dim`."""
    model, pooling = cast(Any, encoder[0]).model, cast(Any, encoder[1])
    final = encoder.anatomy.final if norm == "final" else ()
    last = model.get_submodule(final[-1]) if final else None
    width = int(getattr(last, "out_features", pooling.embedding_dimension))  # OPT-350m ends in a projection
    return min(width, encoder.truncate_dim or width)
