"""What every metric class is: told its layers, updated with one layer at a time, one number per layer at the end."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from midlayer_encoders.errors import LayerIndexError, MidlayerError, NotFiniteError, OptionError

__all__ = ["Kind", "LayerMetric", "TooFewTextsError", "check_at_least", "is_distributed", "joined"]

Kind: TypeAlias = Literal["tokens", "pooled", "views"]
"""What ``update`` wants: token states and their mask, one vector per text, or one vector per text and view."""


class TooFewTextsError(MidlayerError, ValueError):
    """Fewer texts, tokens or distinct vectors than a metric can be computed from."""


class LayerMetric(Metric):
    """One number per layer, from states that arrive layer by layer.

    ``update`` is called once per layer and batch, in any order of batches; ``compute`` returns shape ``(len(layers),)``
    in float64, in the order of ``layers``. States merge across processes by torchmetrics' sync: sums to rounding,
    samples bit for bit. ``update`` does not wait for a GPU, but where eigenvalues are found; whether a number is finite
    is checked in ``compute``.

    Args:
        layers: layer numbers that ``update`` will name, each once.
        torchmetrics_options: torchmetrics' own, such as ``process_group`` or ``compute_on_cpu``.

    Attributes:
        kind: what ``update`` wants: ``"tokens"``, ``"pooled"`` or ``"views"``.
        needs_previous: whether a layer is compared with the one listed before it, so that the first one's value is NaN.
    """

    kind: ClassVar[Kind]
    needs_previous: bool = False
    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    def __init__(self, layers: Sequence[int], **torchmetrics_options: Any) -> None:
        super().__init__(**torchmetrics_options)
        self.layers = tuple(layers)
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise OptionError(f"`layers` must be one or more different layer numbers, but got {list(layers)}.")

    @abstractmethod
    def _value(self, layer: int) -> Tensor:
        """Return the number of one layer, a scalar, from what was kept of it."""

    def compute(self) -> Tensor:
        """Return one value per layer, shape ``(len(layers),)``, float64."""
        return self._all_finite(self.layers, self._values())

    def _values(self) -> Tensor:
        """Return the numbers of all layers, shape ``(len(layers),)``, float64."""
        return torch.stack([self._value(layer).double() for layer in self.layers])

    def forward(self, *_: Any, **__: Any) -> None:
        """Refuse: one layer of one batch has no value for every layer."""
        raise MidlayerError(f"Call `{type(self).__name__}.update` for each layer and batch, then `compute` once.")

    def _position(self, layer: int) -> int:
        if layer not in self.layers:
            raise LayerIndexError(f"`layer` must be one of the metric's layers {list(self.layers)}, but got {layer}.")
        return self.layers.index(layer)

    def _all_finite(self, layers: Sequence[int], values: Tensor) -> Tensor:
        # One look for all layers, since each one waits for the GPU.
        for layer, value in zip(layers, values.tolist(), strict=True):
            if not math.isfinite(value):
                raise NotFiniteError(
                    f"{type(self).__name__} of layer {layer} is {value}: its states hold NaN or infinity. "
                    "Check the model's output at that layer; float16 overflows where bfloat16 or float32 do not."
                )
        return values

    def _finite(self, layer: int, value: Tensor) -> Tensor:
        return self._all_finite([layer], value.double()[None])[0]

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # torchmetrics squeezes a result of one element to a scalar; one layer is still a vector of one.
        wrapped = super()._wrap_compute(compute)
        return functools.wraps(compute)(lambda *args, **kwargs: wrapped(*args, **kwargs).reshape(-1))

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any | None = None
    ) -> None:
        # A process that saw no text has empty lists, which torchmetrics would gather with the wrong shape and type.
        self._agree_on_lists(process_group or self.process_group)
        super()._sync_dist(dist_sync_fn, process_group)

    def _agree_on_lists(self, group: Any | None) -> None:
        """Give every list state one tensor, of the type and shape that the other processes have."""
        names = [name for name, default in self._defaults.items() if isinstance(default, list)]
        if not names or not is_distributed():
            return
        mine = {name: torch.cat(getattr(self, name)) for name in names if getattr(self, name)}
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, {n: (t.dtype, t.shape[1:]) for n, t in mine.items()}, group=group)
        for name in names:
            seen = [their[name] for their in everyone if name in their]
            if seen:
                dtype = functools.reduce(torch.promote_types, [kind for kind, _ in seen])
                empty = torch.empty((0, *seen[0][1]), dtype=dtype, device=self.device)
                setattr(self, name, [mine.get(name, empty).to(dtype)])


def joined(state: Tensor | list[Tensor]) -> Tensor | None:
    """Return a list state as one tensor, as torchmetrics leaves it after a sync; ``None`` when nothing was kept."""
    if isinstance(state, list):
        return torch.cat(state) if state else None
    return state


def is_distributed() -> bool:
    """Return whether more than one process takes part."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_at_least(least: int, count: int, what: str) -> None:
    """Raise a :class:`TooFewTextsError` unless there are ``least`` of something."""
    if count < least:
        raise TooFewTextsError(f"{what} must be at least {least}, but there are {count}: give more, or longer, texts.")
