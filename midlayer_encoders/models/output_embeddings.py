"""The embeddings by which a language model chooses its next token; an encoder has no use for them but to filter."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from midlayer_encoders.errors import OptionError
from midlayer_encoders.models.hub import local_only, read_weight

__all__ = ["output_embeddings"]

_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")  # how the files call them


def output_embeddings(
    loaded: nn.Module, model: str, revision: str | None = None, *, gguf_file: str | None = None
) -> Tensor:
    """Return the output embeddings of a model, one row for each token, shape ``(T, D)``.

    Args:
        loaded: the model without its head, however it is cut.
        model: folder or name on the hub that it was read from.
        revision: on the hub.
        gguf_file: of the model.
    """
    config: Any = loaded.config
    if getattr(config, "tie_word_embeddings", True):
        return loaded.get_input_embeddings().weight.detach()  # type: ignore[operator, no-any-return]
    found = None
    if gguf_file is None:
        found = read_weight(model, _NAMES, revision, local=local_only(model, revision))
    if found is None:
        raise OptionError(
            f"`embed_filter` must be False for {model}: its output embeddings are not in files of safetensors, or have "
            f"another name than {', '.join(_NAMES)}."
        )
    return found
