"""Record how padding affects a model."""

from typing import Any

from torch import nn

_SENSITIVE = "_suffers_from_padding"  # an attribute of the model, so that copies of the model have it


def suffers_from_padding(model: nn.Module) -> bool:
    """Return whether padding changes the states of the real tokens despite the mask.

    Such inputs run in unpadded batches of one length. Examples: the base models of Wav2Vec2, HuBERT and WavLM normalize
    each channel over time, padding included, and were trained without a mask; dynamic rotary embeddings depend on the
    longest text of a batch; sparse attention (DeepSeek V3.2) breaks ties by the number of keys; FNet and Nystromformer
    mix all tokens. For most models, construction of the encoder detects it (:func:`mark_padding`).
    """
    if getattr(model, _SENSITIVE, False):
        return True
    config: Any = getattr(model, "config", None)
    if getattr(config, "feat_extract_norm", None) == "group" or getattr(config, "index_topk", None):
        return True
    rope = getattr(config, "rope_parameters", None)
    settings = [rope, *rope.values()] if isinstance(rope, dict) else []
    return any(isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic") for rope in settings)


def mark_padding(model: nn.Module) -> None:
    """Record that padding changes the states of a model."""
    setattr(model, _SENSITIVE, True)
