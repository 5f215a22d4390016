"""Models whose cut would give other states than the full model: each is refused, or not cut, at construction."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import Norm
from midlayer_encoders.errors import CutError, MidlayerError, ModelNotFoundError
from midlayer_encoders.models import load
from tests.models.cuts import load_and_cut
from tests.support.tiny_folders import TEXTS, Folder

# --- operations after the last block ---------------------------------------------------------------------------------


def shift(states: Tensor) -> Tensor:
    return states + 0.05 * torch.arange(states.shape[-1]) / states.shape[-1]


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda states: 1.02 * states,
    "shifted": shift,
    "tokens in another order": lambda states: states.flip(1),
    "without the first token": lambda states: states[:, 1:],
    "one token off": lambda states: torch.cat([states[:, :1] * 1.1, states[:, 1:]], dim=1),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layer", [1, 4])
def test_operation_after_the_final_norm_is_detected(
    operation: str, layer: int, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_forward = modeling_llama.LlamaModel.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = original_forward(self, *args, **kwargs)
        output.last_hidden_state = OPERATIONS[operation](output.last_hidden_state)
        return output

    folder = tiny_folder("Llama")
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    with pytest.raises(CutError, match=f"gives other states for layer {layer} with norm='final'.*Try norm='none'"):
        LayerEncoder(folder, layer, device="cpu")
    LayerEncoder(folder, layer, norm="none", device="cpu")  # the suggested fix works


@pytest.mark.parametrize("layer", [1, 4])
def test_operation_between_the_last_block_and_the_final_norm_is_detected(
    layer: int, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("Llama")
    forward = modeling_llama.LlamaModel.forward

    def shifting(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = self.norm.register_forward_pre_hook(lambda _m, inputs: (shift(inputs[0]),))
        try:
            return forward(self, *args, **kwargs)
        finally:
            handle.remove()

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", shifting)
    with pytest.raises(CutError, match=f"gives other states for layer {layer} with norm='final'"):
        LayerEncoder(folder, layer, device="cpu")


@pytest.mark.parametrize("norm", ["final", "none"])
def test_states_that_change_between_two_blocks_are_detected_at_any_layer(
    norm: Norm, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """YOLOS adds positions between blocks, so the state of a layer is ambiguous."""
    folder = tiny_folder("Llama")
    forward = modeling_llama.LlamaModel.forward

    def shifting(self: Any, *args: Any, **kwargs: Any) -> Any:
        handles = [
            block.register_forward_pre_hook(lambda _m, inputs: (shift(inputs[0]), *inputs[1:]), prepend=True)
            for block in self.layers[1:]
        ]
        try:
            return forward(self, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", shifting)
    for layer in (3, 4):
        with pytest.raises(CutError, match="changes its states between blocks 1 and 2"):
            LayerEncoder(folder, layer, norm=norm, device="cpu")


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        (
            '"num_hidden_layers": -1',
            r"`num_hidden_layers` .* must be in \[0, 4,096\], but is -1. Correct its config.json",
        ),
        ('"num_hidden_layers": 10000000', r"must be in \[0, 4,096\], but is 10,000,000. Correct its config.json"),
        ('"num_hidden_layers": "4"', "config that this transformers can read, .* expected int, got str"),
        ('"nested": ' + '{"a": ' * 5000 + "1" + "}" * 5000, "config that this transformers can read, .*RecursionError"),
        ('"hidden_act": "unknown"', "cannot be built: KeyError: 'unknown'. Correct its config.json"),
        ('"intermediate_size": -1', "cannot be built: .* negative dimension .* Correct its config.json"),
    ],
)
def test_invalid_config_is_refused(setting: str, problem: str, tiny_folder: Folder, tmp_path: Path) -> None:
    config = Path(tiny_folder("Llama"), "config.json").read_text()
    (tmp_path / "config.json").write_text(config.rstrip().removesuffix("}") + f", {setting}}}")
    with pytest.raises(ModelNotFoundError, match=f"(?s){problem}"):
        LayerEncoder(str(tmp_path), 1, device="cpu")


@pytest.mark.parametrize("reason", [CutError("no part of it is a model"), RuntimeError("of its own")])
def test_model_that_cannot_be_created_is_refused_without_endless_retries(
    reason: Exception, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alternatives are tried a limited number of times."""
    tries = 0

    def fail(*_: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries > 20:
            raise KeyboardInterrupt
        raise reason

    folder = tiny_folder("Llama")
    monkeypatch.setattr(load, "_empty", fail)
    with pytest.raises(CutError if isinstance(reason, CutError) else ModelNotFoundError, match=str(reason)):
        LayerEncoder(folder, 2, device="cpu")


@pytest.mark.parametrize(("layer", "norm"), [(0, "none"), (1, "none"), (3, "none"), (2, "final")])
def test_hidden_states_that_are_not_those_of_the_blocks_are_not_used(
    layer: int, norm: Norm, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("Llama")
    expected = LayerEncoder(folder, layer, norm=norm, device="cpu").encode(TEXTS)
    forward = modeling_llama.LlamaModel.forward

    def shifting(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if output.hidden_states is not None:
            output.hidden_states = tuple(shift(states) for states in output.hidden_states)
        return output

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", shifting)
    encoder = LayerEncoder(folder, layer, norm=norm, device="cpu")
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)


# --- a last block with other settings --------------------------------------------------------------------------------


def change_attribute(block: Any) -> None:
    block.residual_scale = 0.5


def change_submodule(block: Any) -> None:
    block.self_attn.scaling *= 2


def change_tuple(block: Any) -> None:
    block.self_attn.window = (4, 4)


def change_activation(block: Any) -> None:
    block.mlp.act_fn = nn.Tanh()


def add_module(block: Any) -> None:
    block.extra = nn.Identity()


def change_epsilon(block: Any) -> None:
    block.input_layernorm.variance_epsilon = 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_attribute, r"`residual_scale` is 0\.5 instead of 1\.0"),
        (change_submodule, r"`self_attn\.scaling` is 0\.7"),
        (change_tuple, r"`self_attn\.window` is \(4, 4\) instead of \(8, 8\)"),
        (change_activation, "`mlp.act_fn` is .Tanh. instead of .SiLUActivation."),
        (add_module, "`extra` is .Identity. instead of None"),
        (change_epsilon, "`input_layernorm.variance_epsilon` is 0.1 instead of"),
    ],
)
@pytest.mark.parametrize(("norm", "last"), [("final", 2), ("none", 3)])
@pytest.mark.usefixtures("changed_classes")
def test_model_whose_last_block_has_other_settings_is_not_cut(
    change: Callable[[Any], None],
    message: str,
    norm: Norm,
    last: int,
    tiny_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_folder("Llama")
    original_init = modeling_llama.LlamaDecoderLayer.__init__

    def init(self: Any, config: Any, layer_idx: int) -> None:
        original_init(self, config, layer_idx)
        self.residual_scale, self.self_attn.window = 1.0, (8, 8)
        if layer_idx == config.num_hidden_layers - 1:
            change(self)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", init)
    with pytest.raises(CutError, match=f"Block {last} of LlamaModel is set otherwise in a cut model: {message}"):
        load_and_cut(folder, 2, norm=norm)
    whole = LayerEncoder(folder, 4, norm=norm, device="cpu")
    encoder = LayerEncoder(folder, 2, norm=norm, device="cpu")  # reads the layer with hooks
    assert len(encoder.transformer.layers) == 4  # type: ignore[arg-type]
    np.testing.assert_allclose(encoder.encode(TEXTS), whole.encode_layers(TEXTS)[2], atol=1e-5)


@pytest.mark.usefixtures("changed_classes")
def test_weights_that_depend_on_the_depth_are_refused(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("Llama")
    original_init = modeling_llama.LlamaModel.__init__

    def init(self: Any, config: Any) -> None:
        original_init(self, config)
        self.depths = nn.Embedding(config.num_hidden_layers, 3)

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", init)
    with pytest.raises(CutError, match="other parameters come or go with its depth"):
        LayerEncoder(folder, 2, device="cpu")


# --- a missing library -----------------------------------------------------------------------------------------------


def test_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TimmWrapperConfig

    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("\nTimmWrapperConfig requires the timm library but it was not found.\n")

    monkeypatch.setattr(TimmWrapperConfig, "from_dict", missing)
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {}}')
    with pytest.raises(
        MidlayerError, match="needs a library that is not installed: TimmWrapperConfig requires the timm"
    ):
        LayerEncoder(str(tmp_path), 1, device="cpu")
