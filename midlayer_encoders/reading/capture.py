"""One forward pass, every wanted layer handed on as it is made; batches planned over the whole list of texts.

Nothing here keeps token states: a layer is read where the next block receives it, handed to the caller, and let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from midlayer_encoders._types import Norm, Pooling
from midlayer_encoders.errors import NotFiniteError, OptionError, check_choice
from midlayer_encoders.models.anatomy import Anatomy, Site, block_sites
from midlayer_encoders.reading.pooling import pool

__all__ = ["STREAM", "LayerReader", "Receive", "TokenReceive", "capture", "plan_batches", "real_tokens"]

STREAM = "residual_out"
"""The site of a layer itself: the residual stream after its block."""

Receive: TypeAlias = Callable[[int, str, Tensor], None]
"""Called with the layer, the site and the states ``(B, T, D)``, from the first layer to the last."""


TokenReceive: TypeAlias = Callable[[int, Tensor, Tensor, list[int]], None]
"""Called with the layer, the raw states ``(B, T, D)``, the mask ``(B, T)`` and the texts' positions."""


class _EnoughError(Exception):
    """Raised inside the pass when the last wanted layer was handed on."""


def capture(
    model: nn.Module,
    inputs: Mapping[str, Any],
    receive: Receive,
    *,
    anatomy: Anatomy,
    layers: Sequence[int],
    norm: Norm = "none",
    sites: Sequence[str] = (STREAM,),
) -> None:
    """Run ``model`` once and hand on the states of every wanted layer; the blocks after the last one do not run.

    Args:
        model: the uncut model, or one cut after the last wanted layer.
        inputs: keyword arguments of its forward.
        receive: called with each layer's states as they are made. What it keeps is up to it.
        anatomy: of ``model``.
        layers: which layers, ``0`` to ``num_layers``.
        norm: ``"final"`` applies the final norm to the residual stream before it is handed on.
        sites: points of each block to hand on; see :func:`~midlayer_encoders.models.anatomy.block_sites`.
    """
    with _hooked(model, receive, anatomy, sorted(set(layers)), norm, sites):
        try:
            model(**inputs)
        except _EnoughError:
            return


@contextmanager
def _hooked(
    model: nn.Module, receive: Receive, anatomy: Anatomy, layers: Sequence[int], norm: Norm, sites: Sequence[str]
) -> Iterator[None]:
    """Put hooks on the blocks for one pass, and take them off whatever happens."""
    if not layers or layers[0] < 0 or layers[-1] > anatomy.num_layers:
        raise OptionError(f"`layers` must be within [0, {anatomy.num_layers}] and not empty, but got {list(layers)}.")
    final = [model.get_submodule(path) for path in anatomy.final] if norm == "final" else []
    blocks = {id(block): block for block in (anatomy.block(model, k) for k in range(1, anatomy.num_layers + 1))}
    passes = 0  # blocks entered so far in this pass: shared blocks are entered several times

    def hand_on(layer: int, site: str, states: Tensor) -> None:
        if layer in layers and site in sites:
            for module in final if site == STREAM else ():
                states = module(states)
            receive(layer, site, states)
        if layer == layers[-1] and site == STREAM:
            raise _EnoughError

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal passes
        passes += 1
        hand_on(passes - 1, STREAM, args[0] if args else kwargs["hidden_states"])

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        if passes == anatomy.num_layers:
            hand_on(passes, STREAM, output[0] if isinstance(output, tuple) else output)

    def inside(name: str) -> Callable[[Tensor], None]:
        return lambda states: hand_on(passes, name, states)

    with ExitStack() as hooks:
        for block in blocks.values():
            hooks.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(leave).remove)
            for name, site in _inner_sites(block, model, sites).items():
                hooks.callback(_watch(block, site, inside(name)))
        yield


def _inner_sites(block: nn.Module, model: nn.Module, sites: Sequence[str]) -> dict[str, Site]:
    wanted = [name for name in sites if name != STREAM]
    if not wanted:
        return {}
    found = block_sites(block, getattr(model, "config", None))
    for name in wanted:
        check_choice("sites", name, found)
    return {name: found[name] for name in wanted}


def _watch(block: nn.Module, site: Site, receive: Callable[[Tensor], None]) -> Callable[[], None]:
    """Hook one site of a block; return what takes the hook off."""
    module = block.get_submodule(site.module)
    if site.side == "input":

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            receive(args[0] if args else kwargs["hidden_states"])

        return module.register_forward_pre_hook(before, with_kwargs=True).remove

    def after(_: nn.Module, __: Any, output: Any) -> None:
        receive(output[0] if isinstance(output, tuple) else output)

    return module.register_forward_hook(after).remove


