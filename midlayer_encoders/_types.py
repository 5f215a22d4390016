"""Types shared by the whole package: layers, norms, poolings, progress, and the spec that identifies an encoder."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

#: ``0`` = embeddings, ``k`` = after block ``k``, ``-1`` = the last, a float in ``(0, 1]`` = fraction of depth.
Layer: TypeAlias = int | float

#: A layer, or one layer for each tower of a joint model.
LayerArgument: TypeAlias = Layer | Mapping[str, Layer]

#: ``"final"`` applies the model's final norm to the layer's states; ``"none"`` takes the raw residual stream.
Norm: TypeAlias = Literal["final", "none"]

Pooling: TypeAlias = Literal["mean", "last", "cls", "max", "weightedmean"]

#: Bits of the weights that bitsandbytes quantizes while a model is loaded.
Quantization: TypeAlias = Literal["4bit", "8bit"]

#: How the spans of one sequence become one vector; see :class:`~midlayer_encoders.Recipe`.
Join: TypeAlias = Literal["sum", "none", "text", "word", "echo"]

Medium: TypeAlias = Literal["text", "image", "audio"]


#: The numbers of a stored vector: of 32 bits, 8 bits or one bit.
Precision: TypeAlias = Literal["float32", "int8", "binary"]

#: Shortest text that every metric can measure: curvature needs two angles, and each half needs two tokens.
MIN_MEASURED_TOKENS = 4

#: Default limit of an image's size in pixels: 7000 x 7000, 150 MB when decoded.
MAX_PIXELS = 50_000_000

#: Called with a stage (``"embedding"``), the number of its steps done so far, and their total.
Progress: TypeAlias = Callable[[str, int, int], None]


@runtime_checkable
class EncoderChoice(Protocol):
    """A layer that was chosen for a model: a :class:`~midlayer_encoders.Selection`, or the best layer of a sweep."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def revision(self) -> str:
        """Revision of the model; ``default`` if it has none."""

    @property
    def num_layers(self) -> int:
        """Number of blocks of the model."""

    @property
    def options(self) -> Mapping[str, Any] | None:
        """Options of the encoder whose layers were measured; ``None`` if they are not known."""

    @property
    def keywords(self) -> Mapping[str, Any]:
        """Keywords of ``LayerEncoder``: the layer, and the recipe if that was chosen, too."""


NORMS: tuple[Norm, ...] = ("final", "none")
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "cls", "max", "weightedmean")
QUANTIZATIONS: tuple[Quantization, ...] = ("4bit", "8bit")
JOINS: tuple[Join, ...] = ("sum", "none", "text", "word", "echo")


@dataclass
class Stage:
    """Counts the steps of one stage of a long task and reports them to a progress callback.

    Attributes:
        progress: the callback, or ``None``.
        name: name of the stage.
        total: number of steps.
        done: number of steps done.

    Example:
        >>> stage = Stage(lambda *report: print(*report), "embedding", total=3)
        >>> stage.step(3)
        embedding 3 3
        >>> stage.expect(5)
        embedding 3 8
    """

    progress: Progress | None
    name: str
    total: int = 0
    done: int = 0

    def step(self, count: int = 1) -> None:
        """Count steps as done."""
        self.done += count
        self._report()

    def expect(self, more: int) -> None:
        """Add steps to the total."""
        self.total += more
        self._report()

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.name, self.done, self.total)


_NAMES_ON_DISK = {"weights_digest": "weights", "tower_layers": "layers", "prompting": "asked"}


def content_digest(content: str | bytes, size: int = 6) -> str:
    """Return a digest of ``size`` bytes as hexadecimal digits.

    Example:
        >>> content_digest("a text", 4)
        '6dc57015'
    """
    data = content.encode() if isinstance(content, str) else content
    return hashlib.blake2b(data, digest_size=size).hexdigest()


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """Everything that changes a vector or a score: encoders with equal specs return equal vectors.

    Attributes:
        model: name on the hub, or ``local/`` and the name of the folder.
        revision: requested branch, tag or commit; ``None`` for a folder or the default branch.
        layer: number of blocks that a text passes through, ``0`` to ``num_layers``; for a joint model, an image.
        num_layers: number of blocks of the uncut model.
        norm: whether the final norm is applied to the layer's states.
        pooling: how token states become one vector; ``"head"`` for the heads of a joint model.
        max_length: number of tokens after which a text is truncated.
        dtype: dtype of the weights.
        prompts: name and text of each prompt, and the default prompt.
        bidirectional: whether a causal model's mask is off.
        adapters: adapters merged into the weights, in order.
        chat_template: whether texts are wrapped in the tokenizer's chat template.
        truncate_dim: number of leading dimensions kept, ``None`` for all.
        modules: settings of the sentence-transformers modules, as JSON.
        weights_digest: digest of the current weights, which training changes.
        tower: tower of a joint model, ``None`` for other models or for an encoder with both towers.
        tower_layers: name and layer of each tower of a joint model.
        similarity: similarity function, as in sentence-transformers' ``similarity_fn_name``.
        prompting: template and pooled tokens, as JSON; empty for the plain text.
        parts: name and digest of everything else: the model's files and own code, tokenizer, implementation of
            attention, changes in memory, and the generation of the package's numerics.
    """

    model: str
    revision: str | None
    layer: int
    num_layers: int
    norm: Norm
    pooling: Pooling | Literal["head"]
    max_length: int | None
    dtype: str
    prompts: tuple[tuple[str, str], ...]
    bidirectional: bool
    adapters: tuple[str, ...]
    chat_template: bool
    truncate_dim: int | None
    modules: str
    weights_digest: str
    tower: str | None = None
    tower_layers: tuple[tuple[str, int], ...] = ()
    similarity: str = "cosine"
    prompting: str = ""
    parts: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by the names that files on disk have for them."""
        return {_NAMES_ON_DISK.get(name, name): value for name, value in asdict(self).items()}

    @property
    def layer_label(self) -> str:
        """The layer, or the layer of each tower (``text-6-image-9``)."""
        return "-".join(f"{name}-{layer}" for name, layer in self.tower_layers) or str(self.layer)

    @property
    def place_label(self) -> str:
        """The tower, if it is one of a joint model, and the layer of all layers (``image-layer-6-of-12``)."""
        depth = "" if self.tower_layers else f"-of-{self.num_layers}"
        return f"{self.tower}-" * bool(self.tower) + f"layer-{self.layer_label}{depth}"

    def at_layer(self, layer: LayerArgument) -> Self:
        """Return the spec of the same encoder at another layer, given as a number or for each tower."""
        if isinstance(layer, Mapping):
            return replace(self, layer=int(layer["image"]), tower_layers=tuple((k, int(v)) for k, v in layer.items()))
        return replace(self, layer=int(layer))

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that differ whenever any field does."""
        return content_digest(json.dumps(self.to_dict(), sort_keys=True))
