"""Combine several layers in one encoder: concatenate their states from one pass, pool them, and average the results.

Every pooling acts on each dimension separately, so pooling concatenated states concatenates the pooled vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Module, Transformer, WeightedLayerPooling
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import Tensor, nn

from midlayer_encoders._types import Combine, Layer, Norm
from midlayer_encoders.encoder.inputs import probe_inputs, sampling_rate, supported_media, to_device
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.verification import close
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import Anatomy, resolve_layer
from midlayer_encoders.models.cut import Cut
from midlayer_encoders.reading.capture import layers_watched, side_by_side
from midlayer_encoders.reading.locks import turn


@dataclass(frozen=True)
class LayerMix:
    """The layers that an encoder combines.

    Attributes:
        layers: two or more; ascending for ``"mean"``, in the requested order for ``"concat"``.
        shares: weight of each layer in the mean, with the sum 1; all 1 for ``"concat"``.
        combine: ``"mean"`` or ``"concat"``.
    """

    layers: tuple[int, ...]
    shares: tuple[float, ...]
    combine: Combine


def requested_layers(layer: Any, options: EncoderOptions) -> list[Layer] | None:
    """Return the layers to combine, or ``None`` for a single layer; raise if the options do not match."""
    layers: list[Layer] = layer if isinstance(layer, list) else []
    weights = options.layer_weights
    if not layers and (weights is not None or options.combine != "mean"):
        name = "combine" if weights is None else "layer_weights"
        raise OptionError(
            f"`{name}` must be left out unless `layer` is a list of two layers or more, but `layer` is {layer!r}."
        )
    if weights is not None and len(weights) != len(layers):
        raise OptionError(
            f"`layer_weights` must be one for each of the {len(layers)} layers {layers}, but got {len(weights)}."
        )
    return layers or None


def layer_mix(layers: Sequence[Layer], options: EncoderOptions, cut: Cut) -> LayerMix:
    """Return the layers to combine, resolved for a model."""
    numbers = tuple(resolve_layer(layer, cut.anatomy.num_layers) for layer in layers)
    equal = (1.0,) * len(numbers)
    if options.combine == "concat":
        return LayerMix(numbers, equal, "concat")
    weights = options.layer_weights or equal
    shares = sorted((layer, weight / sum(weights)) for layer, weight in zip(numbers, weights, strict=True))
    return LayerMix(tuple(layer for layer, _ in shares), tuple(share for _, share in shares), "mean")


class LayersTransformer(Transformer):
    """sentence-transformers' module around a cut model, with the concatenated states of several layers.

    Attributes:
        anatomy: anatomy of the cut model.
        layers: layers in the order of their states.
        norm: norm of the states of each layer.
        width: width of the concatenated states.
    """

    anatomy: Anatomy
    layers: tuple[int, ...]
    norm: Norm
    width: int

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it adds and removes hooks
    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the features with the states of all layers as ``token_embeddings``."""
        states: dict[int, Tensor] = {}
        deepest = max(self.layers)
        others = [layer for layer in self.layers if layer != deepest]

        def receive(layer: int, _: str, layer_states: Tensor) -> None:
            states[layer] = layer_states

        with layers_watched(self.model, receive, anatomy=self.anatomy, layers=others, norm=self.norm):
            output: dict[str, Any] = super().forward(features, **kwargs)
        states[deepest] = output["token_embeddings"]
        length = states[deepest].shape[1]
        output["token_embeddings"] = side_by_side([states[layer][:, :length] for layer in self.layers])
        return output

    def get_embedding_dimension(self) -> int:
        """Return the width of the concatenated states."""
        return self.width


@torch.no_grad()
def read_side_by_side(first: Any, anatomy: Anatomy, mix: LayerMix, norm: Norm, probe: dict[str, Any]) -> None:
    """Turn a module that reads the deepest of several layers into one that reads all of them, in place.

    Args:
        first: the module.
        anatomy: anatomy of its model.
        mix: the layers.
        norm: norm of their states.
        probe: features of one input.
    """
    first.__class__ = LayersTransformer
    first.anatomy = anatomy
    first.layers = mix.layers
    first.norm = norm
    first.width = int(first(dict(probe))["token_embeddings"].shape[-1])


