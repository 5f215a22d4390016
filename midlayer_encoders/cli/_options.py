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


def _parameter(option: Field[Any], defaults: Mapping[str, Any]) -> inspect.Parameter:
    """Return the parameter from which typer creates an option's flag."""
    default = defaults.get(option.name, option.default)
    flag = flag_name(option)
    kind: Any = str | None
    if option.metadata.get("repeatable"):
        kind = list[str] | None
        default = None
    elif isinstance(option.default, bool):
        kind = bool
    elif option.type == "bool | None":
        kind = bool | None
        flag += flag.replace("--", "/--no-", 1)
    elif "int" in str(option.type).split(" | "):
        kind = int | None
    annotation = Annotated[kind, typer.Option(flag, help=option.metadata["help"], rich_help_panel="Encoder")]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _value(option: Field[Any], words: Any) -> Any:
    """Return an option's value from the words of its flag."""
    parse = option.metadata.get("parse")
    if parse is None:
        return words
    try:
        return parse(words or () if option.metadata.get("repeatable") else words)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag_name(option)) from None
