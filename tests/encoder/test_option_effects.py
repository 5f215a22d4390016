"""Every option of LayerEncoder: its effect, computed independently, and whether it changes the spec."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import MAX_PIXELS
from midlayer_encoders.errors import OptionError
from tests.support.families import tiny
from tests.support.tiny_folders import TEXTS, save_tiny, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # raised once on a CPU without bfloat16

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
PROMPTS = {"prompts": {"ask": "q: ", "other": "a longer one: "}, "default_prompt_name": "ask"}
CENTER = [f"{text} {number}" for number in range(3) for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a tiny Llama whose tokenizer has a chat template, with two adapters beside it."""
    from peft import LoraConfig, get_peft_model

    path = tmp_path_factory.mktemp("options")
    chat_tokenizer = tokenizer()
    chat_tokenizer.chat_template = TEMPLATE
    save_tiny("Llama", path / "model")
    chat_tokenizer.save_pretrained(path / "model")
    for seed in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            lora = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
            get_peft_model(tiny("Llama"), lora).save_pretrained(path / f"adapter-{seed}")  # type: ignore[arg-type]
    return str(path / "model")


def make_encoder(folder: str, **options: Any) -> LayerEncoder:
    adapters = [str(Path(folder).parent / name) for name in options.pop("adapters", ())]
    return LayerEncoder(folder, **{"layer": 2, "device": "cpu", "adapters": adapters} | options)


def by_hand(
    texts: Sequence[str], model: Any = None, *, length: int = 64, mask: bool = True, dtype: torch.dtype = torch.float32
) -> np.ndarray:
    """Return the mean state of each text after two blocks and the final norm, one text at a time, unpadded."""
    model = (tiny("Llama") if model is None else model).to(dtype)
    del model.layers[2:]
    rows = []
    for text in texts:
        ids = torch.tensor([tokenizer().convert_tokens_to_ids(list(text))[:length]])
        mask_kwargs = {} if mask else {"attention_mask": torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=dtype)}
        with torch.no_grad():
            rows.append(model(input_ids=ids, **mask_kwargs).last_hidden_state[0].float().mean(0))
    return torch.stack(rows).numpy()


def adapted(folder: str, names: Sequence[str]) -> nn.Module:
    """Return the full model with the products of the adapters' matrices added to its weights."""
    model = tiny("Llama")
    for name in names:
        adapter_weights = load_file(Path(folder).parent / name / "adapter_model.safetensors")
        for key, down in adapter_weights.items():
            if ".lora_A." in key:
                path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                with torch.no_grad():
                    model.get_submodule(path).weight += (
                        3.0 * adapter_weights[key.replace("lora_A", "lora_B")] @ down
                    )  # 12 / 4
    return model


# --- effects ---------------------------------------------------------------------------------------------------------


