"""A folder that is saved is whole, or the one before, or refuses to load; a full disk and a file in its place are named."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, DiskFullError, FolderError, OptionError
from tests.tiny_folders import TEXTS, save_tiny

Folder = Callable[[str], str]


def vectors(folder: Path) -> np.ndarray:
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS)


def test_a_save_that_stops_halfway_leaves_no_mixture(tiny_folder: Folder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    LayerEncoder(tiny_folder("Llama"), 1, device="cpu").save_pretrained(str(out))
    (out / "mine.txt").write_text("mine")
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").mkdir()  # which no file can take the place of
    deeper = LayerEncoder(tiny_folder("Llama"), 3, device="cpu")
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        deeper.save_pretrained(str(out))
    with pytest.raises(Exception, match=r"config\.json|model_type|Unrecognized"):
        vectors(out)
    (out / "tokenizer.json").rmdir()
    deeper.save_pretrained(str(out))
    np.testing.assert_array_equal(vectors(out), deeper.encode(TEXTS))
    assert (out / "mine.txt").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [out]


def test_an_error_before_the_folder_is_whole_leaves_the_old_one(tiny_folder: Folder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    LayerEncoder(tiny_folder("Llama"), 1, device="cpu").save_pretrained(str(out))
    before = vectors(out)
    other = LayerEncoder(tiny_folder("Llama"), 3, device="cpu")
    # Which no folder holds.
    other[1].register_forward_hook(lambda _, __, made: {**made, "sentence_embedding": made["sentence_embedding"] + 1})
    with pytest.raises(CutError, match="would give other vectors"):
        other.save_pretrained(str(out))
    np.testing.assert_array_equal(vectors(out), before)
    assert list(tmp_path.iterdir()) == [out]


def test_a_model_is_saved_into_the_folder_that_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny("Llama", tmp_path / "model")
    encoder = LayerEncoder(model, 2, device="cpu")
    expected = encoder.encode(TEXTS)
    monkeypatch.chdir(model)
    encoder.save_pretrained(".")
    np.testing.assert_array_equal(vectors(Path()), expected)
    np.testing.assert_array_equal(encoder.encode(TEXTS), expected)


def test_a_full_disk_is_named_and_leaves_the_old_folder(small_disk: Path, tiny_folder: Folder) -> None:
    out = small_disk / "out"
    encoder = LayerEncoder(tiny_folder("Llama"), 1, device="cpu")
    encoder.save_pretrained(str(out))
    before = vectors(out)
    (small_disk / "filler").write_bytes(bytes(2**20 - 2 * _size(out) + 8192))
    with pytest.raises(DiskFullError, match=rf"The disk of {small_disk} is full .*{out} was not written"):
        LayerEncoder(tiny_folder("Llama"), 3, device="cpu").save_pretrained(str(out))
    np.testing.assert_array_equal(vectors(out), before)
    assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "out"]
    gc.collect()  # weights that are mapped keep the disk


def _size(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def test_a_file_in_the_place_of_the_folder_is_named(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    encoder = LayerEncoder(tiny_folder("Llama"), 1, device="cpu")
    for place in ("out", "out/below"):
        with pytest.raises(FolderError, match=r"must be a folder, but .*out is a file"):
            encoder.save_pretrained(str(tmp_path / place))
    assert (tmp_path / "out").read_text() == "mine"
    for wrong in ("", 5, "a\0b"):
        with pytest.raises(OptionError, match="`path` must be"):
            encoder.save_pretrained(wrong)  # type: ignore[arg-type]
