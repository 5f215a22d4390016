"""``TowerReader``: read many layers of a joint model such as CLIP, through the heads of its towers.

The heads pool and project the states after a tower's last block. A layer's vector is what they return if all blocks
return the layer's states, which is the vector of the model without the later blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor, nn

from midlayer_encoders.errors import CutError
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.reading.capture import first_tensor, watch_layers, with_states
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.reader import Flow, LayerReader, TokenReceive


@dataclass(frozen=True)
class TowerReader(LayerReader):
    """Reads the vectors of texts, images, and texts with an image, whose vectors are added.

    Attributes:
        towers: structure of each tower in ``model``, by medium.
        tower_layers: for each tower, its layer for each of ``layers``.
        forward: returns the features of a batch with their ``sentence_embedding``, shape ``(B, D)``.
    """

    towers: Mapping[str, Anatomy] = field(default_factory=dict)
    tower_layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    forward: Callable[[dict[str, Any]], dict[str, Any]] = dict

    def flow(self, inputs: Sequence[Any], tokens: TokenReceive | None) -> Flow:
        """Return the state that the batches of a run share."""
        return _TowerFlow(self, inputs, tokens)


class _TowerFlow(Flow):
    """State shared by the batches of a run."""

    reader: TowerReader

    def read(self, inputs: Mapping[str, Any], real: Tensor | None, positions: list[int]) -> list[Tensor]:  # noqa: ARG002
        """Return the vectors of one batch at each layer."""
        reader = self.reader
        sums: list[Tensor] = []
        for tower, anatomy in reader.towers.items():
            prefix = f"{tower}."
            features = {name.removeprefix(prefix): inputs[name] for name in inputs if name.startswith(prefix)}
            if features:
                layers = reader.tower_layers[tower]
                by_layer = _head_outputs(reader, anatomy, layers, features)
                rows = [by_layer[layer] for layer in layers]
                sums = [first + second for first, second in zip(sums, rows, strict=True)] if sums else rows
        return [vectors[:, : reader.truncate_dim] for vectors in sums]


def _head_outputs(
    reader: TowerReader, anatomy: Anatomy, layers: Sequence[int], features: dict[str, Any]
) -> dict[int, Tensor]:
    """Return the vectors that the model returns without the blocks after each layer.

    Each block runs once. Then the embeddings and the heads run again for each layer, with the blocks replaced.
    """
    model = reader.model
    outputs: dict[int, Tensor] = {}
    waiting: list[tuple[int, Tensor]] = []
    block_output: Any = None
    shape: tuple[int, ...] | None = None

    def remember(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal block_output
        block_output = output if block_output is None else block_output

    def receive(layer: int, states: Tensor) -> None:
        nonlocal shape
        shape = shape or tuple(states.shape)
        if tuple(states.shape) != shape:
            raise CutError(
                f"The layers of {type(model).__name__} cannot be read through its heads: the states of "
                f"{anatomy.blocks} change their shape from {shape} to {tuple(states.shape)}. Pass layer=-1."
            )
        waiting.append((layer, states))
        while waiting and block_output is not None:  # the form of a block's output is known
            layer, states = waiting.pop(0)
            if layer in layers:
                with turn(model), blocks_returning(model, anatomy, block_output, states):
                    outputs[layer] = reader.forward(dict(features))["sentence_embedding"]

    hook = anatomy.block(model, 1).register_forward_hook(remember)
    try:
        with watch_layers(model, receive, anatomy=anatomy, layers=[*layers, 1], complete=False):
            reader.forward(dict(features))
    finally:
        hook.remove()
    return outputs


@contextmanager
def blocks_returning(model: nn.Module, anatomy: Anatomy, output: Any, states: Tensor) -> Iterator[None]:
    """Make all blocks return the same states without running, inside a ``with`` block that holds the model's lock.

    Args:
        model: the model.
        anatomy: structure of ``model``.
        output: an output of a block, whose form the blocks keep.
        states: the states.
    """
    replaced = with_states(output, first_tensor(output), states)
    if first_tensor(replaced) is not states:
        raise CutError(f"The blocks of {type(model).__name__} return {type(output)}, whose states are unknown.")

    def forward(*_: Any, **__: Any) -> Any:
        return replaced

    with ExitStack() as stack:
        for block in anatomy.distinct_blocks(model):
            stack.enter_context(mock.patch.object(block, "forward", forward))
        yield
