"""The blocks of a model compiled, for as long as many batches pass through them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from midlayer_encoders.models.anatomy import Anatomy


@contextmanager
def compiled_blocks(model: nn.Module, anatomy: Anatomy) -> Iterator[None]:
    """Run each block of a model as ``torch.compile`` makes it, until the ``with`` block ends.

    A block is compiled by itself, for batches of any size: all blocks share what is compiled for one, and what is read
    between them is read as before. What they compute is rounded in another order.
    """
    blocks = {id(block): block for block in (anatomy.block(model, k) for k in range(1, anatomy.num_layers + 1))}
    own = [(block, vars(block).get("forward")) for block in blocks.values()]  # accelerate gives blocks one of their own
    try:
        for block in blocks.values():
            # Its forward and not the module itself, whose hooks are made anew for each pass.
            block.forward = torch.compile(block.forward, dynamic=True)
        yield
    finally:
        for block, forward in own:
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward
