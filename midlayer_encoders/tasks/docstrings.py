"""Five built-in tasks of different types, without downloads.

Their texts are plain sentences from the docstrings of libraries that every installation has, read from their sources.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.tasks.task_data import TaskData, TaskType, as_columns

BUILTIN_TASKS: dict[str, TaskType] = {
    "DocstringLibraryClassification": "Classification",
    "DocstringSubjectClustering": "Clustering",
    "DocstringSameObjectPairs": "PairClassification",
    "DocstringDescriptionReranking": "Reranking",
    "DocstringNearnessSTS": "STS",
}
"""Label and type of each built-in task."""

STS_GRADES: tuple[str, ...] = (
    "objects of two libraries",
    "two subjects of one library",
    "two files of one subject",
    "two objects of one file",
    "one object",
)
"""Meaning of each grade of the built-in STS task, from 0 to 4."""

_PER_SHELF = 20
_CANDIDATES = 10

SHELVES: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("docstring_sources.json").read_bytes())
"""By library and subject, the location of the sources: folders, files or patterns under the library's root.

The subjects are a manual selection of prose about one topic. It omits modules that many installations lack (tkinter,
curses, the test suite) and modules that repeat each other (``numpy.polynomial``, ``transformers.models``).
"""

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


class Entry(NamedTuple):
    """A documented object with two texts from its docstring.

    Attributes:
        library: one of the keys of :data:`SHELVES`.
        shelf: subject within the library.
        module: file that defines the object, relative to the library's root.
        name: qualified name in the file.
        summary: first sentence.
        description: sentences after the first.
    """

    library: str
    shelf: str
    module: str
    name: str
    summary: str
    description: str


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


@cache
def entries() -> tuple[Entry, ...]:
    """Return all usable entries with distinct texts, in the order of the sources.

    Nothing is imported: the sources are parsed, so ``python -OO``, which drops docstrings, has no effect.
    """
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
        raise MidlayerError(f"The built-in tasks read the docstrings of {library}, which is not installed here.")
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


Pool: TypeAlias = tuple[tuple[Entry, ...], ...]
"""The objects of each shelf."""


@cache
def builtin_data(label: str) -> TaskData:
    """Return the rows of the built-in task ``label``, which depend only on the versions of the libraries."""
    origin = ",".join(f"{name}-{version}" for name, version in versions().items())
    return TaskData(label=label, type=BUILTIN_TASKS[label], origin=origin, **_MAKERS[label](_pool()))


def _library(pool: Pool) -> dict[str, Any]:
    numbers = {library: number for number, library in enumerate(SHELVES)}

    def columns(objects: Iterable[Entry]) -> dict[str, list[object]]:
        rows = [(text, numbers[entry.library]) for entry in objects for text in (entry.summary, entry.description)]
        return as_columns(("text", "label"), rows)

    return {
        "description": "Which of six libraries is a sentence from? Names that give it away are masked.",
        "splits": {  # both texts of an object are in the same split; otherwise one would reveal the other
            "train": columns(entry for shelf in pool for entry in shelf[::2]),
            "test": columns(entry for shelf in pool for entry in shelf[1::2]),
        },
    }


def _subject(pool: Pool) -> dict[str, Any]:
    rows = [(entry.description, number) for number, shelf in enumerate(pool) for entry in shelf]
    return {
        "description": "Descriptions of objects, to be clustered by the part of a library they are from.",
        "splits": {"test": as_columns(("sentences", "labels"), rows)},
        # mteb draws this many rows with replacement, 16384 by default, ten times.
        "settings": {"max_documents_per_cluster": len(rows), "n_clusters": 5},
    }


def _same_object(pool: Pool) -> dict[str, Any]:
    rows = []
    for entry, shelf in _on_shelves(pool):
        rows.append((entry.summary, entry.description, 1))
        rows.append((entry.summary, _nearest(entry, shelf)[0].description, 0))
    return {
        "description": "Do a summary and a description speak of one object? If not, of two of one subject.",
        "splits": {"test": as_columns(("sentence1", "sentence2", "labels"), rows)},
    }


def _own_description(pool: Pool) -> dict[str, Any]:
    rows = [
        (entry.summary, [entry.description], [other.description for other in _nearest(entry, shelf)[: _CANDIDATES - 1]])
        for entry, shelf in _on_shelves(pool)
    ]
    return {
        "description": f"A summary ranks its own description among {_CANDIDATES} of the same subject.",
        "splits": {"test": as_columns(("query", "positive", "negative"), rows)},
    }


def _nearness(pool: Pool) -> dict[str, Any]:
    objects = sorted((entry for entry, _ in _on_shelves(pool)), key=_order)
    rows = []
    for entry in objects:
        partners: dict[int, list[Entry]] = {}
        for other in objects:
            partners.setdefault(_grade(entry, other), []).append(other)
        draw = int.from_bytes(_order(entry))
        for grade, candidates in sorted(partners.items()):
            rows.append((entry.summary, candidates[draw % len(candidates)].description, float(grade)))
    grades = "; ".join(f"{grade} = {meaning}" for grade, meaning in enumerate(STS_GRADES))
    return {
        "description": f"A summary and a description, graded by how near their objects are, by rule: {grades}.",
        "splits": {"test": as_columns(("sentence1", "sentence2", "score"), rows)},
    }


_MAKERS: dict[str, Callable[[Pool], dict[str, Any]]] = dict(
    zip(BUILTIN_TASKS, (_library, _subject, _same_object, _own_description, _nearness), strict=True)
)


def _on_shelves(pool: Pool) -> Iterator[tuple[Entry, Sequence[Entry]]]:
    """Return every object and its shelf."""
    return ((entry, shelf) for shelf in pool for entry in shelf)


@cache
def _pool() -> Pool:
    """Return up to twenty objects of each shelf, ordered by a hash of their texts so that a new release changes few."""
    shelves = {(library, shelf): list[Entry]() for library in SHELVES for shelf in SHELVES[library]}
    for entry in entries():
        shelves[entry.library, entry.shelf].append(entry)
    for (library, shelf), objects in shelves.items():
        if len(objects) < _CANDIDATES:
            raise MidlayerError(
                f"The built-in tasks read docstrings in Python sources and need {_CANDIDATES} in {library} ({shelf}), "
                f"but found {len(objects)}. Install {library} with its .py files, or pass your own data as a task."
            )
    return tuple(tuple(sorted(objects, key=_order)[:_PER_SHELF]) for objects in shelves.values())


def _order(*objects: Entry) -> bytes:
    texts = "\n".join(entry.summary + entry.description for entry in objects)
    return hashlib.blake2b(texts.encode(), digest_size=8).digest()


def _nearest(entry: Entry, shelf: Sequence[Entry]) -> list[Entry]:
    """Return the other objects of a shelf, those of the same file first."""
    neighbors = [other for other in shelf if other != entry]
    return sorted(neighbors, key=lambda other: (other.module != entry.module, _order(entry, other)))


def _grade(entry: Entry, other: Entry) -> int:
    """Return how many of library, subject, file and object two entries share: an index into :data:`STS_GRADES`."""
    pairs = zip(entry[:4], other[:4], strict=True)  # library, shelf, module and name
    return next((depth for depth, (a, b) in enumerate(pairs) if a != b), len(STS_GRADES) - 1)
