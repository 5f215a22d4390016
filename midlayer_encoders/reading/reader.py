"""``LayerReader``: many layers of a model from one forward pass for each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from midlayer_encoders._types import Layer, Norm, Pooling
from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.models.anatomy import Anatomy, resolve_layers
from midlayer_encoders.reading.capture import capture
from midlayer_encoders.reading.norm import final_norm
from midlayer_encoders.reading.pooling import pool, real_tokens
from midlayer_encoders.reading.source import LayerSource

__all__ = ["LayerReader", "TokenReceive", "layer_reader"]

TokenReceive: TypeAlias = Callable[[int, Tensor, Tensor, list[int]], None]
"""Called with the layer, the raw states ``(B, T, D)``, the mask ``(B, T)`` and the inputs' positions."""


@dataclass(frozen=True)
class LayerReader:
    """Reads the vectors of many layers from one forward pass for each batch.

    Attributes:
        model: the transformer, uncut or cut after the last wanted layer, in eval mode.
        preprocess: makes the model's inputs, on its device, of a list of texts, images or waveforms.
        anatomy: of ``model``.
        layers: which layers, in the order of the results.
        norm: ``"final"`` or ``"none"``.
        pooling: how token states become one vector.
        truncate_dim: number of leading dimensions of a vector to keep, ``None`` for all.
    """

    model: nn.Module
    preprocess: Callable[[list[Any]], Mapping[str, Any]]
    anatomy: Anatomy
    layers: Sequence[int]
    norm: Norm = "final"
    pooling: Pooling = "mean"
    truncate_dim: int | None = None

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
            made[layer] = pool(normed(states), mask, self.pooling)[:, : self.truncate_dim]

        capture(self.model, inputs, receive, anatomy=self.anatomy, layers=self.layers)
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
        for batch in batches:
            yield from self._halving(inputs, list(batch), tokens)

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
        found: list[Tensor] = []
        order: list[int] = []
        for positions, vectors in self.embed(inputs, batches, tokens=tokens):
            found.append(vectors)
            order += positions
            if done is not None:
                done(len(positions))
        return torch.cat(found, dim=1)[:, torch.tensor(order).argsort()]

    def _halving(
        self, inputs: Sequence[Any], batch: list[int], tokens: TokenReceive | None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Embed one batch; when memory runs out, its two halves."""
        try:
            vectors = self._embed_batch(inputs, batch, tokens)
        except torch.OutOfMemoryError:
            if len(batch) == 1 or tokens is not None:  # a metric must not see a state twice
                raise
            torch.cuda.empty_cache()
        else:
            yield batch, vectors
            return
        for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
            yield from self._halving(inputs, half, tokens)

    @torch.inference_mode()
    def _embed_batch(self, inputs: Sequence[Any], batch: list[int], tokens: TokenReceive | None) -> Tensor:
        some = [inputs[position] for position in batch]
        made = self.read(self.preprocess(some), batch, tokens=tokens)
        vectors = torch.stack([one.float().cpu() for one in made])  # layers may lie on several devices
        if not bool(vectors.isfinite().all()):
            row, place = (~vectors.isfinite().all(dim=2)).nonzero()[0].tolist()
            raise NotFiniteError(
                f"Layer {self.layers[row]} gives NaN or infinity for {str(some[place])[:80]!r}. "
                "Load the model with dtype='float32', or check its weights."
            )
        return vectors


def layer_reader(
    source: LayerSource,
    *,
    layers: Sequence[Layer] | str = "all",
    norm: Norm | None = None,
    pooling: Pooling | None = None,
    prompt: str = "",
) -> LayerReader:
    """Return what reads the layers of a source's model from one pass a batch.

    Args:
        source: an encoder of the whole model, or of one cut after the last layer of interest.
        layers: ``"all"`` or some.
        norm: of the vectors; the source's own by default.
        pooling: likewise.
        prompt: put before each text.
    """
    if source.after_pooling:
        raise OptionError(
            f"`encoder` must be a model and its pooling to read its layers, but {source.after_pooling[0]} follows "
            "them, which is made for one layer. Make it without `center`."
        )
    anatomy = source.anatomy
    if not anatomy.num_blocks:
        raise OptionError(
            f"`encoder` must keep a block to read layers from, but {source.name} was cut at layer 0. "
            "Make it with layer=-1."
        )
    wanted = resolve_layers(layers, source.layer, name=source.name)  # a raw encoder keeps a block that is not a layer

    def preprocess(inputs: list[Any]) -> dict[str, Tensor]:
        return source.model_inputs(inputs, prompt=prompt or None)

    source.eval()
    return LayerReader(
        source.transformer, preprocess, anatomy, wanted, norm or source.norm, pooling or source.pooling,
        source.truncate_dim,
    )  # fmt: skip