EFFECTS: dict[str, tuple[dict[str, Any], Callable[[str], np.ndarray]]] = {
    "none": ({}, lambda _: by_hand(TEXTS)),
    "max_length": ({"max_length": 8}, lambda _: by_hand(TEXTS, length=8)),
    "truncate_dim": ({"truncate_dim": 5}, lambda _: by_hand(TEXTS)[:, :5]),
    "prompts": (PROMPTS, lambda _: by_hand(["q: " + text for text in TEXTS])),
    "prompts and max_length": (PROMPTS | {"max_length": 8}, lambda _: by_hand(["q: " + t for t in TEXTS], length=8)),
    "prompts without a default": ({"prompts": PROMPTS["prompts"]}, lambda _: by_hand(TEXTS)),
    "bidirectional": ({"bidirectional": True}, lambda _: by_hand(TEXTS, mask=False)),
    "one adapter": ({"adapters": ["adapter-1"]}, lambda folder: by_hand(TEXTS, adapted(folder, ["adapter-1"]))),
    "two adapters": (
        {"adapters": ["adapter-0", "adapter-1"]},
        lambda folder: by_hand(TEXTS, adapted(folder, ["adapter-0", "adapter-1"])),
    ),
    "chat_template": ({"chat_template": True}, lambda _: by_hand(["<user>" + text for text in TEXTS])),
    "center": ({"center": CENTER}, lambda _: by_hand(TEXTS) - by_hand(CENTER).mean(axis=0)),
    "center with a repeated text": (
        {"center": CENTER + CENTER[:1] * 200},
        lambda _: by_hand(TEXTS) - by_hand(CENTER).mean(axis=0),
    ),
    "center and truncate_dim": (
        {"center": CENTER, "truncate_dim": 5},
        lambda _: (by_hand(TEXTS) - by_hand(CENTER).mean(axis=0))[:, :5],
    ),
    "center and prompts": (
        {"center": CENTER} | PROMPTS,
        lambda _: by_hand(["q: " + t for t in TEXTS]) - by_hand(["q: " + t for t in CENTER]).mean(axis=0),
    ),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effect_of_each_option_matches_the_computation_by_hand(name: str, folder: str) -> None:
    options, compute_expected = EFFECTS[name]
    expected = compute_expected(folder)
    np.testing.assert_allclose(make_encoder(folder, **options).encode(TEXTS), expected, atol=2e-5, rtol=1e-4)
    if expected.shape == (6, 32) and name not in ("none", "prompts without a default"):
        assert np.abs(expected - by_hand(TEXTS)).max() > 1e-2  # the option has an effect


@pytest.mark.parametrize(("requested", "dtype"), [("bfloat16", torch.bfloat16), (torch.float16, torch.float16)])
def test_weights_and_states_have_the_requested_precision(requested: Any, dtype: torch.dtype, folder: str) -> None:
    encoder = make_encoder(folder, dtype=requested)
    assert {parameter.dtype for parameter in encoder.parameters()} == {dtype}
    expected = by_hand(TEXTS, dtype=dtype)
    np.testing.assert_allclose(encoder.encode(TEXTS, batch_size=1).astype(np.float32), expected, atol=0.03)
    np.testing.assert_allclose(make_encoder(folder, dtype="float64").encode(TEXTS), by_hand(TEXTS), atol=1e-5)


def test_half_precision_files_stay_so_unless_another_dtype_is_requested(tmp_path: Path) -> None:
    tiny("Llama").to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[operator]
    tokenizer().save_pretrained(tmp_path)
    for norm in ("final", "none"):
        assert LayerEncoder(str(tmp_path), 2, norm=norm, device="cpu").dtype is torch.bfloat16  # type: ignore[arg-type]
    assert LayerEncoder(str(tmp_path), 2, dtype="float32", device="cpu").dtype is torch.float32


def test_requested_prompt_is_used(folder: str) -> None:
    encoder = make_encoder(folder, **PROMPTS)
    expected = by_hand(["a longer one: " + text for text in TEXTS])
    np.testing.assert_allclose(encoder.encode(TEXTS, prompt_name="other"), expected, atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(encoder.encode(TEXTS, prompt="a longer one: "), expected, atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(encoder.encode(TEXTS, prompt=""), by_hand(TEXTS), atol=2e-5, rtol=1e-4)


# --- identity --------------------------------------------------------------------------------------------------------

DIFFERENT: list[dict[str, Any]] = [
    {"layer": 3}, {"norm": "none"}, {"dtype": "bfloat16"}, {"dtype": torch.float64}, {"max_length": 8}, PROMPTS,
    PROMPTS | {"default_prompt_name": "other"}, PROMPTS | {"prompts": {"ask": "r: ", "other": "a longer one: "}}, {"bidirectional": True}, {"adapters": ["adapter-0"]},
    {"adapters": ["adapter-1"]}, {"chat_template": True}, {"truncate_dim": 8}, {"center": CENTER},
    {"center": CENTER[1:]}, {"template": 'say "{text}":'}, {"template": "say {text}"}, {"skip_first": 1},
    {"recipe": "one-word"}, {"template": 'say "{text}":', "template_tokens": False}, {"normalize": True},
    *({"pooling": mode} for mode in ("last", "cls", "max", "weightedmean")),
]  # fmt: skip
SAME: list[dict[str, Any]] = [
    {"layer": -3}, {"layer": 0.5}, {"norm": "final"}, {"pooling": "mean"}, {"dtype": "float32"}, {"max_length": 64},
    {"adapters": []}, {"chat_template": False}, {"truncate_dim": None}, {"trust_remote_code": True},
    {"max_pixels": MAX_PIXELS}, {"device": None, "device_map": "cpu"}, {"bidirectional": False}, {"center": None},
    {"prompts": None, "default_prompt_name": None}, {"recipe": "plain"}, {"template": None}, {"skip_first": 0}, {"skip_special": False},
    {"template_tokens": True}, {"normalize": False},
]  # fmt: skip


def result_location(encoder: LayerEncoder) -> tuple[str, str]:
    """Return the name and revision under which mteb files the encoder's results."""
    return str(encoder.model_card_data.model_name), str(encoder.model_card_data.base_model_revision)


@pytest.mark.slow
def test_option_changes_the_spec_exactly_when_it_changes_the_vectors(folder: str) -> None:
    base = make_encoder(folder)
    vectors, digests = base.encode(TEXTS), [base.spec.digest]
    locations = [result_location(base)]
    for options in DIFFERENT:
        encoder = make_encoder(folder, **options)
        assert not np.array_equal(encoder.encode(TEXTS), vectors), options
        assert encoder.spec.digest not in digests, options
        assert result_location(encoder) not in locations, options
        digests.append(encoder.spec.digest)
        locations.append(result_location(encoder))


def test_options_set_to_their_defaults_give_the_same_encoder(folder: str) -> None:
    check_same(folder, [*SAME[:4], {name: value for options in SAME[4:] for name, value in options.items()}])


@pytest.mark.slow
def test_each_option_set_to_its_default_gives_the_same_encoder(folder: str) -> None:
    check_same(folder, SAME)


def check_same(folder: str, option_sets: Sequence[dict[str, Any]]) -> None:
    base = make_encoder(folder)
    vectors, location = base.encode(TEXTS), result_location(base)
    for options in option_sets:
        encoder = make_encoder(folder, **options)
        np.testing.assert_array_equal(encoder.encode(TEXTS), vectors, err_msg=str(options))
        assert encoder.spec == base.spec, options
        assert result_location(encoder) == location, options


def test_every_option_is_covered_here_or_in_its_own_file() -> None:
    covered = {name for options in [*DIFFERENT, *SAME] for name in options}
    elsewhere = {"model", "tower", "revision", "gguf_file"}  # files: test_files, test_joint
    elsewhere |= {"texts", "labels"}  # test_choosing
    elsewhere |= {"dense"}  # test_saved_folder
    elsewhere |= {"quantization"}
    elsewhere |= {"join"}  # tests/recipes/test_word_echo.py
    elsewhere |= {"model_name_or_path", "similarity_fn_name", "model_kwargs", "processor_kwargs", "config_kwargs"}
    elsewhere |= {"attn_implementation", "cache_folder", "token", "local_files_only"}  # test_drop_in
    assert covered | elsewhere == set(inspect.signature(LayerEncoder).parameters)


@pytest.mark.parametrize("options", [{"processor": len}, {"blocks": "layers"}, {"final": ("norm",)}])
def test_module_options_are_refused_for_files(options: dict[str, Any], folder: str) -> None:
    with pytest.raises(OptionError, match=f"`{next(iter(options))}` is not an option of LayerEncoder"):
        make_encoder(folder, **options)
