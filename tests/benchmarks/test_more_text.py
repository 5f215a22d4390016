"""More text for the long run: what is read of a package, what is kept of it, and how a run takes it."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.pretraining import more_text
from benchmarks.pretraining.corpus import encode, parts, read_tokens, train_tokenizer, write_tokens
from benchmarks.pretraining.more_text import PACKAGES, SOURCES, Package, Tally, listed, main, prose
from benchmarks.pretraining.prose import (
    Seen,
    docstring_paragraphs,
    fault,
    format_of,
    html_paragraphs,
    json_paragraphs,
    man_paragraphs,
    text_paragraphs,
)
from benchmarks.pretraining.run import read_parts
from benchmarks.pretraining.variants import VARIANTS
from benchmarks.pretraining.vocabulary import SPECIAL

LOCK = "The lock is held while the file is open, so that no other process can write to it at the same time as we do."
NIGHT = (
    "Every night the keeper of the light climbed all of the stairs, and he never once forgot to bring the oil with him."
)
GARDEN = (
    "In the garden behind the old house there was a well, and nobody in the village could say who had dug it, or when."
)
RIVER = "When the river rose in spring they moved their few things to the upper floor and waited there until the water fell."


@pytest.mark.parametrize(
    ("paragraph", "reason"),
    [
        (LOCK, None),
        ("Too short to learn from.", "length"),
        ("for (int i = 0; i < n; ++i) { total += values[i] * weights[i]; } return total / (double) n; // the mean (weighted)", "symbols"),
        ("the rest of a sentence that was broken off because an example stood in the middle of it, which was left out, and", "sentence"),
        ("Die Datei wird gesperrt, solange sie offen ist, damit kein anderer Vorgang zur selben Zeit hineinschreiben kann.", "language"),
        ("Файл заблокирован, пока он открыт, чтобы никакой другой процесс не мог писать в него в то же самое время, и всё.", "letters"),
        ("The QWidget and QLayout of QMainWindow own QMenuBar and QStatusBar, as QDialog and QFrame do for QLabel or QIcon.", "names"),
    ],
)  # fmt: skip
def test_only_english_prose_is_kept(paragraph: str, reason: str | None) -> None:
    assert fault(paragraph) == reason


def test_html_keeps_what_is_read_and_drops_code_and_navigation() -> None:
    page = f"""<html><head><title>{NIGHT}</title><script>var a = "{NIGHT}";</script></head><body>
    <nav><p>{NIGHT}</p></nav><h1>Locks</h1><p class="x">{LOCK.replace("file", "<code>file</code>").replace(" open", chr(10) + "<b>open</b>")}
    <pre>{NIGHT}</pre><!-- <p>{NIGHT}</p> --><ul><li>{GARDEN.replace("who", "&#119;ho")}<li>{RIVER}</ul></body></html>"""
    assert list(html_paragraphs(page)) == [LOCK, GARDEN, RIVER]


def test_plain_text_is_unwrapped_and_its_markup_removed() -> None:
    text = f"""
Locks
=====

{LOCK.replace("file", "``file``").replace("process", ":term:`process <Process>`").replace(" can ", chr(10) + "can ")}

.. figure:: lock.png
   :width: 3

   {NIGHT}

A literal block follows::

    {NIGHT}

- {GARDEN.replace("well", "*well*").replace(" and ", chr(10) + "  and ", 1)}
- {RIVER.replace("the river", "[the river](https://example.org/river)")}

```python
{NIGHT}
```
"""
    assert list(text_paragraphs(text)) == [LOCK, GARDEN, RIVER]


def test_docstrings_are_read_by_the_grammar_and_their_arguments_described() -> None:
    code = f'''"""{LOCK}"""\n# {NIGHT}\nclass A:\n    """One.\n\n    Args:\n        path: name\n            {GARDEN}\n    """
    text = """{NIGHT}"""\n    async def b(self):\n        """{RIVER}"""\n'''
    assert list(docstring_paragraphs(code)) == [LOCK, GARDEN, RIVER]
    assert list(docstring_paragraphs("print 'of an older Python'")) == []


def test_manual_pages_and_api_models() -> None:
    page = rf""".TH LOCK 2
