"""``EncoderOptions``: the single declaration of every option of an encoder.

The constructor's keywords, the flags of every command, the spec, and the lines that recreate an encoder derive from it.
The module imports nothing heavy because the command line reads it to print its help.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import Field, dataclass, field, fields
from functools import cache, partial
from typing import Any, Literal, TypeAlias

from midlayer_encoders import _types as types
from midlayer_encoders import recipes
from midlayer_encoders._types import Join, LayerArgument, Norm, Pooling, Quantization
from midlayer_encoders.errors import DeviceError, OptionError, did_you_mean, short_repr
from midlayer_encoders.files import shell_path
from midlayer_encoders.models import hub
from midlayer_encoders.recipes import Recipe, Template, check_template
from midlayer_encoders.validation import check_choice, check_count, check_flag, check_list, check_text, check_texts

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # accelerate's strategies
_SKIP_SPECIAL = "+skip-special"
_WITHOUT_COUNTERPART = {
    "modules": "A module in memory: LayerEncoder.from_module(module, layer, processor=…).",
    "model_card_data": "Set its fields: encoder.model_card_data.language = ….",
}
_OTHER_NAMES = {"max_seq_length": "max_length", "tokenizer_kwargs": "processor_kwargs", "use_auth_token": "token"}
_MODEL_KWARGS = {"torch_dtype": "dtype"} | {name: name for name in ("dtype", "device_map", "attn_implementation")}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")  # of sentence-transformers


# --- validation: each function returns the value in its canonical type, or raises an OptionError ----------------------


def _check_dtype(argument: str, dtype: Any) -> str:
    name = (dtype if isinstance(dtype, str) else short_repr(dtype)).removeprefix("torch.")
    return check_choice(argument, name, _DTYPES)


def device_name(argument: str, device: Any) -> str:
    """Return the name of a device, given as a ``torch.device`` or by name."""
    name = str(device) if type(device).__module__ == "torch" else device
    if not isinstance(name, str):
        raise OptionError(f"`{argument}` must be a device such as 'cpu' or 'cuda:1', but got {short_repr(device)}.")
    return name


def _check_device_map(argument: str, value: Any) -> str:
    if isinstance(value, Mapping):
        if set(value) != {""}:
            raise OptionError(
                f"`{argument}` must be 'auto', a device, or {{'': device}} for an encoder, whose later blocks do not "
                f"exist, but got {short_repr(value)}."
            )
        value = f"cuda:{value['']}" if isinstance(value[""], int) else device_name(argument, value[""])
    name = check_text(argument, value)
    return name if re.fullmatch(r"[a-z]{2,4}(:\d+)?", name) else check_choice(argument, name, _DEVICE_MAPS)


def _check_prompts(argument: str, prompts: Any) -> dict[str, str]:
    if not isinstance(prompts, Mapping):
        raise OptionError(f"`{argument}` must be a dict of names and texts, but got {short_repr(prompts)}.")
    pairs = ((check_text(f"name in {argument}", name), text) for name, text in prompts.items())
    return {name: check_text(f"{argument}[{name!r}]", text) for name, text in pairs}


def _check_center(argument: str, values: Any) -> list[str]:
    """Return the different texts, so that a repeated one does not dominate their mean."""
    texts = list(dict.fromkeys(check_texts(argument, values, minimum=0)))
    if len(texts) < recipes.SMALLEST_SAMPLE:
        minimum = recipes.SMALLEST_SAMPLE
        raise OptionError(f"`{argument}` must hold {minimum} different texts or more, but got {len(texts) or 'none'}.")
    return texts


def _check_adapters(argument: str, adapters: Any) -> list[str]:
    paths = check_list(argument, () if adapters is None else adapters, "adapters", minimum=0)
    texts = [os.fspath(path) if isinstance(path, os.PathLike) else path for path in paths]
    return check_texts(argument, texts, minimum=0)


def _check_keywords(argument: str, keywords: Any) -> dict[str, Any]:
    if not isinstance(keywords, Mapping) or not all(isinstance(name, str) for name in keywords):
        raise OptionError(f"`{argument}` must be a dict of keywords, but got {short_repr(keywords)}.")
    return dict(keywords)


def _check_folder(argument: str, folder: Any) -> str:
    return check_text(argument, os.fspath(folder) if isinstance(folder, os.PathLike) else folder)


def _check_token(argument: str, token: Any) -> bool | str:
    if not isinstance(token, bool | str):  # a message must not show it
        raise OptionError(f"`{argument}` must be a token or True, but got a {type(token).__name__}.")
    return token


def _check_similarity(argument: str, similarity: Any) -> str:
    return check_choice(argument, getattr(similarity, "value", similarity), SIMILARITIES)


# --- parsing: each function returns an option's value from the words of its flag, or raises a ValueError --------------


def _parse_prompts(words: Sequence[str]) -> dict[str, str] | None:
    pairs = [word.partition("=") for word in words]
    for name, sign, _ in pairs:
        if not sign or not name:
            raise ValueError(f"must be NAME=TEXT, but got {name!r}")
    return {name: text for name, _, text in pairs} or None


def _parse_template(words: Sequence[str]) -> Template | None:
    """Return one template, or one for each kind of text.

    Example:
        >>> _parse_template(['"{text}" in one word:']), _parse_template(["query=Q: {text}", "document={text}"])
        ('"{text}" in one word:', {'query': 'Q: {text}', 'document': '{text}'})
    """
    if not words:
        return None
    pairs = [word.partition("=") for word in words]
    if all(kind in recipes.TEXT_KINDS for kind, _, _ in pairs):
        return {kind: template for kind, _, template in pairs}
    if len(words) > 1:
        raise ValueError("must be given once, or as query=…, document=… and text=…")
    return words[0]


# --- the options -----------------------------------------------------------------------------------------------------

#: What an option changes: how texts are read, the model that is read, or something else about the vectors, which the
#: modules and weights show or not (then the spec contains the option's value); or no vector.
Effect: TypeAlias = Literal["reading", "model", "shown", "vectors", "none"]


def _option(
    default: Any, check: Callable[[str, Any], Any], effect: Effect = "vectors", *, shown: bool = True, **metadata: Any
) -> Any:
    """Return the field of an option.

    Args:
        default: its default.
        check: validates a value and returns it in its canonical type; ``None`` is checked only if not the default.
        effect: what it changes.
        shown: whether ``repr`` shows its value.
        metadata: ``flag``, its flag if named differently, ``None`` for an option without a flag; ``parse``, which turns
            the flag's words into the value, and ``repeatable``; ``in_memory=True`` for one that applies to a module in
            memory; ``medium``, if it applies to one medium only.
    """
    return field(default=default, repr=shown, metadata={"check": check, "effect": effect, **metadata})


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """The validated options of an encoder.

    Attributes:
        norm: final applies the model's final norm to the layer's states; none takes the raw residual stream. With
            ``final`` the encoder equals the model without its last blocks.
        pooling: mean, last, cls, max or weightedmean; defaults to the sentence-transformers folder's or GGUF file's,
            else mean. A joint model pools with its heads and accepts no other. ``mean+skip-special`` sets
            ``skip_special``.
        tower: text or image: use only this tower of a joint model such as CLIP.
        revision: Branch, tag or commit on the hub, such as step1000.
        dtype: float32, bfloat16, float16 or float64; by default the dtype of the files.
        device: cpu, cuda, cuda:1 or mps; by default the fastest available.
        device_map: auto spreads a model over several devices. ``device`` must then be ``None``.
        quantization: 4bit or 8bit: bitsandbytes quantizes the weights while they are loaded.
        max_length: Tokens after which a text is truncated; a template's do not count. By default, all that fit.
        prompts: NAME=TEXT, a prompt put before texts instead of the model's prompts; repeatable. ``None`` takes those
            of ``config_sentence_transformers.json`` unless there is a template; ``{}`` uses no prompts.
        default_prompt_name: Prompt used unless another is named.
        bidirectional: Turn off a causal model's attention mask, as LLM2Vec does.
        adapters: PEFT adapter to merge before the cut; repeatable, in order.
        chat_template: Wrap texts in the tokenizer's chat template.
        gguf_file: Name of a GGUF file in MODEL. Its config and tokenizer are cached in ~/.cache/midlayer-encoders/gguf
            (``MIDLAYER_GGUF_CACHE``).
        truncate_dim: Number of leading dimensions to keep.
        trust_remote_code: Allow code from the model's repository to run.
        max_pixels: Largest image to read, in pixels.
        center: A few hundred different sample texts, whose mean vector is subtracted from every vector. A ``Dense``
            module with a bias does so in an exported folder.
        recipe: Prompt template and pooling by name: plain, one-word, echo, word-echo; see docs/recipes.md. Or a
            :class:`~midlayer_encoders.Recipe`, whose fields replace the options left at their defaults.
        template: Template around every text: 'The essence of "{text}" is:"'; or query=…, document=… and text=….
        skip_first: Number of tokens at the start that are not pooled.
        skip_special: Leave BOS, EOS, CLS and SEP out of the pooling. A text of only these has a zero vector.
        template_tokens: Pool the tokens of the template, too (the default).
        join: sum, none, text, word or echo: how the spans of a template with {read} become one vector.
        normalize: Scale every vector to length 1; by default only if a sentence-transformers folder does.
        dense: keep or drop the trained modules of a sentence-transformers folder, such as Dense. By default the last
            layer keeps them, and an earlier layer, which they were not trained for, is refused.
        similarity_fn_name: cosine, dot, euclidean or manhattan; defaults to the folder's, else cosine.
        model_kwargs: Keywords of the model's ``from_pretrained``. ``dtype``, ``device_map`` and ``attn_implementation``
            become the options of these names.
        processor_kwargs: Keywords of the tokenizer's or processor's ``from_pretrained``.
        config_kwargs: Settings that replace settings of the model's config.
        attn_implementation: Attention of transformers: eager, sdpa, flash_attention_2, ….
        cache_folder: Folder of files from the hub.
        token: Token for the hub.
        local_files_only: Use only files on this machine.
    """

    norm: Norm = _option("final", partial(check_choice, choices=types.NORMS), "reading", in_memory=True)
    pooling: Pooling | None = _option(None, partial(check_choice, choices=types.POOLINGS), "reading", in_memory=True)
    tower: Literal["text", "image"] | None = _option(None, partial(check_choice, choices=("text", "image")), "model")
    revision: str | None = _option(None, check_text, "model")
    dtype: str | None = _option(None, _check_dtype, "shown")
    device: str | None = _option(None, device_name, "none", in_memory=True)
    device_map: str | None = _option(None, _check_device_map, "none")
    quantization: Quantization | None = _option(None, partial(check_choice, choices=types.QUANTIZATIONS), "shown")
    max_length: int | None = _option(None, partial(check_count, unit="tokens"), "shown", medium="text")
    prompts: Mapping[str, str] | None = _option(
        None,
        _check_prompts,
        "reading",
        flag="prompt",
        parse=_parse_prompts,
        repeatable=True,
        in_memory=True,
        medium="text",
    )
    default_prompt_name: str | None = _option(
        None, check_text, "reading", flag="default-prompt", in_memory=True, medium="text"
    )
    bidirectional: bool = _option(False, check_flag, "reading", in_memory=True)
    adapters: tuple[str, ...] = _option((), _check_adapters, "model", flag="adapter", parse=tuple, repeatable=True)
    chat_template: bool = _option(False, check_flag, "reading", medium="text")
    gguf_file: str | None = _option(None, check_text, "model")
    truncate_dim: int | None = _option(None, partial(check_count, unit="dimensions"), "shown", in_memory=True)
    trust_remote_code: bool = _option(False, check_flag, "shown")
    max_pixels: int = _option(
        types.MAX_PIXELS, partial(check_count, unit="pixels"), "shown", in_memory=True, medium="image"
    )
    center: tuple[str, ...] | None = _option(None, _check_center, "model", flag=None, in_memory=True)
    recipe: str | None = _option(None, check_text, "model", medium="text")
    template: Template | None = _option(
        None, check_template, "reading", parse=_parse_template, repeatable=True, medium="text"
    )
    skip_first: int = _option(0, partial(check_count, minimum=0), "reading", in_memory=True, medium="text")
    skip_special: bool = _option(False, check_flag, "reading", in_memory=True, medium="text")
    template_tokens: bool | None = _option(None, check_flag, "reading", medium="text")
    join: Join | None = _option(None, partial(check_choice, choices=types.JOINS), "reading", medium="text")
    normalize: bool | None = _option(None, check_flag, "shown", in_memory=True)
    dense: Literal["keep", "drop"] | None = _option(
        None, partial(check_choice, choices=("keep", "drop")), "shown", medium="text"
    )
    similarity_fn_name: str | None = _option(None, _check_similarity, "shown", flag="similarity", in_memory=True)
    model_kwargs: Mapping[str, Any] | None = _option(None, _check_keywords, flag=None)
    processor_kwargs: Mapping[str, Any] | None = _option(None, _check_keywords, flag=None)
    config_kwargs: Mapping[str, Any] | None = _option(None, _check_keywords, flag=None)
    attn_implementation: str | None = _option(None, check_text, "shown")
    cache_folder: str | None = _option(None, _check_folder, "none", flag=None)
    token: bool | str | None = _option(None, _check_token, "none", flag=None, shown=False)
    local_files_only: bool = _option(False, check_flag, "none", flag=None)

    def __post_init__(self) -> None:
        if isinstance(self.pooling, str) and self.pooling.endswith(_SKIP_SPECIAL):
            object.__setattr__(self, "pooling", self.pooling.removesuffix(_SKIP_SPECIAL))
            object.__setattr__(self, "skip_special", True)
        if self.recipe is not None:
            self._apply(recipes.recipe_of("recipe", self.recipe))
        for name, option in option_fields().items():
            value = getattr(self, name)
            if value is not None or option.default is not None:
                checked = option.metadata["check"](name, value)
                object.__setattr__(self, name, tuple(checked) if isinstance(checked, list) else checked)
        quantizes = "quantization_config" in (self.model_kwargs or {})
        conflicts = {
            "`device` must be None when `device_map` places the model.": self.device_map and self.device,
            "`template` must be None with `chat_template`, which formats the text itself.": (
                self.template is not None and self.chat_template
            ),
            "`adapters` must be empty with `quantization`, which would round the merged weights again. Merge them with "
            "PEFT's merge_and_unload, and save that model.": self.adapters and (quantizes or self.quantization),
            "`gguf_file` must be None with `quantization`: its weights are quantized already.": (
                self.quantization and self.gguf_file
            ),
            "`quantization` must be None with a `quantization_config` in `model_kwargs`.": (
                self.quantization and quantizes
            ),
            "`default_prompt_name` must be None with prompts={}, which has no names.": (
                self.default_prompt_name is not None and self.prompts == {}
            ),
        }
        for message, applies in conflicts.items():
            if applies:
                raise OptionError(message)
        recipes.check_join(self.template, self.join, self.pooling, self.skip_first, self.skip_special)
        if self.default_prompt_name is not None and self.prompts is not None:  # else it names one of the folder's
            check_choice("default_prompt_name", self.default_prompt_name, self.prompts)

    def _apply(self, recipe: Recipe) -> None:
        """Take the fields of a recipe for the options left at their defaults; keep its name if it has one."""
        for name, value in recipe.non_defaults().items():
            option = option_fields().get(name)
            if option is not None and name != "center" and getattr(self, name) == option.default:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "recipe", recipe.name if recipes.has_name(recipe) else None)

    def non_defaults(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name.

        Example:
            >>> EncoderOptions(norm="none", pooling="mean", device="cpu").non_defaults()
            {'norm': 'none', 'pooling': 'mean', 'device': 'cpu'}
        """
        values = {name: (getattr(self, name), option.default) for name, option in option_fields().items()}
        return {name: value for name, (value, default) in values.items() if value != default}

    def recreating(self) -> dict[str, Any]:
        """Return the options that change vectors and differ from their defaults, by name."""
        recipe = recipes.recipe_of("recipe", self.recipe).non_defaults() if self.recipe else {}
        return {
            name: value
            for name, value in self.non_defaults().items()
            if name not in option_names("none") and (name not in recipe or recipe[name] != value)
        }

    def reads_plainly(self) -> bool:
        """Return whether no option says how to read texts."""
        return self.non_defaults().keys().isdisjoint(option_names("reading"))

    def spec_fields(self) -> dict[str, Any]:
        """Return the options that a spec holds as they are."""
        return {name: getattr(self, name) for name in ("revision", "bidirectional", "chat_template", "tower")}

    def own_recipe(self) -> Recipe | None:
        """Return the recipe that the template and the pooling amount to; ``None`` without a template."""
        if self.template is None:
            return None
        return Recipe(name=self.recipe or "own", template=self.template, join=self.join, pooling=self.pooling)

    def locate(self, model: str) -> hub.Location:
        """Return the location of a model."""
        return hub.locate(model, self.revision, self.gguf_file)

    def split_file(self, model: str) -> tuple[str, str | None]:
        """Return the folder or name of a model, and the name of the file in it that holds the model, if one does."""
        return hub.split_file(model, self.gguf_file)

    def check_model(self, model: str) -> None:
        """Raise a :class:`ModelNotFoundError` if a model is not available; torch is not imported."""
        with self.hub_access():
            hub.check_model(model, self.revision, file=self.gguf_file)

    def shown_name(self, model: str) -> str:
        """Return the name of a model for tables and pages."""
        return hub.shown_name(model, self.gguf_file)

    def hub_access(self) -> AbstractContextManager[None]:
        """Return a context in which files are read with the token, the cache and the restriction of the options."""
        return hub.hub_access(token=self.token, cache_folder=self.cache_folder, local_files_only=self.local_files_only)

    def check_for_module(self) -> None:
        """Raise an :class:`OptionError` if an option is set that does not apply to a module in memory."""
        for name, value in self.non_defaults().items():
            if not option_fields()[name].metadata.get("in_memory"):
                raise OptionError(f"`{name}` does not apply to a module in memory, but got {value!r}.")

    def check_for_media(self, media: Sequence[str], model: str) -> None:
        """Raise an :class:`OptionError` if an option is set for a medium that the model does not take."""
        for name, value in self.non_defaults().items():
            medium = option_fields()[name].metadata.get("medium")
            if medium is not None and medium not in media:
                raise OptionError(
                    f"`{name}` does not apply to {model}, which takes no {medium}, but got {short_repr(value)}."
                )


