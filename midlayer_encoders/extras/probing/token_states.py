"""Sources of the tokens that probes read: cached in half precision, or computed by the model for each batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from midlayer_encoders._types import Progress, Stage
from midlayer_encoders.errors import NotFiniteError
from midlayer_encoders.reading.capture import final_norm
from midlayer_encoders.reading.reader import LayerReader


@dataclass(frozen=True)
class CachedTokens:
    """Tokens of every layer in memory.

    Attributes:
        states: shape ``(L, N, T, D)``, in any float dtype.
        mask: True for real tokens, shape ``(N, T)``.

    Example:
        >>> cached = CachedTokens(torch.zeros(3, 9, 4, 8), torch.ones(9, 4, dtype=torch.bool))
        >>> cached.shape, cached.batch(torch.tensor([2, 5]))[0].shape
        ((3, 8), torch.Size([3, 2, 4, 8]))
    """

    states: Tensor
    mask: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers, and width."""
        return self.states.shape[0], self.states.shape[3]

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return states ``(L, B, T, D)`` and mask ``(B, T)`` of the examples at ``index``."""
        index = index.to(self.states.device)
        states = self.states[:, index]
        # A CPU multiplies half precision slowly.
        return states if states.is_cuda else states.float(), self.mask[index]


@dataclass(frozen=True)
class LiveTokens:
    """Tokens of every layer, computed in one forward pass per batch each time they are needed.

    Attributes:
        reader: reads the layers of a frozen model.
        inputs: the examples.
    """

    reader: LayerReader
    inputs: Sequence[Any]

    @property
    def device(self) -> torch.device:
        """Device of the model, or of its first part."""
        return next(self.reader.model.parameters()).device

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers, and width."""
        states, _ = self.batch(torch.tensor([0]))
        return states.shape[0], states.shape[3]

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return states ``(L, B, T, D)`` and mask ``(B, T)`` of the examples at ``index``."""
        states_by_layer: dict[int, Tensor] = {}
        masks: list[Tensor] = []
        apply_norm = final_norm(self.reader.model, self.reader.anatomy, self.reader.norm)

        def receive(layer: int, states: Tensor, mask: Tensor, _: list[int]) -> None:
            states_by_layer[layer] = apply_norm(states)
            masks.append(mask)

        for _ in self.reader.embed(self.inputs, [index.tolist()], tokens=receive):
            pass
        device = masks[0].device  # layers may be on several devices
        states = torch.stack([states_by_layer[layer].to(device) for layer in self.reader.layers])
        return states, masks[0].clone()  # autograd cannot save a tensor created in inference mode


TokenSource: TypeAlias = CachedTokens | LiveTokens

#: The positions of a batch, its states ``(L, B, T, D)`` in half precision, and its mask.
_Part: TypeAlias = tuple[Sequence[int], Tensor, Tensor]


def _half_tokens(live: LiveTokens, positions: Sequence[int]) -> _Part:
    """Return the tokens of a batch without the padding of all its examples."""
    states, mask = live.batch(torch.tensor(positions))
    places = mask.any(dim=0).nonzero()
    length = int(places[-1]) + 1 if len(places) else 1  # Whisper pads every waveform to 30 s
    mask = mask[:, :length]
    states = states[:, :, :length].masked_fill(~mask[None, :, :, None], 0.0).to(torch.float16)
    return positions, states, mask


def read_tokens(
    live: LiveTokens, batches: Sequence[Sequence[int]], *, keep_gb: float, progress: Progress | None = None
) -> TokenSource:
    """Return the tokens of all examples, cached in half precision if they need at most ``keep_gb``, else ``live``.

    The cache is on the model's device; an epoch then needs no forward pass.

    Args:
        live: computes the tokens.
        batches: positions of all examples, such as :func:`~midlayer_encoders.reading.batches.batches_of` returns.
        keep_gb: memory limit.
        progress: called after each batch, with the stage ``"reading"``.
    """
    count = len(live.inputs)
    stage = Stage(progress, "reading", count)
    parts = map(partial(_half_tokens, live), batches)
    first = next(parts)
    layers, _, length, width = first[1].shape
    if 2 * layers * count * length * width > 1e9 * keep_gb:
        return live
    cached_states = first[1].new_zeros(layers, count, length, width)
    cached_mask = first[2].new_zeros(count, length)
    for positions, states, mask in chain([first], parts):
        length = mask.shape[1]
        if (extra := length - cached_mask.shape[1]) > 0:
            cached_states = pad(cached_states, (0, 0, 0, extra))
            cached_mask = pad(cached_mask, (0, extra))
        index = torch.tensor(positions, device=cached_mask.device)
        cached_states[:, index, :length] = states
        cached_mask[index, :length] = mask
        stage.step(len(positions))
    for layer, layer_states in zip(live.reader.layers, cached_states, strict=True):
        if not bool(layer_states.isfinite().all()):
            raise NotFiniteError(
                f"Layer {layer} is too large for half precision. Pass norm='final', or keep_gb=0 to cache nothing."
            )
    return CachedTokens(cached_states, cached_mask)


def read_vectors(
    live: LiveTokens, batches: Sequence[Sequence[int]], *, progress: Progress | None = None
) -> CachedTokens:
    """Return one token for each example: its vector, pooled as the encoder pools, in float32."""
    stage = Stage(progress, "reading", len(live.inputs))
    states = live.reader.vectors(live.inputs, batches, done=stage.step)[:, :, None]
    states = states.to(live.device)
    return CachedTokens(states, torch.ones(states.shape[1], 1, dtype=torch.bool, device=states.device))
