"""The digest of an encoder changes with everything that changes its vectors, and with nothing else."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from transformers import AttentionInterface, BertConfig, EsmTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder import spec as specs
from midlayer_encoders.encoder.description import Description, vocabulary
from tests.support.made_media import IMAGES
from tests.support.tiny_folders import TEXTS, Folder, save_joint, save_tiny


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def swap_tokens(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["t"] = vocabulary["t"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def lowercase(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", normalizer={"type": "Replace", "pattern": {"String": "c"}, "content": "x"})


def truncate_left(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", truncation_side="left", model_max_length=8)


def shorten(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", model_max_length=8)


CHANGES: dict[str, tuple[str, Callable[[Path], None] | dict[str, Any]]] = {
    "activation": ("Llama", {"hidden_act": "relu"}),
    "epsilon": ("Llama", {"rms_norm_eps": 0.5}),
    "rotary base": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}}),
    "residual form": ("GPTNeoX", {"use_parallel_residual": False}),
    "two swapped tokens": ("Llama", swap_tokens),
    "normalizer": ("Llama", lowercase),
    "longest text": ("Llama", shorten),
    "truncation side": ("Llama", truncate_left),
}


def changed_copy(change: str, target: Path) -> str:
    """Write a tiny model with one change that leaves its weights alone."""
    family, edit = CHANGES[change]
    save_tiny(family, target)
    if callable(edit):
        edit(target)
    else:
        edit_json(target / "config.json", **edit)
    return str(target)


@pytest.mark.parametrize("change", CHANGES)
def test_file_that_changes_vectors_changes_the_digest(change: str, tiny_folder: Folder, tmp_path: Path) -> None:
    source = Path(tiny_folder(CHANGES[change][0]))
    encoder = LayerEncoder(str(shutil.copytree(source, tmp_path / "a" / "model")), 2, device="cpu")
    changed = LayerEncoder(changed_copy(change, tmp_path / "b" / "model"), 2, device="cpu")
    assert changed.spec.weights_digest == encoder.spec.weights_digest
    assert np.abs(changed.encode(TEXTS) - encoder.encode(TEXTS)).max() > 1e-3
    assert changed.spec.digest != encoder.spec.digest


def test_settings_of_a_head_leave_the_digest_alone(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("BERT"), tmp_path / Path(tiny_folder("BERT")).name))
    labels = {"id2label": {"0": "no", "1": "yes", "2": "?"}, "label2id": {"no": 0, "yes": 1, "?": 2}}
    edit_json(folder / "config.json", **labels, problem_type="regression", initializer_range=0.5)
    specs = [LayerEncoder(str(path), 2, device="cpu").spec for path in (folder, tiny_folder("BERT"))]
    assert specs[0].digest == specs[1].digest


def test_sides_of_truncation_have_different_digests(tmp_path: Path) -> None:
    encoders = [
        LayerEncoder(changed_copy(change, tmp_path / change / "model"), 2, device="cpu")
        for change in ("longest text", "truncation side")
    ]
    assert np.abs(encoders[0].encode(TEXTS) - encoders[1].encode(TEXTS)).max() > 1e-3
    assert encoders[0].spec.digest != encoders[1].spec.digest


def test_attention_implementations_have_different_digests(tiny_folder: Folder) -> None:
    """They round differently."""
    kinds = ("eager", "sdpa")
    specs = {
        LayerEncoder(tiny_folder("Llama"), 2, attn_implementation=kind, device="cpu").spec.digest for kind in kinds
    }
    assert len(specs) == len(kinds)


def test_image_processor_settings_change_the_digest(tiny_folder: Folder, tmp_path: Path) -> None:
    plain = LayerEncoder(tiny_folder("ViT"), 2, device="cpu")
    folder = Path(shutil.copytree(tiny_folder("ViT"), tmp_path / Path(tiny_folder("ViT")).name))
    edit_json(folder / "preprocessor_config.json", image_mean=[0.1, 0.5, 0.9])
    dark = LayerEncoder(str(folder), 2, device="cpu")
    assert np.abs(plain.encode(IMAGES) - dark.encode(IMAGES)).max() > 1e-3
    assert [
        name for (name, digest), other in zip(plain.spec.parts, dark.spec.parts, strict=True) if digest != other[1]
    ] == ["files"]


def test_tokenizer_and_image_processor_of_a_joint_model_change_the_digest(tmp_path: Path) -> None:
    folder = Path(save_joint("CLIP", tmp_path / "model"))
    digests = {LayerEncoder(str(folder), -1, device="cpu").spec.digest}
    swap_tokens(folder)
    digests.add(LayerEncoder(str(folder), -1, device="cpu").spec.digest)
    for path in folder.glob("*processor_config.json"):
        content = path.read_text().replace("0.48145466", "0.1")
        path.write_text(content)
    digests.add(LayerEncoder(str(folder), -1, device="cpu").spec.digest)
    assert len(digests) == 3


def test_generation_of_the_numerics_changes_the_digest(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    before = encoder.spec.digest
    monkeypatch.setattr(specs, "NUMERICS", specs.NUMERICS + 1)
    assert encoder.spec.digest != before


def test_use_of_an_encoder_leaves_its_digest(tiny_folder: Folder) -> None:
    for family, inputs in (("Llama", TEXTS), ("ViT", IMAGES)):
        encoder = LayerEncoder(tiny_folder(family), 2, device="cpu")
        before = encoder.spec
        encoder.encode(inputs)
        encoder.encode(inputs[:1], batch_size=1)
        assert encoder.spec == before


@pytest.mark.long
def test_compilation_leaves_the_digest(tiny_folder: Folder) -> None:
    import lightning.fabric.wrappers  # noqa: F401  (it wraps torch.compile)

    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    before = encoder.spec
    encoder.compile(backend="eager")
    torch.compile(encoder.transformer, backend="eager")
    assert encoder.spec == before


def test_digest_depends_on_no_address_and_no_hash() -> None:
    describe = Description(nn.Identity())
    assert describe({"b", "a", "c"}) == ["a", "b", "c"]
    assert describe([object(), {"x": object}]) == [["object", "<object object>"], {"x": ["builtins", "object"]}]


@pytest.mark.slow  # it imports the package once more
def test_digest_is_the_same_in_every_process(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    line = f"from midlayer_encoders import LayerEncoder; print(LayerEncoder({folder!r}, 2, device='cpu').spec.digest)"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    output = subprocess.run([sys.executable, "-c", line], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.split()[-1] == LayerEncoder(folder, 2, device="cpu").spec.digest


def test_slow_tokenizer_is_part_of_the_digest(tmp_path: Path) -> None:
    states = []
    for name, order in (("a", "LAGV"), ("b", "LAVG")):
        (tmp_path / name).write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", *order, "<mask>"]))
        states.append(vocabulary(EsmTokenizer(str(tmp_path / name))))
    (tmp_path / "copy").write_text((tmp_path / "a").read_text())
    states.append(vocabulary(EsmTokenizer(str(tmp_path / "copy"))))
    assert states[0] != states[1]
    assert states[0] == states[2]


# --- code that belongs to no package ---------------------------------------------------------------------------------


class Block(nn.Module):
    """A block whose activation and scale are no weights."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.activation = activation
        self.scale = scale

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.scale * self.activation(self.linear(states))


