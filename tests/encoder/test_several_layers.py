"""Several layers in one encoder: the combination of the vectors of single-layer encoders."""

from __future__ import annotations

import copy
import pickle
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from torch import nn
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder, measure, select_layer, sweep
from midlayer_encoders.cli import app
from midlayer_encoders.encoder.options import EncoderOptions, python_line, shell_line
from midlayer_encoders.errors import CutError, LayerIndexError, OptionError
from tests.families import tiny
from tests.tiny_folders import TEXTS, save_joint, tokenizer

Folder = Callable[[str], str]

MIXED = [*TEXTS, "", "x"]  # short and long in one batch, and a text without a token
_PIXELS = np.random.default_rng(0).integers(0, 255, (3, 20, 20, 3), dtype=np.uint8)
_WAVES = [np.sin(np.arange(samples, dtype=np.float32) / 9) for samples in (1600, 3200, 2400)]
INPUTS: dict[str, list[Any]] = {
    "text": MIXED,
    "image": [Image.fromarray(pixels) for pixels in _PIXELS],
    "audio": [{"array": wave, "sampling_rate": 16000} for wave in _WAVES],
}


def encode_each_layer(folder: str, layers: Sequence[int], **options: Any) -> list[np.ndarray]:
    """Return the vectors of a single-layer encoder for each layer, one input at a time."""
    encoders = [LayerEncoder(folder, layer, device="cpu", **options) for layer in layers]
    inputs = INPUTS[encoders[0].media[0]]
    return [np.concatenate([encoder.encode([item]) for item in inputs]) for encoder in encoders]


@pytest.mark.parametrize(
    ("family", "norm", "pooling"),
    [
        ("Llama", "final", "mean"),
        ("BERT", "none", "max"),
        ("OPT-350m", "final", "weightedmean"),  # ends in a projection to another width
    ]
    + [
        pytest.param(family, norm, pooling, marks=pytest.mark.slow)
        for family in ("Llama", "GPTNeoX", "Mamba", "DeBERTaV2-conv", "ModernBERT", "ALBERT", "T5", "ViT", "Wav2Vec2")
        for norm, pooling in (("final", "last"), ("none", "cls"), ("final", "max"))
    ],
)
def test_vector_is_the_combination_of_the_layers(family: str, norm: str, pooling: str, tiny_folder: Folder) -> None:
    options: Any = {"norm": norm, "pooling": pooling}
    first, second, last = encode_each_layer(tiny_folder(family), (1, 2, 4), **options)
    tolerance = {"rtol": 1e-5, "atol": 1e-6 * float(np.abs(last).max())}
    mean = LayerEncoder(tiny_folder(family), [4, 1, 2], layer_weights=[2, 1, 1], device="cpu", **options)
    inputs = INPUTS[mean.media[0]]
    np.testing.assert_allclose(mean.encode(inputs), (first + second + 2 * last) / 4, **tolerance)
    concat = LayerEncoder(tiny_folder(family), [-1, 0.25, 2], combine="concat", device="cpu", **options)
    expected = np.concatenate([last, first, second], axis=1)
    np.testing.assert_allclose(concat.encode(inputs, batch_size=2), expected, **tolerance)
    assert mean.get_embedding_dimension() == last.shape[1]
    assert concat.get_embedding_dimension() == expected.shape[1]


def test_layers_are_read_in_one_pass_of_a_model_cut_after_the_deepest(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), [0, 2], device="cpu")
    blocks: Any = encoder.transformer.get_submodule("layers")
    passes: list[nn.Module] = []
    hooks = [block.register_forward_pre_hook(lambda module, _: passes.append(module)) for block in blocks]
    vectors = encoder.encode(TEXTS)
    for hook in hooks:
        hook.remove()
    assert len(blocks) == 2
    assert passes == list(blocks)
    assert (encoder.layer, encoder.num_layers, encoder.mixture) == (2, 4, ((0, 0.5), (2, 0.5)))
    np.testing.assert_array_equal(copy.deepcopy(encoder).encode(TEXTS), vectors)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(encoder)).encode(TEXTS), vectors)


def test_gradients_reach_the_first_block_and_half_precision_stays(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), [1, 3], dtype="bfloat16", device="cpu")
    vectors = encoder(encoder.preprocess(TEXTS))["sentence_embedding"]
    vectors.float().square().sum().backward()
    grads = [parameter.grad for parameter in encoder.transformer.get_submodule("layers").parameters()]
    assert vectors.dtype is torch.bfloat16
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)


