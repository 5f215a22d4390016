"""The flags by which a command makes an encoder: all come from ``EncoderOptions``."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from typing import Annotated, Any, TypeVar

import typer

from midlayer_encoders.encoder.options import EncoderOptions, flag_name, option_fields
from midlayer_encoders.recipes import KINDS

__all__ = ["model_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def model_options(*, without: Sequence[str] = (), **defaults: Any) -> Callable[[_Command], _Command]:
    """Give a command every flag of :class:`EncoderOptions`; it receives them as its argument ``options``.

    Args:
        without: options that do not apply to this command; a flag of theirs is refused as unknown.
        defaults: of this command where they differ, as ``norm="none"`` where metrics are measured.
    """

    def decorate(command: _Command) -> _Command:
        known = [one for one in option_fields().values() if one.metadata.get("flag", "") is not None]
        one_layer = "layer" not in inspect.signature(command).parameters  # or all of them: nothing is combined
        flags = {
            one.name: one
            for one in known
            if one.name not in without and not (one_layer and one.metadata.get("several"))
        }

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            options = EncoderOptions(**{name: _value(one, given.pop(name)) for name, one in flags.items()})
            return command(options=options, **given)

        hints = typing.get_type_hints(command, include_extras=True)
        given = [one for one in inspect.signature(command).parameters.values() if one.name != "options"]
        own = [one.replace(annotation=hints[one.name]) for one in given]
        parameters = [*own, *(_parameter(one, defaults) for one in flags.values())]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run  # type: ignore[return-value]

    return decorate


def _parameter(one: Field[Any], defaults: Mapping[str, Any]) -> inspect.Parameter:
    """Return the parameter from which typer makes an option's flag."""
    default = defaults.get(one.name, one.default)
    kind: Any = str | None
    if isinstance(one.default, bool):
        kind = bool
    elif one.name == "template_tokens":
        kind = bool | None
    elif one.name in ("prompts", "adapters", "template"):
        kind, default = list[str] | None, None
    elif one.name in ("max_length", "truncate_dim", "max_pixels", "skip_first"):
        kind = int | None
    flag = flag_name(one)
    if kind == bool | None:
        flag += flag.replace("--", "/--no-", 1)
    annotation = Annotated[kind, typer.Option(flag, help=one.metadata["help"], rich_help_panel="Encoder")]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _value(one: Field[Any], given: Any) -> Any:
    """Return an option's value from the words of a shell."""
    if one.name == "prompts":
        pairs = [word.partition("=") for word in given or ()]
        for name, sign, _ in pairs:
            if not sign or not name:
                raise typer.BadParameter(f"must be NAME=TEXT, but got {name!r}", param_hint="--prompt")
        return {name: text for name, _, text in pairs} or None
    if one.name == "template":
        return _template(given or ())
    if one.name == "weights" and given is not None:
        try:
            return tuple(float(word) for word in given.split(","))
        except ValueError:
            raise typer.BadParameter(
                f"must be numbers with commas, but got {given!r}", param_hint="--weights"
            ) from None
    return tuple(given or ()) if one.name == "adapters" else given


def _template(words: Sequence[str]) -> str | dict[str, str] | None:
    """Return one template, or one for each kind of text.

    Example:
        >>> _template(['"{text}" in one word:']), _template(["query=Q: {text}", "document={text}"])
        ('"{text}" in one word:', {'query': 'Q: {text}', 'document': '{text}'})
    """
    if not words:
        return None
    pairs = [word.partition("=") for word in words]
    if all(kind in KINDS for kind, _, _ in pairs):
        return {kind: template for kind, _, template in pairs}
    if len(words) > 1:
        raise typer.BadParameter("must be given once, or as query=…, document=… and text=…", param_hint="--template")
    return words[0]