@cache
def option_fields() -> dict[str, Field[Any]]:
    """Return the fields by name."""
    return {option.name: option for option in fields(EncoderOptions)}


@cache
def option_names(*effects: Effect) -> tuple[str, ...]:
    """Return the names of the options that have one of these effects."""
    return tuple(name for name, option in option_fields().items() if option.metadata["effect"] in effects)


@cache
def option_help(declaration: type = EncoderOptions) -> dict[str, str]:
    """Return the first sentence about each field in the docstring of a dataclass."""
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(declaration) or "", re.MULTILINE)
    return {name: re.split(r"(?<=\.) ", " ".join(text.split()))[0] for name, text in entries}


def name_options(function: Any) -> None:
    """Name the options in the signature of a function that takes them as keywords, for ``help`` and editors."""
    parameters = list(inspect.signature(function).parameters.values())[:-1]
    for name, option in option_fields().items():
        parameters.append(parameters[-1].replace(name=name, default=option.default, annotation=option.type))
    function.__signature__ = inspect.Signature(parameters)


def make_options(keywords: Mapping[str, Any], **defaults: Any) -> EncoderOptions:
    """Return options from keywords; raise an :class:`OptionError` for an unknown keyword or device.

    Args:
        keywords: of a constructor or function.
        defaults: used for options not among ``keywords``.
    """
    values = {**defaults, **keywords}
    _take_sentence_transformers_names(values)
    for name in values:
        if name not in option_fields():
            raise OptionError(f"`{name}` is not an option of LayerEncoder.{did_you_mean(name, option_fields())}")
    options = EncoderOptions(**values)
    recipe = None if values.get("recipe") is None else recipes.recipe_of("recipe", values["recipe"])
    if recipe is not None and recipe.center and options.center is None:
        raise OptionError(
            f"`center` must hold sample texts with the recipe {recipe.name!r}, which centers on them, but got None. "
            f"Pass them (center=texts, or --center FILE), or sweep with recipes=[{recipe.name!r}], which uses the "
            "texts of the tasks."
        )
    check_device(options.device)
    return options