def test_options_apply_to_the_combined_vector(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    full = LayerEncoder(folder, [1, 3], combine="concat", device="cpu").encode(TEXTS)
    short = LayerEncoder(folder, [1, 3], combine="concat", truncate_dim=40, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(short, full[:, :40], rtol=1e-5, atol=1e-6)
    texts = [f"{text} {number}" for number in range(3) for text in TEXTS]
    center = LayerEncoder(folder, [1, 3], device="cpu").encode(texts).mean(axis=0)
    centered = LayerEncoder(folder, [1, 3], center=texts, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(
        centered, LayerEncoder(folder, [1, 3], device="cpu").encode(TEXTS) - center, rtol=1e-4, atol=1e-5
    )
    bidirectional = LayerEncoder(folder, [1, 3], bidirectional=True, device="cpu").encode(TEXTS)
    single_layers = [LayerEncoder(folder, layer, bidirectional=True, device="cpu").encode(TEXTS) for layer in (1, 3)]
    np.testing.assert_allclose(bidirectional, sum(single_layers) / 2, rtol=1e-5, atol=1e-6)


def test_module_in_memory_combines_layers() -> None:
    model, options = tiny("Llama"), {"processor": tokenizer(), "medium": "text", "device": "cpu"}
    single_layers = [LayerEncoder.from_module(model, layer, **options).encode(MIXED) for layer in (1, 3)]  # type: ignore[arg-type]
    mean = LayerEncoder.from_module(model, [3, 1], layer_weights=[3, 1], **options)  # type: ignore[arg-type]
    np.testing.assert_allclose(mean.encode(MIXED), (single_layers[0] + 3 * single_layers[1]) / 4, rtol=1e-5, atol=1e-6)


class Stages(nn.Module):
    """Two blocks of different widths, as in a multi-stage model."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps[1](self.steps[0](x))


def test_layers_of_different_widths_are_refused() -> None:
    with pytest.raises(CutError, match=r"of one width.* \(1, 3, 4\), \(1, 3, 8\)"):
        LayerEncoder.from_module(
            Stages(), [1, 2], processor=lambda items: torch.ones(len(items), 3, 4), blocks="steps", device="cpu"
        )


# --- identity and printed code ---------------------------------------------------------------------------------------


def test_result_names_contain_the_layers(tiny_folder: Folder) -> None:
    names = {}
    for options in ({}, {"layer_weights": [1, 3]}, {"combine": "concat"}):
        data = LayerEncoder(tiny_folder("Llama"), [1, 3], device="cpu", **options).model_card_data
        names[str(data.base_model_revision)] = str(data.model_name)
    assert len(names) == 3
    assert set(names.values()) == {f"local/{Path(tiny_folder('Llama')).name}-layer-1-3"}
    assert all(revision.startswith("default-layer-1-3-of-4-norm-final-mean-") for revision in names)
    specs = [LayerEncoder(tiny_folder("Llama"), *args, device="cpu").spec for args in (([1, 3],), ([-2, 1],))]
    weighted = LayerEncoder(tiny_folder("Llama"), [3, 1], layer_weights=[2, 2], device="cpu").spec
    assert specs[0] == specs[1] == weighted


@pytest.mark.parametrize("options", [{"layer_weights": (1.0, 0.1, 2.5)}, {"combine": "concat", "pooling": "last"}])
def test_printed_code_recreates_a_combined_encoder(
    options: dict[str, Any], tiny_folder: Folder, tmp_path: Path
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), [3, 0, 1], norm="none", device="cpu", **options)
    recreated = eval(python_line(encoder.source, [3, 0, 1], encoder.options), {"LayerEncoder": LayerEncoder})
    assert recreated.spec == encoder.spec
    line = shell_line(encoder.source, [3, 0, 1], encoder.options, out=str(tmp_path / "out"))
    assert " --layer 3,0,1 " in line
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    plain = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    np.testing.assert_allclose(plain.encode(MIXED), encoder.encode(MIXED), rtol=1e-5, atol=1e-7)
    assert plain.get_embedding_dimension() == encoder.get_embedding_dimension()
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(encoder.model_card_data.base_model_revision) in card


# --- invalid calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "options", "error", "match"),
    [
        ([], {}, LayerIndexError, "at least one layer"),
        ([1, 2, -3], {}, LayerIndexError, "names layer 2 of .* twice"),
        ([1, 9], {}, LayerIndexError, r"must be in \[0, 4\]"),
        ({1, 2}, {}, OptionError, "must be a list of layers"),
        ([1, 2], {"layer_weights": [1]}, OptionError, "one for each of the 2 layers"),
        ([1, 2], {"layer_weights": [1, -1]}, OptionError, r"`layer_weights\[1\]` must be a finite number, 0 or more"),
        ([1, 2], {"layer_weights": [1, float("nan")]}, OptionError, r"`layer_weights\[1\]` must be a finite number"),
        ([1, 2], {"layer_weights": [0, 0]}, OptionError, "must include a positive weight"),
        ([1, 2], {"layer_weights": "12"}, OptionError, "must be a list of weights"),
        (
            [1, 2],
            {"layer_weights": [1, 2], "combine": "concat"},
            OptionError,
            "`layer_weights` must be left out with combine",
        ),
        ([1, 2], {"combine": "sum"}, OptionError, "`combine` must be one of 'mean', 'concat'"),
        (2, {"layer_weights": [1]}, OptionError, "`layer_weights` must be left out unless `layer` is a list"),
        ([2], {"combine": "concat"}, OptionError, "`combine` and `layer_weights` must be left out unless"),
    ],
)
def test_invalid_layers_and_weights_are_refused(
    layer: Any, options: Any, error: type[Exception], match: str, tiny_folder: Folder
) -> None:
    with pytest.raises(error, match=match):
        LayerEncoder(tiny_folder("Llama"), layer, device="cpu", **options)


def test_joint_model_needs_a_tower_to_combine_layers(tmp_path: Path) -> None:
    folder = save_joint("CLIP", tmp_path)
    with pytest.raises(OptionError, match="Pass `tower` to combine layers of one tower"):
        LayerEncoder(folder, [1, 2], device="cpu")
    assert LayerEncoder(folder, [1, 2], tower="text", device="cpu").encode(TEXTS).shape == (6, 32)


def test_combined_encoder_cannot_be_measured_per_layer(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), [2, 4], device="cpu")
    for call in (
        lambda: sweep(encoder, out=tmp_path),
        lambda: measure(encoder, TEXTS),
        lambda: select_layer(encoder, [f"{text} {number}" for number in range(3) for text in TEXTS]),
    ):
        with pytest.raises(OptionError, match=r"has the module CombinedLayers\. .* and one layer"):
            call()
    with pytest.raises(OptionError, match="`layer_weights` must be left out unless `layer` is a list"):
        sweep(tiny_folder("Llama"), layer_weights=[1, 2], out=tmp_path)
    assert CliRunner().invoke(app, ["select", "m", "--texts", "t", "--weights", "1,2"]).exit_code == 2


@pytest.mark.parametrize(
    ("family", "options", "match"),
    [
        ("Llama", {}, "cannot apply the final norm to each layer .norm='none' may be exported"),
        ("Llama", {"norm": "none", "pooling": "max"}, "averages layers before pooling='max'"),
        ("BERT", {"combine": "concat", "pooling": "cls"}, "cannot concatenate layers with pooling='cls'"),
        ("OPT-350m", {"norm": "none"}, "have several widths"),
    ],
)
def test_combinations_a_plain_folder_cannot_represent_are_refused(
    family: str, options: Any, match: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    encoder = LayerEncoder(tiny_folder(family), [1, 4], device="cpu", **options)
    vectors = encoder.encode(TEXTS)
    with pytest.raises(CutError, match=match):
        encoder.save_pretrained(str(tmp_path / "out"))
    assert not (tmp_path / "out" / "modules.json").exists()
    np.testing.assert_array_equal(encoder.encode(TEXTS), vectors)


def test_exported_mean_of_an_encoder_without_a_final_norm(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), [0, 2, 3], layer_weights=[1, 2, 3], device="cpu")
    encoder.save_pretrained(str(tmp_path / "out"))
    plain = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert [type(module).__name__ for module in plain] == ["Transformer", "WeightedLayerPooling", "Pooling"]
    np.testing.assert_allclose(plain.encode(MIXED), encoder.encode(MIXED), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(plain.encode(["x"]), encoder.encode(["x"]), rtol=1e-5, atol=1e-6)
    assert not encoder.transformer.config.output_hidden_states  # type: ignore[union-attr]
    assert encoder.after_pooling == ["CombinedLayers"]


def test_saving_in_training_mode_keeps_the_modes(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), [1, 3], device="cpu").train()  # with dropout
    modes = [module.training for module in encoder.modules()]
    state = torch.get_rng_state()
    encoder.save_pretrained(str(tmp_path / "out"))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in encoder.modules()] == modes
    plain = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    np.testing.assert_allclose(plain.encode(MIXED), encoder.eval().encode(MIXED), rtol=1e-5, atol=1e-6)


def test_layer_weights_become_plain_floats() -> None:
    assert EncoderOptions(layer_weights=torch.tensor([1, 2])).layer_weights == (1.0, 2.0)  # type: ignore[arg-type]
    assert EncoderOptions(layer_weights=np.array([0.5, 2])).layer_weights == (0.5, 2.0)  # type: ignore[arg-type]


def test_repr_names_model_layer_and_options(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    name = Path(folder).name
    encoder = LayerEncoder(folder, 2, recipe="echo", device="cpu")
    assert repr(encoder) == f"LayerEncoder({name!r}, layer=2 of 4, recipe='echo', norm='final', pooling='mean')"
    several = LayerEncoder(folder, [1, 3], norm="none", center=[f"text {number}" for number in range(16)], device="cpu")
    assert repr(several).startswith(f"LayerEncoder({name!r}, layer=[1, 3] of 4, norm='none', pooling='mean', center=(")
    assert len(repr(several)) < 200
    assert str(encoder) == torch.nn.Module.__repr__(encoder), "the modules, as sentence-transformers has them"
    assert "(1): Pooling" in str(encoder)
    assert "LayerEncoder object" in repr(LayerEncoder.__new__(LayerEncoder)), "as in the traceback of a constructor"
