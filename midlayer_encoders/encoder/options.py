"""``EncoderOptions``: the one list of options that an encoder is made with.

The constructor's keywords, the flags of every command, the spec, and the lines that recreate an encoder come from it.
Nothing heavy is imported here: the command line reads it for its help.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

from midlayer_encoders._types import MAX_PIXELS, NORMS, POOLINGS, Layer, Norm, Pooling
from midlayer_encoders.errors import DeviceError, OptionError, did_you_mean, short_repr, warn_deprecated
from midlayer_encoders.recipes import RECIPES, SMALLEST_SAMPLE, Recipe, Template, check_template, has_name, recipe_of
from midlayer_encoders.validation import (
    check_choice,
    check_count,
    check_flag,
    check_list,
    check_number,
    check_text,
    check_texts,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "NO_SITE",
    "Combine",
    "EncoderKeywords",
    "EncoderOptions",
    "check_device",
    "device_name",
    "flag_name",
    "make_options",
    "option_fields",
    "python_line",
    "shell_line",
    "with_options",
]

DTYPES = ("float32", "float16", "bfloat16", "float64")

Combine: TypeAlias = Literal["mean", "concat"]
"""How several layers become one vector."""

NO_SITE = (
    "`site` must be left out for an encoder, and for its export: a model that is cut ends after a block, and what "
    "attention or MLP add lies inside of one, where no plain folder reads it. sweep, probe and measure read it."
)


def _option(default: Any, help: str, **more: Any) -> Any:  # noqa: A002  (typer's word)
    """Return a field with the words of its command-line flag.

    ``flag=None`` marks an option that no command takes, ``recreates=False`` one that does not change a vector,
    ``in_memory=True`` one that applies to a module in memory too, and ``medium`` the one that it is about.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """How an encoder is made, checked when it is made.

    Attributes:
        norm: ``"final"`` applies the model's own final norm to the layer's states, so that the encoder is exactly the
            model without its last blocks; ``"none"`` takes the raw residual stream (and keeps one block more for it).
        pooling: ``"mean"`` over real tokens, ``"last"``, ``"cls"``, ``"max"`` or ``"weightedmean"``. ``None`` is the
            mean; a joint model embeds by its own heads, in which its towers meet, and takes no other pooling.
        tower: ``"text"`` or ``"image"`` takes that tower of a joint model alone, its states pooled.
        revision: branch, tag or commit on the hub, as ``"step1000"`` of Pythia.
        dtype: of the weights, a ``torch.dtype`` or its name; ``None`` keeps that of the files.
        device: as in ``SentenceTransformer``; ``None`` takes the best there is.
        device_map: ``"auto"`` spreads a model that is too large for one device; ``device`` must then be ``None``.
        max_length: number of tokens after which a text is truncated; ``None`` takes what the model can.
        prompts: name and text of prompts, as in ``SentenceTransformer``. ``None`` takes those that the folder keeps in
            ``config_sentence_transformers.json``, unless there is a template; ``{}`` is none.
        default_prompt_name: which of them is used when none is asked for; ``None`` takes the folder's with its prompts.
        bidirectional: turn a causal model's mask off, as LLM2Vec does.
        adapters: PEFT adapters, merged in order before the cut (LLM2Vec: the MNTP one, then SimCSE or supervised).
        chat_template: wrap every text in the tokenizer's chat template.
        gguf_file: name of a GGUF file in the model's folder to read the weights from.
        truncate_dim: number of leading dimensions to keep.
        trust_remote_code: whether the model's own code on the hub may run.
        max_pixels: of the largest image that is read.
        center: texts like those to come, a few hundred, whose mean vector is subtracted from every vector (by a
            ``Dense`` with a bias, so the folder stays plain); benchmarks/selection/README.md says what that is worth.
        recipe: a :class:`~midlayer_encoders.Recipe`, or the name of one (``"one-word"``): its fields are taken where
            those of the same name here are left at their defaults.
        template: what stands around every text, as ``'The essence of "{text}" is:"'``, or one for each of ``"query"``,
            ``"document"`` and ``"text"``.
        skip_first: real tokens at the beginning that are not pooled.
        template_tokens: whether tokens of the template, and special ones, are pooled (``None``: they are).
        whiten: scale every direction by its spread over the texts in ``center``.
        embed_filter: keep the middle singular directions of the model's output embeddings alone.
        normalize: scale every vector to length 1.
        combine: where ``layer`` is a list, ``"mean"`` of the layers' vectors, or ``"concat"``, one after another.
        weights: of each layer in the mean; any numbers that are not negative, all alike by default.
    """

    norm: Norm = _option("final", "final: the model's own final norm is applied; none: raw states.", in_memory=True)
    pooling: Pooling | None = _option(None, "mean (the default), last, cls, max or weightedmean.", in_memory=True)
    tower: Literal["text", "image"] | None = _option(None, "text or image: that tower of a joint model such as CLIP.")
    revision: str | None = _option(None, "Branch, tag or commit on the hub, such as step1000.")
    dtype: str | None = _option(None, "float32, bfloat16 or float16; by default as in the files.")
    device: str | None = _option(
        None, "cpu, cuda, cuda:1, mps; by default the best there is.", recreates=False, in_memory=True
    )
    device_map: str | None = _option(None, "auto: spread a model too large for one device.", recreates=False)
    max_length: int | None = _option(None, "Tokens after which a text is truncated.", medium="text")
    prompts: Mapping[str, str] | None = _option(
        None, "NAME=TEXT, put before texts, not the folder's; repeatable.", flag="prompt", in_memory=True, medium="text"
    )
    default_prompt_name: str | None = _option(
        None, "Prompt used when none is named.", flag="default-prompt", in_memory=True, medium="text"
    )
    bidirectional: bool = _option(False, "Turn a causal model's mask off, as LLM2Vec does.", in_memory=True)
    adapters: tuple[str, ...] = _option((), "PEFT adapter to merge before the cut; repeatable.", flag="adapter")
    chat_template: bool = _option(False, "Wrap every text in the tokenizer's chat template.", medium="text")
    gguf_file: str | None = _option(None, "Name of a GGUF file in MODEL to read the weights from.")
    truncate_dim: int | None = _option(None, "Leading dimensions to keep.", in_memory=True)
    trust_remote_code: bool = _option(False, "Let the model's own code from the hub run.")
    max_pixels: int = _option(MAX_PIXELS, "Pixels of the largest image that is read.", in_memory=True, medium="image")
    center: tuple[str, ...] | None = _option(None, "Texts whose mean vector is subtracted.", flag=None, in_memory=True)
    recipe: str | None = _option(
        None, f"How texts are asked: {', '.join(RECIPES)}; see docs/recipes.md.", medium="text"
    )
    template: Template | None = _option(
        None, 'Around every text: \'The essence of "{text}" is:"\'; or query=…, document=… and text=….', medium="text"
    )
    skip_first: int = _option(0, "Tokens at the beginning that are not pooled.", in_memory=True, medium="text")
    template_tokens: bool | None = _option(None, "Whether the template's tokens are pooled (they are).", medium="text")
    whiten: bool = _option(False, "Scale directions by their spread over the texts of --center.", in_memory=True)
    embed_filter: bool = _option(False, "Keep the middle directions of the output embeddings.", medium="text")
    normalize: bool = _option(False, "Scale every vector to length 1.", in_memory=True)
    combine: Combine = _option("mean", "mean or concat, of several layers.", in_memory=True, several=True)
    weights: tuple[float, ...] | None = _option(
        None, "Of each layer in the mean, with commas: 1,2,1.", in_memory=True, several=True
    )

    def __post_init__(self) -> None:
        if self.recipe is not None:
            self._follow(recipe_of("recipe", self.recipe))
        check_choice("norm", self.norm, NORMS)
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        if self.tower is not None:
            check_choice("tower", self.tower, ("text", "image"))
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or option_fields()[name].default is not None:
                object.__setattr__(self, name, check(name, value))
        if self.device_map is not None and self.device is not None:
            raise OptionError(f"`device` must be None when `device_map` places the model, but got {self.device!r}.")
        if self.template is not None and self.chat_template:
            raise OptionError("`template` must be None with `chat_template`, which lays out the text itself.")
        if self.default_prompt_name is not None and self.prompts is not None:  # else it names one of the folder's
            if not self.prompts:
                raise OptionError("`default_prompt_name` must be None with prompts={}, of which it cannot name one.")
            check_choice("default_prompt_name", self.default_prompt_name, self.prompts)
        check_choice("combine", self.combine, get_args(Combine))
        if self.weights is not None and self.combine == "concat":
            raise OptionError("`weights` must be left out with combine='concat', which takes every layer as it is.")

    def _follow(self, recipe: Recipe) -> None:
        """Take a recipe's fields where nothing else was asked for; what has a name is known by it from then on."""
        for name, value in recipe.changed().items():
            known = option_fields().get(name)
            if known is not None and name != "center" and getattr(self, name) == known.default:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "recipe", recipe.name if has_name(recipe) else None)

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name.

        Example:
            >>> EncoderOptions(norm="none", pooling="mean", device="cpu").changed()
            {'norm': 'none', 'pooling': 'mean', 'device': 'cpu'}
        """
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}

    def recreating(self) -> dict[str, Any]:
        """Return the options that change a vector and differ from their defaults, by name."""
        known, of_recipe = option_fields(), recipe_of("recipe", self.recipe).changed() if self.recipe else {}
        return {
            name: value
            for name, value in self.changed().items()
            if known[name].metadata.get("recreates", True) and (name not in of_recipe or of_recipe[name] != value)
        }

    def check_for_module(self) -> None:
        """Raise where an option is set that applies to files only, and not to a module in memory."""
        for one in fields(self):
            if not one.metadata.get("in_memory") and getattr(self, one.name) != one.default:
                raise OptionError(
                    f"`{one.name}` must be left out for a module in memory, which is taken as it is, but got "
                    f"{getattr(self, one.name)!r}."
                )

    def check_for_media(self, media: Sequence[str], model: str) -> None:
        """Raise where an option is set that is about a medium that the model does not take: it has no effect."""
        for one in fields(self):
            medium, value = one.metadata.get("medium"), getattr(self, one.name)
            if medium is not None and medium not in media and value != one.default:
                raise OptionError(
                    f"`{one.name}` must be left out for {model}, which takes {' and '.join(media)} and no {medium}, "
                    f"but got {short_repr(value)}."
                )


class EncoderKeywords(TypedDict, total=False):
    """The fields of :class:`EncoderOptions` as keywords, for type checkers; a test keeps the two lists equal."""

    norm: Norm
    pooling: Pooling | None
    tower: Literal["text", "image"] | None
    revision: str | None
    dtype: torch.dtype | str | None
    device: str | None
    device_map: str | None
    max_length: int | None
    prompts: Mapping[str, str] | None
    default_prompt_name: str | None
    bidirectional: bool
    adapters: Sequence[str]
    chat_template: bool
    gguf_file: str | None
    truncate_dim: int | None
    trust_remote_code: bool
    max_pixels: int
    center: Sequence[str] | None
    recipe: str | Recipe | None
    template: Template | None
    skip_first: int
    template_tokens: bool | None
    whiten: bool
    embed_filter: bool
    normalize: bool
    combine: Combine
    weights: Sequence[float] | None


def make_options(given: Mapping[str, Any], **defaults: Any) -> EncoderOptions:
    """Return options from keywords; a word that is none of them is refused, with the nearest one.

    Args:
        given: the keywords.
        defaults: taken where ``given`` has none, as ``norm="none"`` where metrics are measured.
    """
    words = {**defaults, **given}
    if "centre" in words:
        warn_deprecated("`centre` is spelled `center` now; the old spelling is removed in 0.3.")
        words["center"] = words.pop("centre")
    if "site" in words:
        raise OptionError(NO_SITE)
    for name in words:
        if name not in option_fields():
            raise OptionError(f"`{name}` is not an option of LayerEncoder.{did_you_mean(name, option_fields())}")
    options = EncoderOptions(**words)
    recipe = None if words.get("recipe") is None else recipe_of("recipe", words["recipe"])
    if recipe is not None and recipe.center and options.center is None:
        raise OptionError(
            f"`center` must hold texts like yours with the recipe {recipe.name!r}, which subtracts their mean vector, "
            f"but got None. Pass center=texts (--center FILE), or sweep with recipes=[{recipe.name!r}], which has the "
            "tasks'."
        )
    check_device(options.device)
    return options


def option_fields() -> dict[str, Field[Any]]:
    """Return the fields by name."""
    return {one.name: one for one in fields(EncoderOptions)}


def with_options(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature whose ``**options`` is replaced by the options themselves, for ``help`` and editors."""
    kept = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, keyword, default=one.default) for name, one in option_fields().items()]
    return signature.replace(parameters=[*kept, *more])


