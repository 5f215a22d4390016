"""Each option of an encoder and each part of its processor, changed alone, gives another digest."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as tf
from tokenizers import normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import nn

from midlayer_encoders import EncoderOptions, LayerEncoder
from midlayer_encoders.encoder.description import Description, processors, vocabulary
from tests.support.tiny_folders import TEXTS, Folder, joint_image_processor, tokenizer

#: Option, its other value, and the options that both encoders have.
CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    ("norm", "none", {}),
    ("pooling", "last", {}),
    ("dtype", "float64", {}),
    ("max_length", 8, {}),
    ("prompts", {"a": "x: "}, {}),
    ("default_prompt_name", "b", {"prompts": {"a": "x: ", "b": "y: "}, "default_prompt_name": "a"}),
    ("bidirectional", True, {}),
    ("truncate_dim", 4, {}),
    ("center", [f"{text} {number}" for number in range(3) for text in TEXTS], {}),
    ("recipe", "echo", {}),
    ("template", 'of "{text}" is:', {}),
    ("skip_first", 1, {}),
    ("skip_special", True, {}),
    ("template_tokens", False, {"template": 'of "{text}" is:'}),
    ("join", "text", {"template": 'of "{text}" is{read}: "{text}"'}),
    ("normalize", True, {}),
    ("similarity_fn_name", "dot", {}),
    ("model_kwargs", {"attn_implementation": "eager"}, {}),
    ("processor_kwargs", {"truncation_side": "left"}, {}),
    ("config_kwargs", {"rms_norm_eps": 0.5}, {}),
    ("attn_implementation", "eager", {}),
]
#: Options that are read from the encoder when the spec is made, changed there because files would need more.
READ_BY_THE_SPEC = {"revision": "step1", "adapters": ("a/b",), "chat_template": True, "tower": "text"}
WITHOUT_EFFECT: dict[str, Any] = {
    "trust_remote_code": True, "cache_folder": "elsewhere", "token": "secret", "local_files_only": True, "dense": "keep",
}  # fmt: skip
OF_IMAGES: dict[str, Any] = {"max_pixels": 999_999}
OF_THE_DEVICE = {"device", "device_map", "quantization"}  # weights and dtype have their own digests
OF_A_FILE = {"gguf_file"}


def digest(folder: str, **options: Any) -> str:
    return LayerEncoder(folder, 2, device="cpu", **options).spec.digest


@pytest.mark.parametrize(("option", "value", "base"), CHANGES, ids=[option for option, _, _ in CHANGES])
def test_option_changed_alone_changes_the_digest(
    option: str, value: Any, base: dict[str, Any], tiny_folder: Folder
) -> None:
    assert digest(tiny_folder("Llama"), **base) != digest(tiny_folder("Llama"), **base | {option: value})


@pytest.mark.parametrize("option", READ_BY_THE_SPEC)
def test_option_of_a_loaded_encoder_is_in_its_spec(option: str, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    before = encoder.spec.digest
    object.__setattr__(encoder, "options", replace(encoder.options, **{option: READ_BY_THE_SPEC[option]}))
    assert encoder.spec.digest != before


@pytest.mark.parametrize(("family", "options"), [("Llama", WITHOUT_EFFECT), ("ViT", OF_IMAGES)])
def test_options_that_change_no_vector_leave_the_digest(
    family: str, options: dict[str, Any], tiny_folder: Folder
) -> None:
    assert digest(tiny_folder(family), **options) == digest(tiny_folder(family))


def test_every_option_is_in_one_of_these_tests() -> None:
    groups = [{option for option, _, _ in CHANGES}, READ_BY_THE_SPEC, WITHOUT_EFFECT, OF_IMAGES]
    groups += [OF_THE_DEVICE, OF_A_FILE]
    assert sorted(option for group in groups for option in group) == sorted(x.name for x in fields(EncoderOptions))


# --- processors ------------------------------------------------------------------------------------------------------


def state(processor: Any) -> str:
    parts: Any = processors([SimpleNamespace(processor=processor)])
    describe = Description(nn.Identity())
    return json.dumps([[describe.processor(part), describe(vocabulary(part))] for part in parts], sort_keys=True)


def joint() -> Any:
    return tf.CLIPProcessor(joint_image_processor(), tokenizer())


TOKENIZER: dict[str, tuple[str, Any]] = {
    "model_max_length": ("model_max_length", 9),
    "truncation_side": ("truncation_side", "left"),
    "padding_side": ("padding_side", "left"),
    "special_tokens_map": ("pad_token", "[EOS]"),
    "model_input_names": ("model_input_names", ["input_ids"]),
    "chat_template": ("chat_template", "{{ messages }}"),
    "split_special_tokens": ("split_special_tokens", True),
}


@pytest.mark.parametrize("setting", TOKENIZER)
@pytest.mark.parametrize("make", [tokenizer, joint])
def test_setting_of_a_tokenizer_changes_the_state(setting: str, make: Callable[[], Any]) -> None:
    before, after = make(), make()
    name, value = TOKENIZER[setting]
    setattr(getattr(after, "tokenizer", after), name, value)
    assert state(before) == state(make())
    assert state(before) != state(after)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", normalizers.Lowercase()),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("post_processor", TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 3)])),
    ],
)
def test_step_of_a_tokenizer_changes_the_state(part: str, value: Any) -> None:
    changed = tokenizer()
    setattr(changed.backend_tokenizer, part, value)
    assert state(changed) != state(tokenizer())


def settings_of(processor: Any) -> Iterator[str]:
    """Yield the settings that the processor would save, without the name of its class."""
    yield from (name for name in processor.to_dict() if name in vars(processor) and not name.endswith("_type"))


def other(value: Any) -> Any:
    return not value if isinstance(value, bool) else 7 if isinstance(value, int | float | None) else f"{value} changed"


@pytest.mark.parametrize("make", [joint_image_processor, tf.Wav2Vec2FeatureExtractor])
def test_every_saved_setting_of_a_processor_changes_the_state(make: Callable[[], Any]) -> None:
    names = list(settings_of(make()))
    assert len(names) > 5
    for holder, part in ((lambda processor: processor, make), (lambda processor: processor.image_processor, joint)):
        for name in settings_of(holder(part())):
            changed = part()
            setattr(holder(changed), name, other(getattr(holder(changed), name)))
            assert state(changed) != state(part()), name


@pytest.mark.parametrize("part", ["chat_template", "class", "image_processor", "tokenizer"])
def test_part_of_a_joint_processor_changes_the_state(part: str) -> None:
    changed = joint()
    if part == "chat_template":
        changed.chat_template = "{{ messages }}"
    elif part == "class":
        changed.__class__ = type("OwnProcessor", (tf.CLIPProcessor,), {})
    elif part == "tokenizer":
        changed.tokenizer.model_max_length = 9
    else:
        changed.image_processor.image_mean = [0.1, 0.5, 0.9]
    assert state(changed) != state(joint())
    assert set(joint().get_attributes()) | {"chat_template", "class"} == {
        "chat_template", "class", "image_processor", "tokenizer",
    }  # fmt: skip
