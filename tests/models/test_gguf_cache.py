"""Config and tokenizer of a GGUF file are cached once, its weights are expanded at each load, kept blocks only."""

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import LayerIndexError, MidlayerError
from midlayer_encoders.extras.gguf import cache as gguf_cache_module
from midlayer_encoders.extras.gguf.cache import GGUF_CACHE, gguf_cache
from tests.models.gguf_tokens import FIXTURE, write_vocabulary
from tests.support.tiny_folders import TEXTS

gguf = pytest.importorskip("gguf", reason="pip install 'midlayer-encoders[gguf]'")

DEPTH = 4
_FIELDS = json.loads(FIXTURE.read_text("utf8"))["vocabularies"]["llama"]


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "source").mkdir()
    write_vocabulary(tmp_path / "source" / "model.gguf", _FIELDS, blocks=DEPTH)
    return str(tmp_path / "source")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(GGUF_CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the shapes of the tensors that are dequantized from now on."""
    shapes: list[Any] = []
    original = gguf.dequantize

    def dequantize(data: Any, kind: Any) -> Any:
        shapes.append(data.shape)
        return original(data, kind)

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    return shapes


def load(folder: str, layer: int = 2, **options: Any) -> LayerEncoder:
    return LayerEncoder(folder, layer, gguf_file="model.gguf", device="cpu", **options)


def converted(cache: Path) -> Path:
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return folder


def test_digest_of_an_encoder_covers_the_fields_of_its_file(source: str, cache: Path) -> None:
    before = load(source)
    write_vocabulary(Path(source, "model.gguf"), _FIELDS | {"general.name": "another"}, blocks=DEPTH)
    after = load(source)
    assert after.files == before.files  # a name changes nothing
    write_vocabulary(Path(source, "model.gguf"), _FIELDS | {"add_bos_token": False}, blocks=DEPTH)
    after = load(source)
    assert after.files != before.files
    assert after.spec.digest != before.spec.digest


@pytest.mark.long
def test_load_of_a_cut_expands_the_kept_blocks_alone(source: str, cache: Path, dequantized: list[Any]) -> None:
    first = load(source)
    assert len(dequantized) == 2 * 9 + 2
    assert load(source, DEPTH).num_layers == first.num_layers == DEPTH
    assert len(dequantized) == 2 * 9 + 2 + DEPTH * 9 + 2
    weights = sum(path.stat().st_size for path in converted(cache).rglob("*.safetensors"))
    assert weights == 0
    np.testing.assert_array_equal(load(source).encode(TEXTS), first.encode(TEXTS))


def test_no_bars_are_shown(source: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(source).save_pretrained(str(tmp_path / "encoder"))
    assert capsys.readouterr() == ("", "")


@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_vectors_are_the_same_with_and_without_the_cache(
    source: str, cache: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    vectors = [load(source, dtype=dtype).encode(TEXTS) for _ in range(2)]
    monkeypatch.setenv(GGUF_CACHE, "0")
    uncached = load(source, dtype=dtype)
    for cached in vectors:
        np.testing.assert_array_equal(cached, uncached.encode(TEXTS))
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


DAMAGES = [
    ("config.json", "flip"),
    ("tokenizer/tokenizer.json", "truncate"),
    ("tokenizer/tokenizer_config.json", "remove"),
    ("checksums.json", "flip"),
    ("checksums.json", "truncate"),
]


@pytest.mark.long
def test_a_damaged_file_is_converted_again(source: str, cache: Path) -> None:
    expected = load(source).encode(TEXTS)
    for name, change in DAMAGES:
        path = converted(cache) / name
        content = path.read_bytes()
        middle = len(content) // 2
        path.unlink()
        if change != "remove":
            flipped = bytes([content[middle] ^ 1])
            path.write_bytes(content[:middle] + (flipped + content[middle + 1 :] if change == "flip" else b""))
        np.testing.assert_array_equal(load(source).encode(TEXTS), expected, err_msg=f"{name}: {change}")
        assert path.read_bytes() == content, (name, change)


@pytest.mark.long
def test_a_changed_file_gives_other_vectors(source: str, cache: Path) -> None:
    before = load(source).encode(TEXTS)
    path = Path(source, "model.gguf")
    content = path.read_bytes()
    weights = content.rindex(np.float32(load(source).transformer.norm.weight[0].item()).tobytes())
    path.write_bytes(content[:weights] + np.float32(9).tobytes() + content[weights + 4 :])
    assert np.abs(load(source).encode(TEXTS) - before).max() > 0.01
    write_vocabulary(path, _FIELDS, blocks=DEPTH - 1)
    assert load(source).num_layers == DEPTH - 1
    assert len([folder for folder in cache.iterdir() if folder.is_dir()]) == 2


def test_threads_that_load_one_file_convert_it_once(source: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    original = gguf_cache_module.build_tokenizer
    monkeypatch.setattr(gguf_cache_module, "build_tokenizer", lambda fields: built.append(fields) or original(fields))
    vectors: list[Any] = []
    threads = [threading.Thread(target=lambda: vectors.append(load(source).encode(TEXTS))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(vectors) == 3
    assert len(built) == 1
    for other in vectors[1:]:
        np.testing.assert_array_equal(vectors[0], other)


def test_load_removes_folders_not_used_for_a_month(source: str, cache: Path) -> None:
    index = "checksums.json"
    load(source)
    own = converted(cache)
    now = time.time()
    for name, days in (("a" * 32 + "-" + "b" * 8, 40), ("c" * 32 + "-" + "d" * 8, 20), ("mine", 40)):
        (cache / name).mkdir()
        (cache / name / index).write_text("{}")
        os.utime(cache / name / index, (now - days * 86_400,) * 2)
    os.utime(own / "checksums.json", (now - 29 * 86_400,) * 2)
    load(source)
    kept = {folder.name for folder in cache.iterdir() if folder.is_dir()}
    assert kept == {own.name, "c" * 32 + "-" + "d" * 8, "mine"}
    assert (own / "checksums.json").stat().st_mtime > now - 60


def test_a_cache_that_is_not_writable_is_not_used(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(GGUF_CACHE, str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        load(source).encode(TEXTS)
    assert f"{tmp_path}/file/cache is not writable: model.gguf is converted in every process" in caplog.text


@pytest.mark.usefixtures("cache")
def test_errors_name_a_file_and_the_built_in_model_as_typed(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source)
    monkeypatch.setattr("midlayer_encoders.models.hub.package_folder", lambda _: Path(source))
    for model in ("model.gguf", "built-in"):
        with pytest.raises(LayerIndexError, match=rf"`layer` must be in \[0, {DEPTH}\] for {model} \("):
            LayerEncoder(model, 99, device="cpu")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"layer": 9}, r"`layer` must be in \[0, 4\]"),
        ({"max_length": 10**6}, "`max_length` must be at most 512"),
        ({"chat_template": True}, "`chat_template` must be False"),
    ],
)
def test_errors_name_the_file_of_the_user(source: str, cache: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(MidlayerError, match=why) as error:
        load(source, **options)
    assert f"{source}/model.gguf" in str(error.value)
    assert str(cache) not in str(error.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content[: len(content) // 2], "tensors that end at byte .* it is truncated"),
        (lambda content: content[:8] + bytes([content[8] - 1]) + content[9:], "its header counts too few tensors"),
        (lambda content: content + bytes(64), "its header counts too few tensors"),
        (
            lambda content: content.replace(b"blk.0.attn_q", b"blk.0.attn_z"),
            "tensors that transformers' LlamaModel has no place for: blk.0.attn_z.weight",
        ),
        (
            lambda content: content.replace(b"\0llama\x14", b"\0xyzzy\x14"),
            "has the architecture 'xyzzy'; supported architectures are llama, qwen2",
        ),
        (lambda content: content.replace(b"ggml.model", b"ggml.xxxxx"), "The tokenizer in .* is of the kind None"),
    ],
)
def test_a_damaged_file_is_refused_by_name(source: str, cache: Path, change: Any, why: str) -> None:
    path = Path(source, "model.gguf")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(MidlayerError, match=why) as error:
        load(source)
    assert f"{source}/model.gguf" in str(error.value)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(GGUF_CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gguf_cache() == tmp_path / "midlayer-encoders" / "gguf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf_cache() == Path.home() / ".cache" / "midlayer-encoders" / "gguf"
    monkeypatch.setenv(GGUF_CACHE, "~/models")
    assert gguf_cache() == Path.home() / "models"
    monkeypatch.setenv(GGUF_CACHE, "0")
    assert gguf_cache() is None
