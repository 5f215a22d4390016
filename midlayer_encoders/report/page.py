"""The frame of every page: one file that holds everything it shows and does, no font or picture from elsewhere."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path

from midlayer_encoders.files import write_file
from midlayer_encoders.report.style import ordered_rules, page_css

__all__ = ["code_lines", "document", "facts", "large", "section", "sentences", "soft", "write_page"]


def write_page(text: str, path: str | Path) -> Path:
    """Write a page and return where it lies; its folder is made."""
    where = Path(path)
    # Half a surrogate pair can stand in a file's name, and UTF-8 has no bytes for it.
    write_file(where, text.encode("utf-8", "xmlcharrefreplace"))
    return where


def document(
    title: str, lead: str, sections: Sequence[str], *, notes: Sequence[str] = (), ordered: Iterable[int] = ()
) -> str:
    """Return a whole page.

    Args:
        title: heading of the page.
        lead: HTML below the heading.
        sections: of :func:`section`.
        notes: sentences below the lead.
        ordered: how many curves in order there are in a panel, of every panel that has some: their colors.
    """
    css = page_css() + "".join(ordered_rules(count) for count in sorted(set(ordered) - {0}))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        # Names in the frame are escaped; should one slip through, no browser runs or fetches anything but our script.
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{css}</style></head>\n"
        f"<body><header><h1>{escape(title)}</h1>{lead}{sentences(notes)}</header><main>{''.join(sections)}</main>"
        '<footer><p class="soft">Made by midlayer_encoders. Layer 0 is the embeddings, '
        f"layer k the states after block k.</p></footer><script>{_script()}</script></body></html>\n"
    )


@cache
def _script() -> str:
    return Path(__file__).with_name("page.js").read_text(encoding="utf-8")


@cache
def _policy() -> str:
    """Return what a browser may run and fetch: the one script of every page, by its digest, and styles."""
    digest = b64encode(sha256(_script().encode()).digest()).decode()
    ours = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    return f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'"


def section(heading: str, body: str) -> str:
    """Return a section of a page, or nothing where it would be empty."""
    return f"<section><h2>{escape(heading)}</h2>{body}</section>\n" if body else ""


def facts(known: Mapping[str, str]) -> str:
    """Return a list of names and what they are."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in known.items())
    return f'<dl class="facts">{rows}</dl>'


def sentences(said: Sequence[str]) -> str:
    """Return a paragraph for each sentence."""
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in said)


def large(text: str) -> str:
    """Return a paragraph of what came out, in larger letters."""
    return f'<p class="verdict">{escape(text)}</p>'


def code_lines(lines: Mapping[str, str]) -> str:
    """Return lines of code to copy, each under its language."""
    return "".join(
        f'<div class="soft">{escape(language)}</div><pre><code>{escape(line)}</code></pre>'
        for language, line in lines.items()
    )


def soft(text: str) -> str:
    """Return a paragraph of explanation."""
    return f'<p class="soft">{escape(text)}</p>'
