"""Where probes get a batch of tokens from: a store in half precision, read once, or the model, as often as asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from midlayer_encoders._types import Progress, Stage
from midlayer_encoders.errors import NotFiniteError
from midlayer_encoders.reading.norm import final_norm
from midlayer_encoders.reading.reader import LayerReader

__all__ = ["KeptTokens", "LiveTokens", "TokenSource", "read_tokens", "read_vectors"]


class TokenSource(Protocol):
    """What gives the tokens of every layer for some examples."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers, and width."""
        ...

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return states ``(L, B, T, D)`` and mask ``(B, T)`` of the examples at ``index``."""
        ...


@dataclass(frozen=True)
class KeptTokens:
    """Tokens of every layer that lie in memory.

    Attributes:
        states: shape ``(L, N, T, D)``, in any float type.
        mask: which are real, shape ``(N, T)``.

    Example:
        >>> kept = KeptTokens(torch.zeros(3, 9, 4, 8), torch.ones(9, 4, dtype=torch.bool))
        >>> kept.shape, kept.batch(torch.tensor([2, 5]))[0].shape
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
    """Tokens of every layer from one forward pass a batch, each time they are asked for; nothing is kept.

    Attributes:
        reader: reads the layers of a frozen model.
        inputs: the examples.
    """

    reader: LayerReader
    inputs: Sequence[Any]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers, and width."""
        states, _ = self.batch(torch.tensor([0]))
        return states.shape[0], states.shape[3]

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return states ``(L, B, T, D)`` and mask ``(B, T)`` of the examples at ``index``."""
        made: dict[int, Tensor] = {}
        masks: list[Tensor] = []
        normed = final_norm(self.reader.model, self.reader.anatomy, self.reader.norm)

        def receive(layer: int, states: Tensor, mask: Tensor, _: list[int]) -> None:
            made[layer] = normed(states)
            masks.append(mask)

        for _ in self.reader.embed(self.inputs, [index.tolist()], tokens=receive):
            pass
        device = masks[0].device  # layers may lie on several
        states = torch.stack([made[layer].to(device) for layer in self.reader.layers])
        return states, masks[0].clone()  # one made in inference mode cannot be kept for a backward pass


def read_tokens(
    live: LiveTokens, batches: Sequence[Sequence[int]], *, keep_gb: float, progress: Progress | None = None
) -> TokenSource:
    """Return the tokens of all examples, kept in half precision where they need at most ``keep_gb``, else ``live``.

    Kept ones lie on the model's device; an epoch then costs no forward pass.

    Args:
        live: gives the tokens.
        batches: positions of all examples, such as :func:`~midlayer_encoders.reading.batches.batches_of` gives.
        keep_gb: memory that may be used.
        progress: called after each batch, with the stage ``"reading"``.
    """
    count = len(live.inputs)
    stage = Stage(progress, "reading", count)
    states, mask = torch.empty(0), torch.empty(0)
    for positions in batches:
        made, real = live.batch(torch.tensor(positions))
        if not mask.numel():
            layers, _, tokens, width = made.shape
            if 2 * layers * count * tokens * width > 1e9 * keep_gb:
                return live
            states = made.new_zeros(layers, count, tokens, width, dtype=torch.float16)
            mask = real.new_zeros(count, tokens)
        if real.shape[1] > mask.shape[1]:
            states, mask = _longer(states, real.shape[1], dim=2), _longer(mask, real.shape[1], dim=1)
        index = torch.tensor(positions, device=mask.device)
        states[:, index, : real.shape[1]] = made.masked_fill(~real[None, :, :, None], 0.0).to(states.dtype)
        mask[index, : real.shape[1]] = real
        stage.step(len(positions))
    _check_finite(states, live)
    return KeptTokens(states, mask)


def read_vectors(live: LiveTokens, batches: Sequence[Sequence[int]], *, progress: Progress | None = None) -> KeptTokens:
    """Return one token for each example: its vector, pooled as the encoder pools, in float32."""
    stage = Stage(progress, "reading", len(live.inputs))
    states = live.reader.vectors(live.inputs, batches, done=stage.step)[:, :, None]
    states = states.to(next(live.reader.model.parameters()).device)
    return KeptTokens(states, torch.ones(states.shape[1], 1, dtype=torch.bool, device=states.device))


def _longer(kept: Tensor, length: int, *, dim: int) -> Tensor:
    shape = list(kept.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([kept, kept.new_zeros(shape)], dim=dim)


def _check_finite(states: Tensor, live: LiveTokens) -> None:
    for layer, kept in zip(live.reader.layers, states, strict=True):
        if not bool(kept.isfinite().all()):
            raise NotFiniteError(
                f"Layer {layer} is too large for half precision. Pass norm='final', or keep_gb=0 to keep nothing."
            )