class Squared(Block):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.activation(self.linear(states)) ** 2


class Stack(nn.Module):
    def __init__(self, make_block: Callable[[], nn.Module]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(make_block() for _ in range(2))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            states = block(states)
        return states


def pixels_as(scale: float) -> Callable[[list[Any]], torch.Tensor]:
    return lambda images: torch.tensor(
        np.stack([np.asarray(image.resize((4, 4)))[..., 0] / scale for image in images])
    ).float()


def test_code_and_settings_of_a_module_in_memory_change_the_digest() -> None:
    def digest(make_block: Callable[[], nn.Module], scale: float = 255.0) -> str:
        options: dict[str, Any] = {"blocks": "blocks", "processor": pixels_as(scale), "device": "cpu"}
        return LayerEncoder.from_module(Stack(make_block), 2, **options).spec.digest

    changed = [lambda: Block(F.relu), lambda: Block(scale=0.5), Squared]
    digests = [digest(Block), digest(Block, 99.0), *map(digest, changed)]
    assert len(set(digests)) == len(digests)
    assert digest(Block) == digests[0]


def test_code_typed_at_a_prompt_changes_the_digest() -> None:
    sources = []
    for sign in "+-":
        scope: dict[str, Any] = {"nn": nn, "__name__": "typed"}
        exec(f"class Typed(nn.Module):\n    def forward(self, x):\n        return x {sign} 1", scope)
        sources.append(Description(nn.Identity())(scope["Typed"]))
    assert sources[0] != sources[1]


# --- changes in memory ------------------------------------------------------------------------------------------------


def add_hook(encoder: LayerEncoder, shift: float = 1.0) -> None:
    encoder[0].model.layers[0].register_forward_hook(lambda module, inputs, output: output + shift)


def add_hook_before(encoder: LayerEncoder) -> None:
    encoder[0].model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2, *inputs[1:]))


