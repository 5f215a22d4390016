"""``midlayer …``: the package from a shell. Words only; what is done lives in the other rooms."""

from __future__ import annotations

import sys

from midlayer_encoders.cli import cache as _cache
from midlayer_encoders.cli import export as _export
from midlayer_encoders.cli import metrics as _metrics
from midlayer_encoders.cli import sweep as _sweep
from midlayer_encoders.cli._app import app
from midlayer_encoders.errors import MidlayerError

__all__ = ["app", "main"]

_COMMANDS = (_export, _metrics, _sweep, _cache)  # each registers itself when it is imported


def main() -> None:
    """Run the command line; an error of ours is one line, not a traceback."""
    try:
        app()
    except MidlayerError as error:
        from rich.console import Console
        from rich.markup import escape

        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
