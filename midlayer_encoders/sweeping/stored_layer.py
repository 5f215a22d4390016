"""One layer, as mteb sees it: a model whose vectors lie on disk already, or are made when it first asks for them."""

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

from midlayer_encoders._types import EncoderSpec, Norm, ReadSite, Stage
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.files import read_artifact, write_file_once
from midlayer_encoders.reading.ahead import Behind
from midlayer_encoders.reading.batches import TokenBudget, batches_of, tokens_that_fit
from midlayer_encoders.reading.compiled import compiled_blocks
from midlayer_encoders.reading.flow import Passed
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.scoring import all_alike
from midlayer_encoders.store import EmbeddingStore, StoreDtype
from midlayer_encoders.sweeping.items import item_key
from midlayer_encoders.sweeping.processes import Group
from midlayer_encoders.tasks.compat import prompt_name

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import PromptType
    from torch.utils.data import DataLoader


__all__ = [
    "Embedder",
    "Prompts",
    "StoredLayer",
    "UndefinedScoreError",
    "Vectors",
    "most_texts",
    "num_dims",
    "open_store",
    "store_key",
]


_SHORT = 16  # tokens of a text in a batch that is as full of texts as may be
_FEW_TEXTS, _BATCH_BYTES = 256, 128 * 2**20  # texts that any batch may hold, and bytes of the vectors of more

# Under which names sentence-transformers looks for the prompt of a query or a document, in order.
_FALLBACKS = {"query": ("query",), "document": ("document", "passage", "corpus")}


