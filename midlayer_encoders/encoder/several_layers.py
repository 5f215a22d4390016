"""Several layers in one encoder: their states side by side from one pass, pooled, and then averaged or left so.

Every pooling treats each dimension by itself, so the pooled vector of states side by side is that of each layer side by
side. Masks, padding and media are dealt with as for one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Module, Transformer, WeightedLayerPooling
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import Tensor, nn

from midlayer_encoders._types import Combine, Layer, Norm
from midlayer_encoders.encoder.inputs import media_taken, moved, probe_input, sampling_rate
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.verification import close
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import Anatomy, resolve_layer
from midlayer_encoders.models.cut import Cut
from midlayer_encoders.reading.capture import layers_watched, side_by_side
from midlayer_encoders.reading.locks import turn

__all__ = [
    "CombinedLayers",
    "LayerMix",
    "LayersTransformer",
    "asked_layers",
    "layer_mix",
    "plain_on_disk",
    "read_side_by_side",
]


@dataclass(frozen=True)
class LayerMix:
    """Which layers an encoder combines, and how.

    Attributes:
        layers: ascending under ``"mean"``, in the order asked for under ``"concat"``; two or more.
        shares: of each layer in the mean, with the sum 1; all 1 under ``"concat"``.
        combine: ``"mean"`` or ``"concat"``.
    """

    layers: tuple[int, ...]
    shares: tuple[float, ...]
    combine: Combine


def asked_layers(layer: Any, options: EncoderOptions) -> list[Layer] | None:
    """Return the layers to combine, or ``None`` for a single layer; raise if the options do not fit them."""
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
    """Return what is combined of a model that was cut at the deepest of the layers."""
    found = [resolve_layer(layer, cut.anatomy.num_layers) for layer in layers]
    if options.combine == "concat":
        return LayerMix(tuple(found), (1.0,) * len(found), "concat")
    weights = options.layer_weights or (1.0,) * len(found)
    shares = sorted((layer, weight / sum(weights)) for layer, weight in zip(found, weights, strict=True))
    return LayerMix(tuple(layer for layer, _ in shares), tuple(share for _, share in shares), "mean")


class LayersTransformer(Transformer):
    """sentence-transformers' module around a cut model, whose token embeddings are those of several layers abreast.

    Attributes:
        anatomy: of the cut model.
        layers: in the order of the states.
        norm: applied to the states of each.
        width: of all of them together.
    """

    anatomy: Anatomy
    layers: tuple[int, ...]
    norm: Norm
    width: int

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # hooks come and go in it
    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the features with the states of all layers as ``token_embeddings``."""
        found: dict[int, Tensor] = {}
        deepest = max(self.layers)
        others = [layer for layer in self.layers if layer != deepest]
        with layers_watched(self.model, found.__setitem__, anatomy=self.anatomy, layers=others, norm=self.norm):
            made: dict[str, Any] = super().forward(features, **kwargs)
        found[deepest] = made["token_embeddings"]
        length = found[deepest].shape[1]
        made["token_embeddings"] = side_by_side([found[layer][:, :length] for layer in self.layers])
        return made

    def get_embedding_dimension(self) -> int:
        """Return the width of all layers together."""
        return self.width


@torch.no_grad()
def read_side_by_side(first: Any, anatomy: Anatomy, mix: LayerMix, norm: Norm, probe: dict[str, Any]) -> None:
    """Have a module that reads one layer of a cut model, the deepest of them, read them all.

    Args:
        first: changed in place.
        anatomy: of its model.
        mix: which layers.
        norm: applied to each.
        probe: features of one input, by which widths are seen.
    """
    first.__class__ = LayersTransformer
    first.anatomy, first.layers, first.norm = anatomy, mix.layers, norm
    first.width = int(first(dict(probe))["token_embeddings"].shape[-1])


