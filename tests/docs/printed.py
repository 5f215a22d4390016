"""Commands and Python as pages print them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.running import ROOT

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+)\s*\{?(?P<kind>[\w-]*)[^\n]*$")
_SHELL = ("sh", "bash", "shell", "console", "")
_INLINE = re.compile(r"`(midlayer [\w-]+ [^-`\n][^`\n]*)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, or a command within a sentence: where it begins, what it is, its text."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command as it is printed, without its comment, and where."""

    page: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def pages() -> list[str]:
    """Return every page that users read: the README and all of docs/, but for what is built there."""
    found = sorted(ROOT.glob("docs/**/*.md"))
    own = (path for path in found if not any(part.startswith(("_", ".")) for part in path.relative_to(ROOT).parts))
    return ["README.md", *(path.relative_to(ROOT).as_posix() for path in own)]


def not_run_elsewhere() -> list[str]:
    """Return the pages but for those that a test of their own runs from the first line to the last."""
    return [page for page in pages() if page != "docs/start.md" and not page.startswith("docs/tutorials/")]


def blocks(page: str, root: Path = ROOT) -> Iterator[Block]:
    """Yield the fenced blocks of a page; a fence ends with as many ticks as it began."""
    lines = (root / page).read_text(encoding="utf8").splitlines()
    begun: re.Match[str] | None = None
    start, inside = 0, []
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if begun is None and fence is not None:
            begun, start, inside = fence, number + 1, []
        elif begun is not None and line.strip() == begun["ticks"]:
            yield Block(page, start, begun["kind"].lower(), "\n".join(inside))
            begun = None
        elif begun is not None:
            inside.append(line.removeprefix(begun["indent"]))


def commands(page: str, root: Path = ROOT) -> list[Command]:
    """Return every shell command of a page in its order: the lines of shell blocks, and ``midlayer …`` within sentences.

    A sentence may also name a command or an option of one, or shorten one (``…``): those are not to be typed.
    """
    found: list[Command] = []
    fenced: set[int] = set()
    for block in blocks(page, root):
        fenced.update(range(block.line - 1, block.line + block.text.count("\n") + 2))
        plain = block.kind == "" and not re.match(r"\s*(\$ )?midlayer ", block.text)  # a block of something else
        if block.kind in _SHELL and not plain:
            found += _lines(block)
    for number, line in enumerate((root / page).read_text(encoding="utf8").splitlines(), 1):
        if number not in fenced:
            texts = (match[1].replace("\\|", "|") for match in _INLINE.finditer(line))
            found += [Command(page, number, text) for text in texts if "…" not in text]
    return sorted(found, key=lambda command: command.line)


def _lines(block: Block) -> Iterator[Command]:
    """Yield the commands of a block; a backslash at its end joins a line with the next."""
    joined, start = "", block.line
    for number, line in enumerate(block.text.splitlines(), block.line):
        start = start if joined else number
        joined += line.removeprefix("$ ")
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        if joined.strip() and not joined.lstrip().startswith("#"):
            yield Command(block.page, start, joined.strip())
        joined = ""