.SH NAME
{LOCK.replace(" open", chr(10) + ".BR open" + chr(10)).replace(" file ", chr(92) + "fIfile" + chr(92) + "fP ", 0)}
.nf
{NIGHT}
.fi
.TP
.B \-\-garden
{GARDEN.replace("the old", chr(92) + "fBthe old" + chr(92) + "fP")}
"""
    assert [item.replace(" ,", ",") for item in man_paragraphs(page)] == [LOCK, GARDEN]
    assert list(man_paragraphs(".Dd May 1\n.Dt LOCK 2\n" + LOCK)) == []
    assert list(json_paragraphs(json.dumps({"documentation": f"<p>{LOCK}</p><p>{RIVER}</p>", "name": NIGHT}))) == [
        LOCK,
        RIVER,
    ]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("./usr/share/doc/x/html/intro.html.gz", "html"), ("x-1/docs/guide/intro.rst", "text"), ("x/core.py", "docstrings"),
        ("./usr/share/info/x.info-2.gz", "text"), ("./usr/share/man/man8/x.8.gz", "man"), ("./usr/share/man/de/man8/x.8.gz", None),
        ("botocore/data/s3/2006-03-01/service-2.json.gz", "json"), ("x/data.json", None), ("x-1/tests/test_core.py", None),
        ("x/LICENSE.txt", None), ("x/docs/locale/fr/intro.html", None), ("x/docs/intro.fr.html", None), ("x/logo.png", None),
    ],
)  # fmt: skip
def test_which_files_are_read(path: str, kind: str | None) -> None:
    assert format_of(path) == kind


def test_duplicates_are_dropped_exact_and_near() -> None:
    recorded = Seen()
    assert [recorded.fault(item) for item in (LOCK, NIGHT, LOCK.upper())] == [None, None, "duplicate"]
    assert recorded.fault(LOCK.replace("file", "socket")) == "near duplicate"
    assert recorded.fault(LOCK[:40] + " and " + GARDEN) is None


def test_a_file_with_little_prose_is_dropped_and_everything_is_counted() -> None:
    tally = Tally()
    assert prose("text", LOCK, Seen(), tally) == ""
    assert tally.dropped == {"short document": len(LOCK)}
    complete = "\n\n".join([LOCK, NIGHT, LOCK, GARDEN, RIVER, "{" * 100])
    tally = Tally()
    assert prose("text", complete, Seen(), tally) == "\n\n".join([LOCK, NIGHT, GARDEN, RIVER]) + "\n\n"
    assert tally.kept == sum(map(len, (LOCK, NIGHT, GARDEN, RIVER)))
    assert tally.dropped["duplicate"] == len(LOCK)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder as ``corpus`` makes it, 100 of its 10,000 tokens held out, with a cache of two packages beside."""
    tokenizer = train_tokenizer([LOCK, NIGHT, GARDEN, RIVER], 300)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_tokens(tmp_path / "tokens.xz", encode([(RIVER + " ") * 400], tokenizer)[:10_000])
    tasks = tmp_path / "tasks" / "A"
    tasks.mkdir(parents=True)
    (tasks / "test.jsonl").write_text(json.dumps({"text": NIGHT, "label": 1}) + "\n")
    cache = tmp_path / "cache" / "pypi"
    for name in ("one", "two"):
        (cache / name).mkdir(parents=True)
    long = "\n\n".join(
        f"{LOCK} {GARDEN} Of these there are many, and this one is the {word} of them." for word in ("first", "last")
    )
    files = {
        "one-1.5/PKG-INFO": "Metadata-Version: 2.1\nName: one\nLicense: Apache-2.0\n\nLicense: none of this\n",
        "one-1.5/docs/a.rst": long + "\n\n" + NIGHT + "\n\n" + "A sentence with other words and a [MASK], which is as long as it must be, or else it would be left out for that.",
        "one-1.5/docs/b.rst": long,
    }  # fmt: skip
    with tarfile.open(cache / "one" / "one-1.5.tar.gz", "w:gz") as tar:
        for path, text in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    with zipfile.ZipFile(cache / "two" / "two-2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "two/__init__.py",
            f'"""{RIVER}\n\n{"It rained throughout the morning, and nobody was out in the street. " * 8}"""',
        )
        wheel.writestr("two-2.0.dist-info/METADATA", "Metadata-Version: 2.4\nLicense-Expression: MIT\n\nLicense: no")
    (tmp_path / "packages.txt").write_text("wheel two\nsdist one\nsdist gone  # not in the cache\n")
    return tmp_path


