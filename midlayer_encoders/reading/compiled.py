"""Compile the blocks of a model temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from midlayer_encoders.models.anatomy import Anatomy


@contextmanager
def compiled_blocks(model: nn.Module, anatomy: Anatomy) -> Iterator[None]:
    """Compile each block of a model with ``torch.compile`` inside a ``with`` block.

    Blocks are compiled separately, for batches of any size, so they share compiled code and hooks between them still
    work. Rounding differs from the uncompiled model.
    """
    blocks = {id(block): block for block in (anatomy.block(model, k) for k in range(1, anatomy.num_layers + 1))}
    forwards = [(block, vars(block).get("forward")) for block in blocks.values()]  # set by accelerate
    try:
        for block in blocks.values():
            # Compile `forward`, not the module, whose hooks change with each pass.
            block.forward = torch.compile(block.forward, dynamic=True)
        yield
    finally:
        for block, forward in forwards:
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward
