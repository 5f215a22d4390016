"""More text for the long run: prose out of Debian's documentation packages and PyPI's packages, as one array of token ids.

    python -m benchmarks.pretraining.corpus DATA                        # once: the tokenizer and the novels
    python -m benchmarks.pretraining.more_text DATA --cache CACHE       # on Debian 12; downloads what CACHE lacks

``apt-get`` and ``pip`` download the packages that ``more_packages.txt`` lists. Their documentation (HTML, reStructuredText,
Markdown, plain text, info, man pages, POD) and the docstrings of their Python files are taken apart into paragraphs;
``prose.py`` drops what is not English prose, was there before or is held out. Writes ``DATA/more.xz``, which
``run.py`` reads for a variant with ``more``, and ``DATA/more_manifest.json``: names, versions, licenses, and what was kept and
dropped. The same downloads give the same files, byte for byte. The text itself is not ours to publish and is never committed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import numpy as np
import torch

from benchmarks.pretraining.corpus import STRETCH, encode, parts, read_tokenizer, read_tokens, write_tokens
from benchmarks.pretraining.prose import READERS, Seen, fault, format_of

PACKAGES = Path(__file__).with_name("more_packages.txt")
SOURCES = ("debian", "sdist", "wheel")
DOCUMENT = 400  # characters that a file must keep, or nothing of it is: a lone sentence has no context to learn from
LARGEST = 20_000_000  # bytes of a file; larger ones are data


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
    """Return the packages of a list, one ``source name`` a line, in its order: of two copies of a paragraph the first is kept."""
    lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
    return [Package(*line) for line in lines if line]


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
    r"GNU (?:Lesser |Library |Affero )?(?:General Public|Free Documentation) Licen[cs]e|\b[AL]?GPL[-\d.+v]*|\bMIT\b|\bBSD\b|"
    r"Apache (?:Software )?License|\bArtistic\b|Mozilla Public License|Creative Commons [\w-]+|[Pp]ublic [Dd]omain|\bPython Software"
)


def license_of(text: str) -> str:
    r"""Return the licenses that a Debian copyright file or the metadata of a Python package names.

    Example:
        >>> license_of("Metadata-Version: 2.4\nName: x\nLicense-Expression: BSD-3-Clause\n")
        'BSD-3-Clause'
        >>> license_of("Files: *\nLicense: GPL-2+\n\nFiles: debian/*\nLicense: MIT\n")
        'GPL-2+, MIT'
    """
    if text.startswith("Metadata-Version"):
        text = text.partition("\n\n")[0]
        trove = re.findall(r"^Classifier: License :: (?:OSI Approved :: )?(.+)$", text, re.M)
        found = (
            re.findall(r"^License-Expression: (.+)$", text, re.M) or trove or re.findall(r"^License: (.+)$", text, re.M)
        )
    else:
        found = re.findall(r"^License: *(\S.*)$", text, re.M) or re.findall(r"common-licenses/([\w.+-]*\w)", text)
        found = found or NAMED.findall(text)
    names = list(dict.fromkeys(one.strip()[:60] for one in found)) or ["not named in its metadata"]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


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
        terms = "of the package that its documentation folder links to"
        texts: dict[str, list[str]] = {kind: [] for kind in READERS}
        for path, data in members(file):
            text = data.decode("utf8", errors="replace")
            if (kind := format_of(path)) is None:
                terms = license_of(text)
            else:
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


def written(manifest: dict[str, Any]) -> str:
    """Return the manifest as JSON, one line a package."""
    head = json.dumps({name: value for name, value in manifest.items() if name != "packages"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in manifest["packages"])
    return head.removesuffix("\n}") + ',\n "packages": [\n' + rows + "\n ]\n}\n"


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
    tokenizer.backend_tokenizer.encode_special_tokens = True  # a "[MASK]" that a text speaks of is a word like others
    if not given.offline:
        download(packages, given.cache)
    remember_held_out(given.data, tokenizer, seen)
    ids, manifest = collect(packages, given.cache, tokenizer, seen)
    out = given.out or given.data
    write_tokens(out / "more.xz", ids)
    (out / "more_manifest.json").write_text(written(manifest))
    print(f"{len(ids):,} tokens")


if __name__ == "__main__":
    main()
