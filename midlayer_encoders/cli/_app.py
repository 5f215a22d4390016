"""The application, and the decorator that registers a command with its shared flags."""

import copy
import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Annotated, Any, Literal

import typer

from midlayer_encoders import __version__
from midlayer_encoders.cli import _progress
from midlayer_encoders.encoder.options import EncoderOptions, flag_name, option_fields, option_help
from midlayer_encoders.errors import OptionError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

_Function = Callable[..., Any]
#: Flags of the encoder that ``--help`` names.
_FREQUENT = ("--device", "--dtype", "--max-length", "--norm", "--pooling", "--revision")


@app.callback(invoke_without_command=True)
def _callback(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Find the layer of a model that embeds best, and use it as a SentenceTransformer."""
    if version:
        from importlib.metadata import version as installed_version

        pytrec_eval = installed_version("pytrec-eval-terrier")
        stand_in = ", the NumPy stand-in" if pytrec_eval.endswith("+midlayer") else ""
        typer.echo(f"midlayer-encoders {__version__} (pytrec-eval-terrier {pytrec_eval}{stand_in})")
        raise typer.Exit


def _print_all(context: typer.Context, value: bool) -> None:
    """Print a command's help with the options that ``--help`` leaves out, and exit."""
    if value:
        whole = copy.copy(context.command)
        whole.params = [copy.copy(parameter) for parameter in whole.params]
        for parameter in whole.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(whole.get_help(context))
        raise typer.Exit


def command(
    panel: str | None = None,
    *,
    name: str | None = None,
    quiet: bool = True,
    without: Sequence[str] = (),
    application: typer.Typer = app,
    **defaults: Any,
) -> Callable[[_Function], _Function]:
    """Register a function as a command; its help is the docstring, with the examples at the end.

    Args:
        panel: heading of the command in ``midlayer --help``.
        name: name of the command, by default the function's.
        quiet: whether the command has progress to hide.
        without: fields of encoder options and settings that do not apply to it.
        application: the application that it is a command of.
        defaults: encoder options whose defaults differ here.
    """

    def register(function: _Function) -> _Function:
        text, _, examples = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
        epilog = "\n\n".join(["Examples:", *(line.strip() for line in examples.splitlines())])
        run = with_flags(function, quiet=quiet, without=without, defaults=defaults)
        application.command(name, rich_help_panel=panel, help=text, epilog=epilog)(run)
        return run

    return register


def with_flags(
    function: _Function, *, quiet: bool = True, without: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> _Function:
    """Return a function with the flags ``--json`` and ``--quiet``, and one flag for each encoder option.

    A parameter ``options`` of the function receives the :class:`EncoderOptions`. A parameter whose type is another
    dataclass stands for a flag for each of its fields. The help of a field without one is in the docstring.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    encoder_options = [
        option
        for option in option_fields().values()
        if "options" in hints and option.name not in without and option.metadata.get("flag", "") is not None
    ]
    groups = {name: hint for name, hint in hints.items() if _is_group(hint)}
    parameters = _parameters(function, without)
    if encoder_options:
        parameters.append(_help_all(tuple(map(flag_name, encoder_options))))
    parameters += [_option_parameter(each, (defaults or {}).get(each.name, each.default)) for each in encoder_options]
    if quiet:
        parameters.append(_parameter("quiet", bool, False, "--quiet", "Show no progress.", "Output"))
    parameters.append(_parameter("as_json", bool, False, "--json", "Print the result as one JSON object.", "Output"))

    @functools.wraps(function)
    def run(*, as_json: bool, quiet: bool = False, **arguments: Any) -> Any:
        arguments.pop("help_all", None)
        if quiet and as_json:
            raise typer.BadParameter("give one of --quiet and --json")
        if "options" in hints:
            values = {option.name: _option_value(option, arguments.pop(option.name)) for option in encoder_options}
            arguments["options"] = EncoderOptions(**values)
        for name, group in groups.items():
            arguments[name] = _take_group(group, arguments)
        # The bars and notices of the loaders, which read this when they are imported.
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        with _progress.display_mode("quiet" if quiet else "json" if as_json else None):
            return function(**arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _parameters(function: _Function, without: Sequence[str]) -> list[inspect.Parameter]:
    """Return the parameters of a function, and the fields of a dataclass in place of a parameter of that type."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for item in inspect.signature(function).parameters.values():
        if _is_group(hint := hints[item.name]):
            parameters += _parameters(hint, without)
        elif is_dataclass(function) and typing.get_origin(hint) is not Annotated:
            parameters += [] if item.name in without else [_setting_parameter(function, item.name, hint, item.default)]
        elif item.name != "options":
            parameters.append(item.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    return parameters


def _setting_parameter(settings: type, name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Return the parameter of a field of settings, which check the value of a ``Literal`` themselves."""
    kind = str if typing.get_origin(hint) is Literal else int if hint == bool | int else hint
    kind = str | None if hint == Sequence[int] | None else kind
    texts = {field: text for base in reversed(settings.__mro__) for field, text in option_help(base).items()}
    text, flag = re.sub(r"``(\w+)``", r"--\1", texts[name]), "--" + name.replace("_", "-")
    limits = {"min": 0} if name == "seed" else {}
    return _parameter(name, kind, int(default) if kind is int else default, flag, text, None, **limits)


def _take_group(group: Any, arguments: dict[str, Any]) -> Any:
    """Return an instance of a dataclass whose fields, and its dataclasses' fields, are removed from arguments."""
    hints = typing.get_type_hints(group)
    taken = {}
    for name, hint in ((each.name, hints[each.name]) for each in fields(group)):
        if _is_group(hint):
            taken[name] = _take_group(hint, arguments)
        elif name in arguments:
            value = arguments.pop(name)
            taken[name] = (parse_sizes(name, value) or None) if hint == Sequence[int] | None else value
    return group(**taken)


def parse_sizes(flag: str, words: str | None) -> list[int]:
    """Return numbers of dimensions from words separated by commas."""
    try:
        return [int(word) for word in words.split(",")] if words is not None else []
    except ValueError:
        raise OptionError(f"`--{flag}` must be numbers separated by commas, but got {words!r}.") from None


def _is_group(hint: Any) -> bool:
    return is_dataclass(hint) and hint is not EncoderOptions


def _help_all(flags: Sequence[str]) -> inspect.Parameter:
    """Return the parameter of ``--help-all``, whose help names some of the flags that it shows."""
    named = ", ".join(flag for flag in _FREQUENT if flag in flags)
    text = f"Show also the {len(flags)} options of the encoder: {named} …"
    return _parameter("help_all", bool, False, "--help-all", text, "Encoder", is_eager=True, callback=_print_all)


def _parameter(
    name: str, kind: Any, default: Any, flag: str, text: str, panel: str | None, **settings: Any
) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(flag, help=text, rich_help_panel=panel, **settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@functools.cache
def _option_parameter(option: Field[Any], default: Any) -> inspect.Parameter:
    """Return the parameter from which typer creates an encoder option's flag."""
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
    # Completion offers only what is not hidden.
    hidden = "_MIDLAYER_COMPLETE" not in os.environ
    return _parameter(option.name, kind, default, flag, option_help()[option.name], "Encoder", hidden=hidden)


def _option_value(option: Field[Any], words: Any) -> Any:
    """Return an encoder option's value from the words of its flag."""
    parse = option.metadata.get("parse")
    if parse is None:
        return words
    try:
        return parse(words or () if option.metadata.get("repeatable") else words)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag_name(option)) from None