def _take_sentence_transformers_names(values: dict[str, Any]) -> None:
    """Replace keywords that are named otherwise in ``SentenceTransformer``, or that ``model_kwargs`` holds."""
    check_choice("backend", values.pop("backend", "torch"), ("torch",))
    for name, remedy in _WITHOUT_COUNTERPART.items():
        if values.pop(name, None) is not None:
            raise OptionError(f"`{name}` does not apply to an encoder of files. {remedy}")
    model_kwargs = _check_keywords("model_kwargs", values.get("model_kwargs") or {})
    for keywords, names in ((values, _OTHER_NAMES), (model_kwargs, _MODEL_KWARGS)):
        for old, new in names.items():
            value = keywords.pop(old, None)
            if value is None or (new == "dtype" and value == "auto"):  # the default
                continue
            if values.get(new) is not None:
                raise OptionError(f"`{old}` cannot be combined with `{new}`, which means the same, but got {value!r}.")
            values[new] = value
    if "model_kwargs" in values:
        values["model_kwargs"] = model_kwargs or None


def check_device(device: str | None) -> None:
    """Raise a :class:`DeviceError` if this machine does not have the device, before anything large is read."""
    if device is None:
        return
    import torch

    try:
        usable = torch.empty(0, device=device).device.type != "meta"  # a meta tensor holds no data
    except (RuntimeError, AssertionError):
        usable = False
    if not usable:
        devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        devices += ["mps"] if torch.backends.mps.is_available() else []
        raise DeviceError(f"`device` must be one of {', '.join(devices)} on this machine, but got {device!r}.")


