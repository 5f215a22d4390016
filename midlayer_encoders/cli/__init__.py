"""``midlayer …``: the package from a shell. Words only; what is done lives in the other rooms."""

from __future__ import annotations

import sys

from midlayer_encoders.cli import cache as _cache
from midlayer_encoders.cli import compare as _compare
from midlayer_encoders.cli import demo_vision as _demo_vision
from midlayer_encoders.cli import export as _export
from midlayer_encoders.cli import metrics as _metrics
from midlayer_encoders.cli import probe as _probe
from midlayer_encoders.cli import progression as _progression
from midlayer_encoders.cli import reproduce as _reproduce
from midlayer_encoders.cli import select as _select
from midlayer_encoders.cli import sweep as _sweep
from midlayer_encoders.cli._app import app
from midlayer_encoders.errors import MidlayerError

__all__ = ["app", "main"]

# Each registers itself when it is imported.
_COMMANDS = (
    _export,
    _metrics,
    _sweep,
    _cache,
    _progression,
    _probe,
    _demo_vision,
    _compare,
    _select,
    _reproduce,
)


def main() -> None:
    """Run the command line; an error of ours is one line, not a traceback."""
    try:
        app()
    except MidlayerError as error:
        from rich.console import Console
        from rich.markup import escape

        words = str(error).encode("utf8", "backslashreplace").decode()  # the name of a file may be no text
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(words)}", highlight=False, soft_wrap=True)
        sys.exit(2)