# --- what each option must be ----------------------------------------------------------------------------------------


def _dtype_name(argument: str, dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else short_repr(dtype)
    check_choice(argument, name.removeprefix("torch."), DTYPES)
    return name.removeprefix("torch.")


def device_name(argument: str, device: Any) -> str:
    """Return the name of a device of torch, or that was named."""
    name = str(device) if type(device).__module__ == "torch" else device
    if not isinstance(name, str):
        raise OptionError(f"`{argument}` must be a device such as 'cpu' or 'cuda:1', but got {short_repr(device)}.")
    return name


_SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")  # accelerate's ways to place a model


def _device_map(argument: str, value: Any) -> str:
    name = check_text(argument, value)
    if name not in _SPREADS and not re.fullmatch(r"[a-z]{2,4}(:\d+)?", name):
        raise OptionError(
            f"`{argument}` must be {', '.join(map(repr, _SPREADS))} or a device, but got {short_repr(value)}."
        )
    return name


def _prompt_texts(argument: str, prompts: Any) -> dict[str, str]:
    if not isinstance(prompts, Mapping):
        raise OptionError(f"`{argument}` must be a dict of names and texts, but got {short_repr(prompts)}.")
    pairs = ((check_text(f"name in {argument}", name), text) for name, text in prompts.items())
    return {name: check_text(f"{argument}[{name!r}]", text) for name, text in pairs}


def _adapter_names(argument: str, adapters: Any) -> tuple[str, ...]:
    if isinstance(adapters, str):
        raise OptionError(f"`{argument}` must be a list of adapters, but got a string. Write [{adapters!r}].")
    if adapters is None:
        return ()
    if not isinstance(adapters, list | tuple):
        raise OptionError(f"`{argument}` must be a list of adapters, but got {short_repr(adapters)}.")
    return tuple(check_text(f"{argument}[{place}]", _path_text(one)) for place, one in enumerate(adapters))


def _center_texts(argument: str, texts: Any) -> tuple[str, ...]:
    return tuple(check_texts(argument, texts, minimum=SMALLEST_SAMPLE))


def _layer_weights(argument: str, weights: Any) -> tuple[float, ...]:
    given = enumerate(check_list(argument, weights, "weights"))
    numbers = tuple(check_number(f"{argument}[{place}]", _scalar(one)) for place, one in given)
    if sum(numbers) <= 0:
        raise OptionError(f"`{argument}` must have a positive one among them, but got {list(numbers)}.")
    return numbers


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "revision": check_text,
    "dtype": _dtype_name,
    "device": device_name,
    "device_map": _device_map,
    "max_length": partial(check_count, unit="tokens"),
    "prompts": _prompt_texts,
    "default_prompt_name": check_text,
    "bidirectional": check_flag,
    "adapters": _adapter_names,
    "chat_template": check_flag,
    "gguf_file": check_text,
    "truncate_dim": partial(check_count, unit="dimensions"),
    "trust_remote_code": check_flag,
    "max_pixels": partial(check_count, unit="pixels"),
    "center": _center_texts,
    "template": check_template,
    "skip_first": partial(check_count, minimum=0),
    "template_tokens": check_flag,
    "whiten": check_flag,
    "embed_filter": check_flag,
    "normalize": check_flag,
    "weights": _layer_weights,
}
"""What checks each option, and returns it as it is kept; those of few words are checked against them."""