class CombinedLayers(Module):
    """Makes one vector of the pooled vectors of several layers that lie side by side.

    Args:
        layers: which they are.
        weights: share of each in the mean.
        combine: ``"mean"``; ``"concat"`` leaves them as they are.
        embedding_dimension: of what comes out.
    """

    config_keys: list[str] = ["layers", "weights", "combine", "embedding_dimension"]  # noqa: RUF012  (the base's way)

    def __init__(self, layers: Sequence[int], weights: Sequence[float], combine: Combine, embedding_dimension: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers, self.weights, self.combine = list(layers), list(weights), combine
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
        """Refuse: a plain folder holds other modules in its place, see :func:`plain_on_disk`."""
        raise CutError(f"A plain folder cannot hold {type(self).__name__}, so it is not saved to {output_path}.")


# --- the plain folder ------------------------------------------------------------------------------------------------


@contextmanager
def plain_on_disk(encoder: SentenceTransformer) -> Iterator[None]:
    """Have an encoder hold, while it is saved, modules of sentence-transformers that combine its layers alike.

    An encoder of one layer is left as it is.

    Args:
        encoder: changed until the block is left.

    Raises:
        CutError: naming why its modules cannot.
    """
    first: Any = encoder[0]
    if not isinstance(first, LayersTransformer):
        yield
        return
    held: list[Any] = list(encoder)
    _, pooling, combined, *others = held
    alone = probe_input(media_taken(first.modalities), sampling_rate(first.processor), first.tokenizer)
    probe = moved(encoder.preprocess([alone]), encoder.device)
    modules = [first, *_plain(first, pooling, combined, *_entries(first, probe)), *others]
    kept, config = dict(encoder._modules), first.model.config
    before = config.output_hidden_states
    with turn(first.model):  # in which others embed
        try:
            first.__class__ = Transformer
            config.output_hidden_states = True
            _hold(encoder, {str(number): module for number, module in enumerate(modules)})
            yield
        finally:
            first.__class__ = LayersTransformer
            config.output_hidden_states = before
            _hold(encoder, kept)


def _hold(encoder: nn.Module, modules: dict[str, Any]) -> None:
    encoder._modules.clear()
    encoder._modules.update(modules)


@torch.no_grad()
def _entries(first: LayersTransformer, probe: dict[str, Any]) -> tuple[list[int], int]:
    """Return the places of the layers among the model's hidden states, and how many there are; raise where not all are.

    What the entries are differs between families: they are compared with the states of the layers themselves.
    """
    model: Any = first.model
    name = type(model).__name__
    if internals.lacks_folder(model):
        raise CutError(
            f"{name} is written to a folder inside a model with a decoder, where sentence-transformers does not find "
            "the states of several layers. Use this encoder itself."
        )
    with _without_dropout(model):
        states = first(dict(probe))["token_embeddings"].chunk(len(first.layers), dim=-1)
        hidden = _hidden_states(first, probe)
    found: list[int] = []
    for layer, wanted in zip(first.layers, states, strict=True):
        # The nearest: beside a state as large as some are, those of two layers may look alike.
        far = [_distance(wanted, entry) for entry in hidden]
        place = min(range(len(far)), key=far.__getitem__, default=0)
        if not hidden or place in found or not close(wanted, hidden[place]):
            reason = (
                "its final norm is applied to the states of each layer, and a plain folder has no module that does so: "
                "norm='none' may be exported"
                if first.norm == "final" and first.anatomy.final
                else "it does not return them among its hidden states"
            )
            raise CutError(
                f"Layers {', '.join(map(str, first.layers))} of {name} cannot be combined in a plain folder: layer "
                f"{layer} cannot be had there, since {reason}. Use this encoder itself, or export one layer."
            )
        found.append(place)
    if len({entry.shape for entry in hidden[min(found) :]}) > 1:
        raise CutError(
            f"The hidden states of {name} are of several widths, which a plain folder cannot combine. Use this encoder "
            "itself, or export one layer."
        )
    return found, len(hidden)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Have a model that may be in training make the same states twice."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _distance(states: Tensor, entry: Tensor) -> float:
    return float((states - entry).norm()) if entry.shape == states.shape else torch.inf


def _hidden_states(first: LayersTransformer, probe: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the hidden states that a plain module sees once the config asks for them."""
    config: Any = first.model.config
    before, config.output_hidden_states = config.output_hidden_states, True
    try:
        made = Transformer.forward(first, dict(probe))
    finally:
        config.output_hidden_states = before
    return tuple(made.get("all_layer_embeddings") or ())


def _plain(
    first: LayersTransformer, pooling: Any, combined: CombinedLayers, places: Sequence[int], count: int
) -> list[nn.Module]:
    """Return the modules after the transformer, for layers at these places among so many hidden states."""
    mode, width = pooling.pooling_mode, first.width // len(places)
    if combined.combine == "mean":
        if mode == "max":
            raise CutError(
                "The mean of several layers with pooling='max' cannot be exported: a plain folder takes the mean of "
                "the states before it pools them, and the largest mean is not the mean of the largest. Use this "
                "encoder itself, another pooling, or combine='concat'."
            )
        shares = dict(zip(places, combined.weights, strict=True))
        return [_weighted(width, count, shares), PoolingModule(width, pooling_mode=mode)]
    if mode == "cls":
        raise CutError(
            "Several layers side by side with pooling='cls' cannot be exported: the one way in which a plain folder "
            "puts pooled vectors side by side takes the place of that pooling. Use this encoder itself, or the mean "
            "of the layers."
        )
    modules: list[nn.Module] = []
    for number, place in enumerate(places, 1):
        # What stands under this name is what `Pooling` takes for the first token, and puts before its own vector.
        kept = "cls_token_embeddings" if number < len(places) else "sentence_embedding"
        modes = mode if number == 1 else ("cls", mode)
        modules += [_weighted(width, count, {place: 1.0}), PoolingModule(width, pooling_mode=modes)]
        if number < len(places) or number > 2:  # the last one says how wide the vector is, which the pooling cannot
            modules.append(_same(number * width, kept))
    return [module.to(next(first.parameters()).device) for module in modules]


def _weighted(width: int, count: int, shares: dict[int, float]) -> nn.Module:
    """Return what takes a mean of ``count`` hidden states, by their places; those before the first are left out."""
    start = min(shares)
    weights = torch.tensor([shares.get(place, 0.0) for place in range(start, count)])
    return WeightedLayerPooling(
        width, num_hidden_layers=count - 1, layer_start=start, layer_weights=nn.Parameter(weights)
    )


def _same(width: int, kept: str) -> nn.Module:
    """Return what hands on a vector under another name."""
    return Dense(
        width, width, bias=False, activation_function=nn.Identity(), init_weight=torch.eye(width),
        module_output_name=kept,
    )  # fmt: skip
