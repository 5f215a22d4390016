"""Passes on a GPU with fewer operations, by the kernels in :mod:`midlayer_encoders.extras.kernels.fused_blocks`."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def fused_blocks(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the passes of a model on a GPU are faster, and which holds the model's lock.

    Without a GPU, and where gradients are recorded, nothing changes. States differ from transformers' by rounding.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or not parameter.is_cuda or torch.is_grad_enabled():
        return nullcontext()
    from midlayer_encoders.extras.kernels.fused_blocks import run_fused

    return run_fused(model)