def check_device(device: str | None) -> None:
    """Raise a :class:`DeviceError` where this machine has no such device, before anything large is read."""
    if device is None:
        return
    import torch

    try:
        torch.empty(0, device=device)
        there = torch.device(device).type != "meta"  # on which nothing is computed
    except (RuntimeError, AssertionError):
        there = False
    if not there:
        found = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        found += ["mps"] if torch.backends.mps.is_available() else []
        raise DeviceError(f"`device` must be one of {', '.join(found)} on this machine, but got {device!r}.")


# --- lines that recreate an encoder ---------------------------------------------------------------------------------


def python_line(model: str, layer: Layer | Sequence[Layer] | Mapping[str, Layer], options: EncoderOptions) -> str:
    """Return the Python expression that makes the same encoder.

    Example:
        >>> python_line("EleutherAI/pythia-410m", 17, EncoderOptions(pooling="last", device="cpu"))
        "LayerEncoder('EleutherAI/pythia-410m', layer=17, pooling='last')"
    """
    words = [repr(model), f"layer={_plain(layer)!r}"]
    words += [f"{name}={_plain(value)!r}" for name, value in options.recreating().items()]
    return f"LayerEncoder({', '.join(words)})"


def shell_line(
    model: str, layer: Layer | Sequence[Layer] | Mapping[str, Layer], options: EncoderOptions, *, out: str
) -> str:
    """Return the command that exports the same encoder.

    Example:
        >>> shell_line("EleutherAI/pythia-410m", 17, EncoderOptions(pooling="last", chat_template=True), out="layer-17")
        'midlayer export EleutherAI/pythia-410m --layer 17 --pooling last --chat-template --out layer-17'
    """
    if options.center is not None:
        raise OptionError("`center` cannot be written as a command, since it holds texts. Use the Python line.")
    if isinstance(layer, Mapping):
        layer = [f"{name}={one}" for name, one in layer.items()]  # type: ignore[misc]
    layers = map(str, layer) if isinstance(layer, Sequence) else [str(layer)]
    words = ["midlayer", "export", model, "--layer", ",".join(layers)]
    for name, value in options.recreating().items():
        words += _flag_words(option_fields()[name], value)
    return shlex.join([*words, "--out", out])


def flag_name(one: Field[Any]) -> str:
    """Return an option's flag, ``--max-length`` of ``max_length``."""
    return "--" + str(one.metadata.get("flag", one.name.replace("_", "-")))


def _flag_words(one: Field[Any], value: Any) -> list[str]:
    flag = flag_name(one)
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, Mapping):
        named = value or {"query": ""}  # no prompts, as one that is empty: a flag must hold something
        return [word for name, text in named.items() for word in (flag, f"{name}={text}")]
    if one.name == "weights":
        return [flag, ",".join(f"{weight!r}" for weight in value)]
    if isinstance(value, tuple):
        return [word for part in value for word in (flag, part)]
    return [flag, str(value)]


def _plain(value: Any) -> Any:
    """Return a value as a reader would write it."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
