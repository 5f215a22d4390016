"""The layers of an uncut model, read without this package: the inputs and outputs of each block of its stack.

A layer with the final norm is the model's own output when every block after that layer returns its input.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.families import DEPTH


class NoStackError(Exception):
    """A model without a list of blocks of one width that its states pass in order."""


@dataclass(frozen=True)
class Call:
    """One pass through a block: its index in the list, and its states before and after."""

    place: int
    before: Tensor
    after: Tensor


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in a tuple, list or mapping."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((tensor for tensor in map(first_tensor, inner) if tensor is not None), None)


def input_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the input states of a block."""
    states = first_tensor(list(args))
    if states is None:
        states = first_tensor(kwargs.get("hidden_states")) if "hidden_states" in kwargs else first_tensor(kwargs)
    return states


def replace_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return a block's output with one tensor in it replaced."""
    if value is old:
        return new
    if isinstance(value, Mapping):
        for key in list(value):
            value[key] = replace_tensor(value[key], old, new)  # type: ignore[index]
        return value
    if isinstance(value, list | tuple):
        items = [replace_tensor(item, old, new) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


@contextmanager
def wrapped_blocks(
    model: nn.Module, paths: list[str], call: Callable[[str, int, Any, Tensor | None, Any], Any]
) -> Iterator[None]:
    """Wrap the forward of each block in the lists, to record calls that bypass hooks (``block.forward(…)``) too."""
    wrapped: list[nn.Module] = []
    for path in paths:
        for place, block in enumerate(model.get_submodule(path)):  # type: ignore[arg-type]

            def forward(
                *args: Any, _made: Any = block.forward, _path: str = path, _place: int = place, **kwargs: Any
            ) -> Any:
                before = input_states(args, kwargs)
                return call(_path, _place, _made(*args, **kwargs), before, None)

            block.forward = forward
            wrapped.append(block)
    try:
        yield
    finally:
        for block in wrapped:
            block.__dict__.pop("forward", None)


@dataclass(frozen=True)
class Uncut:
    """A model and the path of its stack of blocks."""

    model: nn.Module
    blocks: str
    num_layers: int

    def _run(self, inputs: Mapping[str, Any], bypass: int | None = None) -> tuple[list[Call], Tensor]:
        calls: list[Call] = []

        def call(_: str, place: int, output: Any, before: Tensor | None, __: Any) -> Any:
            after = first_tensor(output)
            assert before is not None
            assert after is not None
            calls.append(Call(place, before.clone(), after.clone()))
            return replace_tensor(output, after, before) if bypass is not None and len(calls) > bypass else output

        with wrapped_blocks(self.model, [self.blocks], call):
            output = self.model(**inputs)
        final = first_tensor([output[0]] if not hasattr(output, "last_hidden_state") else [output.last_hidden_state])
        assert final is not None
        return calls, final

    @torch.no_grad()
    def layers(self, inputs: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """Return the states ``(B, T, D)`` of every layer, raw and with the modules after the last block."""
        calls, last = self._run(inputs)
        rows = len(next(value for value in inputs.values() if isinstance(value, Tensor)))
        raw = [calls[0].before, *(after.before for after in calls[1:]), calls[-1].after]
        final = [self._run(inputs, bypass=k)[1] for k in range(len(calls))] + [last]
        return {
            "none": [as_tokens(states, rows, last) for states in raw],
            "final": [as_tokens(states, rows, last) for states in final],
        }


def as_tokens(states: Tensor, rows: int, like: Tensor) -> Tensor:
    """Return states as ``(B, T, D)``, for any order or grid of a family's axes."""
    if states.ndim == 3 and states.shape[-1] == like.shape[-1] and states.shape[1] > like.shape[1]:
        return states[:, : like.shape[1]]  # padded to full windows inside
    if states.ndim == 3 and states.shape != like.shape:
        for order in itertools.permutations(range(3)):
            if states.permute(order).shape == like.shape:
                return states.permute(order).contiguous()
    if states.ndim == 2 and rows == 1:
        return states[None]
    if states.ndim == 4 and states.shape[0] == rows:
        return states.flatten(1, 2) if states.shape[-1] == like.shape[-1] else states.flatten(2).transpose(1, 2)
    return states


def find_stack(model: nn.Module, inputs: Mapping[str, Any]) -> Uncut:
    """Return the outermost list of blocks that the states of these inputs pass, the largest of several."""
    calls_by_path: dict[str, list[Call]] = {}

    def call(path: str, place: int, output: Any, before: Tensor | None, _: Any) -> Any:
        after = first_tensor(output)
        if before is not None and after is not None:
            calls_by_path.setdefault(path, []).append(Call(place, before[:0], after[:0]))
            shapes.setdefault(path, []).append((tuple(before.shape), tuple(after.shape)))
        return output

    shapes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    lists = [p for p, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    with torch.no_grad(), wrapped_blocks(model, lists, call):
        model(**inputs)
    candidates = [
        path
        for path, calls in calls_by_path.items()
        if len(calls) >= 2
        and len({shape for pair in shapes[path] for shape in pair}) == 1
        and [c.place for c in calls] == sorted(c.place for c in calls)
    ]
    outer = [path for path in candidates if not any(path.startswith(f"{prefix}.") for prefix in candidates)]
    if not outer:
        raise NoStackError(f"lists called: { ({p: s[0] for p, s in shapes.items()}) }"[:300])
    # Tiny models have this depth; other lists come before or after the stack.
    deep = [path for path in outer if len(calls_by_path[path]) == DEPTH]
    best = max(deep or outer, key=lambda path: sum(p.numel() for p in model.get_submodule(path).parameters()))
    return Uncut(model, best, len(calls_by_path[best]))


def reach(
    model: nn.Module, blocks: str, inputs: Mapping[str, Any], row: int, length: int
) -> list[tuple[bool, bool, bool]]:
    """Return for each block whether token 0 sees token 1, the last real token sees 0, and 0 sees the last."""
    seen: list[tuple[Tensor, Tensor]] = []
    stack: Any = model.get_submodule(blocks)
    handles = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = input_states(args, kwargs)
        assert before is not None
        leaf = before.detach().requires_grad_(True)
        pending.append(leaf)
        swap = lambda v: leaf if v is before else v  # noqa: E731
        return tuple(map(swap, args)), {k: swap(v) for k, v in kwargs.items()}

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        after = first_tensor(output)
        assert after is not None
        seen.append((pending.pop(), after))

    pending: list[Tensor] = []
    for block in stack:
        handles += [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]
    try:
        with torch.enable_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [
        (depends(one, row, 0, 1), depends(one, row, length - 1, 0), depends(one, row, 0, length - 1)) for one in seen
    ]


def depends(seen: tuple[Tensor, Tensor], row: int, target: int, source: int) -> bool:
    """Return whether a block's output at one token depends on its input at another."""
    before, after = seen
    weights = torch.randn(after.shape[-1], generator=torch.Generator().manual_seed(0))
    (slope,) = torch.autograd.grad((after[row, target] * weights).sum(), before, retain_graph=True, allow_unused=True)
    return slope is not None and bool(slope[row, source].abs().max() > 1e-12)
