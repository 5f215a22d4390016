"""Prose out of documentation: the paragraphs of each format, what is English prose among them, and what was there before."""

from __future__ import annotations

import ast
import hashlib
import html
import json
import re
import warnings
import zlib
from collections.abc import Iterator
from pathlib import PurePosixPath

import numpy as np

SHINGLE = 5  # words
SHORTEST, LONGEST = 90, 6000  # characters in a paragraph

UNSEEN = re.compile(
    r"<(script|style|pre|head|nav|footer|svg|math|programlisting|screen)\b.*?</\1\s*>|<!--.*?-->", re.S | re.I
)
INLINE = (
    "a|abbr|acronym|b|bdi|big|cite|code|dfn|em|font|i|ins|kbd|mark|q|s|samp|small|span|strong|sub|sup|tt|u|var|"
    "application|citetitle|command|emphasis|file|filename|firstterm|gui|guibutton|guilabel|guimenu|guimenuitem|key|keycap|"
    "link|literal|option|quote|replaceable|sys|ulink|xref"
)
BLOCK_TAG = re.compile(rf"<(?!/?(?:{INLINE})\b)[^>]*>", re.I)
TAG = re.compile(r"<[^>]*>")


def html_paragraphs(text: str) -> Iterator[str]:
    """Yield what stands between two block-level tags of HTML, DocBook or Mallard, without code and navigation."""
    for piece in BLOCK_TAG.split(UNSEEN.sub("<p>", text)):
        if len(piece) >= SHORTEST:
            yield one_line(html.unescape(TAG.sub("", piece)).replace("¶", ""))


BULLET = re.compile(r"^( *)([-*+•]|\(?\d{1,3}[.)]|#\.)( +)(?=\S)")
RULE = re.compile(r"([^\w\s])\1{2,}$")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.S | re.M)
DIRECTIVE = re.compile(r"(\.\. |:[\w -]+:( |$)|@\w+|>>> |\$ |\* [^:]+::|[=#]\w+ |\|)")
MARKUP = (
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[([^\]]+)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),  # Markdown links
    (re.compile(r":[\w:+.-]+:`[~!]?([^`<]*?)\s*(<[^`]*>)?`"), r"\1"),  # roles
    (re.compile(r"`([^`<]+?)\s*<[^`]*>`_{0,2}"), r"\1"),
    (re.compile(r"\b[BCFILSX]<{1,3} ?([^<>]*?) ?>{1,3}"), r"\1"),  # POD
    (re.compile(r"(?<![\w`])([`*_|]{1,3})(?=\S)([^`*|]*?[^\s`*|])\1_{0,2}(?!\w)"), r"\2"),
    (re.compile(r"\s*\[[#\w]+\]_"), ""),
    (re.compile(r"\s*(\(<?|<)https?://[^\s>)]+(>?\)|>)"), ""),
)


