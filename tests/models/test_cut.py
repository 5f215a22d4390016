from pathlib import Path

import pytest
import torch
from torch import Tensor

from midlayer_encoders._types import NORMS, Norm
from midlayer_encoders.errors import CutError
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.models.cut import Cut, cut_config, cut_model
from tests.models.cuts import load_and_cut
from tests.support.families import DEPTH, FAMILIES, tiny
from tests.support.families import inputs as family_inputs


def expected_states(
    name: str, norm: Norm, *, model: torch.nn.Module | None = None, inputs: dict[str, Tensor] | None = None
) -> list[Tensor]:
    """Return every layer of the uncut model from hooks on its blocks, with its own final norm applied on request."""
    model = tiny(name) if model is None else model
    model_inputs = family_inputs(name) if inputs is None else inputs
    rows = len(next(iter(model_inputs.values())))
    anatomy = find_anatomy(model)
    states: list[Tensor] = []

    def record(value: object) -> None:
        states.append((value[0] if isinstance(value, tuple) else value).reshape(rows, -1, 32))  # type: ignore[attr-defined]

    blocks = {id(block): block for block in (anatomy.block(model, k) for k in range(1, DEPTH + 1))}
    # The input of the first block, then of each next one (a convolution may come between), then the last output.
    handles = [
        block.register_forward_pre_hook(
            lambda _m, args, kwargs: record(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        for block in blocks.values()
    ]
    outputs: list[object] = []
    last = anatomy.block(model, DEPTH)
    handles.append(last.register_forward_hook(lambda _m, _a, out: outputs.append(out)))
    with torch.no_grad():
        model(**model_inputs)
        record(outputs[-1])
        for handle in handles:
            handle.remove()
        if norm == "final":
            for path in anatomy.final:
                states = [model.get_submodule(path)(value) for value in states]
    assert len(states) == DEPTH + 1
    return states


def read_output(model: torch.nn.Module, output: str | tuple[str, int], name: str) -> Tensor:
    with torch.no_grad():
        outputs = model(**family_inputs(name), output_hidden_states=True)
    value = outputs[output] if isinstance(output, str) else outputs[output[0]][output[1]]
    return value.reshape(2, -1, value.shape[-1])


# Each norm runs with a sixth of the families here and with the others in `make test-slow`; the census samples each kind.
@pytest.mark.parametrize(
    ("name", "norm"),
    [
        pytest.param(name, norm, marks=[pytest.mark.slow] if position % 6 != 3 * (norm == "final") else [])
        for position, name in enumerate(FAMILIES)
        for norm in NORMS
    ],
)
def test_every_layer_of_every_family_is_exact_before_and_after_reloading(name: str, norm: Norm, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path / "whole")  # type: ignore[operator]
    for layer, expected in enumerate(expected_states(name, norm)):
        model, cut = load_and_cut(str(tmp_path / "whole"), layer, norm=norm)
        assert cut.layer == layer
        torch.testing.assert_close(read_output(model, cut.output, name), expected, msg=lambda m: f"layer {layer}: {m}")
        # Only some layers are saved: the files differ at the first, the last and in between, and without the norm.
        if layer % 2 or (norm == "none" and layer < DEPTH):
            continue
        model.save_pretrained(tmp_path / "cut")  # type: ignore[operator]
        reloaded = type(model).from_pretrained(tmp_path / "cut").eval()  # type: ignore[attr-defined]
        torch.testing.assert_close(
            read_output(reloaded, cut.output, name), expected, msg=lambda m: f"reloaded {layer}: {m}"
        )


def test_plain_module_is_cut_in_memory() -> None:
    model = torch.nn.ModuleDict({"steps": torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(5))})
    anatomy = find_anatomy(model, blocks="steps")
    cut_model(model, Cut(anatomy, 2, "final", 2, "last_hidden_state"))
    assert len(model["steps"]) == 2  # type: ignore[arg-type]


def test_config_without_the_block_count_is_refused() -> None:
    import transformers as tf

    with pytest.raises(CutError, match="does not say that the model has 7 blocks"):
        cut_config(tf.BertConfig(num_hidden_layers=4), 7, 2)


@pytest.mark.usefixtures("changed_classes")
def test_block_that_depends_on_the_depth_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    original_init = modeling_llama.LlamaDecoderLayer.__init__

    def scaled_by_depth(self: torch.nn.Module, config: object, layer_idx: int) -> None:
        original_init(self, config, layer_idx)
        self.residual_scale = 1.0 / config.num_hidden_layers  # type: ignore[attr-defined]

    tiny("Llama").save_pretrained(tmp_path)  # type: ignore[operator]
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", scaled_by_depth)
    with pytest.raises(
        CutError, match=r"Block 1 of LlamaModel is set otherwise in a cut model: `residual_scale` is 0.5"
    ):
        load_and_cut(str(tmp_path), 2)
    load_and_cut(str(tmp_path), 4)


def test_weights_after_the_layer_are_not_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny("Llama").save_pretrained(tmp_path)  # type: ignore[operator]
    weights = load_file(tmp_path / "model.safetensors")
    poisoned = {key: value * float("nan") if ".2." in key or ".3." in key else value for key, value in weights.items()}
    save_file(poisoned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, cut = load_and_cut(str(tmp_path), 2)
    assert read_output(model, cut.output, "Llama").isfinite().all()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.usefixtures("changed_classes")
def test_model_that_recounts_its_blocks_counts_those_of_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama")
    model_class, original_init = type(model), type(model).__init__
    model.config.n_layers = 2 * DEPTH  # two caches for each block, as LongCat-Flash has in transformers 5.17

    def doubled_init(self: torch.nn.Module, config: object) -> None:
        original_init(self, config)
        self.config.n_layers = 2 * config.num_hidden_layers  # type: ignore[attr-defined, union-attr]

    monkeypatch.setattr(model_class, "__init__", doubled_init)
    cut_model(model, Cut(find_anatomy(model), DEPTH, "none", DEPTH + 1, ("hidden_states", DEPTH)))
    assert model.config.n_layers == 2 * (DEPTH + 1)
