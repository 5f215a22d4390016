"""Tokens that all texts begin with pass once: their keys, values and states serve every batch of a run.

What a template puts before a text, and the special tokens there, are the same for every text, and in a causal model
nothing that follows reaches them. So a batch is read from the token after them on, with their keys and values in the
model's cache, and their states are put before those of the batch, where whoever pools finds them.

Which models this is exact for is tried, not looked up. Where it is not, or where it does not pay, all tokens are read.
What it brings: ``benchmarks/results/prefix.md``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.transformers_internals import empty_cache
from midlayer_encoders.reading.capture import Receive, capture

__all__ = ["SharedPrefix", "pays", "shared_ids", "shared_prefix"]

_FEWEST = 3  # tokens that are worth a cache
_SAVED = 128  # tokens over all texts that are worth its pass, which reads all weights as any other does
_BEGINNINGS = ["a", "The", "7", "(", "é"]  # of texts that have nothing in common
_ROUNDINGS = 64  # of the size of a layer's states: matrices of other shapes add up in another order, block after block
_TRIED = 24  # tokens of the longer text that is tried
_EXACT = (torch.float32, torch.float64)  # in half precision rounding would hide a difference

_log = logging.getLogger(__name__)
_works: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()  # beside the models, as turns are


def shared_ids(inputs_of: Callable[[list[Any]], Mapping[str, Any]], most: int | None = None) -> tuple[int, ...]:
    """Return the token ids that texts begin with whatever they are; none where there are too few to be worth it.

    Args:
        inputs_of: makes the model's inputs of a list of texts, with template and prompt.
        most: how many stand before a text, where that is known.
    """
    if most is not None and most < _FEWEST:
        return ()
    made = [inputs_of([text])["input_ids"][0].tolist() for text in _BEGINNINGS]
    count = 0
    while count != most and all(len(ids) > count + 1 and ids[count] == made[0][count] for ids in made):
        count += 1
    return tuple(made[0][:count]) if count >= _FEWEST else ()


def pays(ids: Sequence[int], texts: int) -> bool:
    """Return whether it saves enough to have the tokens that so many texts begin with pass once."""
    return len(ids) * texts >= _SAVED


class SharedPrefix:
    """The tokens that the texts of a run begin with, after their one pass.

    Args:
        model: in eval mode, causal.
        anatomy: of it.
        ids: of the tokens.
        layers: that are read.
        sites: what of each layer is read.
        device: of the model's inputs.

    Raises:
        ValueError: the model keeps something else than the keys and values of all tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        ids: Sequence[int],
        *,
        layers: Sequence[int],
        sites: Sequence[str],
        device: torch.device,
    ) -> None:
        self.ids = torch.tensor([list(ids)], device=device)
        self._states: dict[int, Tensor] = {}
        self._cache = empty_cache(model)
        inputs = {"input_ids": self.ids, "past_key_values": self._cache, "use_cache": True}

        def receive(layer: int, _: str, states: Tensor) -> None:
            self._states[layer] = states.clone()

        capture(model, inputs, receive, anatomy=anatomy, layers=layers, sites=sites)

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self.ids.shape[1]

    def begins(self, ids: Tensor, mask: Tensor) -> bool:
        """Return whether each text of a batch begins with it and goes on."""
        if ids.shape[1] <= self.length:
            return False
        return bool((ids[:, : self.length] == self.ids).all() and mask[:, self.length].all())

    def rest(self, ids: Tensor) -> dict[str, Any]:
        """Return the inputs of a pass over what follows it in the texts of a batch."""
        cache = copy.deepcopy(self._cache)  # a pass adds to it
        cache.batch_repeat_interleave(len(ids))
        return {"input_ids": ids[:, self.length :], "past_key_values": cache, "use_cache": True}

    def whole(self, receive: Receive) -> Receive:
        """Return what hands on the states of all tokens where those of the rest are made."""

        def hand_on(layer: int, site: str, states: Tensor) -> None:
            before = self._states[layer].expand(len(states), -1, -1)
            receive(layer, site, torch.cat([before, states], dim=1))

        return hand_on


@torch.inference_mode()
def shared_prefix(
    model: nn.Module,
    anatomy: Anatomy,
    ids: Sequence[int],
    example: Tensor,
    *,
    layers: Sequence[int],
    sites: Sequence[str],
) -> SharedPrefix | None:
    """Return the tokens that texts begin with after their pass, or ``None`` where all tokens must be read.

    It is tried once for each model: the states of two texts, one of them padded on the right, must be those that a pass
    over all of their tokens gives, at every layer, within rounding.

    Args:
        model: in eval mode; that it needs no mask must be known.
        anatomy: of it.
        ids: of the tokens.
        example: of some text, the ids that follow these, at least one, shape ``(T,)``.
        layers: that are read.
        sites: what of each layer is read.
    """
    if max(layers) == 0 or next(model.parameters()).dtype not in _EXACT:
        return None
    config = getattr(model, "config", None)
    kind = tuple(ids), tuple(sites), getattr(config, "_attn_implementation", None)
    known = _works.setdefault(model, {})
    device = example.device
    try:
        if kind not in known:
            every = SharedPrefix(model, anatomy, ids, layers=_all_layers(anatomy, sites), sites=sites, device=device)
            known[kind] = _works_for(model, anatomy, every, example, sites)
            if not known[kind]:
                _log.info(
                    "%s is read with all tokens of a template: its states differ otherwise.", type(model).__name__
                )
        if known[kind]:
            return SharedPrefix(model, anatomy, ids, layers=layers, sites=sites, device=device)
    except Exception as reason:  # a family may raise anything at a cache that it does not expect
        known[kind] = False
        _log.info("%s is read with all tokens of a template: %s", type(model).__name__, reason)
    return None


def _all_layers(anatomy: Anatomy, sites: Sequence[str]) -> range:
    return range(0 if tuple(sites) == ("residual_out",) else 1, anatomy.num_layers + 1)


def _works_for(model: nn.Module, anatomy: Anatomy, prefix: SharedPrefix, example: Tensor, sites: Sequence[str]) -> bool:
    """Return whether two texts have the same states at every layer in both ways."""
    text = example.repeat(-(-_TRIED // len(example)))[:_TRIED]
    short = text.clone()
    kept = _TRIED // 3
    short[kept:] = text[0]  # whatever is padded
    ids = torch.cat([prefix.ids.expand(2, -1), torch.stack([text, short])], dim=1)
    layers = _all_layers(anatomy, sites)

    def states(inputs: dict[str, Any], through: Callable[[Receive], Receive]) -> Tensor:
        found: list[Tensor] = []
        receive = through(lambda _, __, one: found.append(one.clone()))
        capture(model, inputs, receive, anatomy=anatomy, layers=layers, sites=sites)
        return torch.stack(found, dim=1)  # (B, L, T, D)

    plain = states({"input_ids": ids}, lambda receive: receive)
    made = states(prefix.rest(ids), prefix.whole)
    count = prefix.length
    # Apart, so that the outsized states of the first token hide nothing.
    parts = [(0, 0, count), (0, count, count + _TRIED), (1, count, count + kept)]
    most = _ROUNDINGS * torch.finfo(plain.dtype).eps
    for row, start, end in parts:
        expected = plain[row, :, start:end]
        off = (made[row, :, start:end] - expected).norm(dim=(1, 2))
        if not bool((off <= most * expected.norm(dim=(1, 2))).all()):
            return False
    return True
