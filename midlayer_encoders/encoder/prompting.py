"""Apply templates and prompts to an encoder, and add the modules after its pooling."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import Tensor, nn

from midlayer_encoders._types import Pooling
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import ModelNotFoundError, OptionError
from midlayer_encoders.files import read_json
from midlayer_encoders.models.hub import local_only, model_file
from midlayer_encoders.recipes import TemplateParts, TokenLayout, add_template, split_template
from midlayer_encoders.recipes.counting import Counting
from midlayer_encoders.recipes.vectors import middle_directions, vector_map

logger = logging.getLogger(__name__)

_PROMPTS_FILE = "config_sentence_transformers.json"
_POOLING_MODES = {"last": "lasttoken"}  # names in sentence-transformers

_Encoder = TypeVar("_Encoder", bound=Any)


# --- prompts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedPrompts:
    """The prompts of a sentence-transformers folder.

    Attributes:
        texts: prompts by name.
        default: name of the default prompt.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None


def load_saved_prompts(model: str, revision: str | None = None, *, gguf_file: str | None = None) -> SavedPrompts:
    """Return the prompts that ``SentenceTransformer`` loads from a folder or a name on the hub.

    Args:
        model: folder or name.
        revision: revision on the hub.
        gguf_file: file of the weights.

    Raises:
        ModelNotFoundError: if there is no such model, or its prompts are malformed.
    """
    local = local_only(model, revision, filename=gguf_file or "config.json")
    find = partial(model_file, model, revision=revision, local=local)
    try:
        modules = find("modules.json")
        settings = None if modules is None else find(_PROMPTS_FILE)
    except OSError as reason:  # for invalid names, too
        raise ModelNotFoundError(
            f"`model` must be a folder or a name on the hub, but got {model!r}: {reason}"
        ) from reason
    if modules is None or settings is None:
        return SavedPrompts()
    try:
        config = read_json(Path(settings))
        # The prompts of other classes, such as rerankers, do not apply.
        if config.get("model_type", "SentenceTransformer") != "SentenceTransformer":
            return SavedPrompts()
        texts = {name: text or "" for name, text in (config.get("prompts") or {}).items()}
        default = config.get("default_prompt_name")
        if not all(isinstance(text, str) for text in texts.values()):
            raise TypeError("a prompt is no string")
        # Every SentenceTransformer has the prompts "query" and "document", empty by default.
        if default is not None and default not in {"query", "document", *texts}:
            raise ValueError(f"the default, {default!r}, is none of the prompts")
        pooled = not any(texts.values()) or _pools_prompts(read_json(Path(modules)), find)
    except (AttributeError, TypeError, ValueError) as reason:
        raise ModelNotFoundError(
            f"`model` must hold a {_PROMPTS_FILE} whose `prompts` are names and texts, but that of {model!r} does not "
            f"({reason}). Correct it, or pass `prompts`, {{}} for none."
        ) from reason
    if not pooled:
        logger.warning(
            "The prompts of %s are not used: its pooling excludes their tokens, which this encoder would pool. "
            "Pass `prompts` to use them, pooled with the text, or `prompts={}` for none.",
            model,
        )
        return SavedPrompts()
    return SavedPrompts(texts, default)


def _pools_prompts(modules: list[dict[str, Any]], find: Callable[[str], str | None]) -> bool:
    """Return whether the pooling includes the tokens of a prompt; Instructor models exclude them."""
    paths = [module["path"] for module in modules if module["type"].endswith(".Pooling")]
    files = [find(f"{path}/config.json") for path in paths]
    return all(read_json(Path(file)).get("include_prompt", True) for file in files if file is not None)


def resolve_prompts(options: EncoderOptions, saved: SavedPrompts) -> tuple[dict[str, str] | None, str | None]:
    """Return the prompts of an encoder and the name of the default one.

    They come from the options, from the template, or else from the folder. A template replaces the folder's prompts.

    Args:
        options: options of the encoder.
        saved: prompts of the folder.
    """
    prompts = dict(options.prompts) if options.prompts is not None else None
    default = options.default_prompt_name
    if prompts is None and options.template is None:
        prompts = dict(saved.texts)
        default = default or saved.default
    if options.default_prompt_name is not None and options.default_prompt_name not in (prompts or {}):
        names = ", ".join(map(repr, prompts or ())) or "none"
        raise OptionError(
            "`default_prompt_name` must name one of `prompts` or, without them and without a template, a prompt that "
            f"the model's folder keeps (here: {names}), but got {options.default_prompt_name!r}."
        )
    prefixes = {kind: frame.before for kind, frame in split_template(options.template).items()}
    if len(set(prefixes.values())) == 1:
        return prompts, default
    if prompts is not None:
        raise OptionError("`prompts` must be None if the template differs for queries and documents.")
    return prefixes, "text"


