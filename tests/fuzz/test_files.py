"""Every format that is read, whole and damaged: what it holds, or an error of ours that names the file."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest

from midlayer_encoders import LayerEncoder, SweepResult
from midlayer_encoders.cli._labeled_examples import read_examples
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.reading.media_inputs import media_files, read_audio, read_image
from midlayer_encoders.tasks.sources import task_sources
from midlayer_encoders.tasks.text_lists import read_texts
from midlayer_encoders.validation import lone_surrogate
from tests.fuzz.files import damaged, picture, table, waveform, write
from tests.fuzz.running import Case, check_cases, seeds
from tests.fuzz.values import text
from tests.support.tiny_folders import Folder

Read = Callable[[], Any]


def files_case(folder: Path) -> Case:
    """Return a case of a reader and the file that it reads; an error must name the file, or the folder."""
    readers = (_texts, _task, _task_folder, _examples, _media, _media_folder)

    def case(random: Random) -> tuple[str, Callable[[], Any]]:
        place = folder / str(random.random())
        place.mkdir()
        result = random.choice(readers)(random, place)
        return f"{result.__qualname__} of {place}: {_listed(place)}", lambda: _check(result, place)

    return case


def _listed(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes()[:200] if path.is_file() else b"" for path in place.rglob("*")}


def _check(result: Read, place: Path) -> None:
    names = [place.name, *(path.name for path in place.rglob("*"))]
    try:
        actual = result()
    except MidlayerError as error:
        words = str(error)
        if lone_surrogate(words) is not None or not any(name in words for name in names):
            raise AssertionError(f"no file is named: {words}") from error
        raise
    finally:
        shutil.rmtree(place)
    assert actual


def _name(random: Random, suffix: str) -> str:
    return random.choice(["test", "train", "a b", "ü", "x[1]", "a" * 200, "*", "-1"]) + suffix


def _texts(random: Random, place: Path) -> Read:
    content = "\n".join(text(random) for _ in range(4)).encode("utf8", "replace")
    path = write(random, place / _name(random, ".txt"), damaged(random, content))
    return lambda: [line.encode("utf8") for line in read_texts(path)]


def _task(random: Random, place: Path) -> Read:
    suffix = random.choice([".jsonl", ".csv", ".csv", ".parquet", ".tsv", ".json"])
    path = write(random, place / _name(random, suffix), damaged(random, table(random, suffix)))
    return lambda: [source.make().metadata.name for source in task_sources(path)]


def _task_folder(random: Random, place: Path) -> Read:
    for split in random.sample(["test", "train", "other"], random.choice([1, 2])):
        suffix = random.choice([".jsonl", ".csv", ".parquet"])
        write(random, place / f"{split}{suffix}", damaged(random, table(random, suffix)))
    return lambda: [source.name.encode() for source in task_sources(place)]


def _examples(random: Random, place: Path) -> Read:
    if random.random() < 0.5:
        suffix = random.choice([".jsonl", ".csv", ".parquet"])
        path = write(random, place / _name(random, suffix), damaged(random, table(random, suffix)))
        return lambda: read_examples(path, ["text"])
    for label in random.sample(["cats", "dogs", ".hidden", "ü"], random.choice([1, 2, 3])):
        (place / label).mkdir()
        write(random, place / label / "a.txt", damaged(random, text(random).encode("utf8", "replace")))
    return lambda: read_examples(place, ["text"])


def _media(random: Random, place: Path) -> Read:
    suffix = random.choice([".png", ".jpg", ".wav", ".gif", ".tif"])
    content = waveform(random) if suffix == ".wav" else picture(random)
    path = write(random, place / _name(random, suffix), damaged(random, content))
    return lambda: read_audio(path) if suffix == ".wav" else read_image(str(path))


def _media_folder(random: Random, place: Path) -> Read:
    medium = random.choice(["image", "audio"])
    for number in range(random.choice([0, 1, 3])):
        content, suffix = (picture(random), ".png") if medium == "image" else (waveform(random), ".wav")
        write(random, place / f"{number}{suffix}", damaged(random, content))
    bad = random.choice(["refuse", "skip"])
    return lambda: media_files(place, medium, bad=bad)


# --- folders that programs write -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Folder) -> Path:
    """Return the folder of a sweep without tasks."""
    from midlayer_encoders import sweep

    folder = tmp_path_factory.mktemp("swept")
    sweep(LayerEncoder(tiny_folder("Llama"), -1, device="cpu"), out=folder)
    rows = {
        "model": "m",
        "revision": "r",
        "layer": 1,
        "depth": 0.25,
        "kind": "score",
        "dataset": "d",
        "name": "n",
        "value": 0.5,
    }
    pl.DataFrame([rows]).write_parquet(folder / "frame.parquet")
    return folder


def folders_case(folder: Path, model: str, swept: Path) -> Case:
    """Return a case of a model's folder, or a sweep's, of which one file is damaged."""

    def case(random: Random) -> tuple[str, Callable[[], Any]]:
        complete = random.choice([Path(model), swept])
        place = folder / str(random.random())
        shutil.copytree(complete, place)
        path = random.choice(sorted(path for path in place.iterdir() if path.is_file()))
        write(random, path, damaged(random, path.read_bytes()))
        return f"{path.name} of {complete.name}", lambda: _open(place, swept if complete == swept else None)

    return case


def _open(place: Path, swept: Path | None) -> None:
    try:
        if swept is not None:
            SweepResult.load(place).html()
        else:
            LayerEncoder(str(place), 1, device="cpu").encode("a text")
    finally:
        shutil.rmtree(place)


@seeds(110, 5, 900)
def test_files(tmp_path: Path, first: int, count: int) -> None:
    check_cases(files_case(tmp_path), "files", first, count)


@seeds(15, 1, 500)
def test_folders(tmp_path: Path, tiny_folder: Folder, swept: Path, first: int, count: int) -> None:
    check_cases(folders_case(tmp_path, tiny_folder("Llama"), swept), "folders", first, count)
