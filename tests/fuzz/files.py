"""Files as people, and their bugs, leave them: every one is a function of the generator alone."""

import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import polars as pl
from PIL import Image
from scipy.io import wavfile

from tests.fuzz.values import text

__all__ = ["damaged", "picture", "rows", "table", "waveform", "write"]

_COLUMNS = ("text", "label", "labels", "sentence1", "sentence2", "score", "query", "positive", "negative", "path")
_NUMBERS = ("1" * 5000, "1e999", "-0", "007", "NaN", "1.5", "0", "1", "7")


def write(random: Random, path: Path, content: bytes) -> Path:
    """Write a file, now and then as a FIFO, a folder, a dangling link, or nothing at all."""
    path.unlink(missing_ok=True)
    kind = random.random()
    if kind < 0.02:
        os.mkfifo(path)
    elif kind < 0.04:
        path.symlink_to(path.with_name("nowhere"))
    elif kind > 0.02:
        path.write_bytes(content)
    return path


def damaged(random: Random, content: bytes) -> bytes:
    """Return what is in a file, half of the time cut, changed, or in another encoding."""
    if random.random() < 0.5 or not content:
        return content
    place, second = random.randrange(len(content)), bytes([random.randrange(256)])

    def encoded(name: str) -> bytes:
        return content.decode("utf8", "replace").encode(name, "replace")

    changes: list[Callable[[], bytes]] = [
        lambda: content[:place],
        lambda: content[:place] + second + content[place + 1 :],
        lambda: content[:place] + content[place : place + 9] * 3 + content[place:],
        lambda: b"\xef\xbb\xbf" + content,
        lambda: encoded("utf-16"),
        lambda: encoded("utf-16-le"),
        lambda: encoded("latin-1"),
        lambda: gzip.compress(content + b"\0" * random.choice([0, 10_000_000])),
        lambda: content.replace(b"\n", random.choice([b"\r\n", b"\r", b"\xe2\x80\xa8"])),
        lambda: bytes(random.randrange(256) for _ in range(40)),
    ]
    return random.choice(changes)()


def rows(random: Random) -> list[dict[str, Any]]:
    """Return rows that are nearly those of a task."""
    columns = random.choice(
        [("text", "label"), ("sentence1", "sentence2", "score"), ("text", "labels"), ("query", "positive", "negative"),
         ("sentence1", "sentence2", "labels"), ("path", "label"), random.sample(_COLUMNS, 3)]
    )  # fmt: skip

    def cell(column: str, place: int) -> Any:
        if random.random() < 0.01:
            return random.choice([None, text(random), [], {}, 10**18, 0.5, True, ["a", None], [text(random)]])
        if column in ("positive", "negative"):
            return [f"{column} {place} {part}" for part in range(2)]
        return place % 2 if column in ("label", "labels", "score") else f"{column} {place}"

    return [{column: cell(column, place) for column in columns} for place in range(random.choice([0, 1, 8, 8, 12]))]


def table(random: Random, suffix: str) -> bytes:
    """Return a table as a file with this suffix holds it, right or wrong."""
    actual = rows(random)
    if suffix == ".parquet":
        try:
            frame = pl.DataFrame(actual, strict=False)
        except Exception:  # rows that no frame holds
            frame = pl.DataFrame({"text": ["a", "b"], "label": [0, 1]})
        buffer = io.BytesIO()
        try:
            frame.write_parquet(buffer)
        except Exception:  # a column without a type that parquet has
            return b"PAR1"
        return buffer.getvalue()
    if suffix == ".csv":
        names = list(actual[0]) if actual else ["text", "label"]
        names = [*names, names[0]] if random.random() < 0.1 else names
        cells = [",".join(_csv_cell(random, row.get(name)) for name in names) for row in actual]
        return "\n".join([",".join(names), *cells]).encode("utf8", "replace")
    lines = [json.dumps(row, ensure_ascii=random.random() < 0.5) for row in actual]
    if lines and random.random() < 0.3:
        odd = [
            "[" * 100_000,
            '{"text": "\\ud83d", "label": 1}',
            '{"text": "a\u2028b", "label": 0}',
            "3",
            '{"text": 1, "text": 2}',
        ]
        odd += [f'{{"text": "a", "label": {number}}}' for number in _NUMBERS]
        lines[random.randrange(len(lines))] = random.choice(odd)
    return "\n".join(lines).encode("utf8", "replace")


def _csv_cell(random: Random, value: Any) -> str:
    if random.random() < 0.02:
        return random.choice([*_NUMBERS, '"', '"a\nb"', "a,b", "'", '"a""b"', " "])
    if isinstance(value, list | dict):
        return '"' + json.dumps(value).replace('"', '""') + '"'
    return "" if value is None else str(value)


def picture(random: Random) -> bytes:
    """Return a small image in some format."""
    buffer = io.BytesIO()
    mode = random.choice(["RGB", "L", "RGBA", "P"])
    kind = random.choice(
        ["PNG", "GIF", "BMP", "TIFF", "WEBP"] if mode == "RGBA" else ["PNG", "JPEG", "GIF", "BMP", "TIFF"]
    )
    image = Image.new(mode, (7, 5))
    (image.convert("RGB") if kind == "JPEG" else image).save(buffer, kind)
    return buffer.getvalue()


def waveform(random: Random) -> bytes:
    """Return a short WAV file."""
    buffer = io.BytesIO()
    kind = random.choice(["int16", "int32", "float32", "uint8"])
    wavfile.write(
        buffer, random.choice([8000, 16000]), np.ones((random.choice([0, 1, 800]), random.choice([1, 2]))).astype(kind)
    )
    return buffer.getvalue()