def plan_batches(lengths: Sequence[int], *, token_budget: int = 4096, max_texts: int = 256) -> list[list[int]]:
    """Return batches of positions: like lengths together, the longest first, each within the budget when padded.

    The plan depends on the whole list alone, so a run, a resumed run and one shared among processes make the same
    batches, and so the same vectors to the last bit.

    Args:
        lengths: tokens of each text.
        token_budget: texts times longest text in a batch. A text longer than that gets a batch of its own.
        max_texts: texts in a batch, at the most.

    Example:
        >>> plan_batches([3, 9, 4, 2], token_budget=12)
        [[1], [2, 0, 3]]
    """
    if token_budget < 1 or max_texts < 1:
        raise OptionError(f"`token_budget` and `max_texts` must be positive, but got {token_budget} and {max_texts}.")
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and len(batches[-1]) < max_texts and longest * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


@dataclass(frozen=True)
class LayerReader:
    """Reads the vectors of many layers from one forward pass for each batch.

    Attributes:
        model: the transformer, uncut or cut after the last wanted layer, in eval mode.
        preprocess: makes the model's inputs, on its device, of a list of texts (or images).
        anatomy: of ``model``.
        layers: which layers, in the order of the results.
        norm: ``"final"`` or ``"none"``.
        pooling: how token states become one vector.
    """

    model: nn.Module
    preprocess: Callable[[list[Any]], Mapping[str, Any]]
    anatomy: Anatomy
    layers: Sequence[int]
    norm: Norm = "final"
    pooling: Pooling = "mean"

    def embed(
        self, texts: Sequence[Any], batches: Sequence[Sequence[int]], *, tokens: TokenReceive | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the positions of each batch and its vectors, ``(L, B, D)`` float32 on the CPU.

        Args:
            texts: the whole list.
            batches: positions in it, from :func:`plan_batches`.
            tokens: also handed the raw states of every layer, the mask and the positions.

        Raises:
            NotFiniteError: naming the layer and text whose states hold NaN or infinity.
        """
        for batch in batches:
            yield from self._halving(texts, list(batch), tokens)

    def _halving(
        self, texts: Sequence[Any], batch: list[int], tokens: TokenReceive | None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Embed one batch; when memory runs out, its two halves."""
        try:
            vectors = self._read(texts, batch, tokens)
        except torch.OutOfMemoryError:
            if len(batch) == 1 or tokens is not None:  # a metric must not see a state twice
                raise
            torch.cuda.empty_cache()
        else:
            yield batch, vectors
            return
        for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
            yield from self._halving(texts, half, tokens)

    @torch.inference_mode()
    def _read(self, texts: Sequence[Any], batch: list[int], tokens: TokenReceive | None) -> Tensor:
        inputs = self.preprocess([texts[position] for position in batch])
        real = inputs.get("attention_mask")
        final = [self.model.get_submodule(path) for path in self.anatomy.final] if self.norm == "final" else []
        made: dict[int, Tensor] = {}

        def receive(layer: int, _: str, states: Tensor) -> None:
            mask = real_tokens(real, states, model=self.model)
            if tokens is not None:
                tokens(layer, states, mask, batch)
            for module in final:
                states = module(states)
            made[layer] = pool(states, mask, self.pooling)

        capture(self.model, inputs, receive, anatomy=self.anatomy, layers=self.layers)
        vectors = torch.stack([made[layer].float().cpu() for layer in self.layers])  # layers may lie on several devices
        self._check(vectors, [texts[position] for position in batch])
        return vectors

    def _check(self, vectors: Tensor, texts: Sequence[Any]) -> None:
        if not bool(vectors.isfinite().all()):
            row, text = (~vectors.isfinite().all(dim=2)).nonzero()[0].tolist()
            raise NotFiniteError(
                f"Layer {self.layers[row]} gives NaN or infinity for {str(texts[text])[:80]!r}. "
                "Load the model with dtype='float32', or check its weights."
            )


def real_tokens(real: Tensor | None, states: Tensor, *, model: nn.Module | None = None) -> Tensor:
    """Return which states are of real tokens, bool, shape ``(B, T)``; all of them where the inputs do not say.

    Models of sound convolve their samples or spectra down to fewer states than the mask of their inputs has entries.
    Those that say how (Wav2Vec2, HuBERT, WavLM) are asked; Whisper's states are every second one of its spectra.

    Args:
        real: the ``attention_mask`` of the model's inputs, one row for each.
        states: shape ``(B, T, D)``.
        model: the transformer, to be asked.
    """
    if real is None or len(real) != len(states) or real.ndim != 2:
        return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    real, length = real.to(states.device), states.shape[1]
    if real.shape[1] == length:
        return real.bool()
    if (asked := getattr(model, "_get_feature_vector_attention_mask", None)) is not None:
        return asked(length, real.long()).bool()  # type: ignore[no-any-return]
    if getattr(model, "main_input_name", "") == "input_features":
        return real[:, :: -(-real.shape[1] // length)].bool()
    return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
