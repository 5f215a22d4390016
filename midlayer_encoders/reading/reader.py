"""``LayerReader``: many layers of a model from one forward pass for each batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from midlayer_encoders._types import READ_SITES, Layer, Norm, Pooling, ReadSite
from midlayer_encoders.errors import LayerIndexError, OptionError
from midlayer_encoders.models.anatomy import Anatomy, resolve_layers
from midlayer_encoders.models.sites import block_sites
from midlayer_encoders.reading.capture import capture
from midlayer_encoders.reading.flow import Passed, ReaderSettings, TokenReceive, passes
from midlayer_encoders.reading.norm import final_norm
from midlayer_encoders.reading.pooling import pool, real_tokens
from midlayer_encoders.reading.source import LayerSource
from midlayer_encoders.reading.tokenization import TextInputs
from midlayer_encoders.validation import check_choice


class LayerReader(ReaderSettings):
    """Reads the vectors of many layers from one forward pass per batch."""

    def read(
        self, inputs: Mapping[str, Any], positions: list[int], *, tokens: TokenReceive | None = None
    ) -> list[Tensor]:
        """Return the vectors of one batch, ``(B, D)`` in float32 or better for each layer, where the layer lies.

        Modes, gradients and precision are the caller's: a callback reads a model in training through this method.

        Args:
            inputs: keyword arguments of the model's forward.
            positions: of the batch in the whole list, handed on to ``tokens``.
            tokens: also handed the raw states of every layer.
        """
        real = inputs.get("attention_mask")
        normed = final_norm(self.model, self.anatomy, self.norm)
        made: dict[int, Tensor] = {}

        def receive(layer: int, _: str, states: Tensor) -> None:
            mask = real_tokens(real, states, model=self.model)
            if tokens is not None:
                tokens(layer, states, mask, positions)
            made[layer] = pool(normed(states), self.counting(mask), self.pooling)[:, : self.truncate_dim]

        capture(self.model, inputs, receive, anatomy=self.anatomy, layers=self.layers, sites=self.sites)
        return [made[layer] for layer in self.layers]

    def embed(
        self, inputs: Sequence[Any], batches: Sequence[Sequence[int]], *, tokens: TokenReceive | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the positions of each batch and its vectors, ``(L, B, D)`` float32 on the CPU.

        Args:
            inputs: the whole list.
            batches: positions in it, from :func:`~midlayer_encoders.reading.batches.batches_of`.
            tokens: also handed the raw states of every layer, the mask and the positions.

        Raises:
            NotFiniteError: naming the layer and input whose states hold NaN or infinity.
        """
        behind = 0 if tokens is not None or self.device is None or self.device.type != "cuda" else 1
        waiting: deque[Passed] = deque()
        with closing(self.passes(inputs, batches, tokens=tokens)) as started:
            for passed in started:
                waiting.append(passed)
                if len(waiting) > behind:
                    yield _kept(waiting.popleft())
        yield from map(_kept, waiting)

    def passes(
        self, inputs: Sequence[Any], batches: Sequence[Sequence[int]], *, tokens: TokenReceive | None = None
    ) -> Generator[Passed, None, None]:
        """Yield each batch as soon as its pass is started: the vectors are waited for by whoever asks for them.

        Args:
            inputs: the whole list.
            batches: positions in it.
            tokens: as in :meth:`embed`.
        """
        return passes(self, inputs, batches, tokens=tokens)

    def vectors(
        self,
        inputs: Sequence[Any],
        batches: Sequence[Sequence[int]],
        *,
        tokens: TokenReceive | None = None,
        done: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return the vectors of all inputs in their order, shape ``(L, N, D)`` float32 on the CPU.

        Args:
            inputs: the whole list.
            batches: all positions in it.
            tokens: as in :meth:`embed`.
            done: called after each batch with the number of inputs in it.
        """
        whole: Tensor | None = None
        for positions, vectors in self.embed(inputs, batches, tokens=tokens):
            if whole is None:
                whole = vectors.new_empty(len(vectors), len(inputs), vectors.shape[2])
            whole[:, positions] = vectors
            if done is not None:
                done(len(positions))
        return torch.empty(len(self.layers), 0, 0) if whole is None else whole


def _kept(passed: Passed) -> tuple[list[int], Tensor]:
    """Return the positions and vectors of a batch, in memory that may be kept."""
    vectors = passed.vectors()
    return passed.positions, vectors.clone() if passed.pinned else vectors


def layer_reader(
    source: LayerSource,
    *,
    layers: Sequence[Layer] | str = "all",
    norm: Norm | None = None,
    pooling: Pooling | None = None,
    prompt: str = "",
    site: ReadSite = "block",
) -> LayerReader:
    """Return what reads the layers of a source's model from one pass a batch.

    Args:
        source: an encoder of the whole model, or of one cut after the last layer of interest.
        layers: ``"all"`` or some.
        norm: of the vectors; the source's own by default.
        pooling: likewise.
        prompt: put before each text.
        site: what of each layer is read. Layer 0 has no attention and no MLP: there ``"all"`` begins with layer 1.
    """
    check_choice("site", site, READ_SITES)
    if source.after_pooling:
        raise OptionError(
            f"`encoder` must be a model and its pooling to read its layers, but {source.after_pooling[0]} follows "
            "them, which is made for its own vectors. Make it without `center`, `embed_filter` and `normalize`, and "
            "with one layer."
        )
    anatomy = source.anatomy
    if not anatomy.num_blocks:
        raise OptionError(
            f"`encoder` must keep a block to read layers from, but {source.name} was cut at layer 0. "
            "Make it with layer=-1."
        )
    wanted = site_layers(layers, source.layer, site, name=source.name)  # a raw one keeps a block that is not a layer
    _check_site(source.transformer, anatomy, wanted, site)

    def plain(inputs: list[Any]) -> dict[str, Any]:
        return source.host_inputs(inputs, prompt=prompt or None)

    source.eval()
    return LayerReader(
        source.transformer,
        TextInputs(source.tokenizer, plain, prompt),
        anatomy,
        wanted,
        norm or source.norm,
        pooling or source.pooling,
        source.truncate_dim,
        device=source.device,
        unmasked=source.device.type in ("cpu", "cuda"),
        counting=source.counting,
        site=site,
    )


def site_layers(layers: Sequence[Layer] | str, num_layers: int, site: ReadSite, *, name: str) -> list[int]:
    """Return layers as ascending numbers; ``"all"`` leaves out the embeddings, which have no attention and no MLP.

    Example:
        >>> site_layers("all", 3, "block", name="m"), site_layers("all", 3, "mlp", name="m")
        ([0, 1, 2, 3], [1, 2, 3])
    """
    wanted = resolve_layers(layers, num_layers, name=name)
    if site == "block":
        return wanted
    if isinstance(layers, str):
        return wanted[1:]
    if wanted[0] == 0:
        raise LayerIndexError(
            f"`layers` must be from 1 up with site={site!r}: layer 0 of {name} is its embeddings, which no {site} "
            "wrote. Leave it out, or pass 'all' for every block."
        )
    return wanted


def _check_site(model: nn.Module, anatomy: Anatomy, layers: Sequence[int], site: ReadSite) -> None:
    """Raise unless every block that is read has the site."""
    for layer in layers if site != "block" else ():
        block = anatomy.block(model, layer)
        if site not in block_sites(block, getattr(model, "config", None)):
            raise OptionError(
                f"`site` must be one that the blocks have, but block {layer} of {type(model).__name__}, a "
                f"{type(block).__name__}, has no {site} that is known here. Read site='block', or other layers."
            )
