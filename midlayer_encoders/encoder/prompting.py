"""Apply templates and prompts to an encoder, and add the modules after its pooling."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import nn

from midlayer_encoders import recipes
from midlayer_encoders._types import Pooling
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import ModelNotFoundError, OptionError
from midlayer_encoders.files import read_json
from midlayer_encoders.models.hub import local_only, model_file

logger = logging.getLogger(__name__)

_PROMPTS_FILE = "config_sentence_transformers.json"


# --- prompts ---------------------------------------------------------------------------------------------------------


class SavedPrompts(NamedTuple):
    """The prompts of a sentence-transformers folder.

    Attributes:
        texts: prompts by name.
        default: name of the default prompt.
    """

    texts: Mapping[str, str] = {}
    default: str | None = None


def load_saved_prompts(model: str, revision: str | None = None, *, gguf_file: str | None = None) -> SavedPrompts:
    """Return the prompts that ``SentenceTransformer`` loads from a folder or a name on the hub.

    Args:
        model: folder or name.
        revision: revision on the hub.
        gguf_file: GGUF file with the weights.

    Raises:
        ModelNotFoundError: if there is no such model, or its prompts are malformed.
    """
    local = local_only(model, revision, filename=gguf_file or "config.json")
    find = partial(model_file, model, revision=revision, local=local)
    try:
        modules = find("modules.json")
        settings = None if modules is None else find(_PROMPTS_FILE)
    except OSError as reason:  # also raised for invalid names
        raise ModelNotFoundError(f"`model` must be a folder or hub name, but got {model!r}: {reason}") from reason
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
            raise TypeError("a prompt is not a string")
        # Every SentenceTransformer has the prompts "query" and "document", empty by default.
        if default is not None and default not in {"query", "document", *texts}:
            raise ValueError(f"the default prompt, {default!r}, is not one of the prompts")
        # Instructor models exclude the tokens of a prompt from pooling.
        poolings = [module["path"] for module in read_json(Path(modules)) if module["type"].endswith(".Pooling")]
        files = [find(f"{path}/config.json") for path in poolings if any(texts.values())]
        pooled = all(read_json(Path(file)).get("include_prompt", True) for file in files if file is not None)
    except (AttributeError, TypeError, ValueError) as reason:
        raise ModelNotFoundError(
            f"`model` must hold valid prompts in its {_PROMPTS_FILE}, but {model!r} does not ({reason}). Correct them, "
            "or pass `prompts` ({} for none)."
        ) from reason
    if not pooled:
        logger.warning(
            "The prompts of %s are not used because its pooling excludes their tokens. Pass `prompts` to use them and "
            "pool their tokens, or prompts={} to use none.",
            model,
        )
        return SavedPrompts()
    return SavedPrompts(texts, default)


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


def apply_template(first: Any, options: EncoderOptions, name: str) -> recipes.Counting:
    """Make the first module's tokenizer add the template to each text, and return the selection of the pooled tokens.

    Args:
        first: first module of the encoder.
        options: options of the encoder.
        name: name of the model for error messages.
    """
    pool_template = options.template_tokens is not False
    layout = recipes.TokenLayout()
    if first.tokenizer is not None and (options.template is not None or not pool_template):
        tokenizer, layout = recipes.add_template(first.tokenizer, _tokenizer_parts(options), model=name)
        if options.template is not None and first.processor is first.tokenizer:
            first.processor = tokenizer
        elif options.template is not None:
            first.processor.tokenizer = tokenizer
    return recipes.Counting(layout, options.skip_first, pool_template)


def _tokenizer_parts(options: EncoderOptions) -> recipes.TemplateParts:
    """Return the parts of the template that the tokenizer adds; prefixes that differ by kind of text are prompts."""
    templates = recipes.split_template(options.template)
    if len({parts.before for parts in templates.values()}) == 1:
        return templates["text"]
    if options.template_tokens is False:
        raise OptionError(
            "`template_tokens` must not be False if queries and documents have different prefixes of unknown length."
        )
    return replace(templates["text"], before="")


def prompting_settings(options: EncoderOptions) -> str:
    """Return the template and the pooled tokens as JSON; empty for the defaults."""
    pool_template = options.template_tokens is not False
    if options.template is None and options.skip_first == 0 and pool_template:
        return ""
    settings = {"skip_first": options.skip_first, "template": options.template, "template_tokens": pool_template}
    return json.dumps(settings, sort_keys=True)


# --- pooling and the modules after it --------------------------------------------------------------------------------


def pooling_module(first: Any, pooling: Pooling | None) -> nn.Module:
    """Return sentence-transformers' pooling for the states of the first module."""
    mode = "lasttoken" if pooling == "last" else pooling or "mean"  # names in sentence-transformers
    module: nn.Module = PoolingModule(first.get_embedding_dimension(), pooling_mode=mode)
    return module


def modules_after_pooling(encoder: Any, options: EncoderOptions) -> list[nn.Module]:
    """Return the modules that follow the pooling of an encoder."""
    if options.whiten and options.center is None:
        raise OptionError(
            "`whiten` must be False without `center`: it scales each direction by its spread over those texts."
        )
    if options.embed_filter and options.combine == "concat":
        raise OptionError("`embed_filter` must be False with combine='concat': it projects vectors of one layer.")
    modules: list[nn.Module] = []
    if options.center is not None or options.embed_filter:
        width = encoder.get_embedding_dimension()
        sample = None
        if options.center is not None:
            sample = encoder.encode(list(options.center), convert_to_tensor=True, show_progress_bar=False)
        projection = recipes.middle_directions(encoder.output_embeddings()) if options.embed_filter else None
        matrix, offset = recipes.vector_map(sample, width=width, whiten=options.whiten, projection=projection)
        initial: dict[str, Any] = {"init_weight": matrix.float(), "init_bias": offset.float()}
        modules.append(Dense(width, width, activation_function=nn.Identity(), **initial))
    if options.normalize:
        modules.append(Normalize())
    return modules
