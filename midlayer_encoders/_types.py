"""The words that the rooms share: layers, norms, poolings, and what identifies a vector. Hardly any logic."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

__all__ = [
    "MAX_PIXELS",
    "NORMS",
    "POOLINGS",
    "READ_SITES",
    "EncoderSpec",
    "Layer",
    "Medium",
    "Norm",
    "Pooling",
    "Progress",
    "ReadSite",
    "Stage",
]

Layer: TypeAlias = int | float
"""``0`` = embeddings, ``k`` = after block ``k``, ``-1`` = the last, a float in ``(0, 1]`` = fraction of depth."""

Norm: TypeAlias = Literal["final", "none"]
"""``"final"``: the model's own final norm is applied to the layer's states; ``"none"``: the raw residual stream."""

Pooling: TypeAlias = Literal["mean", "last", "cls", "max", "weightedmean"]

Medium: TypeAlias = Literal["text", "image", "audio"]

ReadSite: TypeAlias = Literal["block", "attention", "mlp"]
"""What of a layer is read: the residual stream after its block, or what the block's attention or MLP adds to it."""

MAX_PIXELS = 50_000_000
"""Pixels of the largest image that is read unless told otherwise: 7000 x 7000, 150 MB when decoded."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage (``"embedding"``), how many of its steps are done so far, and how many there are."""

NORMS: tuple[Norm, ...] = ("final", "none")
READ_SITES: tuple[ReadSite, ...] = ("block", "attention", "mlp")
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "cls", "max", "weightedmean")


@dataclass
class Stage:
    """Counts the steps of one stage of a long task and reports them to a progress callback.

    Attributes:
        progress: what is called; ``None`` for nothing.
        name: of the stage.
        total: number of steps known so far.
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
        """Add steps that were done."""
        self.done += count
        self._report()

    def expect(self, more: int) -> None:
        """Add steps that are still to be done."""
        self.total += more
        self._report()

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.name, self.done, self.total)


_NAMES_ON_DISK = {"weights_digest": "weights", "tower_layers": "layers", "prompting": "asked"}


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """Everything that changes a vector or a score: two encoders with equal specs give equal vectors for a text.

    Attributes:
        model: name on the hub, or ``local/`` and the name of the folder.
        revision: branch, tag or commit asked for; ``None`` for a folder or the default branch.
        layer: number of blocks that a text passes through, ``0`` to ``num_layers``; of a joint model, an image.
        num_layers: number of blocks of the uncut model.
        norm: whether the final norm is applied to the layer's states.
        pooling: how token states become one vector; ``"head"`` where a joint model's own heads do it.
        max_length: number of tokens after which a text is truncated.
        dtype: of the weights.
        prompts: name and text of each prompt, and which is used by default.
        bidirectional: whether a causal model's mask is off.
        adapters: adapters merged into the weights, in order.
        chat_template: whether texts are wrapped in the tokenizer's chat template.
        gguf_file: file of quantised weights inside ``model``.
        truncate_dim: number of leading dimensions kept, ``None`` for all.
        modules: settings of the modules that texts pass through, such as the pooling's, as JSON.
        weights_digest: digest of the current weights, which training changes.
        tower: which tower of a joint model it is, ``None`` for a model of one or an encoder with both.
        tower_layers: name and layer of each tower of a joint model.
        similarity: how two vectors are compared, as in sentence-transformers' ``similarity_fn_name``.
        prompting: the template and the tokens that are pooled, as JSON; empty for the text alone.
        mixture: where several layers are combined, each and its share, 1 where they lie side by side; ``layer`` is the
            deepest of them.
        site: what of the layer is read.
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
    gguf_file: str | None
    truncate_dim: int | None
    modules: str
    weights_digest: str
    tower: str | None = None
    tower_layers: tuple[tuple[str, int], ...] = ()
    similarity: str = "cosine"
    prompting: str = ""
    mixture: tuple[tuple[int, float], ...] = ()
    site: ReadSite = "block"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by the names that files on disk have for them."""
        return {_NAMES_ON_DISK.get(name, name): value for name, value in asdict(self).items()}

    def __getattr__(self, name: str) -> Any:
        for new, old in _NAMES_ON_DISK.items():
            if name == old:
                message = f"`EncoderSpec.{old}` is `{new}` now; the old name is removed in 0.4."
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                return getattr(self, new)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that differ whenever any field does."""
        named = self.to_dict()
        for name, default in (("similarity", "cosine"), ("asked", ""), ("mixture", ()), ("site", "block")):
            if named[name] == default:
                del named[name]  # as before there was such a field: results under the old names stay readable
        fields = json.dumps(named, sort_keys=True)
        return hashlib.blake2b(fields.encode(), digest_size=6).hexdigest()
