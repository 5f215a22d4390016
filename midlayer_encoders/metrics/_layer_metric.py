"""The base class of all metrics, updated with one layer at a time, and their common inputs, precision and products."""

from __future__ import annotations

import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor
from torch import distributed as dist
from torchmetrics import Metric

from midlayer_encoders._isolation import full_precision
from midlayer_encoders.errors import LayerIndexError, MidlayerError, NotFiniteError, OptionError
from midlayer_encoders.metrics.eigen import KERNELS_IN_FLOAT64, kernels_enabled, kernels_run_on
from midlayer_encoders.validation import check_choice, check_count

_STACK_SIZE = 2**24  # numbers of several layers that are stacked: 128 MB in float64
_MAX_TEMPORARIES = 2**24  # temporary numbers at once, 64 MB in float32: a large batch is never copied whole

#: The input of ``update``: token states and their mask, one vector per text, one per text and view, or one of each
#: text (view 0) and one of its shortened copy (view 1).
Kind: TypeAlias = Literal["tokens", "pooled", "views", "copies"]

#: Divisor of the entropy: 1, min(log N, log D), log N, log D, or log N log D.
Normalization: TypeAlias = Literal["raw", "maxEntropy", "logN", "logD", "logNlogD"]

#: The class of each metric by the name of its function.
CLASSES: dict[str, type[LayerMetric]] = {}


class TooFewTextsError(MidlayerError, ValueError):
    """There are fewer texts, tokens or distinct vectors than a metric needs."""