def text_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of plain text, reStructuredText, Markdown, POD or info: lines of equal indentation, unwrapped.

    Literal blocks (after ``::`` or between fences) are left out; emphasis, roles and links keep their words alone.
    """
    lines: list[str] = []
    depth = literal = -1
    for line in [*FENCE.sub("", text.expandtabs()).splitlines(), ""]:
        words = line.strip()
        margin = indent = len(line) - len(line.lstrip())
        if words and literal >= 0:
            if margin > literal:
                continue
            literal = -1
        code = item = None
        if words and not words[0].isalpha():  # few lines, so that this loop is quick
            if item := BULLET.match(line):
                indent, words = len(item[0]), line[len(item[0]) :].strip()
            code = DIRECTIVE.match(words) or RULE.match(words)
        if lines and (code or item or not words or indent != depth):
            yield from unmarked(lines)
            lines = []
        if code:
            literal = margin if words.startswith(".. ") else -1  # a directive's options and contents, as of a figure
        elif words:
            lines.append(words)
            depth = indent
            if words.endswith("::"):
                literal = margin


def unmarked(lines: list[str]) -> Iterator[str]:
    joined = one_line(" ".join(lines))
    if len(joined) >= SHORTEST:
        for pattern, kept in MARKUP:
            joined = pattern.sub(kept, joined)
        yield joined.replace("\\", "").replace("``", "").removesuffix("::")


def docstring_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a Python file's docstrings, none if the file is not of this Python's grammar."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in other people's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from text_paragraphs(ast.get_docstring(node) or "")


FONTS = re.compile(r"^\.(B|I|BR|RB|BI|IB|IR|RI|SM|SB) +(.+)$")
UNSHOWN = re.compile(r"^\.(?:nf|EX|ft CW)\b.*?^\.(?:fi|EE|ft R)\b", re.S | re.M)
ESCAPES = (
    (re.compile(r"\\f(\[[^\]]*\]|\(..|.)|\\[&|^/,)]|\\s[-+]?\d|\\\*\(C[`']|\\c?$", re.M), ""),
    (re.compile(r"\\\(?[lr]q|\\\[[lr]q\]|\\\*\(?[lr]q|\\\(dq|\\\*\([LR]\"|\\\[dq\]"), '"'),
    (re.compile(r"\\\((aq|cq|oq)|\\\[(aq|cq|oq)\]|\\\*\(Aq"), "'"),
    (re.compile(r"\\\(em|\\\[em\]|\\\*\(--"), "--"),
    (re.compile(r"\\-|\\\(hy|\\\[en\]|\\\(en"), "-"),
    (re.compile(r"\\[ ~0]"), " "),
)


def man_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a manual page in the macros of ``man``; none of one in ``mdoc``'s, which hide half of the words."""
    if re.search(r"^\.Dd", text, re.M):
        return
    text = UNSHOWN.sub(".PP", text)
    for pattern, kept in ESCAPES:
        text = pattern.sub(kept, text)
    lines: list[str] = []
    tag = False  # a line that names what the next paragraph describes
    for line in [*text.splitlines(), ".PP"]:
        if font := FONTS.match(line):
            words = [quoted.strip('"') for quoted in re.findall(r'"[^"]*"|\S+', font[2])]
            lines.append((" " if font[1] in ("B", "I", "SM", "SB") else "").join(words))
        elif not line.startswith((".", "'")) and line.strip():
            lines.append(line)
        if tag or (line.startswith((".", "'")) and not font) or not line.strip():
            yield from unmarked(lines)
            lines = []
        tag = line.startswith(".TP")


DOCUMENTATION = re.compile(r'"(?:documentation|description)": ?"((?:[^"\\]|\\.)*)"')


def json_paragraphs(text: str) -> Iterator[str]:
    """Yield what a JSON file describes under ``documentation`` or ``description``, as HTML or plain text."""
    for found in DOCUMENTATION.finditer(text):
        if len(found[1]) >= SHORTEST:
            yield from html_paragraphs(json.loads(f'"{found[1]}"', strict=False))


def one_line(text: str) -> str:
    return " ".join(text.split())


READERS = {
    "html": html_paragraphs,
    "text": text_paragraphs,
    "docstrings": docstring_paragraphs,
    "man": man_paragraphs,
    "json": json_paragraphs,
}
SUFFIXES = {
    **dict.fromkeys((".html", ".htm", ".xhtml", ".docbook", ".page", ".xml"), "html"),
    **dict.fromkeys((".txt", ".rst", ".md", ".info", ".pod", ".dict", ".org", ".mkd", ".markdown", ".rest"), "text"),
    ".py": "docstrings",
}
BORING = re.compile(
    r"(^|/)(license|licence|copying|copyright|changelog|changes|news|authors|credits|contributors|thanks|notice|"
    r"genindex|py-modindex|search|objects|requirements|tests?|testing|locales?|translations|locale|_sources|node_modules)([./_-]|$)",
    re.I,
)
API = re.compile(r"^(botocore/data|googleapiclient/discovery_cache/documents)/.*\.json$")
LANGUAGE = re.compile(
    r"[./_-](?!en)(ar|bg|ca|cs|da|de|el|es|fa|fi|fr|hr|hu|id|it|ja|ko|nb|nl|pl|pt|ro|ru|sk|sl|sr|sv|tr|uk|vi|zh)([._-][A-Za-z]+)?[./]"
)


