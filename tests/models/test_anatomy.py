import pytest
import torch
from torch import Tensor, nn
from transformers import JambaConfig, JambaModel

from midlayer_encoders.errors import AnatomyError, LayerIndexError
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy, resolve_layer
from tests.support.families import DEPTH, FAMILIES, inputs, tiny


def first_tensor(value: object) -> Tensor:
    return value[0] if isinstance(value, tuple) else value  # type: ignore[return-value]


def record_states(
    model: nn.Module, name: str, points: dict[str, tuple[nn.Module, str]]
) -> tuple[dict[str, list[Tensor]], Tensor]:
    """Run the family's input through the model; return the states at each point, call by call, and the model's output."""
    recorded: dict[str, list[Tensor]] = {key: [] for key in points}
    handles = []
    for key, (module, side) in points.items():
        if side == "input":
            hook = module.register_forward_pre_hook(
                lambda _m, args, kwargs, key=key: recorded[key].append(
                    first_tensor(args or kwargs.get("hidden_states"))
                ),
                with_kwargs=True,
            )
        else:
            hook = module.register_forward_hook(lambda _m, _a, out, key=key: recorded[key].append(first_tensor(out)))
        handles.append(hook)
    with torch.no_grad():
        output = model(**inputs(name)).last_hidden_state
    for handle in handles:
        handle.remove()
    return recorded, output


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_and_final_norm_match_the_forward_pass(name: str) -> None:
    model = tiny(name)
    anatomy = find_anatomy(model)
    assert anatomy.num_layers == DEPTH
    assert anatomy.final == FAMILIES[name].final
    blocks = {id(anatomy.block(model, k)): anatomy.block(model, k) for k in range(1, DEPTH + 1)}
    recorded, output = record_states(model, name, {str(key): (block, "output") for key, block in blocks.items()})
    assert sum(len(calls) for calls in recorded.values()) == DEPTH
    states = recorded[str(id(anatomy.block(model, DEPTH)))][-1]
    with torch.no_grad():
        for path in anatomy.final:
            states = model.get_submodule(path)(states)
    torch.testing.assert_close(states, output)


def test_blocks_of_several_kinds_are_found_under_the_classes_of_fsdp2() -> None:
    config = JambaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4,
    )  # fmt: skip
    model = JambaModel(config)
    expected = find_anatomy(model)
    classes = {type(block): type(f"FSDP{type(block).__name__}", (type(block),), {}) for block in model.layers}
    assert len(classes) == 2
    for block in model.layers:
        block.__class__ = classes[type(block)]
    assert find_anatomy(model) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_found(name: str) -> None:
    model = tiny(name)
    path = find_anatomy(model).embeddings
    assert path is not None
    assert sum(p.numel() for p in model.get_submodule(path).parameters()) > 0


def test_albert_reports_shared_blocks() -> None:
    anatomy = find_anatomy(tiny("ALBERT"))
    assert anatomy.shared
    assert anatomy.num_blocks == 1
    assert not find_anatomy(tiny("BERT")).shared


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.other = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.ln = nn.LayerNorm(4)


def test_plain_module_with_a_path_to_its_blocks() -> None:
    assert find_anatomy(Plain(), blocks="stages") == Anatomy("stages", 3, ("ln",), None, 3)


def test_plain_module_error_names_the_fix() -> None:
    with pytest.raises(AnatomyError, match=r"'stages', 'other'.*Pass one as `blocks`"):
        find_anatomy(Plain())
    with pytest.raises(AnatomyError, match=r"but got 'stage'. Its lists are: 'stages', 'other'"):
        find_anatomy(Plain(), blocks="stage")
    with pytest.raises(AnatomyError, match="has no list of like blocks"):
        find_anatomy(nn.Linear(2, 2))


def test_two_towers_error_names_both() -> None:
    import transformers as tf

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = tf.CLIPModel(tf.CLIPConfig(text_config=small | {"vocab_size": 50}, vision_config=small))
    with pytest.raises(AnatomyError, match=r"more than one list of blocks: 'text_model.encoder.layers'"):
        find_anatomy(model)
    assert find_anatomy(model, blocks="vision_model.encoder.layers").num_layers == 2


def test_model_inside_another_module_is_found() -> None:
    holder = nn.ModuleDict({"backbone": tiny("OPT")})
    anatomy = find_anatomy(holder)
    assert anatomy.blocks == "backbone.decoder.layers"
    assert anatomy.final == ("backbone.decoder.final_layer_norm",)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [(0, 0), (24, 24), (-1, 24), (-24, 1), (1.0, 24), (0.5, 12), (0.7, 17), (0.01, 0), (0.0209, 1)],
)
def test_layers_resolve(layer: float, expected: int) -> None:
    assert resolve_layer(layer, 24) == expected


def test_half_a_layer_rounds_up() -> None:
    assert [resolve_layer(0.5, depth) for depth in (5, 6, 7)] == [3, 3, 4]


@pytest.mark.parametrize("layer", [25, -25, 1000])
def test_layer_out_of_range_error_names_the_range(layer: int) -> None:
    with pytest.raises(LayerIndexError, match=rf"in \[0, 24\] for tiny \(24 blocks.*but got {layer}"):
        resolve_layer(layer, 24, name="tiny")


@pytest.mark.parametrize("layer", [0.0, -0.5, 1.5, float("nan"), "auto", None, True])
def test_invalid_layers_are_refused(layer: object) -> None:
    with pytest.raises(LayerIndexError, match=r"`layer`.*must be"):
        resolve_layer(layer, 24)  # type: ignore[arg-type]