class LayerMetric(Metric):
    """One number per layer, from states that arrive layer by layer.

    Call ``update(…, layer=k)`` once per layer and batch, in any order of batches; ``compute`` returns shape
    ``(len(layers),)`` in float64, in the order of ``layers``. torchmetrics' sync merges states across processes: sums
    up to rounding, samples bit for bit. ``update`` waits for a GPU only to find eigenvalues; ``compute`` checks
    that values are finite.

    A subclass declares its options by naming its function: ``class Curvature(LayerMetric, function=curvature)`` takes
    every argument of ``curvature`` that has a default, except the mask.

    Args:
        layers: layer numbers that ``update`` will be called with, each once.
        options: options of the metric's function, and torchmetrics' own, such as ``process_group``.

    Attributes:
        kind: the input of ``update``: ``"tokens"``, ``"pooled"``, ``"views"`` or ``"copies"``.
        needs_previous: True if each layer is compared with the one listed before it, so that the first value is NaN.
        options: values of the function's options.
    """

    kind: ClassVar[Kind]
    needs_previous: bool = False
    is_differentiable = False
    higher_is_better = None
    full_state_update = (
        True  # a batch takes an update for each layer, so `Running` refuses it: its window counts updates
    )
    _option_defaults: ClassVar[dict[str, Any]] = {}
    _number: ClassVar[Callable[..., Any]]

    def __init_subclass__(
        cls, *, function: Callable[..., Tensor] | None = None, number: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        """Declare the options of a subclass.

        Args:
            function: the pure function whose name and options the metric has.
            number: computes the numbers of several layers from what the base class accumulates and the options; by
                default ``function``.
            kwargs: passed on.
        """
        super().__init_subclass__(**kwargs)
        if function is None:
            return
        CLASSES[function.__name__] = cls
        cls._number = staticmethod(number or function)
        options = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is not parameter.empty and parameter.name != "mask"
        ]
        cls._option_defaults = {option.name: option.default for option in options}
        _, *named, rest = inspect.signature(cls.__init__).parameters.values()
        named = [parameter for parameter in named if parameter.name not in cls._option_defaults]
        cls.__signature__ = inspect.Signature([*named, *options, rest])  # type: ignore[attr-defined]

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        values = {name: options.pop(name, default) for name, default in self._option_defaults.items()}
        # torchmetrics would gather in a group of one process, too, and fail if it has no backend for the device.
        super().__init__(**{"distributed_available_fn": is_distributed, "dist_sync_fn": gather_states, **options})
        check_options(**values)
        self.options = values
        self.layers = tuple(layers)
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise OptionError(f"`layers` must be one or more different layer numbers, but got {list(layers)}.")
        # After one update, a MetricCollection treats metrics with close states as one and updates only the first. Equal
        # states of different metrics can mean different things, and NaN keeps them unequal.
        self.add_state("not_shared", torch.tensor(torch.nan), dist_reduce_fx="sum")

    def settle(self) -> None:
        """Queue the remaining work of ``compute`` without waiting for the device."""

    def compute(self) -> Tensor:
        """Return one value per layer, shape ``(len(layers),)``, float64; the first is NaN if ``needs_previous``."""
        values = self._values()
        # One check for all layers because each check waits for the GPU.
        for layer, value in zip(self.layers, values.tolist(), strict=True):
            if self._has_value(layer) and not math.isfinite(value):
                raise self._not_finite(layer, value)
        return values

    @abstractmethod
    def _values(self) -> Tensor:
        """Return the numbers of all layers, shape ``(len(layers),)``, float64."""

    def _has_value(self, layer: int) -> bool:
        return not self.needs_previous or layer != self.layers[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> LayerMetric:
        # torchmetrics converts the states in `set_dtype`, and if a module that holds the metric is converted with `to`,
        # as Lightning does for precision="bf16-true". But a metric accumulates in float64 whatever its inputs.
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, *args, **kwargs)
        return self

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: one update has the states of one layer, and ``compute`` returns the values of all layers."""
        raise MidlayerError(f"{type(self).__name__} must not be called: call `update` for each layer, then `compute`.")

    def _position(self, layer: int) -> int:
        if layer not in self.layers:
            raise LayerIndexError(f"`layer` must be one of the metric's layers {list(self.layers)}, but got {layer}.")
        return self.layers.index(layer)

    def _not_finite(self, layer: int, value: float) -> NotFiniteError:
        return NotFiniteError(
            f"{type(self).__name__} of layer {layer} is {value} because its states hold NaN or infinity. "
            "Check the model's output at that layer; float16 overflows where bfloat16 and float32 do not."
        )

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # torchmetrics squeezes a result of one element to a scalar, but the result must have one axis.
        wrapped = super()._wrap_compute(compute)
        return functools.wraps(compute)(lambda *args, **kwargs: wrapped(*args, **kwargs).reshape(-1))


def gather_states(state: Tensor, group: Any = None) -> list[Tensor]:
    """Return the state of every process that has one, for torchmetrics' sync.

    torchmetrics' own function would gather the empty list of a process without texts with the wrong shape and type.
    """
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, state.cpu(), group=group)
    return [part.to(state.device) for part in parts if part.numel()] or [state]


def concat_state(state: Tensor | list[Tensor]) -> Tensor:
    """Return a list state, which may be empty, as one tensor; after a sync it already is a tensor."""
    if isinstance(state, Tensor):
        return state
    return torch.cat(state) if state else torch.empty(0)


def in_stacks(layers: Sequence[Tensor], number: Callable[[Tensor], Tensor], *, temporaries: int = 0) -> list[Tensor]:
    """Return the number of each layer, computed for as many similar layers at once as fit into memory.

    Args:
        layers: one tensor per layer.
        number: returns the numbers ``(L,)`` of stacked layers, ``(L, *)``.
        temporaries: temporary numbers that one layer needs, if more than its own size.

    Example:
        >>> in_stacks([torch.ones(2), torch.ones(3), torch.ones(3)], lambda stack: stack.sum(dim=1))
        [tensor(2.), tensor(3.), tensor(3.)]
    """
    groups: dict[Any, list[int]] = {}
    for position, tensor in enumerate(layers):
        groups.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(position)
    numbers: dict[int, Tensor] = {}
    for positions in groups.values():
        size = max(1, _STACK_SIZE // max(1, temporaries, layers[positions[0]].numel()))
        for start in range(0, len(positions), size):
            chunk = positions[start : start + size]
            numbers.update(zip(chunk, number(torch.stack([layers[position] for position in chunk])), strict=True))
    return [numbers[position] for position in range(len(layers))]


def one_device(values: Sequence[Tensor]) -> Tensor:
    """Return scalars from several devices as one float64 tensor."""
    return torch.stack([value.to(values[0].device, torch.float64) for value in values])


def is_distributed() -> bool:
    """Return True if there is more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_at_least(least: int, count: int, subject: str) -> None:
    """Raise a :class:`TooFewTextsError` if ``count`` is below ``least``."""
    if count < least:
        raise TooFewTextsError(f"{subject} must be at least {least}, but there are {count}: pass more or longer texts.")


