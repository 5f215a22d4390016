"""Write the texts and rows of the built-in tasks, ``midlayer_encoders/tasks/docstring_texts.json``, from installed libraries.

    python -m benchmarks.quality.docstring_texts.extract

The texts are plain sentences from the docstrings of five libraries and the standard library, read from their sources.
``sources.json`` names the sources by library and subject: a manual selection of prose about one topic, without modules
that many installations lack (tkinter, curses, the test suite) or that repeat each other (``numpy.polynomial``,
``transformers.models``). The file that the package contains is of the versions that it names.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.quality.docstring_texts.tasks import numbered_tasks
from midlayer_encoders.tasks.docstrings import TEXTS, Entry

SHELVES: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("sources.json").read_bytes())
"""By library and subject, the location of the sources: folders, files or patterns under the library's root."""

_PACKAGES = {"sklearn": "scikit-learn"}  # packages whose name differs from the module's
_SKIPPED_FOLDERS = {"tests", "test", "testing", "externals", "_vendor", "__pycache__"}

MASK = "something"
"""Replaces every name that would reveal the library."""

# Terms of one library and the plain word that replaces them.
_DIALECT = (
    (r"\b(nd-?arrays?|(sub)?tensors?|array[-_ ]likes?|dtensors?|tensordicts?)\b", "array"),
    (r"\bestimators?\b", "model"),
    (r"\b(cuda|cudnn|nccl|rocm)\b", "GPU"),
    (r"\b(asyncio|urllib|unittest|xmlrpc|wsgiref|multiprocessing|tarfile|zipfile|shutil|f2py|onnx|trainer)\b", MASK),
    (
        r"\b(numpy|scipy|scikit[- ]learn|scikits?|sklearn|pytorch|torch|hugging ?face|transformers|c?python)('s)?\b",
        MASK,
    ),
    (r"\b((?-i:np|sp|hf)|matlab|autograd|torchscript|(pep|rfc)[ -]?\d+)\b", MASK),
)
_MARKUP = (
    (r":[a-zA-Z][\w:+-]*:`~?!?([^`<]*?)\s*(?:<[^`>]*>)?`", r"`\1`"),  # :class:`~torch.Tensor`, :ref:`text <target>`
    (r"`([^`<]*?)\s*<[^`>]*>`_*", r"\1"),  # `text <target>`_
    (r"\[([^\]]*)\]\([^)]*\)", r"\1"),  # [text](target)
    (r"\[(`[^`\]]*`)\]", r"\1"),  # [`Name`]
    (r"\s*\[[\w, ]*\]_", ""),  # [1]_
    (r"(?<![\w*])\*{1,2}([^*\s](?:[^*]*[^*\s])?)\*{1,2}(?![\w*])", r"\1"),  # *emphasis*, **strong**
    (r"`_{1,2}", "`"),
    (r"\s*\(functional name: [^)]*\)", ""),  # torch's data pipes
)
_CODE = re.compile(r"`+([^`]*)`+")
# A word that only code has.
_IDENTIFIER = re.compile(
    r"(?<![\w.])(?!e\.g\b|i\.e\b)\.?(?:"
    r"[^\W\d]\w*(?:\.\w+)+(?:\(\))?"  # dotted.name
    r"|\w*[^\W_]_\w*(?:\(\))?|_+\w+(?:\(\))?"  # under_score, __dunder__
    r"|\w+\(\)"  # call()
    r"|[a-z]+[A-Z]\w*|[A-Z]+[a-z0-9]+[A-Z]\w*"  # camelCase, CamelCase
    r"|--?[a-z][\w-]+"  # --option
    r")(?!\w)"
)
_UNWANTED = re.compile(r"[\\{}<>=@|~^$#`*\[\]\"]|::|http|[^\x20-\x7e]")
_STOCK = re.compile(
    r"user guide|deprecat|see also|\bsee\b|refer to|for (more|full|further|additional) |more (details|information)"
    r"|docs?\b|documentation|docstring|(super|sub)class|inherit|metadata routing|only relevant|in version|same as"
    r"|equivalent to|alias (of|for)|experimental|in-place|examples?\b|below|above|following",
    re.IGNORECASE,
)
_SECTION = re.compile(r"^[ \t]*\w[\w /-]*\n[ \t]*([-=~^])\1{2,}[ \t]*$", re.MULTILINE)
_GOOGLE_SECTION = re.compile(r"^[ \t]*(?:[A-Z]\w*[ ]?){1,2}:*[ \t]*$")
_NOT_PROSE = re.compile(r"^\s*(>>>|\.\. |:\w|@|[-*+] |\d+[.)] |#|\||```|\$\$|<|\w+ ?: |\w+\(.*\)\s*(->|$))|:$")
_SENTENCE_END = re.compile(r"(?<=[a-z)\d][.!?])\s+(?=[A-Z])")


def versions() -> dict[str, str]:
    """Return the version of every library, that of the standard library under ``python``."""
    packages = {library: _PACKAGES.get(library, library) for library in SHELVES if library != "stdlib"}
    installed = {library: importlib.metadata.version(package) for library, package in packages.items()}
    return {"python": platform.python_version()} | installed


