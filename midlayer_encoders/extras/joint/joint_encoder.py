"""``JointEncoder``: the methods of a ``LayerEncoder`` of a joint model, each of whose towers ends at its own layer.

The core knows models of one stack of blocks. A ``LayerEncoder`` takes these methods once its files turn out to hold a
joint model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from midlayer_encoders._types import EncoderSpec, Layer, LayerArgument
from midlayer_encoders.encoder.encoding import as_list
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import LayerIndexError, OptionError
from midlayer_encoders.extras.joint.loading import load_towers, paired_layers
from midlayer_encoders.extras.joint.reader import TowerReader
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy, media_parts, resolve_layers
from midlayer_encoders.models.load import ModelFiles
from midlayer_encoders.reading.batches import is_combined
from midlayer_encoders.reading.reader import check_after_pooling
from midlayer_encoders.recipes import Recipe

_LayerEncoder: Any = object  # the other base of the class that :func:`joint_class` makes; it imports this module
_OF_ONE_STACK = {"norm", "adapters", "bidirectional", "pooling", "skip_first", "skip_special"}  # options


class JointEncoder(_LayerEncoder):  # type: ignore[misc]
    """Embeds texts, images, and texts with an image, whose vectors are added.

    ``layer`` and ``num_layers`` count the blocks of the image tower.

    Attributes:
        encoder_class: the class of the encoder without these methods.
    """

    encoder_class: type[Any]

    def load_towers(self, files: ModelFiles, layer: LayerArgument, options: EncoderOptions) -> Any:
        """Return the model with its towers cut at a layer, and the cut of the image tower."""
        if refused := [option for option in options.non_defaults() if option in _OF_ONE_STACK]:
            raise OptionError(
                f"`{refused[0]}` does not apply to {files.model}, a joint model, whose heads normalize and pool. "
                "Pass tower='image' or tower='text'."
            )
        loaded, cuts = load_towers(files, layer)
        self.tower_layers = {name: cut.layer for name, cut in cuts.items()}
        self.tower_depths = {name: cut.anatomy.num_layers for name, cut in cuts.items()}
        self.ends_early = self.tower_layers != self.tower_depths
        return loaded, replace(cuts["image"], heads=True)

    @property
    def layers(self) -> dict[str, int]:
        """The layer of each tower."""
        return dict(self.tower_layers)

    @property
    def depths(self) -> dict[str, int]:
        """The number of blocks of each tower before the cut."""
        return dict(self.tower_depths)

    @property
    def spec(self) -> EncoderSpec:
        """Everything that changes this encoder's vectors and scores."""
        spec: EncoderSpec = super().spec
        return replace(spec, tower_layers=tuple(self.tower_layers.items()))

    @property
    def towers(self) -> dict[str, Anatomy]:
        """The paths of the parts of each tower."""
        model = self.transformer
        return {name: find_anatomy(model.get_submodule(path)).below(path) for name, path in media_parts(model).items()}

    @property
    def anatomy(self) -> NoReturn:
        """Raise: there is one for each tower."""
        raise OptionError(f"`encoder` must have one tower, but {self.name} has two. Load one: tower='image'.")

    def check_one_stack(self, argument: str) -> None:
        """Raise: a joint model has two stacks of blocks."""
        raise OptionError(
            f"`{argument}` cannot be combined with the two towers of {self.name}. Pass tower='image' or tower='text'."
        )

    def layer_argument(self, layer: int) -> dict[str, int]:
        """Return a layer of the image tower, and the layer of the text tower at the same relative depth."""
        return paired_layers(layer, self.tower_depths)

    def kept_blocks(self, layer: int) -> list[tuple[Anatomy, int]]:
        """Return each tower with its number of blocks at a layer of the image tower."""
        kept = self.layer_argument(layer)
        return [(anatomy, kept[tower]) for tower, anatomy in self.towers.items()]

    def with_recipe(self, recipe: Recipe | str) -> NoReturn:  # noqa: ARG002
        """Raise: recipes say how to pool one stack of layers."""
        raise OptionError(f"`recipe` applies to one tower, but {self.name} has two. Pass tower='text'.")

    def encode(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return embeddings like ``LayerEncoder.encode``; of texts with images, ``{"text": …, "image": …}``, the sums.

        mteb's CLIP adds the vectors, too. They are normalized after the sum if requested.
        """
        single = self.is_singular_input(inputs)
        items = [inputs] if single else as_list(inputs)
        if not items or not is_combined(items[0]):
            return super().encode(inputs if single else items, *args, **kwargs)
        normalize = kwargs.pop("normalize_embeddings", False)
        parts = [self.encode([item[medium] for item in items], *args, **kwargs) for medium in ("text", "image")]
        rows = [text + image for text, image in zip(*parts, strict=True)]
        if normalize:
            rows = [row / max(float((row * row).sum()) ** 0.5, 1e-12) for row in rows]
        if single or isinstance(parts[0], list):
            return rows[0] if single else rows
        return torch.stack(rows) if isinstance(parts[0], Tensor) else np.stack(rows)

    def vector_reader(self, layers: Sequence[Layer] | str = "all", *, prompt: str = "") -> TowerReader:
        """Return a reader of the vectors of layers, which come from the heads.

        Args:
            layers: ``"all"`` or a list of layers of the image tower; the text tower is read at the same relative depth.
            prompt: prompt prepended to each text.
        """
        check_after_pooling(self)
        numbers = resolve_layers(layers, self.layer, name=f"the image tower of {self.name}")
        pairs = [self.layer_argument(number) for number in numbers]
        for tower, depth in self.tower_layers.items():
            if not depth or pairs[-1][tower] > depth:
                raise LayerIndexError(
                    f"`encoder` must have layer {max(pairs[-1][tower], 1)} of its {tower} tower, but {self.name} was "
                    f"cut at layer {depth}. Create it with layer=-1."
                )

        def preprocess(inputs: list[Any]) -> dict[str, Any]:
            features: dict[str, Any] = {}
            for tower in self.tower_layers if is_combined(inputs[0]) else [None]:
                contents = inputs if tower is None else [item[tower] for item in inputs]
                is_text = all(isinstance(content, str) for content in contents)
                part = self.preprocess(contents, prompt=(prompt or None) if is_text else None)
                features |= {f"{part['modality']}.{name}": value for name, value in part.items()}
            return features

        self.eval()
        towers = self.towers
        return TowerReader(
            self.transformer,
            preprocess,
            towers["image"],
            numbers,
            norm="none",  # the heads apply it
            truncate_dim=self.truncate_dim,
            device=self.device,
            towers=towers,
            tower_layers={tower: [pair[tower] for pair in pairs] for tower in towers},
            forward=self.forward,  # without taking the model's lock
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to create the encoder in a worker process, where its class is made again."""
        return _new_encoder, (self.encoder_class,), cast(Any, self).__getstate__()


@cache
def joint_class(encoder_class: type[Any]) -> type[Any]:
    """Return a class of encoders, ``LayerEncoder`` or a user's subclass, with the methods for joint models."""
    if issubclass(encoder_class, JointEncoder):
        return encoder_class
    attributes = {"__module__": encoder_class.__module__, "encoder_class": encoder_class}
    return type(encoder_class.__name__, (JointEncoder, encoder_class), attributes)


def _new_encoder(encoder_class: Any) -> Any:
    return object.__new__(joint_class(encoder_class))