def steer(encoder: LayerEncoder) -> None:
    class Steering:
        def __init__(self, vector: torch.Tensor) -> None:
            self.vector = vector

        def hook(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output + self.vector

    encoder[0].model.layers[0].register_forward_hook(Steering(torch.linspace(0, 1, 32)).hook)


def add_hook_to_vectors(encoder: LayerEncoder) -> None:
    encoder.register_forward_hook(
        lambda module, inputs, output: output | {"sentence_embedding": output["sentence_embedding"] * torch.arange(32)}
    )


def replace_activation(encoder: LayerEncoder, activation: Callable[[], nn.Module] = nn.Tanh) -> None:
    encoder[0].model.layers[0].mlp.act_fn = activation()


def replace_by_own_class(encoder: LayerEncoder) -> None:
    class Own(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states * 2

    replace_activation(encoder, Own)


def replace_forward(encoder: LayerEncoder) -> None:
    mlp = encoder[0].model.layers[0].mlp
    mlp.forward = MethodType(lambda self, states: states * 0.5, mlp)


def change_number(encoder: LayerEncoder) -> None:
    encoder[0].model.layers[0].self_attn.scaling = 3.0


def change_unsaved_buffer(encoder: LayerEncoder) -> None:
    encoder[0].model.rotary_emb.inv_freq.mul_(0.5)


def split_special_tokens(encoder: LayerEncoder) -> None:
    encoder.tokenizer.split_special_tokens = True


def replace_tokenization(encoder: LayerEncoder) -> None:
    tokenizer, call = encoder[0].processor, encoder[0].processor._encode_plus
    tokenizer._encode_plus = lambda text, **kwargs: call([entry[::-1][:2] for entry in text], **kwargs)


def steer_from_slots(encoder: LayerEncoder, factor: float) -> None:
    encoder[0].model.layers[0].register_forward_hook(Scaling(factor))


def change_class_attribute(encoder: LayerEncoder, factor: float) -> None:
    scope: dict[str, Any] = {"nn": nn, "__name__": "typed"}
    lines = [
        "class Typed(nn.Module):",
        f"    factor = {factor}",
        "    def forward(self, x):",
        "        return x * self.factor",
    ]
    exec("\n".join(lines), scope)
    encoder[0].model.layers[0].mlp.act_fn = scope["Typed"]()


def change_inner_code(encoder: LayerEncoder, factor: float) -> None:
    scope: dict[str, Any] = {"nn": nn, "__name__": "typed"}
    lines = ["class Typed(nn.Module):", "    def forward(self, x):", f"        return (lambda y: y * {factor})(x)"]
    exec("\n".join(lines), scope)
    encoder[0].model.layers[0].mlp.act_fn = scope["Typed"]()


def change_property(encoder: LayerEncoder, factor: float) -> None:
    scope: dict[str, Any] = {"nn": nn, "__name__": "typed", "FACTOR": factor}
    lines = ["class Typed(nn.Module):", "    factor = property(lambda self: FACTOR)"]
    exec("\n".join([*lines, "    def forward(self, x):", "        return x * self.factor"]), scope)
    encoder[0].model.layers[0].mlp.act_fn = scope["Typed"]()


def use_global_inside(encoder: LayerEncoder, factor: float) -> None:
    scope: dict[str, Any] = {"__name__": "typed", "FACTOR": factor}
    exec("def hook(module, inputs, output):\n    return (lambda x: x * FACTOR)(output)", scope)
    encoder[0].model.layers[0].register_forward_hook(scope["hook"])


def replace_method(encoder: LayerEncoder, name: str) -> None:
    call = getattr(encoder, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        if name == "encode":
            return output * 2
        return output | {key: value * 2 for key, value in output.items() if key == "sentence_embedding"}

    setattr(encoder, name, replaced)


class Square(nn.Module):
    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return features | {"sentence_embedding": features["sentence_embedding"] ** 2}


class Rounding(nn.Module):
    """A module with attributes that are named like those that copies of a model do not share."""

    def __init__(self, dtype: torch.dtype, cached_scale: float) -> None:
        super().__init__()
        self.dtype, self.cached_scale = dtype, cached_scale

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return (states * self.cached_scale).to(self.dtype).float()


def add_hook_around(encoder: LayerEncoder, dtype: Any, scale: Any) -> None:
    encoder[0].model.layers[0].register_forward_hook(
        lambda module, inputs, output: (output * scale.f(dtype)).to(dtype).float()
    )


def add_hook_with_table(encoder: LayerEncoder, place: int) -> None:
    table = pandas.DataFrame(np.eye(1, 200, place).T)
    encoder[0].model.layers[0].register_forward_hook(
        lambda module, inputs, output: output + torch.arange(32) * float(table.to_numpy().argmax())
    )


def add_one_of_two_hooks(encoder: LayerEncoder, number: int) -> None:
    hooks = [lambda module, inputs, output: output.cos(), lambda module, inputs, output: output.exp()]  # in one line
    encoder[0].model.layers[0].register_forward_hook(hooks[number])


class Scaling:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * self.factor


IN_MEMORY = [
    add_hook, lambda encoder: add_hook(encoder, 2.0), add_hook_before, steer, add_hook_to_vectors, replace_activation,
    lambda encoder: replace_activation(encoder, nn.ReLU), replace_by_own_class, replace_forward, change_number,
    change_unsaved_buffer, split_special_tokens, replace_tokenization,
    *(
        partial(change, factor=factor)
        for change in (
            steer_from_slots, change_class_attribute, change_inner_code, change_property, use_global_inside,
        )
        for factor in (2.0, 3.0)
    ),
    *(partial(replace_method, name=name) for name in ("encode", "forward")),
    lambda encoder: encoder.append(Square()),
    *(
        partial(replace_activation, activation=partial(Rounding, *settings))
        for settings in ((torch.float8_e4m3fn, 1.0), (torch.float8_e5m2, 1.0), (torch.float32, 3.0))
    ),
    *(partial(add_hook_around, dtype=dtype, scale=SimpleNamespace(f=lambda _: 9)) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)),
    *(partial(add_hook_around, dtype=torch.float32, scale=SimpleNamespace(f=f)) for f in (lambda _: 5, lambda _: 7)),
    *(partial(add_hook_with_table, place=place) for place in (100, 120)),
    *(partial(add_one_of_two_hooks, number=number) for number in (0, 1)),
]  # fmt: skip


def test_spec_any_change_in_memory_has_its_own_digest(tiny_folder: Folder) -> None:
    texts = [*TEXTS, "the[EOS] cat"]
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    digests, vectors = [encoder.spec.digest], encoder.encode(texts)
    for change in IN_MEMORY:
        changed = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
        change(changed)
        assert np.abs(changed.encode(texts) - vectors).max() > 1e-3, change
        digests.append(changed.spec.digest)
    assert len(set(digests)) == len(digests)
    assert LayerEncoder(tiny_folder("Llama"), 2, device="cpu").spec.digest == digests[0]


def test_spec_functions_in_code_of_transformers_show(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(module: Any, *states: Any, **keywords: Any) -> Any:
        output, weights = sdpa_attention_forward(module, *states, **keywords)
        return output * 2, weights

    folder = tiny_folder("Llama")
    encoder = LayerEncoder(folder, 2, device="cpu")
    digest, vectors = encoder.spec.digest, encoder.encode(TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda query, key, *_, **__: (query, key))
        assert np.abs(LayerEncoder(folder, 2, device="cpu").encode(TEXTS) - vectors).max() > 1e-4
        assert len({digest, encoder.spec.digest, LayerEncoder(folder, 2, device="cpu").spec.digest}) == 2
    assert encoder.spec.digest == digest
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", doubled)
    assert np.abs(encoder.encode(TEXTS) - vectors).max() > 1e-3
    assert encoder.spec.digest != digest


def test_spec_own_attention_of_the_same_name_shows(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for factor in (1.0, 2.0, 2.0):
        monkeypatch.setitem(AttentionInterface._global_mapping, "own", partial(sdpa_attention_forward, factor=factor))
        encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
        encoder[0].model.config._attn_implementation = "own"
        digests.append(encoder.spec.digest)
    assert digests[0] != digests[1] == digests[2]


def test_spec_hook_ignores_globals_named_like_its_attributes() -> None:
    scopes = [{"__name__": "typed", "shape": number} for number in (1, 2)]
    for scope in scopes:
        exec("def hook(module, inputs, output):\n    return output.reshape(output.shape)", scope)
    described = [Description(nn.Identity())(scope["hook"]) for scope in scopes]
    assert described[0] == described[1]


def test_spec_instance_with_slots_has_no_address() -> None:
    assert Description(nn.Identity())([Scaling(2.0)]) == Description(nn.Identity())([Scaling(2.0)])


def test_spec_replaced_preprocessing_of_images_shows(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("ViT"), 2, device="cpu")
    before, preprocess = encoder.spec.digest, encoder.processor.preprocess
    encoder.processor.preprocess = lambda *args, **kwargs: preprocess(*args, **kwargs)
    assert encoder.spec.digest != before


def test_spec_changed_code_of_an_installed_class_shows(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder("Llama")
    before = LayerEncoder(folder, 2, device="cpu").spec.digest
    kind = type(LayerEncoder(folder, 2, device="cpu")[0].model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", lambda self, states: states * 2)
    assert LayerEncoder(folder, 2, device="cpu").spec.digest != before


def test_spec_module_in_memory_tensors_and_code_it_calls_show() -> None:
    def digest(offset: float, factor: float) -> str:
        def scaled(states: torch.Tensor) -> torch.Tensor:
            return states * factor

        stack = Stack(lambda: Block(scaled))
        stack.blocks[0].offset = torch.tensor(offset)
        stack.blocks[1].register_buffer("mask", torch.tensor([offset]), persistent=False)
        options: dict[str, Any] = {"blocks": "blocks", "processor": pixels_as(255.0), "device": "cpu"}
        return LayerEncoder.from_module(stack, 2, **options).spec.digest

    digests = [digest(1.0, 1.0), digest(2.0, 1.0), digest(1.0, 2.0)]
    assert len(set(digests)) == 3
    assert digest(1.0, 1.0) == digests[0]


REMOTE = """
from torch import nn
from transformers import BertConfig, BertModel
from .helper import SCALE

class ScaledConfig(BertConfig):
    model_type = "scaled"

class ScaledModel(BertModel):
    config_class = ScaledConfig

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
"""


def test_files_of_a_models_own_code_change_the_digest(tmp_path: Path) -> None:
    digests = []
    for number, scale in enumerate([1, 2, 1]):
        folder = Path(save_tiny("BERT", tmp_path / str(number) / "model"))
        (folder / "scaled.py").write_text(REMOTE)
        (folder / "helper.py").write_text(f"SCALE = {scale}\n")
        classes = {"AutoConfig": "scaled.ScaledConfig", "AutoModel": "scaled.ScaledModel"}
        edit_json(folder / "config.json", model_type="scaled", auto_map=classes)
        digests.append(LayerEncoder(str(folder), 2, device="cpu", trust_remote_code=True).spec.digest)
    assert digests[0] == digests[2] != digests[1]


def test_config_without_defaults_is_digested_as_a_whole() -> None:
    class NeedyConfig(BertConfig):
        def __init__(self, scale: float, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.scale = scale

    settings = [Description(nn.Identity())._config(NeedyConfig(scale)) for scale in (1.0, 2.0)]
    assert settings[0] != settings[1]
