"""``midlayer …``: the package from a shell. Words only; what is done lives in the other rooms."""

from __future__ import annotations

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
from midlayer_encoders.errors import MidlayerError

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


def main() -> None:
    """Run the command line; what goes wrong is one line, not a traceback.

    The exit code is 2 for words that cannot be meant, 130 for Ctrl-C, and 1 for whatever else fails.
    """
    try:
        app()
    except MidlayerError as error:
        _say(str(error))
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except OSError as error:
        _say(f"{error.filename}: {error.strerror}." if error.filename is not None else str(error))
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:  # typer's, for KeyboardInterrupt
            resumes = {"embed", "sweep", "demo", "progression", "reproduce", "tune"} & set(sys.argv[1:2])
            again = "goes on where it stopped" if resumes else "begins anew"
            _say(f"Stopped. The same command, run again, {again}.", head="")
        raise


def _say(words: str, head: str = "Error: ") -> None:
    """Print a line about what went wrong."""
    from rich.console import Console
    from rich.text import Text

    readable = words.encode("utf8", "backslashreplace").decode()  # the name of a file may be no text
    line = Text(head, style="bold red") + Text(" ".join(readable.split()), style="not bold")
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)