def format_of(path: str) -> str | None:
    """Return which reader a file in a package asks for, ``None`` if none: no prose, a license, a translation.

    Example:
        >>> format_of("usr/share/man/man1/ls.1.gz"), format_of("a/docs/intro.rst"), format_of("a/LICENSE.txt")
        ('man', 'text', None)
    """
    path = re.sub(r"\.info-\d+$", ".info", re.sub(r"\.(gz|dz)$", "", path))
    if BORING.search(path) or LANGUAGE.search(path):
        return None
    if re.search(r"/man/man\d/[^/]+$", path):
        return "man"
    if API.search(path):
        return "json"
    return SUFFIXES.get(PurePosixPath(path.lower()).suffix)


COMMON = frozenset(
    re.findall(
        r"\w+",
        "a about after all also an and any are as at be because been before but by can could do does each for from had has have "
        "he her his how i if in into is it its made may more most must no not of on one only or other our out over same she "
        "should so some such than that the their them then there these they this those through to two under up used was we were "
        "what when where which while who will with would you your",
    )
)
WORD = re.compile(r"[a-z]+")


def fault(paragraph: str) -> str | None:
    """Return why a paragraph is not English prose, ``None`` if it is.

    Example:
        >>> fault("The lock is held while the file is open, so that no other process can write to it at the same time.")
        >>> fault("int main(int argc, char **argv) { return run(argc, argv, NULL, 0); } // not reached, see run.c.")
        'symbols'
    """
    if not SHORTEST <= len(paragraph) <= LONGEST:
        return "length"
    ends = paragraph[-1] in ".!?:;\"')]" or len(paragraph) > 250
    if not (paragraph[0].isalpha() or paragraph[0] in "\"'(") or not ends:
        return "sentence"
    if not paragraph.isascii() and len(paragraph.encode("ascii", "ignore")) < 0.98 * len(paragraph):
        return "letters"
    words = paragraph.split()
    letters = sum(map(str.isalpha, paragraph))
    if letters < 0.88 * (len(paragraph) - len(words) + 1):
        return "symbols"
    if not 3.2 <= letters / len(words) <= 8:
        return "words"
    plain = [word for word in words if word.isalpha() or word.rstrip(".,;:!?)\"'").lstrip("(\"'").isalpha()]
    named = sum(not word[1:].islower() for word in plain if len(word) > 2)
    if len(plain) < 0.8 * len(words) or named > 0.2 * len(words):
        return "names"
    if sum(word.lower() in COMMON for word in words) < 0.25 * len(words):
        return "language"
    return None


class Seen:
    """Which paragraphs and runs of five words were there: one bit for every value of CRC-32 that a run can have.

    With 100 million runs 2 % of the bits are set, so that half of ten new runs look old once in a million times.
    """

    def __init__(self) -> None:
        self.exact: set[bytes] = set()
        self.bits = np.zeros(2**29, dtype=np.uint8)

    def fault(self, text: str) -> str | None:
        """Return whether a text, or half of its runs or more, was there before; ``None`` if not. Remember it."""
        words = WORD.findall(text.lower())
        if len(words) < SHINGLE:
            return None
        key = hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()
        if key in self.exact:
            return "duplicate"
        self.exact.add(key)
        hashes = np.array([zlib.crc32(word.encode()) for word in words], dtype=np.uint32)
        runs = sum(
            hashes[at : len(words) - SHINGLE + 1 + at] * np.uint32(31**at) for at in range(SHINGLE)
        )  # modulo 2^32
        place, bit = runs >> 3, (1 << (runs & 7)).astype(np.uint8)
        old = np.count_nonzero(self.bits[place] & bit)
        self.bits[place] |= bit  # of two runs in one byte one is forgotten, about once in 10,000 paragraphs
        return "near duplicate" if old >= len(runs) / 2 else None
