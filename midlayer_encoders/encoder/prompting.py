"""What a recipe changes in the modules of an encoder: the tokenizer, prompts, and what follows the pooling."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import Tensor, nn

from midlayer_encoders._types import Pooling
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.saved_prompts import SavedPrompts
from midlayer_encoders.errors import OptionError
from midlayer_encoders.recipes import Frame, Placed, frames_of, with_frame
from midlayer_encoders.recipes.counting import Counting
from midlayer_encoders.recipes.vectors import middle_directions, vector_map

__all__ = ["after_pooling", "ask", "asked", "asked_copy", "pooling_module", "prompts_of"]

_MODES = {"last": "lasttoken"}  # sentence-transformers' own name for it

_Encoder = TypeVar("_Encoder", bound=Any)


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


def asked_copy(encoder: _Encoder, options: EncoderOptions) -> _Encoder:
    """Return an encoder that shares another's model, with the tokenizer, prompts and pooling of its own options."""
    made: _Encoder = _shallow(encoder)
    first = _shallow(encoder[0])
    if first.processor is not first.tokenizer:
        first.processor = copy.copy(first.processor)
    placed = ask(first, options, encoder.name)
    made._modules = {"0": first, "1": pooling_module(first, options.pooling)}
    made.counting = Counting(placed, options.skip_first, options.template_tokens is not False)
    prompts, made.default_prompt_name = prompts_of(options, encoder.saved_prompts)
    made.prompts = {"query": "", "document": "", **(prompts or {})}
    made.model_card_data = copy.copy(encoder.model_card_data)
    made.model_card_data.register_model(made)
    return made


def _shallow(module: Any) -> Any:
    """Return a module that has the same parts as another, and may be given others."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


def pooling_module(first: Any, pooling: Pooling | None) -> nn.Module:
    """Return sentence-transformers' own pooling of the states that the first module hands on."""
    mode = pooling or "mean"
    made: nn.Module = PoolingModule(first.get_embedding_dimension(), pooling_mode=_MODES.get(mode, mode))
    return made


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


def prompts_of(options: EncoderOptions, saved: SavedPrompts) -> tuple[dict[str, str] | None, str | None]:
    """Return the prompts of an encoder, and which is the default.

    They are the user's, or those that a template is made of, or the folder's. A template is all that stands around a
    text: the folder's are left out beside it.

    Args:
        options: of the encoder.
        saved: the folder's own.
    """
    given = dict(options.prompts) if options.prompts is not None else None
    default = options.default_prompt_name
    before = {kind: frame.before for kind, frame in frames_of(options.template).items()}
    if given is None and options.template is None:
        given, default = dict(saved.texts), default or saved.default
    if options.default_prompt_name is not None and options.default_prompt_name not in (given or {}):
        raise OptionError(
            "`default_prompt_name` must name one of `prompts` or, without them and without a template, one that the "
            f"model's folder keeps (here: {', '.join(map(repr, given or ())) or 'none'}), but got "
            f"{options.default_prompt_name!r}."
        )
    if len(set(before.values())) == 1:
        return given, default
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
    if options.embed_filter and options.combine == "concat":
        raise OptionError("`embed_filter` must be False with combine='concat': it maps the vector of one layer.")
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
