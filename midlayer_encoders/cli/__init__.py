"""``midlayer …``: the package from a shell. Words only; what is done lives in the other rooms."""

from __future__ import annotations

import json
import sys

from midlayer_encoders.cli import board as _board
from midlayer_encoders.cli import cache as _cache
from midlayer_encoders.cli import compare as _compare
from midlayer_encoders.cli import demo_vision as _demo_vision
from midlayer_encoders.cli import embed as _embed
from midlayer_encoders.cli import export as _export
from midlayer_encoders.cli import metrics as _metrics
from midlayer_encoders.cli import probe as _probe
from midlayer_encoders.cli import progression as _progression
from midlayer_encoders.cli import reproduce as _reproduce
from midlayer_encoders.cli import select as _select
from midlayer_encoders.cli import sweep as _sweep
from midlayer_encoders.cli import tune as _tune
from midlayer_encoders.cli._app import app
from midlayer_encoders.cli._help import arrange, command_names
from midlayer_encoders.errors import MidlayerError, redact_tokens

__all__ = ["app", "main"]

_INTERRUPTED = 130

# Each registers itself when it is imported.
_COMMANDS = (
    _export,
    _embed,
    _metrics,
    _sweep,
    _board,
    _cache,
    _progression,
    _probe,
    _demo_vision,
    _compare,
    _select,
    _reproduce,
    _tune,
)
arrange(app)


def main() -> None:
    """Run the command line; what goes wrong is one line, not a traceback.

    The exit code is 2 for words that cannot be meant, 130 for Ctrl-C, and 1 for whatever else fails.
    """
    try:
        app()
    except MidlayerError as error:
        wrong_words = isinstance(error, ValueError)
        _say(str(error), see=_help_line() if wrong_words else "")
        sys.exit(2 if wrong_words else 1)
    except OSError as error:
        _say(f"{error.filename}: {error.strerror}." if error.filename is not None else str(error))
        sys.exit(1)
    except KeyboardInterrupt:  # before typer runs, or while it ends
        _stopped()
        sys.exit(_INTERRUPTED)
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:  # typer's, for KeyboardInterrupt
            _stopped()
        raise


def _stopped() -> None:
    resumes = {"embed", "sweep", "demo", "progression", "reproduce", "tune"} & set(sys.argv[1:2])
    again = "goes on where it stopped" if resumes else "begins anew"
    _say(f"Stopped. The same command, run again, {again}.", head="")


def _help_line() -> str:
    """Return the command that shows how the one that was called is used."""
    return " ".join(["midlayer", *(word for word in sys.argv[1:2] if word in command_names(app)), "--help"])


def _say(words: str, head: str = "Error: ", see: str = "") -> None:
    """Print a line about what went wrong, and the command to try; under ``--json`` both as one object."""
    from rich.console import Console
    from rich.text import Text

    readable = words.encode("utf8", "backslashreplace").decode()  # the name of a file may be no text
    readable = redact_tokens(" ".join(readable.split()))
    if "--json" in sys.argv[1:]:
        print(json.dumps({"error": readable, "see": see or None}), file=sys.stderr)  # noqa: T201
        return
    console = Console(stderr=True)
    line = Text(head, style="bold red") + Text(readable, style="not bold")
    console.print(line, highlight=False, soft_wrap=True)
    if see:
        console.print(f"Try: {see}", highlight=False, markup=False, soft_wrap=True)