class Vectors(Protocol):
    """Where the vectors of every layer are read from."""

    @property
    def key(self) -> str:
        """What names everything that changes them, but layer and text."""

    @property
    def dim(self) -> int:
        """Dimensions of a vector."""

    def read(self, layer: int, keys: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return those of some keys at a layer, shape ``(N, D)``."""

    def refresh(self) -> None:
        """See what other processes have stored."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of an encoder and which is put before a text, as sentence-transformers inside mteb decides it."""

    named: tuple[tuple[str, str], ...] = ()
    default: str | None = None

    @classmethod
    def of(cls, encoder: LayerEncoder) -> Prompts:
        """Return those of an encoder."""
        return cls(tuple((name, text or "") for name, text in encoder.prompts.items()), encoder.default_prompt_name)

    def choose(self, task: TaskMetadata, kind: PromptType | None) -> str:
        """Return the prompt for a task's queries, documents or plain texts; empty where there is none."""
        prompts = dict(self.named)
        if not any(prompts.values()):
            return ""
        of_mteb = {name: text for name, text in prompts.items() if name != "text"}  # a template's own: mteb would warn
        known, _ = AbsEncoder.validate_task_to_prompt_name(of_mteb, raise_for_invalid_keys=False)
        name = prompt_name(known, task, kind) if known else None
        if name is not None:
            return prompts[name]
        for fallback in _FALLBACKS.get(kind.value, ()) if kind is not None else ():
            if fallback in prompts:
                return prompts[fallback]
        return prompts.get(self.default or "", "")


class UndefinedScoreError(MidlayerError):
    """A layer has one vector for all inputs, so what is scored would be chance or ties."""


class StoredLayer:
    """An mteb encoder of one layer: reads vectors from the store, by the content of each text or image.

    Args:
        store: holds every layer of every text.
        layer: which of them this is.
        name: under which mteb files the results.
        revision: likewise.
        prompts: put before texts.
        modalities: what the model takes.
        similarity: how vectors are compared, as the encoder itself does.
        ensure: called first with the items, their keys and the prompt; makes what is not stored yet.
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
        self.store, self.layer, self.prompts, self.ensure = store, layer, prompts, ensure
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
        self,
        inputs: DataLoader[Any],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,  # noqa: ARG002  (mteb names them)
        hf_subset: str,  # noqa: ARG002
        prompt_type: PromptType | None = None,
        **_: Any,
    ) -> npt.NDArray[np.float32]:
        """Return one row for each input, shape ``(N, D)``."""
        keys = self.keys(inputs, task_metadata=task_metadata, prompt_type=prompt_type)
        vectors = self.store.read(self.layer, keys)
        if all_alike(torch.from_numpy(vectors)[None], keys).item():
            raise UndefinedScoreError(f"All vectors of layer {self.layer} are alike.")
        return vectors

    def keys(
        self, inputs: DataLoader[Any], *, task_metadata: TaskMetadata, prompt_type: PromptType | None
    ) -> list[str]:
        """Return the key of each input; all are then stored, where ``ensure`` is there to do so."""
        items = self._items(inputs)
        prompt = self.prompts.choose(task_metadata, prompt_type)
        keys = [item_key(item, prompt) for item in items]
        if self.ensure is not None:
            self.ensure(items, keys, prompt)
        return keys

    def _items(self, inputs: DataLoader[Any]) -> list[Any]:
        """Return what of the inputs the model takes; a task of images may hold texts beside them."""
        items: list[Any] = []
        for batch in inputs:
            medium = next((name for name in self.media if name in batch), None)
            if medium is None:
                raise OptionError(
                    f"The task hands out {', '.join(batch)}, but the model takes {', '.join(self.media)}."
                )
            items += batch[medium]
        return items


@dataclass(frozen=True)
class Embedder:
    """Embeds what the store lacks: every layer of a text from one pass, batch by batch.

    Attributes:
        encoder: with the whole model.
        store: where the vectors go.
        token_budget: tokens in a batch, or ``"auto"``: as many as the device runs best with.
        stage: counts the texts that this process embeds.
        group: the processes that share the batches.
        compile: whether the model's blocks are compiled while they run.
        planning: is reported to while batches are planned.
        site: what of each layer is read.
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
        """Tokens in a batch that is planned now."""
        return tokens_that_fit(self.encoder) if self.token_budget == "auto" else self.token_budget

    def __call__(self, items: Sequence[Any], keys: Sequence[str], prompt: str) -> None:
        """Embed the items whose keys are not stored.

        The batches are planned when the items are first asked for, and the plan is kept beside the store, so that a
        resumed run and one shared among processes make the same batches, and so the same vectors.
        """
        distinct: Mapping[str, Any] = dict(zip(keys, items, strict=True))
        names, texts = list(distinct), list(distinct.values())
        for planned in (self._planned, self._plan):  # anew where something was pruned, or damaged, since it was planned
            # What one process does not see is made again: they must agree on which batches are whose.
            lacking = set[int]().union(*self.group.share(lambda: self.store.missing(names), inside=True))
            if not lacking:
                return
            plan = partial(planned, names, texts, lacking, prompt) if self.group.rank == 0 else list[list[int]]
            self.planning.step(0)
            batches = self.group.share(plan, inside=True)[0]
            self.group.share(partial(self._embed, names, texts, lacking, batches, prompt), inside=True)
            self.store.refresh()

    def _plan(self, _: Sequence[str], texts: Sequence[Any], lacking: set[int], prompt: str) -> list[list[int]]:
        positions = sorted(lacking)
        batches = batches_of(
            self.encoder,
            [texts[n] for n in positions],
            token_budget=self.tokens,
            max_texts=most_texts(self.tokens, len(self.store.layers), self.store.dim),
            prompt=prompt,
        )
        return [[positions[n] for n in batch] for batch in batches]

    def _planned(self, names: Sequence[str], texts: Sequence[Any], lacking: set[int], prompt: str) -> list[list[int]]:
        """Return the batches that were planned for these items when they were first asked for, or plan them now."""
        # What fits on a GPU may change until it is resumed, and differ between processes; the plan must not.
        chosen = self.token_budget if self.encoder.device.type == "cuda" else self.tokens
        digest = hashlib.blake2b("".join((*names, str(chosen))).encode(), digest_size=12).hexdigest()
        path = self.store.folder / "plans" / f"{digest}.json"
        read = partial(_read_plan, count=len(names))
        while (kept := read_artifact(path, read)) is None:
            write_file_once(path, json.dumps(self._plan(names, texts, lacking, prompt)).encode())
        return kept

    def _embed(
        self,
        names: Sequence[str],
        texts: Sequence[Any],
        lacking: set[int],
        batches: Sequence[Sequence[int]],
        prompt: str,
    ) -> None:
        """Pass the batches that lack something, those of this process, through the model and store what was lacking."""
        reader = layer_reader(self.encoder, layers=self.store.layers, prompt=prompt, site=self.site)
        if self.compile:  # a cache would be compiled anew for each size of batch
            reader = replace(reader, shared=())
        mine = self.group.part([batch for batch in batches if lacking.intersection(batch)])
        self.stage.expect(sum(len(batch) for batch in mine))
        blocks = compiled_blocks(reader.model, reader.anatomy) if self.compile else nullcontext()
        with blocks, Behind(done=self.stage.step) as writing, closing(reader.passes(texts, mine)) as started:
            for passed in started:
                writing.hand_on(self._write, passed, names, lacking)

    def _write(self, passed: Passed, names: Sequence[str], lacking: set[int]) -> int:
        """Store what was lacking of a batch, when the device has made it, and return how many inputs it had."""
        wanted = [n for n, position in enumerate(passed.positions) if position in lacking]
        vectors = passed.vectors()
        if len(wanted) < len(passed.positions):
            vectors = vectors[:, wanted]
        self.store.write([names[passed.positions[n]] for n in wanted], vectors.numpy(), finite=True)
        return len(passed.positions)


def most_texts(tokens: int, layers: int, dim: int) -> int:
    """Return how many texts a batch of so many tokens may hold, whose vectors of all layers are in memory."""
    return max(_FEW_TEXTS, min(tokens // _SHORT, _BATCH_BYTES // (4 * layers * dim)))


def _read_plan(path: Path, *, count: int) -> list[list[int]]:
    """Return the batches in a file, or raise where they are not places of ``count`` items."""
    batches: list[list[int]] = json.loads(path.read_bytes())
    if not isinstance(batches, list) or any(place not in range(count) for batch in batches for place in batch):
        raise ValueError(f"it must be lists of numbers below {count}")
    return batches


def open_store(
    root: Path | str, spec: EncoderSpec, layers: Sequence[int], encoder: LayerEncoder, dtype: StoreDtype
) -> EmbeddingStore:
    """Open the store of everything that changes a vector but the layer and the text."""
    whole = _of_all_layers(spec)
    description = {name: value for name, value in whole.to_dict().items() if name not in ("layer", "similarity")}
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
    return _of_all_layers(spec).digest + ("-half" if dtype == "float16" else "")


def _of_all_layers(spec: EncoderSpec) -> EncoderSpec:
    return replace(spec, layer=-1, similarity="cosine")  # which changes scores, not vectors


def num_dims(encoder: LayerEncoder, norm: Norm) -> int:
    """Return the number of dimensions of a vector, after what follows the last block and after `truncate_dim`."""
    model, pool = cast(Any, encoder[0]).model, cast(Any, encoder[1])
    final = encoder.anatomy.final if norm == "final" else ()
    last = model.get_submodule(final[-1]) if final else None
    width = int(getattr(last, "out_features", pool.embedding_dimension))  # OPT-350m ends in a projection, not a norm
    return min(width, encoder.truncate_dim or width)
