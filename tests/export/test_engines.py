"""What is exported, in the engine that it is for: onnxruntime and llama.cpp."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, DiskFullError, OptionError
from midlayer_encoders.export import export_for
from midlayer_encoders.export._comparison import cosine, sample_inputs
from midlayer_encoders.export._llama import llama_vectors
from tests.cli.calls import run
from tests.tiny_folders import TEXTS, save_joint

pytestmark = pytest.mark.engines
Folder = Callable[[str], str]

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
LIKE = tuple(f"text number {n} of {n * n}" for n in range(16))


@pytest.fixture
def onnxruntime() -> Any:
    pytest.importorskip("onnx", reason="pip install 'midlayer-encoders[onnx]'")
    pytest.importorskip("onnxscript", reason="pip install 'midlayer-encoders[onnx]'")
    return pytest.importorskip("onnxruntime", reason="pip install 'midlayer-encoders[onnx]'")


@pytest.mark.parametrize("name", ["BERT", "Llama", "GPTNeoX", "ModernBERT", "ViT", "CLIPText", "CLIPVision"])
def test_a_graph_gives_the_vectors_of_the_encoder(
    onnxruntime: Any, tiny_folder: Folder, tmp_path: Path, name: str
) -> None:
    encoder = LayerEncoder(tiny_folder(name), 2, device="cpu")
    made = export_for(encoder, "onnx", tmp_path / "out")
    assert made.error is not None
    assert made.error < 1e-5
    inputs = sample_inputs(encoder, encoder.media[0])
    inputs = [*inputs, *(TEXTS if encoder.media == ["text"] else inputs[:2])]  # another batch, another length
    features = encoder.preprocess(inputs)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    fed = {one.name: features[one.name].numpy() for one in session.get_inputs()}
    np.testing.assert_allclose(session.run(None, fed)[0], encoder.encode(inputs), rtol=1e-4, atol=1e-5)
    other = LayerEncoder(tiny_folder(name), 1, device="cpu").encode(inputs)
    assert np.abs(session.run(None, fed)[0] - other).max() > 1e-3


def test_both_towers_of_a_joint_model_are_graphs(onnxruntime: Any, tmp_path: Path) -> None:
    encoder = LayerEncoder(save_joint("CLIP", tmp_path / "clip"), {"text": 1, "image": 2}, device="cpu")
    export_for(encoder, "onnx", tmp_path / "out")
    card = json.loads((tmp_path / "out" / "midlayer.json").read_text())
    assert card["layer"] == {"text": 1, "image": 2}
    assert {name: graph["medium"] for name, graph in card["graphs"].items()} == {
        "text.onnx": "text",
        "image.onnx": "image",
    }
    assert all(graph["error"] < 1e-5 for graph in card["graphs"].values())


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "one-word", "center": LIKE, "normalize": True},
        {"skip_first": 1, "truncate_dim": 8, "prompts": {"ask": "hm: "}, "default_prompt_name": "ask"},
    ],
)
def test_the_ten_lines_of_the_page_encode_without_torch(
    onnxruntime: Any, tiny_folder: Folder, tmp_path: Path, options: Any
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", **options)
    export_for(encoder, "onnx", tmp_path / "model-onnx")
    (snippet,) = re.findall(r"```python\n(import json.*?)```", PAGE.read_text(encoding="utf8"), flags=re.DOTALL)
    script = f"{snippet}\nimport sys\nassert 'torch' not in sys.modules\nnp.save('vectors.npy', encode({TEXTS!r}))\n"
    assert len(snippet.strip().splitlines()) <= 14
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    expected = encoder.encode(TEXTS)
    np.testing.assert_allclose(np.load(tmp_path / "vectors.npy"), expected, rtol=1e-4, atol=1e-5)


def test_eight_bits_are_a_second_graph_and_the_command_says_how_near(
    onnxruntime: Any, tiny_folder: Folder, tmp_path: Path
) -> None:
    words = ["export", tiny_folder("BERT"), "--layer", "2", "--for", "onnx", "--int8", "--out", str(tmp_path / "out")]
    said = run(*words)
    assert re.search(r"onnxruntime \S+ gives the encoder's vectors .*relative error \S+e-0[678]; 8-bit: cosine", said)
    assert "SentenceTransformer(" not in said
    graphs = json.loads((tmp_path / "out" / "midlayer.json").read_text())["graphs"]
    assert 0.9 < graphs["model_int8.onnx"]["cosine"] < 1
    sizes = [(tmp_path / "out" / name).stat().st_size for name in ("model.onnx", "model_int8.onnx")]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(
    ("name", "layer", "options", "why"),
    [
        ("Llama", 2, {"norm": "none"}, r"states of norm='none' are read by hooks.*Pass norm='final'"),
        ("Llama", [1, 2], {"norm": "none"}, "states of several layers are read by hooks"),
        ("Llama", 2, {"dtype": "bfloat16"}, "must be in float32"),
        ("Wav2Vec2", 2, {}, "not exported to ONNX"),
        ("Mamba", 2, {}, "torch cannot write MambaModel as an ONNX graph"),
    ],
)
def test_what_a_graph_would_get_wrong_is_refused(
    onnxruntime: Any, tiny_folder: Folder, tmp_path: Path, name: str, layer: Any, options: Any, why: str
) -> None:
    encoder = LayerEncoder(tiny_folder(name), layer, device="cpu", **options)
    with pytest.raises((CutError, OptionError), match=why):
        export_for(encoder, "onnx", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_other_vectors_leave_nothing(onnxruntime: Any, tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), 1, device="cpu")
    encode = encoder.encode
    encoder.encode = lambda *args, **options: encode(*args, **options) * 1.0001  # type: ignore[method-assign]
    with pytest.raises(CutError, match=r"gives other vectors in onnxruntime .* 1\.0e-04, more than 1e-05"):
        export_for(encoder, "onnx", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(onnxruntime: Any, small_disk: Path, tiny_folder: Folder) -> None:
    (small_disk / "filler").write_bytes(bytes(2**20 - 65536))
    with pytest.raises(DiskFullError, match="is full"):
        export_for(LayerEncoder(tiny_folder("BERT"), 3, device="cpu"), "onnx", small_disk / "out")
    assert [one.name for one in small_disk.iterdir()] == ["filler"]


def test_llama_cpp_reads_the_layer_of_a_cut_file(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="pip install 'midlayer-encoders[gguf]'")
    layer = 12
    encoders = {k: LayerEncoder("built-in", k, device="cpu") for k in (layer - 1, layer, layer + 1)}
    made = export_for(encoders[layer], "gguf", tmp_path / "out")
    assert made.error is not None
    assert made.error < 1e-3
    theirs = llama_vectors(tmp_path / "out" / "model.gguf", TEXTS)
    near = {k: cosine(encoder.encode(TEXTS), theirs) for k, encoder in encoders.items()}
    assert near[layer] > 0.999
    assert max(near[layer - 1], near[layer + 1]) < 0.995
    encoders[layer].layer = layer + 1  # one block too many
    with pytest.raises(CutError, match=r"llama\.cpp makes other vectors"):
        export_for(encoders[layer], "gguf", tmp_path / "wrong")
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_file_that_llama_cpp_cannot_read_is_named(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="pip install 'midlayer-encoders[gguf]'")
    from tests.export.tiny_gguf import save_gguf

    with pytest.raises(CutError, match=r"llama\.cpp does not read the file"):
        llama_vectors(save_gguf(tmp_path / "odd.gguf", "llama"), ["a"])
