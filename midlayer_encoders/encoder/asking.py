"""What a recipe changes in the modules of an encoder: the tokenizer, prompts, and what follows the pooling."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from torch import Tensor, nn

from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError
from midlayer_encoders.recipes import Frame, Placed, frames_of, middle_directions, vector_map, with_frame

__all__ = ["after_pooling", "ask", "asked", "prompts_of"]


def ask(first: Any, options: EncoderOptions, name: str) -> Placed:
    """Have the first module's tokenizer put the template around every text, and return where a text's tokens then are.

    Args:
        first: sentence-transformers' own module around the model.
        options: of the encoder.
        name: of the model, for errors.
    """
    if first.tokenizer is None or (options.template is None and options.template_tokens in (None, True)):
        return Placed()
    framed, placed = with_frame(first.tokenizer, _in_tokenizer(options), model=name)
    if options.template is None:
        return placed
    if first.processor is first.tokenizer:
        first.processor = framed
    else:
        first.processor.tokenizer = framed
    return placed


def _in_tokenizer(options: EncoderOptions) -> Frame:
    """Return what the tokenizer puts around every text: what stands before it only where that is always the same."""
    frames = frames_of(options.template)
    first = frames["text"]
    if len({frame.before for frame in frames.values()}) == 1:
        return first
    if options.template_tokens is False:
        raise OptionError(
            "`template_tokens` must not be False where queries and documents begin in different ways: nothing says "
            "where the text begins."
        )
    return Frame("", first.between, first.after)


def prompts_of(options: EncoderOptions) -> tuple[dict[str, str] | None, str | None]:
    """Return the prompts of an encoder, and which is the default: the user's, or those that a template is made of."""
    given = dict(options.prompts) if options.prompts is not None else None
    before = {kind: frame.before for kind, frame in frames_of(options.template).items()}
    if len(set(before.values())) == 1:
        return given, options.default_prompt_name
    if given is not None:
        raise OptionError(
            "`prompts` must be None where a template differs for queries and documents: that is done by prompts."
        )
    return before, "text"


def asked(options: EncoderOptions) -> str:
    """Return as JSON what stands around a text and which tokens count; empty for the text itself."""
    words = {
        "template": options.template,
        "skip_first": options.skip_first,
        "template_tokens": options.template_tokens is not False,
    }
    plain: Mapping[str, Any] = {"template": None, "skip_first": 0, "template_tokens": True}
    return "" if words == plain else json.dumps(words, sort_keys=True)


def after_pooling(
    options: EncoderOptions,
    width: int,
    *,
    vectors: Callable[[tuple[str, ...]], Tensor],
    embeddings: Callable[[], Tensor],
) -> list[nn.Module]:
    """Return the modules that follow the pooling.

    Args:
        options: of the encoder.
        width: dimensions of a vector.
        vectors: returns those of texts, before these modules.
        embeddings: returns the model's output embeddings.
    """
    modules: list[nn.Module] = []
    if options.whiten and options.center is None:
        raise OptionError("`whiten` must be False without `center`, the texts by whose spread directions are scaled.")
    if options.center is not None or options.embed_filter:
        sample = vectors(options.center) if options.center is not None else None
        projection = middle_directions(embeddings()) if options.embed_filter else None
        matrix, offset = vector_map(sample, width=width, whiten=options.whiten, projection=projection)
        modules.append(
            Dense(width, width, activation_function=nn.Identity(), init_weight=matrix.float(), init_bias=offset.float())
        )
    if options.normalize:
        modules.append(Normalize())
    return modules