def made(data: Path, out: Path) -> tuple[bytes, dict[str, Any]]:
    out.mkdir()
    main(
        [
            str(data),
            "--out",
            str(out),
            "--cache",
            str(data / "cache"),
            "--packages",
            str(data / "packages.txt"),
            "--offline",
        ]
    )
    return (out / "more.xz").read_bytes(), json.loads((out / "more_manifest.json").read_text())


def test_the_same_downloads_give_the_same_file_and_the_manifest_adds_up(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(more_text, "DOCUMENT", 100)
    monkeypatch.setattr(more_text, "STRETCH", 100)
    first, manifest = made(data, data / "first")
    assert made(data, data / "again") == (first, manifest)
    tokens = read_tokens(data / "first" / "more.xz")
    assert manifest["totals"]["tokens"] == len(tokens) == sum(manifest["tokens_by_source"].values())
    assert (
        len(tokens) == sum(row["tokens"] for row in manifest["packages"]) == sum(manifest["tokens_by_format"].values())
    )
    assert [tuple(row.values())[:4] for row in manifest["packages"]] == [
        ("wheel", "two", "2.0", "MIT"), ("sdist", "one", "1.5", "Apache-2.0")
    ]  # fmt: skip
    assert manifest["absent"] == ["sdist gone"]
    assert str(data) not in json.dumps(manifest)
    assert tokens.min() >= len(SPECIAL), "a special token that a text speaks of"
    text = more_text.read_tokenizer(data).decode(tokens.tolist())
    assert "and a [MASK], which" in text
    assert text.count(LOCK) == 1, "a near duplicate in the same file, and its copy in another"
    assert NIGHT not in text, "a task's text"
    assert RIVER not in text, "held out"
    assert "It rained throughout" in text


def test_a_run_trains_on_more_text_and_holds_out_the_same(data: Path) -> None:
    namespace = Namespace(data=data, stretch=100)
    with pytest.raises(FileNotFoundError, match=r"benchmarks\.pretraining\.more_text .* --cache"):
        read_parts(namespace, more=True)
    write_tokens(data / "more.xz", np.arange(7, dtype=np.uint16))
    train, stored = parts(torch.from_numpy(read_tokens(data / "tokens.xz")), 100)
    separate, longer = ([item.cpu() for item in read_parts(namespace, more=more)] for more in (False, True))
    assert torch.equal(separate[0], train)
    assert torch.equal(longer[0], torch.cat([train, torch.arange(7)]))
    assert all(torch.equal(item[1], stored) for item in (separate, longer))
    assert [name for name, variant in VARIANTS.items() if variant.more] == ["long"]


def test_the_list_of_packages_is_read_once_each() -> None:
    packages = listed(PACKAGES)
    assert len(packages) == len({package.name for package in packages}) > 50
    assert {package.source for package in packages} == set(SOURCES)
    assert Package("debian", "x").file(Path("nowhere")) is None


def test_the_committed_manifest_is_of_the_list_and_adds_up() -> None:
    text = (PACKAGES.parent / "results" / "more_manifest.json").read_text()
    manifest = json.loads(text)
    rows = manifest["packages"]
    assert [Package(row["source"], row["name"]) for row in rows] == listed()
    assert all(row["version"] and row["license"] for row in rows)
    assert {name: sum(row[name] for row in rows) for name in manifest["totals"]} == manifest["totals"]
    assert sum(manifest["tokens_by_format"].values()) == manifest["totals"]["tokens"]
    assert text == more_text.written(manifest)


def test_compressed_members_are_opened(tmp_path: Path) -> None:
    file = tmp_path / "x-1.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        info = tarfile.TarInfo("x-1/a.txt.gz")
        zipped = gzip.compress(LOCK.encode())
        info.size = len(zipped)
        tar.addfile(info, io.BytesIO(zipped))
    assert list(more_text.members(file)) == [("x-1/a.txt.gz", LOCK.encode())]
