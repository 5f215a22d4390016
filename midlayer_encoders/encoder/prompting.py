"""Apply templates and prompts to an encoder, and add the modules after its pooling."""

import copy
import json
from dataclasses import replace
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import nn
from transformers import PreTrainedTokenizerBase

from midlayer_encoders import recipes
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.saved_folder import SavedFolder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.models.anatomy import most_tokens
from midlayer_encoders.reading.pooled_spans import PooledSpans, split_spans
from midlayer_encoders.token_selector import TokenLayout, TokenSelector

# --- prompts ---------------------------------------------------------------------------------------------------------


def resolve_prompts(options: EncoderOptions, saved: SavedFolder) -> tuple[dict[str, str] | None, str | None]:
    """Return the prompts of an encoder and the name of the default one.

    They come from the options, from the template, or else from the folder. A template replaces the folder's prompts.

    Args:
        options: options of the encoder.
        saved: the folder's settings.
    """
    if options.template is not None and any(isinstance(module, PooledSpans) for module in saved.modules):
        raise OptionError(
            f"`{'recipe' if options.recipe else 'template'}` does not apply to a folder that contains its template "
            "already and pools its spans. Leave it out, or create the encoder from the original model."
        )
    prompts = dict(options.prompts) if options.prompts is not None else None
    default = options.default_prompt_name
    if prompts is None and options.template is None:
        prompts = dict(saved.prompts)
        default = default or saved.default_prompt_name
    if options.default_prompt_name is not None and options.default_prompt_name not in (prompts or {}):
        names = ", ".join(map(repr, prompts or ())) or "none"
        raise OptionError(
            "`default_prompt_name` must name one of `prompts`, or a prompt saved with the model if neither `prompts` "
            f"nor a template is passed (available: {names}), but got {options.default_prompt_name!r}."
        )
    prefixes = {kind: parts.before for kind, parts in recipes.split_template(options.template).items()}
    if len(set(prefixes.values())) == 1:
        return prompts, default
    if prompts is not None:
        raise OptionError("`prompts` must be None if the template differs for queries and documents.")
    return prefixes, "text"


# --- templates -------------------------------------------------------------------------------------------------------


def copy_first_module(encoder: Any) -> Any:
    """Return a copy of an encoder's first module that shares its model and takes another tokenizer."""
    first = copy.copy(encoder[0])
    first._modules = dict(first._modules)
    if first.processor is not first.tokenizer:
        first.processor = copy.copy(first.processor)
    return first


def set_tokenizer(first: Any, tokenizer: Any) -> None:
    """Replace the tokenizer of a first module, which may be its processor or a part of it."""
    if first.processor is first.tokenizer:
        first.processor = tokenizer
    else:
        first.processor.tokenizer = tokenizer


def apply_template(first: Any, options: EncoderOptions, name: str) -> TokenSelector:
    """Make the first module's tokenizer add the template to each text, and return the selection of the pooled tokens.

    Args:
        first: first module of the encoder.
        options: options of the encoder.
        name: name of the model for error messages.
    """
    pool_template = options.template_tokens is not False
    layout = TokenLayout()
    special_ids: tuple[int, ...] = ()
    if options.skip_special:
        if not isinstance(first.tokenizer, PreTrainedTokenizerBase):
            raise OptionError(f"`skip_special` must be False for {name}, which has no tokenizer of transformers.")
        special_ids = recipes.special_ids(first.tokenizer)
    if first.tokenizer is not None and (options.template is not None or not pool_template):
        first.tokenizer_without_template = first.tokenizer
        tokenizer, layout = recipes.add_template(
            first.tokenizer,
            _tokenizer_parts(options),
            model=name,
            max_length=options.max_length,
            positions=most_tokens(first.model),
        )
        if options.template is not None:
            set_tokenizer(first, tokenizer)
    return TokenSelector(layout, options.skip_first, pool_template, special_ids=special_ids)


def _tokenizer_parts(options: EncoderOptions) -> recipes.TemplateParts:
    """Return the parts of the template that the tokenizer adds; prefixes that differ by kind of text are prompts."""
    templates = recipes.split_template(options.template)
    if len({parts.before for parts in templates.values()}) == 1:
        return templates["text"]
    if options.template_tokens is False:
        raise OptionError("`template_tokens` must not be False if queries and documents have different prefixes.")
    return replace(templates["text"], before="")


def prompting_settings(options: EncoderOptions) -> str:
    """Return the template and the pooled tokens as JSON; empty for the defaults."""
    pool_template = options.template_tokens is not False
    if options.template is None and options.skip_first == 0 and pool_template and not options.skip_special:
        return ""
    settings = {"skip_first": options.skip_first, "template": options.template, "template_tokens": pool_template}
    settings |= {"skip_special": True} if options.skip_special else {}
    return json.dumps(settings, sort_keys=True)


# --- the pooling and the modules after it ---------------------------------------------------------------------------


def pool_spans(modules: list[Any], layout: TokenLayout, join: str | None) -> list[Any]:
    """Return modules whose pooling takes the spans of a template with a mark; otherwise the same modules.

    Args:
        modules: the modules after the first one.
        layout: positions of the text's tokens.
        join: the option.
    """
    if not layout.question:
        return modules
    if not any(isinstance(module, PoolingModule) for module in modules):
        raise OptionError("`template` must not mark a span with {read} for a model that pools in its own way.")
    counts = {name: getattr(layout, name) for name in ("front", "question", "between", "back")}
    return [
        PooledSpans(module.embedding_dimension, **counts, join=join or "sum")
        if isinstance(module, PoolingModule)
        else module
        for module in modules
        if join != "none" or not isinstance(module, Normalize)
    ]


def modules_after_pooling(encoder: Any, options: EncoderOptions) -> list[nn.Module]:
    """Return the modules that follow :func:`~midlayer_encoders.encoder.saved_folder.later_modules`."""
    modules: list[nn.Module] = []
    if options.center is not None:
        spans = encoder.spans
        if spans is not None:
            join, spans.join = spans.join, "none"
        sample = encoder.encode(list(options.center), convert_to_tensor=True, show_progress_bar=False)
        if spans is not None:
            spans.join = join
            spans.center(recipes.centering_offset(split_spans(sample)[0]))
        else:
            offset: Any = recipes.centering_offset(sample).float()
            identity: Any = torch.eye(width := len(offset))
            dense = Dense(width, width, activation_function=nn.Identity(), init_weight=identity, init_bias=offset)
            modules.append(dense)
    if options.normalize and options.join != "none" and not isinstance([*encoder, *modules][-1], Normalize):
        modules.append(Normalize())
    return modules
