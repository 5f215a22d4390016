"""A saved folder is complete, unchanged, or refuses to load; a full disk and a file in its place raise errors."""

import gc
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, DiskFullError, FolderError, OptionError
from tests.support.tiny_folders import TEXTS, Folder, save_tiny


def encode_with(folder: Path) -> np.ndarray:
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS)


@pytest.mark.long
def test_interrupted_save_leaves_no_mixture(tiny_folder: Folder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    LayerEncoder(tiny_folder("Llama"), 1, device="cpu").save_pretrained(str(out))
    (out / "mine.txt").write_text("mine")
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").mkdir()  # which no file can replace
    deeper = LayerEncoder(tiny_folder("Llama"), 3, device="cpu")
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        deeper.save_pretrained(str(out))
    with pytest.raises(Exception, match=r"config\.json|model_type|Unrecognized"):
        encode_with(out)
    (out / "tokenizer.json").rmdir()
    deeper.save_pretrained(str(out))
    np.testing.assert_array_equal(encode_with(out), deeper.encode(TEXTS))
    assert (out / "mine.txt").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [out]


def test_error_while_saving_keeps_the_old_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    LayerEncoder(tiny_folder("Llama"), 1, device="cpu").save_pretrained(str(out))
    vectors = encode_with(out)
    encoder = LayerEncoder(tiny_folder("Llama"), 3, device="cpu")
    # A plain folder cannot represent this hook.
    encoder[1].register_forward_hook(
        lambda _, __, output: {**output, "sentence_embedding": output["sentence_embedding"] + 1}
    )
    with pytest.raises(CutError, match="would give other vectors"):
        encoder.save_pretrained(str(out))
    np.testing.assert_array_equal(encode_with(out), vectors)
    assert list(tmp_path.iterdir()) == [out]


def test_model_can_be_saved_into_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny("Llama", tmp_path / "model")
    encoder = LayerEncoder(model, 2, device="cpu")
    expected = encoder.encode(TEXTS)
    monkeypatch.chdir(model)
    encoder.save_pretrained(".")
    np.testing.assert_array_equal(encode_with(Path()), expected)
    np.testing.assert_array_equal(encoder.encode(TEXTS), expected)


def test_full_disk_raises_and_keeps_the_old_folder(small_disk: Path, tiny_folder: Folder) -> None:
    out = small_disk / "out"
    encoder = LayerEncoder(tiny_folder("Llama"), 1, device="cpu")
    encoder.save_pretrained(str(out))
    vectors = encode_with(out)
    (small_disk / "filler").write_bytes(bytes(2**20 - 2 * _size(out) + 8192))
    with pytest.raises(DiskFullError, match=rf"The disk of {small_disk} is full .*{out} was not written"):
        LayerEncoder(tiny_folder("Llama"), 3, device="cpu").save_pretrained(str(out))
    np.testing.assert_array_equal(encode_with(out), vectors)
    assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "out"]
    gc.collect()  # mapped weights keep the disk busy


def _size(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def test_folder_keeps_the_length_and_what_a_pooling_leaves_out(tiny_folder: Folder, tmp_path: Path) -> None:
    modules = [Transformer(tiny_folder("RoBERTa")), Pooling(32, "lasttoken", include_prompt=False)]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "whole"), create_model_card=False)
    center = tuple(f"text number {n} of {n * n}" for n in range(16))
    encoder = LayerEncoder(str(tmp_path / "whole"), 2, device="cpu", center=center, normalize=True, max_length=40)
    encoder.save_pretrained(str(tmp_path / "cut"))
    loaded = SentenceTransformer(str(tmp_path / "cut"), device="cpu")
    assert [type(module).__name__ for module in loaded] == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert loaded[1].include_prompt is False
    assert loaded.max_seq_length == 40
    long = [*TEXTS, " ".join(TEXTS * 9)]
    np.testing.assert_array_equal(loaded.encode(long), encoder.encode(long))


def test_file_in_place_of_the_folder_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    encoder = LayerEncoder(tiny_folder("Llama"), 1, device="cpu")
    for name in ("out", "out/below"):
        with pytest.raises(FolderError, match=r"out cannot be written \(File exists\)"):
            encoder.save_pretrained(str(tmp_path / name))
    assert (tmp_path / "out").read_text() == "mine"
    for invalid in ("", 5, "a\0b"):
        with pytest.raises(OptionError, match="`path` must be"):
            encoder.save_pretrained(invalid)  # type: ignore[arg-type]
