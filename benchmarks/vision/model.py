"""One trunk for every objective: patches, twelve pre-norm blocks, a final norm; no token but the patches'."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["Block", "PatchTransformer", "prefix_mask", "to_patches"]


class Attention(nn.Module):
    """Self-attention; ``mask`` says which tokens (columns) each token (row) sees."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        B, T, D = states.shape
        query, key, value = self.qkv(states).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.proj(mixed.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """A pre-norm transformer block, the same under every objective."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        states = states + self.attention(self.norm1(states), mask)
        return states + self.mlp(self.norm2(states))


class PatchTransformer(nn.Module):
    """Patches embedded, fixed sine positions added, blocks, final norm; returns states ``(B, T, D)``."""

    positions: Tensor

    def __init__(self, *, size: int = 32, patch: int = 4, width: int = 192, blocks: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.patch, self.width = patch, width
        self.embed = nn.Linear(3 * patch * patch, width)
        self.register_buffer("positions", sine_positions(size // patch, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.apply(_start)

    def forward(
        self, pixel_values: Tensor, mask: Tensor | None = None, kept: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Return the states of the patches.

        Args:
            pixel_values: normalised images, ``(B, 3, H, W)``.
            mask: which patches each patch sees, ``(B, 1, T, T)`` or ``None`` for all.
            kept: positions of the patches to encode, ``(B, K)``, as MAE leaves the others out.
            causal: whether a patch sees only those before it, in raster order.
        """
        states = self.embed(to_patches(pixel_values, self.patch)) + self.positions
        if kept is not None:
            states = states.gather(1, kept[:, :, None].expand(-1, -1, self.width))
        if causal:
            mask = prefix_mask(torch.ones(1, dtype=torch.int64, device=states.device), states.shape[1])
        for block in self.blocks:
            states = block(states, mask)
        return self.norm(states)


def to_patches(images: Tensor, patch: int) -> Tensor:
    """Return the patches in raster order, ``(B, T, 3 * patch * patch)``."""
    B, C, H, W = images.shape
    cut = images.reshape(B, C, H // patch, patch, W // patch, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(B, (H // patch) * (W // patch), C * patch * patch)


def prefix_mask(prefix: Tensor, tokens: int) -> Tensor:
    """Return AIM's prefix attention, ``(B, 1, T, T)``: all of the prefix is seen by all, the rest by what follows it."""
    place = torch.arange(tokens, device=prefix.device)
    causal = place[None, :] <= place[:, None]
    return (causal | (place[None, None, :] < prefix[:, None, None]))[:, None]


def sine_positions(side: int, width: int) -> Tensor:
    """Return fixed positions of a grid, ``(side * side, width)``: half of the width for the row, half for the column."""
    rates = torch.exp(-math.log(10000.0) * torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * rates
    line = torch.cat([angles.sin(), angles.cos()], dim=1)
    grid = torch.cat([line[:, None].expand(-1, side, -1), line[None].expand(side, -1, -1)], dim=2)
    return grid.reshape(side * side, width)


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
