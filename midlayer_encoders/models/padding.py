"""What padding does to a model: whether the states of real inputs change with it."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["mark_padding", "mark_wants_padding", "suffers_from_padding", "wants_padding"]

_MARK = "_suffers_from_padding"  # an attribute of the model, so that it goes where copies of the model go
_WANTS = "_wants_padding"


def suffers_from_padding(model: nn.Module) -> bool:
    """Return whether padding changes the states of the input before it, whatever the mask says.

    The base models of Wav2Vec2, HuBERT and WavLM norm each channel over all of time, padding included, and were
    trained without a mask; rotary embeddings that are scaled by the longest text of a batch change the others;
    attention that picks a few keys (DeepSeek V3.2) breaks ties by their number; FNet and Nystromformer mix all tokens;
    and so on. Their inputs pass in batches of one length, unpadded. For most models it is seen when an encoder is made
    (:func:`mark_padding`).
    """
    if getattr(model, _MARK, False):
        return True
    config: Any = getattr(model, "config", None)
    if getattr(config, "feat_extract_norm", None) == "group" or getattr(config, "index_topk", None):
        return True
    rope = getattr(config, "rope_parameters", None)
    kinds = [rope, *rope.values()] if isinstance(rope, dict) else []
    return any(isinstance(one, dict) and one.get("rope_type") in ("longrope", "dynamic") for one in kinds)


def mark_padding(model: nn.Module) -> None:
    """Note that padding was seen to change the states of a model."""
    setattr(model, _MARK, True)


def wants_padding(model: nn.Module) -> bool:
    """Return whether a model runs only where something is padded: one column more, which the mask hides, is added."""
    return bool(getattr(model, _WANTS, False))


def mark_wants_padding(model: nn.Module) -> None:
    """Note that a model was seen to run only where something is padded."""
    setattr(model, _WANTS, True)
