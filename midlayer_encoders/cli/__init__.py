"""The command line, ``midlayer``: it parses arguments and prints results; the other packages do the work."""

import importlib
import json
import signal
import sys
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from midlayer_encoders.cli._app import app
from midlayer_encoders.errors import MidlayerError, redact_tokens

__all__ = ["app", "main"]

_UsageError: Any = typer.BadParameter.__base__  # typer's, or click's, on which earlier releases are built
_INTERRUPTED = 130
_TERMINATED = 143
_RESUMABLE = {"embed", "sweep", "demo", "progression", "tune", "distill"}

# Each module registers its commands, in the order of the help.
for _module in ("find", "use", "inside"):
    importlib.import_module(f"{__name__}.{_module}")


def main(application: typer.Typer = app, *, resumes: bool | None = None) -> None:
    """Run a command line, by default ``midlayer``; an error is one line, not a traceback.

    The exit code is 2 for invalid arguments, 130 for Ctrl-C, 143 for SIGTERM, and 1 for any other failure.

    Args:
        application: the application to run.
        resumes: whether the same call continues an interrupted one; by default it depends on the command.
    """
    resumes = bool(set(sys.argv[1:2]) & _RESUMABLE) if resumes is None else resumes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        code = application(standalone_mode=False)
    except _UsageError as error:
        if message := error.format_message():  # typer has printed the help if there is none
            _print_error(message)
        sys.exit(2)
    except (MidlayerError, OSError) as error:
        path = None if isinstance(error, MidlayerError) else error.filename
        _print_error(str(error) if path is None else f"{path}: {error.strerror}.")  # type: ignore[union-attr]
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except (KeyboardInterrupt, SystemExit) as ended:  # typer turns most interrupts into an exit code
        code = getattr(ended, "code", _INTERRUPTED)
    if code in (_INTERRUPTED, _TERMINATED):
        effect = "continues from there" if resumes else "starts from the beginning"
        _print_error(f"Stopped. The same command {effect}.", head="")
    sys.exit(code)


def _print_error(message: str, head: str = "Error: ") -> None:
    """Print an error, under ``--json`` as an object."""
    readable = message.encode("utf8", "backslashreplace").decode()  # a file name may not be valid text
    readable = redact_tokens(" ".join(readable.split()))
    if "--json" in sys.argv[1:]:
        print(json.dumps({"error": readable}), file=sys.stderr)  # noqa: T201
        return
    console = Console(stderr=True)
    line = Text(head, style="bold red") + Text(readable, style="not bold")
    console.print(line, highlight=False, soft_wrap=True)
