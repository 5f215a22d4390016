"""``LayerReader``: read many layers of a model from one forward pass per batch."""

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
        """Return the vectors of one batch, ``(B, D)`` in float32 or better for each layer, on the layer's device.

        This method does not change mode, gradients or precision, so callbacks can read a model in training.

        Args:
            inputs: keyword arguments of the model's forward.
            positions: positions of the batch in the whole list, passed to ``tokens``.
            tokens: also called with the raw states of each layer.
        """
        real = inputs.get("attention_mask")
        normed = final_norm(self.model, self.anatomy, self.norm)
        vectors: dict[int, Tensor] = {}

        def receive(layer: int, _: str, states: Tensor) -> None:
            mask = real_tokens(real, states, model=self.model)
            if tokens is not None:
                tokens(layer, states, mask, positions)
            vectors[layer] = pool(normed(states), self.counting(mask), self.pooling)[:, : self.truncate_dim]

        capture(self.model, inputs, receive, anatomy=self.anatomy, layers=self.layers, sites=self.sites)
        return [vectors[layer] for layer in self.layers]

    def embed(
        self, inputs: Sequence[Any], batches: Sequence[Sequence[int]], *, tokens: TokenReceive | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the positions of each batch and its vectors, ``(L, B, D)`` float32 on the CPU.

        Args:
            inputs: all inputs.
            batches: positions of each batch, from :func:`~midlayer_encoders.reading.batches.batches_of`.
            tokens: also called with the raw states of each layer, the mask and the positions.

        Raises:
            NotFiniteError: if a vector contains NaN or infinity; the message names the layer and the input.
        """
        max_pending = 0 if tokens is not None or self.device is None or self.device.type != "cuda" else 1
        pending: deque[Passed] = deque()
        with closing(self.passes(inputs, batches, tokens=tokens)) as started:
            for passed in started:
                pending.append(passed)
                if len(pending) > max_pending:
                    yield _positions_and_vectors(pending.popleft())
        yield from map(_positions_and_vectors, pending)

    def passes(
        self, inputs: Sequence[Any], batches: Sequence[Sequence[int]], *, tokens: TokenReceive | None = None
    ) -> Generator[Passed, None, None]:
        """Yield each batch once its pass has started, without waiting for its vectors.

        Args:
            inputs: all inputs.
            batches: positions of each batch.
            tokens: see :meth:`embed`.
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
        """Return the vectors of all inputs in order, shape ``(L, N, D)`` float32 on the CPU.

        Args:
            inputs: all inputs.
            batches: positions of each batch, covering all inputs.
            tokens: see :meth:`embed`.
            done: called after each batch with its number of inputs.
        """
        all_vectors: Tensor | None = None
        for positions, vectors in self.embed(inputs, batches, tokens=tokens):
            if all_vectors is None:
                all_vectors = vectors.new_empty(len(vectors), len(inputs), vectors.shape[2])
            all_vectors[:, positions] = vectors
            if done is not None:
                done(len(positions))
        return torch.empty(len(self.layers), 0, 0) if all_vectors is None else all_vectors


def _positions_and_vectors(passed: Passed) -> tuple[list[int], Tensor]:
    """Return the positions and vectors of a batch, copied from pinned memory."""
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
    """Return a reader of the layers of a source's model.

    Args:
        source: an encoder of the whole model, or of one cut after the last layer to read.
        layers: ``"all"`` or a list of layers.
        norm: norm of the vectors; by default that of the source.
        pooling: pooling; by default that of the source.
        prompt: prompt prepended to each text.
        site: part of each block to read. Layer 0 has no attention or MLP, so ``"all"`` then starts at layer 1.
    """
    check_choice("site", site, READ_SITES)
    if source.after_pooling:
        raise OptionError(
            f"`encoder` must end with its pooling to read its layers, but has the module "
            f"{source.after_pooling[0]} after it. Create it without `center`, `embed_filter` and `normalize`, and with "
            "one layer."
        )
    anatomy = source.anatomy
    if not anatomy.num_blocks:
        raise OptionError(
            f"`encoder` must have at least one block, but {source.name} was cut at layer 0. Create it with layer=-1."
        )
    # With norm="none" the model has one block more than `source.layer`.
    layer_numbers = site_layers(layers, source.layer, site, name=source.name)
    _verify_site(source.transformer, anatomy, layer_numbers, site)

    def plain(inputs: list[Any]) -> dict[str, Any]:
        return source.host_inputs(inputs, prompt=prompt or None)

    source.eval()
    return LayerReader(
        source.transformer,
        TextInputs(source.tokenizer, plain, prompt),
        anatomy,
        layer_numbers,
        norm or source.norm,
        pooling or source.pooling,
        source.truncate_dim,
        device=source.device,
        unmasked=source.device.type in ("cpu", "cuda"),
        counting=source.counting,
        site=site,
    )


def site_layers(layers: Sequence[Layer] | str, num_layers: int, site: ReadSite, *, name: str) -> list[int]:
    """Return layers as ascending numbers; ``"all"`` omits the embeddings for attention and MLP.

    Example:
        >>> site_layers("all", 3, "block", name="m"), site_layers("all", 3, "mlp", name="m")
        ([0, 1, 2, 3], [1, 2, 3])
    """
    numbers = resolve_layers(layers, num_layers, name=name)
    if site == "block":
        return numbers
    if isinstance(layers, str):
        return numbers[1:]
    if numbers[0] == 0:
        raise LayerIndexError(
            f"`layers` must be 1 or higher with site={site!r}: layer 0 of {name} is its embeddings, which have no "
            f"{site}. Leave it out, or pass 'all' for all blocks."
        )
    return numbers


def _verify_site(model: nn.Module, anatomy: Anatomy, layers: Sequence[int], site: ReadSite) -> None:
    """Verify that all blocks to read have the site."""
    for layer in layers if site != "block" else ():
        block = anatomy.block(model, layer)
        if site not in block_sites(block, getattr(model, "config", None)):
            raise OptionError(
                f"`site` must exist in all blocks, but block {layer} of {type(model).__name__}, a "
                f"{type(block).__name__}, has no {site}. Read site='block', or other layers."
            )