class CombinedLayers(Module):
    """Combines the concatenated pooled vectors of several layers.

    Args:
        layers: the layers.
        weights: weight of each in the mean.
        combine: ``"mean"``, or ``"concat"``, which leaves them unchanged.
        embedding_dimension: dimensions of the result.
    """

    config_keys: list[str] = ["layers", "weights", "combine", "embedding_dimension"]  # noqa: RUF012  (as in the base class)

    def __init__(self, layers: Sequence[int], weights: Sequence[float], combine: Combine, embedding_dimension: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = list(layers)
        self.weights = list(weights)
        self.combine = combine
        self.embedding_dimension = embedding_dimension

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return the features with the combined vector."""
        if self.combine == "mean":
            vectors: Tensor = features["sentence_embedding"]
            parts = vectors.reshape(*vectors.shape[:-1], len(self.layers), -1)
            parts = parts.float() if vectors.dtype in (torch.float16, torch.bfloat16) else parts
            shares = torch.tensor(self.weights, dtype=parts.dtype, device=parts.device)
            features["sentence_embedding"] = torch.einsum("bld,l->bd", parts, shares).to(vectors.dtype)
        return features

    def get_embedding_dimension(self) -> int:
        """Return the number of dimensions of a vector."""
        return self.embedding_dimension

    def save(self, output_path: str, *_: Any, **__: Any) -> NoReturn:
        """Raise: :func:`plain_on_disk` replaces this module in a plain folder."""
        raise CutError(f"A plain folder cannot hold {type(self).__name__}, so it is not saved to {output_path}.")


# --- the plain folder ------------------------------------------------------------------------------------------------


@contextmanager
def plain_on_disk(encoder: SentenceTransformer) -> Iterator[None]:
    """Replace the modules of an encoder of several layers by plain ones while it is saved.

    Raises:
        CutError: if no plain modules combine the layers in the same way.
    """
    first: Any = encoder[0]
    if not isinstance(first, LayersTransformer):
        yield
        return
    _, pooling, combined, *others = cast(Any, list(encoder))
    short, _ = probe_inputs(supported_media(first.modalities), sampling_rate(first.processor), first.tokenizer)
    probe = to_device(encoder.preprocess([short]), encoder.device)
    plain = [first, *_plain_modules(first, pooling, combined, *_hidden_state_indices(first, probe)), *others]
    modules = dict(encoder._modules)
    with turn(first.model), _with_hidden_states(first.model):
        try:
            first.__class__ = Transformer
            _replace_modules(encoder, {str(number): module for number, module in enumerate(plain)})
            yield
        finally:
            first.__class__ = LayersTransformer
            _replace_modules(encoder, modules)


def _replace_modules(encoder: nn.Module, modules: dict[str, Any]) -> None:
    encoder._modules.clear()
    encoder._modules.update(modules)


@contextmanager
def _with_hidden_states(model: Any) -> Iterator[None]:
    """Let the config of a model request hidden states."""
    before = model.config.output_hidden_states
    model.config.output_hidden_states = True
    try:
        yield
    finally:
        model.config.output_hidden_states = before


@torch.no_grad()
def _hidden_state_indices(first: LayersTransformer, probe: dict[str, Any]) -> tuple[list[int], int]:
    """Return the indices of the layers among the model's hidden states, and the number of hidden states.

    Hidden states differ between families, so they are compared with the states of the layers.
    """
    model: Any = first.model
    name = type(model).__name__
    if internals.lacks_folder(model):
        raise CutError(
            f"{name} is saved inside an encoder-decoder, where sentence-transformers does not find the states of "
            "several layers. Use this encoder directly."
        )
    with _without_dropout(model):
        states = first(dict(probe))["token_embeddings"].chunk(len(first.layers), dim=-1)
        with _with_hidden_states(model):
            hidden = tuple(Transformer.forward(first, dict(probe)).get("all_layer_embeddings") or ())
    indices: list[int] = []
    for layer, expected in zip(first.layers, states, strict=True):
        # The nearest: with massive activations, the states of two layers may both be close.
        distances = [_distance(expected, entry) for entry in hidden]
        index = min(range(len(hidden)), key=distances.__getitem__, default=0)
        if not hidden or index in indices or not close(expected, hidden[index]):
            reason = "it is not among the hidden states"
            if first.norm == "final" and first.anatomy.final:
                reason = "a plain folder cannot apply the final norm to each layer (norm='none' may be exported)"
            raise CutError(
                f"Layers {', '.join(map(str, first.layers))} of {name} cannot be combined in a plain folder: layer "
                f"{layer} is not available because {reason}. Use this encoder directly, or export one layer."
            )
        indices.append(index)
    if len({entry.shape for entry in hidden[min(indices) :]}) > 1:
        raise CutError(
            f"The hidden states of {name} have several widths, which a plain folder cannot combine. Use this encoder "
            "directly, or export one layer."
        )
    return indices, len(hidden)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode temporarily."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _distance(states: Tensor, entry: Tensor) -> float:
    return float((states - entry).norm()) if entry.shape == states.shape else torch.inf


def _plain_modules(
    first: LayersTransformer, pooling: Any, combined: CombinedLayers, indices: Sequence[int], count: int
) -> list[nn.Module]:
    """Return the plain modules after the transformer for the layers at these indices of ``count`` hidden states."""
    mode = pooling.pooling_mode
    width = first.width // len(indices)
    if combined.combine == "mean":
        if mode == "max":
            raise CutError(
                "The mean of several layers with pooling='max' cannot be exported: a plain folder averages the states "
                "before it pools them. Use this encoder directly, another pooling, or combine='concat'."
            )
        shares = dict(zip(indices, combined.weights, strict=True))
        return [_weighted_mean(width, count, shares), PoolingModule(width, pooling_mode=mode)]
    if mode == "cls":
        raise CutError(
            "Concatenated layers with pooling='cls' cannot be exported: a plain folder concatenates by that pooling. "
            "Use this encoder directly, or the mean of the layers."
        )
    modules: list[nn.Module] = []
    for number, index in enumerate(indices, 1):
        # `Pooling` reads "cls_token_embeddings" as the first token and puts it before its own vector.
        output = "cls_token_embeddings" if number < len(indices) else "sentence_embedding"
        modes = mode if number == 1 else ("cls", mode)
        modules += [_weighted_mean(width, count, {index: 1.0}), PoolingModule(width, pooling_mode=modes)]
        if number < len(indices) or number > 2:  # the last one declares the width of the vector
            modules.append(_identity(number * width, output))
    return [module.to(next(first.parameters()).device) for module in modules]


def _weighted_mean(width: int, count: int, shares: dict[int, float]) -> nn.Module:
    """Return a module that takes the weighted mean of hidden states, with weights by index."""
    start = min(shares)
    weights = nn.Parameter(torch.tensor([shares.get(index, 0.0) for index in range(start, count)]))
    return WeightedLayerPooling(width, num_hidden_layers=count - 1, layer_start=start, layer_weights=weights)


def _identity(width: int, output: str) -> nn.Module:
    """Return a module that copies the vector to another feature."""
    options: dict[str, Any] = {"init_weight": torch.eye(width), "module_output_name": output}
    return Dense(width, width, bias=False, activation_function=nn.Identity(), **options)
