"""Fail if vague words are bound as variables or arguments in the package; `make check` runs this.

    python3 scripts/check_names.py            # count them
    python3 scripts/check_names.py --list     # and print where each one is

A name says what a thing is (`layer`, `scores`, `saved_config`), not what happened to it (`found`, `made`, `kept`).
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("midlayer_encoders", "callbacks", "benchmarks/paper")
VAGUE = frozenset(
    ["one", "found", "made", "given", "kept", "wanted", "asked", "seen", "told", "some", "of", "known", "own", "every"]
)
LIMIT = 59


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that a module binds as a variable or an argument, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def vague_names() -> list[str]:
    """Return the place and the name of each binding of a vague word."""
    files = sorted({path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")})
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for name, line in bound_names(ast.parse(path.read_text(encoding="utf8")))
        if name in VAGUE
    ]


def main() -> None:
    """Print the count and exit with 1 if it is over the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print every place")
    args = parser.parse_args()
    places = vague_names()
    too_many = len(places) > LIMIT
    if args.list or too_many:
        print("\n".join(places))
    print(f"{len(places)} variables or arguments with a vague name (at most {LIMIT})")
    sys.exit(too_many)


if __name__ == "__main__":
    main()