# --- lines that recreate an encoder ---------------------------------------------------------------------------------


def python_line(model: str, layer: LayerArgument, options: EncoderOptions) -> str:
    """Return the Python expression that creates the same encoder.

    Example:
        >>> python_line("EleutherAI/pythia-410m", 17, EncoderOptions(pooling="last", device="cpu"))
        "LayerEncoder('EleutherAI/pythia-410m', layer=17, pooling='last')"
    """
    arguments = {"layer": layer, **options.recreating()}
    literals = {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}
    return f"LayerEncoder({', '.join([repr(model), *(f'{name}={value!r}' for name, value in literals.items())])})"


def shell_line(model: str, layer: LayerArgument, options: EncoderOptions, *, out: str) -> str:
    """Return the command that exports the same encoder.

    Example:
        >>> shell_line("EleutherAI/pythia-410m", 17, EncoderOptions(pooling="last", chat_template=True), out="layer-17")
        'midlayer export EleutherAI/pythia-410m --layer 17 --pooling last --chat-template --out layer-17'
    """
    layers = [f"{name}={number}" for name, number in layer.items()] if isinstance(layer, Mapping) else [str(layer)]
    words = ["--layer", ",".join(layers)]
    for name, value in options.recreating().items():
        option = option_fields()[name]
        if option.metadata.get("flag", "") is None:
            raise OptionError(f"`{name}` cannot be written as a command because it has no flag. Use the Python line.")
        flag = flag_name(option)
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
            continue
        if isinstance(value, Mapping):  # a flag needs a value: an empty prompt stands for no prompts
            value = [f"{key}={text}" for key, text in (value or {"query": ""}).items()]
        for word in value if isinstance(value, list | tuple) else [value]:
            words += [flag, str(word)]
    return f"midlayer export {shell_path(model)} {shlex.join([*words, '--out', out])}"


def flag_name(option: Field[Any]) -> str:
    """Return an option's flag, such as ``--max-length`` for ``max_length``."""
    return "--" + str(option.metadata.get("flag", option.name.replace("_", "-")))
