"""The application, and the decorator that registers a command with its shared flags."""

import copy
import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any

import typer

from midlayer_encoders import __version__
from midlayer_encoders.cli._progress import output_mode
from midlayer_encoders.encoder.options import EncoderOptions, flag_name, option_help
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
    """Return a function with the flags ``--json`` and ``--quiet``, and one flag for each field of a dataclass.

    A parameter whose type is a dataclass, such as :class:`EncoderOptions`, receives an instance of it. The help of a
    field without a typer option is in the docstring of the dataclass.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = _parameters(function, without, defaults or {})
    if quiet:
        parameters.append(_flag("quiet", bool, False, "--quiet", "Show no progress.", "Output"))
    parameters.append(_flag("as_json", bool, False, "--json", "Print the result as one JSON object.", "Output"))

    @functools.wraps(function)
    def run(*, as_json: bool, quiet: bool = False, **arguments: Any) -> Any:
        arguments.pop("help_all", None)
        if quiet and as_json:
            raise typer.BadParameter("give one of --quiet and --json")
        for name, hint in hints.items():
            if is_dataclass(hint):
                arguments[name] = _make(typing.cast(type, hint), arguments)
        # The bars and notices of the loaders, which read this when they are imported.
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        with output_mode("quiet" if quiet else "json" if as_json else None):
            return function(**arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _parameters(owner: Callable[..., Any], without: Sequence[str], defaults: Mapping[str, Any]) -> list[Parameter]:
    """Return the parameters of a function; one whose type is a dataclass is replaced by a flag for each field."""
    hints = typing.get_type_hints(owner, include_extras=True)
    parameters: list[Parameter] = []
    for item in inspect.signature(owner).parameters.values():
        hint, default = hints[item.name], defaults.get(item.name, item.default)
        if is_dataclass(hint):
            parameters += _parameters(typing.cast(type, hint), without, defaults)
        elif not is_dataclass(owner) or typing.get_origin(hint) is Annotated:
            parameters.append(item.replace(annotation=hint, kind=Parameter.KEYWORD_ONLY))
        elif item.name not in without:
            parameters += _declared_flag(owner, item.name, hint, default)
    if owner is EncoderOptions:
        flags = [flag_name(EncoderOptions.__dataclass_fields__[item.name]) for item in parameters]
        named = ", ".join(flag for flag in _FREQUENT if flag in flags)
        text = f"Show also the {len(flags)} options of the encoder: {named} …"
        whole = _flag("help_all", bool, False, "--help-all", text, "Encoder", is_eager=True, callback=_print_all)
        parameters.insert(0, whole)
    return parameters


def _declared_flag(owner: Any, name: str, hint: Any, default: Any) -> list[Parameter]:
    """Return the parameter from which typer creates the flag of a field, if it has one; its help is in the docstring.

    Typer parses numbers and switches; the dataclass checks everything else.
    """
    metadata = owner.__dataclass_fields__[name].metadata
    flag = metadata.get("flag", name.replace("_", "-"))
    if flag is None:
        return []
    flag, kinds = f"--{flag}", {*(typing.get_args(hint) or [hint])} - {type(None)}
    kind: Any = next((number for number in (int, float) if number in kinds), str)
    if metadata.get("repeatable"):
        kind, default = list[str], None
    elif kind is int and default is False:
        default = 0
    elif kinds == {bool}:
        kind, flag = bool, flag if default is False else f"{flag}/--no-{flag[2:]}"
    help_texts = {field: text for base in reversed(owner.__mro__) for field, text in option_help(base).items()}
    text = re.sub(r"``(\w+)``", lambda match: f"--{match[1].replace('_', '-')}", help_texts[name])
    # Completion offers only what is not hidden.
    is_hidden = owner is EncoderOptions and "_MIDLAYER_COMPLETE" not in os.environ
    panel = "Encoder" if owner is EncoderOptions else None
    return [_flag(name, kind | None if default is None else kind, default, flag, text, panel, hidden=is_hidden)]


def _flag(name: str, kind: Any, default: Any, flag: str, text: str, panel: str | None, **settings: Any) -> Parameter:
    annotation = Annotated[kind, typer.Option(flag, help=text, rich_help_panel=panel, **settings)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _make(group: Any, arguments: dict[str, Any]) -> Any:
    """Return an instance of a dataclass whose fields, and its dataclasses' fields, are removed from arguments."""
    hints = typing.get_type_hints(group)
    values = {}
    for field in fields(group):
        if is_dataclass(hint := hints[field.name]):
            values[field.name] = _make(hint, arguments)
        elif field.name in arguments and field.metadata.get("flag", "") is not None:
            words = arguments.pop(field.name)
            if hint == Sequence[int] | None:
                words = parse_sizes(field.name, words) or None
            values[field.name] = _parse(field, words)
    return group(**values)


def _parse(field: Field[Any], words: Any) -> Any:
    """Return the value of a field from the words of its flag."""
    if "parse" not in field.metadata:
        return words
    try:
        return field.metadata["parse"](words or () if field.metadata.get("repeatable") else words)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag_name(field)) from None


def parse_sizes(flag: str, words: str | None) -> list[int]:
    """Return numbers of dimensions from words separated by commas."""
    try:
        return [int(word) for word in words.split(",")] if words is not None else []
    except ValueError:
        raise OptionError(f"`--{flag}` must be numbers separated by commas, but got {words!r}.") from None