def check_options(**options: Any) -> None:
    """Raise an :class:`OptionError` if an option of a metric is invalid; others may have any value."""
    for name, value in options.items():
        if name in ("alpha", "t", "temperature", "delta") and not value > 0:
            raise OptionError(f"`{name}` must be greater than 0, but got {value}.")
        if name in ("step", "k", "permutations"):
            check_count(name, value)
    if not options.get("epsilon", 0) >= 0:
        raise OptionError(f"`epsilon` must be 0 or more (1e-7 for RankMe), but got {options['epsilon']}.")
    if not 0 <= options.get("discard", 0) < 1:
        raise OptionError(f"`discard` must be in [0, 1), but got {options['discard']}.")
    first, last = options.get("first", 1), options.get("last", 2)
    if not 1 <= first < last:
        raise OptionError(f"`first` and `last` must be ranks with 1 <= first < last, but got {first} and {last}.")
    check_choice("normalization", options.get("normalization", "raw"), get_args(Normalization))


def check_embeddings(embeddings: Tensor, index: Tensor | None) -> None:
    """Raise an :class:`OptionError` unless there is one row, and one index, per text."""
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        raise OptionError(
            f"`embeddings` must be (B, D) of floats, but got {tuple(embeddings.shape)} of {embeddings.dtype}."
        )
    if index is not None and (index.shape != embeddings.shape[:1] or index.is_floating_point()):
        raise OptionError(
            f"`index` must be {len(embeddings)} integers, the position of each text in the whole list, "
            f"but got {tuple(index.shape)} of {index.dtype}."
        )


def copy_if_view(embeddings: Tensor) -> Tensor:
    """Return vectors that own their memory: a copy if they are a view into larger states."""
    rows = embeddings.detach()
    return rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows


def check_tokens(states: Tensor, mask: Tensor) -> None:
    """Raise an :class:`OptionError` unless the mask fits the states."""
    if states.ndim != 3 or mask.shape != states.shape[:2] or mask.dtype != torch.bool:
        raise OptionError(
            "`states` must be (B, T, D) and `mask` (B, T) of bool, "
            f"but got {tuple(states.shape)} and {tuple(mask.shape)} of {mask.dtype}."
        )