def plain(text: str, name: str = "") -> str:
    """Return ``text`` without markup, with names masked that would reveal the library.

    Args:
        text: reStructuredText or Markdown, one paragraph.
        name: name of the documented object, which is masked in code markup.

    Example:
        >>> plain("Apply :class:`~torch.nn.ReLU` to a **PyTorch** tensor, as `fit_transform` does.")
        'Apply something to a something array, as something does.'
    """
    for pattern, replacement in _MARKUP:
        text = re.sub(pattern, replacement, text)
    object_names = {name, name.rpartition(".")[2]}
    text = _CODE.sub(lambda code: MASK if code[1].strip("()") in object_names else code[1], text)
    for pattern, replacement in _DIALECT:
        text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)
    text = _IDENTIFIER.sub(MASK, text)
    return re.sub(rf"\b{MASK}(?:[ ./]+{MASK})+\b", MASK, " ".join(text.split()))


def entries() -> tuple[Entry, ...]:
    """Return all usable entries with distinct texts, in the order of the sources, which are parsed, not imported."""
    used: set[str] = set()
    usable = []
    for library, shelves in SHELVES.items():
        for shelf, patterns in shelves.items():
            for entry in _shelf(library, shelf, patterns):
                texts = {re.sub(r"[^a-z]", "", text.lower()) for text in (entry.summary, entry.description)}
                keys = {*texts, f"{library}/{entry.module}:{entry.name}"}  # a name that is defined twice counts once
                if len(texts) == 2 and not keys & used:
                    usable.append(entry)
                    used |= keys
    return tuple(usable)


def _root(library: str) -> Path:
    if library == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{library} is not installed.")
    return Path(spec.origin).parent


def _shelf(library: str, shelf: str, patterns: Sequence[str]) -> Iterator[Entry]:
    root = _root(library)
    for path in sorted(path for pattern in patterns for path in _sources(root, pattern)):
        module = path.relative_to(root).with_suffix("").as_posix()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in the sources
            tree = ast.parse(path.read_bytes())
        for name, docstring in _documented(tree):
            texts = _sentences(docstring, name)
            if texts is not None:
                yield Entry(library, shelf, module, name, *texts)


def _sources(root: Path, pattern: str) -> Iterable[Path]:
    if pattern.endswith(".py"):
        return root.glob(pattern)
    paths = (root / pattern).rglob("*.py")
    return (path for path in paths if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts))


def _documented(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield public functions, classes and methods with their docstrings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            name = f"{prefix}{node.name}"
            docstring = ast.get_docstring(node)
            if docstring:
                yield name, docstring
            if isinstance(node, ast.ClassDef):
                yield from _documented(node, f"{name}.")


def _paragraphs(docstring: str) -> Iterator[str]:
    """Yield the paragraphs before the first section of a docstring; those that are not prose are empty strings."""
    section = _SECTION.search(docstring)
    for block in re.split(r"\n\s*\n", docstring[: section.start()] if section else docstring):
        lines = block.splitlines()
        if len(lines) > 1 and _GOOGLE_SECTION.match(lines[0]):
            return
        prose = not block.startswith((" ", "\t")) and not any(map(_NOT_PROSE.search, lines))
        yield " ".join(block.split()) if prose else ""


def _sentences(docstring: str, name: str) -> tuple[str, str] | None:
    """Return the first sentence and the next ones up to about 25 words, or ``None`` if either is not plain prose."""
    sentences = (sentence for block in _paragraphs(docstring) for sentence in _SENTENCE_END.split(plain(block, name)))
    summary = next(sentences, "")
    if not _usable(summary, low=5, high=20):
        return None
    description: list[str] = []
    words = 0
    for sentence in sentences:
        if words < 12 and words + len(sentence.split()) <= 32 and _usable(sentence, low=5, high=32):
            description.append(sentence)
            words += len(sentence.split())
    text = " ".join(description)
    return (summary, text) if words >= 8 else None


def _usable(sentence: str, *, low: int, high: int) -> bool:
    """Return True if a sentence is prose of ``low`` to ``high`` words: no code, no stock phrase, mostly unmasked."""
    words = sentence.split()
    masked = sum(MASK in word for word in words)
    return (
        low <= len(words) <= high
        and sentence[0].isupper()
        and sentence[-1] in ".!?"
        and masked * 4 <= len(words)
        and _UNWANTED.search(sentence) is None
        and _STOCK.search(sentence) is None
    )


def main() -> None:
    texts = entries()
    rows = ",\n".join(json.dumps(entry) for entry in texts)
    compact = {name: json.dumps(tasks, separators=(",", ":")) for name, tasks in numbered_tasks(texts).items()}
    tasks = ",\n".join(f"{json.dumps(name)}: {text}" for name, text in compact.items())
    parts = f'"versions": {json.dumps(versions())}, "entries": [\n{rows}\n], "tasks": {{\n{tasks}\n}}'
    TEXTS.write_text(f"{{{parts}}}\n", encoding="utf8")


if __name__ == "__main__":
    main()
