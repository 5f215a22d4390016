"""Run the tutorials and write each one, with its output, as a page: `make tutorials`, or `render.py 3` for one.

A tutorial is a script in jupytext's percent format: `# %%` begins a code cell, `# %% [markdown]` a prose cell. Jupyter and
editors open it as a notebook, and Python runs it as a script. This module generates the page next to it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).resolve().parent


class Cell(NamedTuple):
    """A part of a tutorial: prose, without its comment signs, or code."""

    prose: bool
    text: str


def tutorials() -> list[Path]:
    """Return the scripts, in their order."""
    return sorted(HOME.glob("[0-9]_*.py"))


def cells(script: Path) -> Iterator[Cell]:
    """Yield the cells of a script."""
    for part in re.split(r"^# %%", script.read_text(encoding="utf8"), flags=re.MULTILINE)[1:]:
        kind, _, body = part.partition("\n")
        prose = kind.strip() == "[markdown]"
        lines = body.strip("\n").splitlines()
        yield Cell(prose, "\n".join(re.sub("^# ?", "", line) for line in lines) if prose else "\n".join(lines))


def run(script: Path) -> list[str]:
    """Run a script's cells, one after another in a folder of their own, and return what each of them printed.

    Its pictures are left in that folder's place: ``figures/`` beside the script.
    """
    printed: list[str] = []
    names = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, cell in enumerate(cells(script), 1):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                if not cell.prose:
                    exec(compile(cell.text, f"{script.name}, cell {number}", "exec"), names)
            printed.append(re.sub(r"[ \t]+$", "", out.getvalue().rstrip(), flags=re.MULTILINE))
        for picture in Path(folder).glob("*.png"):
            shutil.copy(picture, HOME / "figures")
    return printed


def page(script: Path, printed: list[str]) -> str:
    """Return the page of a script."""
    parts = []
    for cell, out in zip(cells(script), printed, strict=True):
        parts += [cell.text] if cell.prose else [f"```python\n{cell.text}\n```"]
        parts += [f"```text\n{out}\n```"] if out else []
    note = f"*`make tutorials` runs [{script.name}]({script.name}) and writes this page with its output.*"
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}\n\n{note}\n{rest}\n"


def main() -> None:
    """Render the tutorials that the command line names by number, or all: each in a process of its own."""
    wanted = sys.argv[1:] or [script.name[0] for script in tutorials()]
    if len(wanted) > 1:
        for one in wanted:
            if os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, one]):
                sys.exit(1)
        return
    script = next(script for script in tutorials() if script.name.startswith(wanted[0]))
    script.with_suffix(".md").write_text(page(script, run(script)), encoding="utf8")


if __name__ == "__main__":
    main()