def chunks(states: Tensor, mask: Tensor, in_place: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a batch in chunks that need a bounded number of temporary numbers: T x D for a text, T x T ``in_place``."""
    tokens, width = states.shape[1:]
    texts = max(1, _MAX_TEMPORARIES // max(1, tokens * (tokens if in_place else width)))
    yield from zip(torch.split(states, texts), torch.split(mask, texts), strict=True)


def all_real(states: Tensor) -> Tensor:
    """Return the mask of states without padding, shape ``(*, T)``."""
    return torch.ones(states.shape[:-1], dtype=torch.bool, device=states.device)


# --- precision and Gram matrices ------------------------------------------------------------------------------------


def precise(states: Tensor) -> Tensor:
    """Return states in float64 on a CPU, where it costs little more, and in float32 or better elsewhere."""
    double = states.device.type == "cpu" or states.dtype == torch.float64
    return states.to(torch.float64 if double else torch.float32)


def result_dtype(states: Tensor) -> torch.dtype:
    """Return float64 for float64 states and float32 for all others."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


def exact_products(rows: Tensor) -> AbstractContextManager[None]:
    """Return a context for products of ``rows`` without autocast and TF32, which float64 never has."""
    # These settings belong to all threads, and while a callback computes in float64, another thread may train.
    return nullcontext() if rows.dtype == torch.float64 else full_precision(rows.device.type)


def lengths(rows: Tensor) -> Tensor:
    """Return the Euclidean length of each row of ``(*, N, D)``, shape ``(*, N)``."""
    result: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return result


def unit_rows(rows: Tensor) -> Tensor:
    """Scale each row of ``(*, N, D)`` to length one; a zero row stays zero, NaN stays NaN."""
    length = lengths(rows).unsqueeze(-1)
    return rows / torch.where(length == 0, 1.0, length)


def kernels_can_read(states: Tensor) -> bool:
    """Return True if the Triton kernels can read these states: on an NVIDIA GPU with TF32, or in the interpreter."""
    readable = states.ndim == 3 and states.stride(-1) == 1 and states.dtype != torch.float64 and states.numel() > 0
    return readable and kernels_enabled() and torch.version.hip is None and kernels_run_on(states, (8, 0))


def prepare_rows(states: Tensor, mask: Tensor | None, *, center: bool, unit: bool) -> Tensor:
    """Return rows in working precision with padding set to zero, optionally centered and scaled to unit length.

    A row that differs from the mean only by rounding becomes zero: scaled up, repeated rows would be noise.

    Args:
        states: shape ``(*, N, D)``.
        mask: real rows, shape ``(*, N)``; ``None`` for all.
        center: subtract the mean of the real rows.
        unit: scale rows to length one, after centering.

    Returns:
        Shape ``(*, N, D)``.
    """
    rows = precise(states if mask is None else torch.where(mask.unsqueeze(-1), states, 0.0))
    if not center and not unit:
        return rows
    mean = torch.zeros_like(rows[..., :1, :])
    if center:
        count = rows.shape[-2] if mask is None else mask.sum(dim=-1).clamp(min=1)[..., None, None]
        mean = rows.sum(dim=-2, keepdim=True) / count
    rows = rows - mean
    return rows * row_scale(lengths(rows), lengths(mean), mask, unit).unsqueeze(-1)


def token_gram(
    states: Tensor, mask: Tensor, *, center: bool, unit: bool, double: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the :func:`smaller_gram` of each text's :func:`prepared` tokens, and the size of its valid corner.

    Args:
        states: shape ``(*, T, D)``.
        mask: real tokens, shape ``(*, T)``; they are moved to the front.
        center: subtract the mean of the text's tokens.
        unit: scale tokens to length one, after centering.
        double: compute in float64 on every device.

    Returns:
        Matrices of shape ``(*, n, n)`` with ``n = min(T, D)``, and the sizes of their leading corners, shape ``(*)``,
        or ``None`` if the whole matrix is valid.
    """
    if states.shape[-2] > states.shape[-1]:
        return smaller_gram(prepare_rows(states.double() if double else states, mask, center=center, unit=unit)), None
    if kernels_can_read(states) and (KERNELS_IN_FLOAT64 or not double):
        from midlayer_encoders.extras.kernels.tokens import prepared_gram

        return prepared_gram(states, mask, center=center, unit=unit, double=double)
    states, mask = tokens_first(states, mask)
    return smaller_gram(prepare_rows(states.double() if double else states, mask, center=center, unit=unit)), mask.sum(
        dim=-1
    )


def row_scale(length: Tensor, mean_length: Tensor, mask: Tensor | None, unit: bool) -> Tensor:
    """Return the factor of each row, shape ``(*, N)``: 0 for padding and for rows that are only rounding."""
    real = torch.ones_like(length, dtype=torch.bool) if mask is None else mask
    longest = torch.where(real, length, 0.0).amax(dim=-1, keepdim=True)
    tiny = torch.where(mean_length == 0, 0.0, 32 * torch.finfo(length.dtype).eps * (mean_length + longest))
    nonzero = real & ~(length <= tiny)  # True for NaN
    return torch.where(nonzero, 1.0 / length if unit else 1.0, 0.0)


def products(first: Tensor, second: Tensor) -> Tensor:
    """Return the products of all rows of ``(*, N, D)`` and ``(*, M, D)``, shape ``(*, N, M)``."""
    with exact_products(first):
        return first @ second.mT


def smaller_gram(rows: Tensor) -> Tensor:
    """Return ``rows rows'`` or ``rows' rows`` of ``(*, N, D)``, whichever is smaller: ``(*, min(N, D), min(N, D))``."""
    rows = rows if rows.shape[-2] <= rows.shape[-1] else rows.mT
    return products(rows, rows)


def tokens_first(states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``(*, T, D)`` and their mask with the real tokens of each text first, in their order."""
    # Checking for this common case is cheap on a CPU; on a GPU it would wait for the device.
    if mask.device.type == "cpu" and not (mask[..., 1:] & ~mask[..., :-1]).any():
        return states, mask
    order = torch.argsort(~mask, dim=-1, stable=True)
    return states.take_along_dim(order.unsqueeze(-1), dim=-2), mask.take_along_dim(order, dim=-1)
