"""What every metric class is: updated with one layer at a time, one number per layer at the end."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from midlayer_encoders.errors import LayerIndexError, MidlayerError, NotFiniteError, OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


_TOGETHER = 2**24  # numbers of several layers that are taken together: 128 MB in float64

Kind: TypeAlias = Literal["tokens", "pooled", "views", "attentions"]
"""What ``update`` expects: token states and their mask, one vector per text, one per text and view, or attentions."""


class TooFewTextsError(MidlayerError, ValueError):
    """Fewer texts, tokens or distinct vectors than a metric can be computed from."""


class LayerMetric(Metric):
    """One number per layer, from states that arrive layer by layer.

    ``update`` is called once per layer and batch, in any order of batches; ``compute`` returns shape ``(len(layers),)``
    in float64, in the order of ``layers``. States merge across processes by torchmetrics' sync: sums to rounding,
    samples bit for bit. ``update`` does not wait for a GPU, except to find eigenvalues; whether a number is finite is
    checked in ``compute``.

    Args:
        layers: layer numbers that ``update`` will be called with, each once.
        torchmetrics_options: torchmetrics' own, such as ``process_group`` or ``compute_on_cpu``.

    Attributes:
        kind: what ``update`` expects: ``"tokens"``, ``"pooled"``, ``"views"`` or ``"attentions"``.
        needs_previous: whether a layer is compared with the one listed before it, so that the first one's value is NaN.
    """

    kind: ClassVar[Kind]
    needs_previous: bool = False
    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    _compares: ClassVar[str] = ""
    """What a value is made from, of which one update holds only one; empty where one update has a value."""

    def __init__(self, layers: Sequence[int], **torchmetrics_options: Any) -> None:
        super().__init__(**torchmetrics_options)
        self.layers = tuple(layers)
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise OptionError(f"`layers` must be one or more different layer numbers, but got {list(layers)}.")
        # After one update a MetricCollection takes metrics whose states are close for the same, and from then on
        # updates only one of them. States that are alike here can mean different things, so none may ever seem equal
        # to another: NaN is not.
        self.add_state("not_shared", torch.tensor(torch.nan), dist_reduce_fx="sum")

    @abstractmethod
    def _value(self, layer: int) -> Tensor:
        """Return the number of one layer, a scalar, from what was kept of it."""

    def settle(self) -> None:
        """Start what is left to do before ``compute``, without waiting for the device: nothing here."""

    def compute(self) -> Tensor:
        """Return one value per layer, shape ``(len(layers),)``, float64; NaN for the first if ``needs_previous``."""
        return self._all_finite(self.layers, self._values(self.layers))

    def _values(self, layers: Sequence[int]) -> Tensor:
        """Return the numbers of some layers, shape ``(len(layers),)``, float64."""
        return one_device([self._value(layer) for layer in layers])

    def _has_value(self, layer: int) -> bool:
        return not self.needs_previous or layer != self.layers[0]

    def forward(self, layer: int, *args: Any, **kwargs: Any) -> Tensor:
        """Add one layer of a batch as ``update`` does, and return that layer's value on this batch alone.

        torchmetrics returns ``compute`` of the batch here. One call brings one layer, so it is one number: a scalar in
        float64, of this process alone unless ``dist_sync_on_step``. Metrics that compare layers, or views, of a text
        have no value on one layer of one view, and raise a :class:`MidlayerError`.
        """
        if self._compares:
            raise MidlayerError(
                f"{type(self).__name__} has no value for one update: it compares {self._compares} of a batch. "
                "Call `update` for each of them, then `compute` once."
            )
        batch = self._without_texts()
        batch.update(layer, *args, **kwargs)
        batch.sync(should_sync=self.dist_sync_on_step)
        value = batch._all_finite([layer], batch._values([layer]))[0]
        self.update(layer, *args, **kwargs)
        self._forward_cache = value  # type: ignore[assignment]  # Lightning logs it
        return value

    def _without_texts(self) -> LayerMetric:
        """Return a metric with the same options that has seen no text."""
        other = copy(self)
        for name, default in self._defaults.items():
            if isinstance(default, list):  # `reset` would clear the list that both hold
                setattr(other, name, [])
        other.reset()
        return other

    def plot(
        self, val: Tensor | Sequence[Tensor] | None = None, ax: Axes | None = None
    ) -> tuple[Figure | SubFigure, Axes]:
        """Draw the values over the layers, and return the figure and its axes.

        Args:
            val: what ``compute`` returned, or several of those, one line each; ``None`` to compute it now.
            ax: axes to draw in; ``None`` for a new figure.
        """
        import matplotlib.pyplot as plt

        axes = plt.subplots()[1] if ax is None else ax
        val = self.compute() if val is None else val
        for values in [val] if isinstance(val, Tensor) else val:
            axes.plot(self.layers, values.tolist(), marker="o")
        axes.set(xlabel="layer", ylabel=type(self).__name__)
        return axes.figure, axes

    def _position(self, layer: int) -> int:
        if layer not in self.layers:
            raise LayerIndexError(f"`layer` must be one of the metric's layers {list(self.layers)}, but got {layer}.")
        return self.layers.index(layer)

    def _all_finite(self, layers: Sequence[int], values: Tensor) -> Tensor:
        # All layers at once, since each check waits for the GPU.
        for layer, value in zip(layers, values.tolist(), strict=True):
            if self._has_value(layer) and not math.isfinite(value):
                raise self._not_finite(layer, value)
        return values

    def _not_finite(self, layer: int, value: float) -> NotFiniteError:
        return NotFiniteError(
            f"{type(self).__name__} of layer {layer} is {value}: its states hold NaN or infinity. "
            "Check the model's output at that layer; float16 overflows where bfloat16 or float32 do not."
        )

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
                setattr(self, name, [mine.get(name, empty).to(self.device, dtype)])


def joined(state: Tensor | list[Tensor]) -> Tensor | None:
    """Return a list state as one tensor, as torchmetrics leaves it after a sync; ``None`` when nothing was kept."""
    if isinstance(state, list):
        return torch.cat(state) if state else None
    return state


def in_stacks(layers: Sequence[Tensor], of: Callable[[Tensor], Tensor], *, numbers: int = 0) -> list[Tensor]:
    """Return the number of each layer, found for as many layers at once as are alike and fit into memory.

    Args:
        layers: what was kept of each layer.
        of: the numbers ``(L,)`` of several layers whose tensors are stacked, ``(L, *)``.
        numbers: how many temporary numbers one layer takes, where these are more than it has itself.

    Example:
        >>> in_stacks([torch.ones(2), torch.ones(3), torch.ones(3)], lambda stack: stack.sum(dim=1))
        [tensor(2.), tensor(3.), tensor(3.)]
    """
    groups: dict[Any, list[int]] = {}
    for place, kept in enumerate(layers):
        groups.setdefault((kept.shape, kept.dtype, kept.device), []).append(place)
    found: dict[int, Tensor] = {}
    for places in groups.values():
        size = max(1, _TOGETHER // max(1, numbers, layers[places[0]].numel()))
        for start in range(0, len(places), size):
            some = places[start : start + size]
            found.update(zip(some, of(torch.stack([layers[place] for place in some])), strict=True))
    return [found[place] for place in range(len(layers))]


def one_device(values: Sequence[Tensor]) -> Tensor:
    """Return scalars, of layers that may lie on several devices, as one tensor in float64."""
    return torch.stack([value.to(values[0].device, torch.float64) for value in values])


def is_distributed() -> bool:
    """Return whether more than one process takes part."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_at_least(least: int, count: int, what: str) -> None:
    """Raise a :class:`TooFewTextsError` unless there are ``least`` of something."""
    if count < least:
        raise TooFewTextsError(f"{what} must be at least {least}, but there are {count}: give more, or longer, texts.")
