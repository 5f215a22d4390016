"""Run the blocks of a model on a GPU with fewer operations.

transformers composes an RMSNorm of six operations and a rotation by position of ten, each of which reads and writes all
states: on an H200 they take half of the time of a Llama's pass. Inside :func:`run_fused` each is one operation.

- A norm becomes torch's own ``rms_norm``, which rounds once where transformers rounds twice.
- A rotation becomes a Triton kernel with bitwise equal results, as soon as another thread has compiled it.
- Attention does not use cuDNN, which needs about 0.1 s for its plan of each new shape and is no faster afterwards.
"""

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from midlayer_encoders._isolation import with_globals
from midlayer_encoders.extras.kernels import rotations
from midlayer_encoders.extras.kernels.norm_forms import find_form, norm_eps
from midlayer_encoders.metrics.eigen import kernels_run_on
from midlayer_encoders.reading.locks import turn

_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # all but cuDNN
_ROTATION = "apply_rotary_pos_emb"  # the function of a modeling file that rotates queries and keys

_Forward: TypeAlias = Callable[..., Any]

_compiling = ThreadPoolExecutor(1, thread_name_prefix="midlayer-compiling")
_fusions: WeakKeyDictionary[nn.Module, list[tuple[nn.Module, _Forward]]] = WeakKeyDictionary()


@contextmanager
def run_fused(model: nn.Module) -> Iterator[None]:
    """Run the passes of a model on a GPU faster inside a ``with`` block, which holds the model's lock."""
    with turn(model), sdpa_kernel(_ATTENTION), _replace_forwards(model):
        yield


@contextmanager
def _replace_forwards(model: nn.Module) -> Iterator[None]:
    if model not in _fusions:
        _fusions[model] = list(_find_fusions(model))
    # A forward function that the module itself has, such as a user's or an outer block's, stays.
    replaced = [(module, forward) for module, forward in _fusions[model] if "forward" not in vars(module)]
    for module, forward in replaced:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, _ in replaced:
            vars(module).pop("forward", None)


def _find_fusions(model: nn.Module) -> Iterator[tuple[nn.Module, _Forward]]:
    """Return the modules that can run faster, and their forward functions."""
    for module in model.modules():
        if _is_rms_norm(module):
            yield module, partial(_rms_norm, module)
        elif (forward := _with_fused_rotation(type(module).forward)) is not None:
            yield module, MethodType(forward, module)


# --- norms ------------------------------------------------------------------------------------------------------------


def _is_rms_norm(module: nn.Module) -> bool:
    """Return True if a module divides by the root mean square and multiplies by a weight, tried on random rows."""
    weight = getattr(module, "weight", None)
    num_arguments = len(inspect.signature(type(module).forward).parameters) - 1  # a gate would be a second one
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or num_arguments != 1:
        return False
    try:
        form = find_form(nn.Sequential(module), weight.detach()[None, None])
    except Exception:  # weights that are elsewhere until a pass, or another kind of module
        return False
    return form is not None and not form.center and not form.offset and getattr(module, "bias", None) is None


def _rms_norm(module: Any, hidden_states: Tensor) -> Tensor:
    states, weight = hidden_states, module.weight
    # A pass of another thread, autocast, or a part of the states.
    if torch.is_grad_enabled() or states.dtype != weight.dtype or states.shape[-1:] != weight.shape:
        return type(module).forward(module, states)  # type: ignore[no-any-return]
    return nn.functional.rms_norm(states, weight.shape, weight, norm_eps(module))


# --- rotations --------------------------------------------------------------------------------------------------------


@cache
def _with_fused_rotation(forward: _Forward) -> _Forward | None:
    """Return the forward function of an attention module with a fused rotation, or None if it rotates nothing."""
    if not isinstance(forward, FunctionType) or forward.__closure__ or _ROTATION not in forward.__code__.co_names:
        return None
    rotation = forward.__globals__.get(_ROTATION)
    if not callable(rotation) or list(inspect.signature(rotation).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None
    # Its own globals, so that other users of the modeling file keep theirs.
    return with_globals(forward, **{_ROTATION: _Rotation(rotation)})  # type: ignore[no-any-return]


class _Rotation:
    """Rotates queries and keys with a kernel, once it is compiled and was bitwise equal to the plain function."""

    def __init__(self, plain: _Forward) -> None:
        self.plain = plain
        self._trials: dict[Any, Future[bool]] = {}

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain_only = args or kwargs or torch.is_grad_enabled() or not (_fits(q, cos) and _fits(k, cos))
        if not plain_only and self._is_ready(q, k):
            return rotations.rotate(q, cos, sin), rotations.rotate(k, cos, sin)
        return self.plain(q, k, cos, sin, *args, **kwargs)

    def _is_ready(self, q: Tensor, k: Tensor) -> bool:
        kind = q.device, q.dtype, q.shape[1], k.shape[1], q.shape[3]
        if kind not in self._trials:
            self._trials[kind] = _compiling.submit(self._agrees, *kind)
        trial = self._trials[kind]
        return trial.done() and trial.result()

    @torch.inference_mode()
    def _agrees(self, device: torch.device, dtype: torch.dtype, q_heads: int, k_heads: int, width: int) -> bool:
        """Compile the kernel, and return whether it agrees with the plain function on random states."""
        try:
            draw = torch.Generator().manual_seed(0)
            shapes = (2, 3, q_heads, width), (2, 3, k_heads, width), (1, 3, width), (1, 3, width)
            q, k, cos, sin = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
            states = q.transpose(1, 2), k.transpose(1, 2)
            expected = self.plain(*states, cos, sin)
            return all(
                torch.equal(rotations.rotate(each, cos, sin), plain)
                for each, plain in zip(states, expected, strict=True)
            )
        except Exception:  # the plain function is always right
            return False


def _fits(states: Tensor, cos: Tensor) -> bool:
    """Return True if the kernel can rotate these states, ``(B, H, T, D)``, by a table of cosines ``(B, T, D)``."""
    if states.ndim != 4 or cos.ndim != 3 or len(cos) not in (1, len(states)):
        return False
    is_table = cos.shape[1:] == states.shape[2:] and cos.dtype == states.dtype and cos.is_contiguous()
    return is_table and states.stride(3) == 1 and states.numel() > 0 and kernels_run_on(states, (7, 0))