# --- templates -------------------------------------------------------------------------------------------------------


def apply_template(first: Any, options: EncoderOptions, name: str) -> TokenLayout:
    """Make the first module's tokenizer add the template to each text, and return the positions of the text's tokens.

    Args:
        first: sentence-transformers' module around the model.
        options: options of the encoder.
        name: name of the model in errors.
    """
    if first.tokenizer is None or (options.template is None and options.template_tokens in (None, True)):
        return TokenLayout()
    tokenizer, placed = add_template(first.tokenizer, _tokenizer_frame(options), model=name)
    if options.template is None:
        return placed
    if first.processor is first.tokenizer:
        first.processor = tokenizer
    else:
        first.processor.tokenizer = tokenizer
    return placed


def _tokenizer_frame(options: EncoderOptions) -> TemplateParts:
    """Return the part of the template that the tokenizer adds; prefixes that differ by kind of text are prompts."""
    frames = split_template(options.template)
    frame = frames["text"]
    if len({other.before for other in frames.values()}) == 1:
        return frame
    if options.template_tokens is False:
        raise OptionError(
            "`template_tokens` must not be False if queries and documents have different prefixes, since the start of "
            "the text is then unknown."
        )
    return TemplateParts("", frame.between, frame.after)


def prompting_settings(options: EncoderOptions) -> str:
    """Return the template and the pooled tokens as JSON; empty for the defaults."""
    settings = {
        "template": options.template,
        "skip_first": options.skip_first,
        "template_tokens": options.template_tokens is not False,
    }
    defaults = {"template": None, "skip_first": 0, "template_tokens": True}
    return "" if settings == defaults else json.dumps(settings, sort_keys=True)


def copy_with_options(encoder: _Encoder, options: EncoderOptions) -> _Encoder:
    """Return an encoder that shares another's model, with the tokenizer, prompts and pooling of other options."""
    copied: _Encoder = _shallow_copy(encoder)
    first = _shallow_copy(encoder[0])
    if first.processor is not first.tokenizer:
        first.processor = copy.copy(first.processor)
    placed = apply_template(first, options, encoder.name)
    copied._modules = {"0": first, "1": pooling_module(first, options.pooling)}
    copied.counting = Counting(placed, options.skip_first, options.template_tokens is not False)
    prompts, copied.default_prompt_name = resolve_prompts(options, encoder.saved_prompts)
    copied.prompts = {"query": "", "document": "", **(prompts or {})}
    copied.model_card_data = copy.copy(encoder.model_card_data)
    copied.model_card_data.register_model(copied)
    return copied


def _shallow_copy(module: Any) -> Any:
    """Return a copy of a module with the same submodules, which can be replaced."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


# --- pooling and the modules after it --------------------------------------------------------------------------------


def pooling_module(first: Any, pooling: Pooling | None) -> nn.Module:
    """Return sentence-transformers' pooling for the states of the first module."""
    mode = pooling or "mean"
    module: nn.Module = PoolingModule(first.get_embedding_dimension(), pooling_mode=_POOLING_MODES.get(mode, mode))
    return module


def modules_after_pooling(
    options: EncoderOptions,
    width: int,
    *,
    embed: Callable[[tuple[str, ...]], Tensor],
    output_embeddings: Callable[[], Tensor],
) -> list[nn.Module]:
    """Return the modules that follow the pooling.

    Args:
        options: options of the encoder.
        width: dimensions of a vector.
        embed: returns the pooled vectors of texts.
        output_embeddings: returns the model's output embeddings.
    """
    if options.whiten and options.center is None:
        raise OptionError("`whiten` must be False without `center`, the texts whose spread scales the directions.")
    if options.embed_filter and options.combine == "concat":
        raise OptionError("`embed_filter` must be False with combine='concat': it maps the vector of one layer.")
    modules: list[nn.Module] = []
    if options.center is not None or options.embed_filter:
        sample = embed(options.center) if options.center is not None else None
        projection = middle_directions(output_embeddings()) if options.embed_filter else None
        matrix, offset = vector_map(sample, width=width, whiten=options.whiten, projection=projection)
        initial: dict[str, Any] = {"init_weight": matrix.float(), "init_bias": offset.float()}
        modules.append(Dense(width, width, activation_function=nn.Identity(), **initial))
    if options.normalize:
        modules.append(Normalize())
    return modules
