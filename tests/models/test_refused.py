"""Models whose cut would give other states than the whole model does: each is refused when the encoder is made."""

from __future__ import annotations

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
from midlayer_encoders.errors import CutError, MidlayerError
from midlayer_encoders.models import load
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]


# --- something after the last block ----------------------------------------------------------------------------------


def shifted(states: Tensor) -> Tensor:
    return states + 0.05 * torch.arange(states.shape[-1]) / states.shape[-1]


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda states: 1.02 * states,
    "shifted": shifted,
    "tokens in another order": lambda states: states.flip(1),
    "without the first token": lambda states: states[:, 1:],
    "one token off": lambda states: torch.cat([states[:, :1] * 1.1, states[:, 1:]], dim=1),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layer", [1, 4])
def test_an_operation_after_the_final_norm_is_noticed(
    operation: str, layer: int, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = modeling_llama.LlamaModel.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = made(self, *args, **kwargs)
        output.last_hidden_state = OPERATIONS[operation](output.last_hidden_state)
        return output

    folder = tiny_folder("Llama")
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    with pytest.raises(CutError, match=f"gives other states for layer {layer} with norm='final'.*Try norm='none'"):
        LayerEncoder(folder, layer, device="cpu")
    LayerEncoder(folder, layer, norm="none", device="cpu")  # the advice works


@pytest.mark.parametrize("layer", [1, 4])
def test_an_operation_between_the_last_block_and_the_final_norm_is_noticed(
    layer: int, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("Llama")
    forward = modeling_llama.LlamaModel.forward

    def shifting(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = self.norm.register_forward_pre_hook(lambda _m, given: (shifted(given[0]),))
        try:
            return forward(self, *args, **kwargs)
        finally:
            handle.remove()

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", shifting)
    with pytest.raises(CutError, match=f"gives other states for layer {layer} with norm='final'"):
        LayerEncoder(folder, layer, device="cpu")


@pytest.mark.parametrize("norm", ["final", "none"])
def test_states_that_change_between_two_blocks_are_noticed_at_any_layer(
    norm: Norm, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As YOLOS adds positions there: is the sum a layer's state, or what the block before returned?"""
    folder = tiny_folder("Llama")
    forward = modeling_llama.LlamaModel.forward

    def shifting(self: Any, *args: Any, **kwargs: Any) -> Any:
        handles = [
            block.register_forward_pre_hook(lambda _m, given: (shifted(given[0]), *given[1:]), prepend=True)
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


@pytest.mark.parametrize("reason", [CutError("no part of it is a model"), RuntimeError("of its own")])
def test_a_model_that_cannot_be_made_is_refused_once_and_for_all(
    reason: Exception, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other way to have the layer is tried for ever."""
    tries = 0

    def fail(*_: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries > 20:
            raise KeyboardInterrupt
        raise reason

    folder = tiny_folder("Llama")
    monkeypatch.setattr(load, "_empty", fail)
    with pytest.raises(CutError, match=str(reason)):
        LayerEncoder(folder, 2, device="cpu")


@pytest.mark.parametrize(("layer", "norm"), [(0, "none"), (1, "none"), (3, "none"), (2, "final")])
def test_an_operation_between_blocks_is_noticed(
    layer: int, norm: Norm, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states that a block hands on are not those that the next one receives."""
    folder = tiny_folder("Llama")
    forward = modeling_llama.LlamaModel.forward

    def shifting(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if output.hidden_states is not None:
            output.hidden_states = tuple(shifted(states) for states in output.hidden_states)
        return output

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", shifting)
    if norm == "final":  # which reads no hidden states
        LayerEncoder(folder, layer, norm=norm, device="cpu")
        return
    with pytest.raises(CutError, match=f"gives other states for layer {layer} with norm='none'.*Try norm='final'"):
        LayerEncoder(folder, layer, norm=norm, device="cpu")
    LayerEncoder(folder, layer, norm="final", device="cpu")


# --- a block that knows it is the last -------------------------------------------------------------------------------


def by_attribute(block: Any) -> None:
    block.residual_scale = 0.5


def in_a_part(block: Any) -> None:
    block.self_attn.scaling *= 2


def by_a_row_of_numbers(block: Any) -> None:
    block.self_attn.window = (4, 4)


def by_another_activation(block: Any) -> None:
    block.mlp.act_fn = nn.Tanh()


def by_one_module_more(block: Any) -> None:
    block.extra = nn.Identity()


def by_another_epsilon(block: Any) -> None:
    block.input_layernorm.variance_epsilon = 0.1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (by_attribute, r"`residual_scale` is 0\.5 instead of 1\.0"),
        (in_a_part, r"`self_attn\.scaling` is 0\.7"),
        (by_a_row_of_numbers, r"`self_attn\.window` is \(4, 4\) instead of \(8, 8\)"),
        (by_another_activation, "`mlp.act_fn` is Tanh instead of SiLUActivation"),
        (by_one_module_more, "`extra` is Identity instead of NoneType"),
        (by_another_epsilon, "`input_layernorm.variance_epsilon` is 0.1 instead of"),
    ],
)
@pytest.mark.parametrize(("norm", "last"), [("final", 2), ("none", 3)])
def test_a_last_block_that_is_set_otherwise_than_the_others_is_refused_unless_it_is_the_models(
    change: Callable[[Any], None],
    text: str,
    norm: Norm,
    last: int,
    tiny_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_folder("Llama")
    made = modeling_llama.LlamaDecoderLayer.__init__

    def init(self: Any, config: Any, layer_idx: int) -> None:
        made(self, config, layer_idx)
        self.residual_scale, self.self_attn.window = 1.0, (8, 8)
        if layer_idx == config.num_hidden_layers - 1:
            change(self)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", init)
    with pytest.raises(CutError, match=f"Block {last} of LlamaModel is set otherwise in a cut model: {text}"):
        LayerEncoder(folder, 2, norm=norm, device="cpu")
    assert np.isfinite(LayerEncoder(folder, 4, device="cpu").encode(TEXTS)).all()


def test_weights_that_come_and_go_with_the_depth_are_refused(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("Llama")
    made = modeling_llama.LlamaModel.__init__

    def init(self: Any, config: Any) -> None:
        made(self, config)
        self.depths = nn.Embedding(config.num_hidden_layers, 3)

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", init)
    with pytest.raises(CutError, match="other parameters come or go with its depth"):
        LayerEncoder(folder, 2, device="cpu")


# --- a library that is not installed ---------------------------------------------------------------------------------


def test_a_model_that_needs_another_library_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TimmWrapperConfig

    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("\nTimmWrapperConfig requires the timm library but it was not found.\n")

    monkeypatch.setattr(TimmWrapperConfig, "from_dict", missing)
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {}}')
    with pytest.raises(
        MidlayerError, match="needs a library that is not installed: TimmWrapperConfig requires the timm"
    ):
        LayerEncoder(str(tmp_path), 1, device="cpu")
