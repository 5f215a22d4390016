"""Folders with their own code (``trust_remote_code``), whose layers may depend on the number of blocks."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import content_digest
from midlayer_encoders.errors import CutError, MidlayerError, ModelNotFoundError
from tests.support.tiny_folders import TEXTS, tokenizer

DEPTH = 6

CONFIG = """
from transformers import PretrainedConfig

class CustomConfig(PretrainedConfig):
    model_type = "custom-code"

    def __init__(self, num_hidden_layers=6, hidden_size=16, vocab_size=99, **kwargs):
        self.num_hidden_layers, self.hidden_size, self.vocab_size = num_hidden_layers, hidden_size, vocab_size
        super().__init__(**kwargs)
"""
MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .configuration_custom import CustomConfig

class CustomBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, states):
        positions = torch.arange(1, states.shape[1] + 1, device=states.device)[:, None]
        return states + self.linear(states.cumsum(dim=1) / positions).tanh()

class CustomModel(PreTrainedModel):
    config_class = CustomConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(CustomBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.scale = config.num_hidden_layers ** 0.5
        self.post_init()

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, attention_mask=None, output_hidden_states=False, return_dict=True):
        states = self.table(input_ids) * (EMBEDDING_SCALE)
        every = [states]
        for position, layer in enumerate(self.layers):
            states = states * (BETWEEN)
            states = layer(states)
            every.append(states)
        return BaseModelOutput(self.norm(states), hidden_states=tuple(every) if output_hidden_states else None)
"""


@pytest.fixture
def code_folder(tmp_path: Path) -> Any:
    """Return a function that writes a folder whose model scales its embeddings, or its states between blocks."""

    def write(embedding_scale: str = "1.0", between: str = "1.0") -> str:
        folder = tmp_path / f"custom-{content_digest(embedding_scale + between)}"  # transformers caches code by name
        folder.mkdir()
        (folder / "configuration_custom.py").write_text(CONFIG)
        code = MODEL.replace("EMBEDDING_SCALE", embedding_scale).replace("BETWEEN", between)
        (folder / "modeling_custom.py").write_text(code)
        auto = {"AutoConfig": "configuration_custom.CustomConfig", "AutoModel": "modeling_custom.CustomModel"}
        config = {"model_type": "custom-code", "num_hidden_layers": DEPTH, "auto_map": auto, "hidden_size": 16}
        (folder / "config.json").write_text(json.dumps(config))
        tokenizer().save_pretrained(folder)
        import transformers as tf

        torch.manual_seed(0)
        loaded_config = tf.AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = tf.AutoModel.from_config(loaded_config, trust_remote_code=True)
        nn.init.normal_(model.norm.weight)
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return write


@torch.no_grad()
def uncut_vectors(folder: str, layer: int, norm: str) -> np.ndarray:
    """Return the vectors of a layer from hooks on the blocks of the complete model."""
    import transformers as tf

    model: Any = tf.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args[0])
        outputs.append(output)

    for block in model.layers:
        block.register_forward_hook(record)
    rows: list[Tensor] = []
    for text in TEXTS:
        inputs.clear()
        outputs.clear()
        model(torch.tensor([tokenizer()(text)["input_ids"]]))
        states = outputs[layer - 1] if layer else inputs[0]
        rows.append((model.norm(states) if norm == "final" else states)[0].mean(dim=0))
    return torch.stack(rows).numpy()


def remote_encoder(folder: str, layer: int, **options: Any) -> LayerEncoder:
    return LayerEncoder(folder, layer, trust_remote_code=True, device="cpu", **options)


@pytest.mark.parametrize("norm", ["final", "none"])
@pytest.mark.parametrize(
    ("scale", "is_cut"),
    [
        ("1.0", True),
        ("self.scale", True),
        ("len(self.layers)", False),
        ("self.config.num_hidden_layers", False),
        ("1 + 1e-6 * len(self.layers)", False),
    ],
)
def test_every_layer_is_that_of_the_complete_model(scale: str, is_cut: bool, norm: Any, code_folder: Any) -> None:
    folder = code_folder(scale)
    for layer in (0, 2, DEPTH):
        encoder = remote_encoder(folder, layer, norm=norm)
        expected = uncut_vectors(folder, layer, norm)
        np.testing.assert_allclose(encoder.encode(TEXTS), expected, rtol=1e-5, atol=1e-5)
        if layer:
            np.testing.assert_allclose(encoder.encode_layers(TEXTS)[layer], expected, rtol=1e-5, atol=1e-5)
        size = len(encoder.transformer.layers)  # type: ignore[arg-type]
        assert (size <= layer + 1) == (is_cut or layer == DEPTH)


def test_export_of_a_model_that_is_not_cut_is_refused(code_folder: Any, tmp_path: Path) -> None:
    encoder = remote_encoder(code_folder("len(self.layers)"), 2)
    with pytest.raises(CutError, match=r"CustomModel is not cut, because a cut would change its layers"):
        encoder.save_pretrained(str(tmp_path / "out"))


def test_export_whose_scale_changes_with_the_config_is_refused(code_folder: Any, tmp_path: Path) -> None:
    encoder = remote_encoder(code_folder("self.scale"), 2)
    with pytest.raises(CutError, match="would give other vectors"):
        encoder.save_pretrained(str(tmp_path / "out"))


def test_export_of_a_cut_model_gives_its_vectors(code_folder: Any, tmp_path: Path) -> None:
    encoder = remote_encoder(code_folder(), 2)
    encoder.save_pretrained(str(tmp_path / "out"))
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["num_hidden_layers"] == 2


def test_changes_between_late_blocks_are_noticed(code_folder: Any) -> None:
    folder = code_folder(between="1.001 if position == 4 else 1.0")
    for layer in (0, 2, 3):
        np.testing.assert_allclose(
            remote_encoder(folder, layer).encode(TEXTS), uncut_vectors(folder, layer, "final"), atol=1e-5
        )
    for layer in (4, 5, DEPTH):
        with pytest.raises(MidlayerError, match="changes its states between blocks 4 and 5"):
            remote_encoder(folder, layer)


def test_code_that_changed_since_the_last_load_is_used(code_folder: Any) -> None:
    folder = code_folder()
    other_folder = code_folder("3.0")  # with the same weights
    before = remote_encoder(folder, 2)
    shutil.copy(Path(other_folder, "modeling_custom.py"), folder)
    after = remote_encoder(folder, 2)
    np.testing.assert_allclose(after.encode(TEXTS), uncut_vectors(other_folder, 2, "final"), atol=1e-5)
    assert np.abs(before.encode(TEXTS) - after.encode(TEXTS)).max() > 1e-3
    assert dict(before.spec.parts)["code"] != dict(after.spec.parts)["code"]


@pytest.mark.parametrize(
    ("first_line", "problem"),
    [
        ("raise RuntimeError('unknown GPU')", "RuntimeError: unknown GPU"),
        ("from .absent import name", "FileNotFoundError: .*absent.py"),
        ("two words", "SyntaxError: invalid syntax"),
    ],
)
def test_code_that_cannot_be_imported_is_refused(first_line: str, problem: str, code_folder: Any) -> None:
    folder = code_folder()
    code = Path(folder, "modeling_custom.py")
    code.write_text(f"{first_line}\n{code.read_text()}")
    with pytest.raises(ModelNotFoundError, match=f"cannot be built: {problem}.* Correct its code or config.json"):
        remote_encoder(folder, 2)
