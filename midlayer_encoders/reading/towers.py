"""``TowerReader``: read many layers of a joint model such as CLIP, through the heads of its towers.

The heads pool and project the states after a tower's last block. A layer's vector is what they return if all blocks
return the layer's states, which is the vector of the model without the later blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from midlayer_encoders._types import Layer
from midlayer_encoders.errors import CutError, LayerIndexError
from midlayer_encoders.models.anatomy import Anatomy, paired_layers, resolve_layers
from midlayer_encoders.reading.batches import LayerSource, is_combined
from midlayer_encoders.reading.capture import blocks_returning, layers_watched
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.reader import Flow, LayerReader, TokenReceive, check_after_pooling


class JointSource(LayerSource, Protocol):
    """A joint model whose layers can be read; ``LayerEncoder`` implements it."""

    tower_layers: dict[str, int]
    tower_depths: dict[str, int]

    @property
    def towers(self) -> Mapping[str, Anatomy]:
        """The structure of each tower, by medium."""

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None) -> dict[str, Any]:
        """Return the features of a batch of texts or images."""

    def forward(self, input: dict[str, Any]) -> dict[str, Any]:  # noqa: A002  (the name in sentence-transformers)
        """Return the features with their ``sentence_embedding``, without taking the model's lock."""


@dataclass(frozen=True)
class TowerReader(LayerReader):
    """Reads the vectors of texts, images, and texts with an image, whose vectors are added.

    Attributes:
        towers: structure of each tower in ``model``, by medium.
        tower_layers: for each tower, its layer for each of ``layers``.
        project: returns the vectors ``(B, D)`` of a batch's features.
    """

    towers: Mapping[str, Anatomy] = field(default_factory=dict)
    tower_layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    project: Callable[[dict[str, Any]], Tensor] = lambda features: features["sentence_embedding"]

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
                by_layer = _head_outputs(reader.model, anatomy, layers, partial(reader.project, features))
                rows = [by_layer[layer] for layer in layers]
                sums = [first + second for first, second in zip(sums, rows, strict=True)] if sums else rows
        return [vectors[:, : reader.truncate_dim] for vectors in sums]


def _head_outputs(
    model: nn.Module, anatomy: Anatomy, layers: Sequence[int], run: Callable[[], Tensor]
) -> dict[int, Tensor]:
    """Return what ``run``, a pass of the model, returns without the blocks after each layer.

    Each block runs once. Then the embeddings and the heads run again for each layer, with the blocks replaced.
    """
    outputs: dict[int, Tensor] = {}
    waiting: list[tuple[int, Tensor]] = []
    block_output: Any = None
    shape: tuple[int, ...] | None = None

    def remember(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal block_output
        block_output = output if block_output is None else block_output

    def receive(layer: int, _: str, states: Tensor) -> None:
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
                    outputs[layer] = run()

    hook = anatomy.block(model, 1).register_forward_hook(remember)
    try:
        with layers_watched(model, receive, anatomy=anatomy, layers=[*layers, 1], complete=False):
            run()
    finally:
        hook.remove()
    return outputs


def joint_reader(source: JointSource, *, layers: Sequence[Layer] | str = "all", prompt: str = "") -> TowerReader:
    """Return a reader of the layers of a joint model.

    Args:
        source: an encoder of the whole model, or of one cut after the last layers to read.
        layers: ``"all"`` or a list of layers of the image tower; the text tower is read at the same relative depth.
        prompt: prompt prepended to each text.
    """
    check_after_pooling(source)
    numbers = resolve_layers(layers, source.layer, name=f"the image tower of {source.name}")
    pairs = [paired_layers(number, source.tower_depths) for number in numbers]
    for tower, depth in source.tower_layers.items():
        if not depth or pairs[-1][tower] > depth:
            raise LayerIndexError(
                f"`encoder` must have layer {max(pairs[-1][tower], 1)} of its {tower} tower, but {source.name} was cut "
                f"at layer {depth}. Create it with layer=-1."
            )

    def preprocess(inputs: list[Any]) -> dict[str, Any]:
        features: dict[str, Any] = {}
        for tower in source.tower_layers if is_combined(inputs[0]) else [None]:
            contents = inputs if tower is None else [item[tower] for item in inputs]
            is_text = all(isinstance(content, str) for content in contents)
            part = source.preprocess(contents, prompt=(prompt or None) if is_text else None)
            features |= {f"{part['modality']}.{name}": value for name, value in part.items()}
        return features

    def project(features: dict[str, Any]) -> Tensor:
        vectors: Tensor = source.forward(dict(features))["sentence_embedding"]
        return vectors

    source.eval()
    towers = source.towers
    return TowerReader(
        source.transformer,
        preprocess,
        towers["image"],
        numbers,
        norm="none",  # the heads apply it
        truncate_dim=source.truncate_dim,
        device=source.device,
        towers=towers,
        tower_layers={tower: [pair[tower] for pair in pairs] for tower in towers},
        project=project,
    )
