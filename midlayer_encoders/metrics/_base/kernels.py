"""Whether token states can be read where they are, by the Triton kernels, which are imported only then."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from midlayer_encoders.spectra import kernels_wanted

__all__ = ["kernels_run"]


def kernels_run(states: Tensor) -> bool:
    """Return whether the kernels can read the states: on an NVIDIA GPU with TF32, or in Triton's interpreter."""
    readable = states.ndim == 3 and states.stride(-1) == 1 and states.dtype != torch.float64 and states.numel() > 0
    if not readable or not kernels_wanted() or not _triton_is_here():
        return False
    if states.is_cuda:
        return _has_tf32(states.device)
    return os.environ.get("TRITON_INTERPRET") == "1" and states.device.type == "cpu"


@cache
def _has_tf32(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _triton_is_here() -> bool:
    return find_spec("triton") is not None
