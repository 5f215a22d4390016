"""What `models/transformers_internals.py` takes for granted of transformers: each test fails when a release changes it."""

from __future__ import annotations

import pickle

import pytest
import torch
import transformers as tf
from transformers.utils import output_capturing

from midlayer_encoders.models import transformers_internals as internals
from tests.families import DEPTH, FAMILIES, inputs, tiny

_BLOCKS = {
    "GPTNeoX": "GPTNeoXLayer",
    "Llama": "LlamaDecoderLayer",
    "BERT": "BertLayer",
    "ViT": "ViTLayer",
}


@pytest.mark.parametrize("name", _BLOCKS)
def test_the_class_that_is_not_split_is_the_block(name: str) -> None:
    assert _BLOCKS[name] in internals.unsplit_classes(tiny(name))


def test_a_plain_module_names_no_class_and_is_no_model_of_transformers() -> None:
    assert internals.unsplit_classes(torch.nn.Linear(2, 2)) == set()
    assert not internals.is_pretrained(torch.nn.Linear(2, 2))


def test_a_model_inside_another_is_known_by_its_prefix() -> None:
    model = tf.LlamaForCausalLM(tiny("Llama").config)
    assert [name for name, module in model.named_modules() if internals.is_pretrained(module)] == ["", "model"]


@pytest.mark.parametrize("removed", [True, False])
def test_opt_has_its_final_norm_unless_the_private_setting_removes_it(removed: bool) -> None:
    config = tf.OPTConfig(
        vocab_size=9, hidden_size=8, word_embed_proj_dim=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8,
        _remove_final_layer_norm=removed,
    )  # fmt: skip
    assert internals.opt_lacks_final_norm(config) is removed
    assert (tf.OPTModel(config).decoder.final_layer_norm is None) is removed


@pytest.mark.parametrize("name", ["Wav2Vec2", "HuBERT", "WavLM"])
def test_the_mask_of_states_counts_what_the_convolutions_leave_of_each_waveform(name: str) -> None:
    model = tiny(name)
    assert internals.has_mask_of_states(model)
    mask = torch.zeros(2, 400, dtype=torch.int32)
    mask[0, :], mask[1, :105] = 1, 1

    def states(samples: int) -> int:  # of one waveform alone, without padding
        with torch.no_grad():
            return model(input_values=torch.randn(1, samples)).last_hidden_state.shape[1]

    made = internals.mask_of_states(model, states(400), mask)
    assert made.dtype == torch.bool
    assert made.sum(dim=1).tolist() == [states(400), states(105)]
    assert made[1, : states(105)].all()


def test_a_text_model_has_no_mask_of_states() -> None:
    assert not internals.has_mask_of_states(tiny("BERT"))


@pytest.mark.parametrize("model_type", internals.ENCODERS)
def test_the_encoder_alone_is_a_model_of_its_family(model_type: str) -> None:
    kind = internals.encoder_part(tf.AutoConfig.for_model(model_type)).kind
    assert issubclass(kind, tf.PreTrainedModel)
    assert kind.config_class.model_type == model_type


def test_a_family_without_a_decoder_has_no_encoder_alone() -> None:
    assert internals.encoder_part(tf.BertConfig()) is None


@pytest.mark.parametrize("name", ["BEiT", "DINOv2"])
def test_stages_of_a_backbone_are_made_anew_for_another_depth(name: str) -> None:
    config = tiny(name).config
    fields = config.to_dict()
    assert set(internals.BACKBONE_STAGES) & {*fields, *vars(config)}
    left = {key: value for key, value in fields.items() if key not in internals.BACKBONE_STAGES}
    made = type(config).from_dict({**left, "num_hidden_layers": DEPTH - 2})
    assert len(made.stage_names) == DEPTH - 2 + 1
    assert made.out_indices == [DEPTH - 2]


@pytest.mark.parametrize("name", ["Llama", "BERT", "ViT"])
def test_without_its_recording_hooks_a_model_can_be_pickled_and_records_again(name: str) -> None:
    model = tiny(name)
    expected = model(**inputs(name), output_hidden_states=True).hidden_states
    with pytest.raises(AttributeError, match="output_capturing_hook"):
        pickle.dumps(model)
    internals.drop_recording_hooks(model)
    for again in (model, pickle.loads(pickle.dumps(tiny(name)))):
        found = again(**inputs(name), output_hidden_states=True).hidden_states
        assert len(found) == len(expected) == DEPTH + 1
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_a_class_is_registered_as_recording_when_a_model_of_it_is_made() -> None:
    model = tiny("BERT")
    output_capturing._CAN_RECORD_REGISTRY.pop(str(type(model)))  # as in a process that made none
    assert model(**inputs("BERT"), output_hidden_states=True).hidden_states is None
    internals.register_recordable_outputs(model)
    assert len(model(**inputs("BERT"), output_hidden_states=True).hidden_states) == DEPTH + 1


def test_weights_are_read_without_a_word_about_those_that_are_expected(
    tmp_path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny("Llama")
    whole.save_pretrained(tmp_path)
    small = type(whole.config).from_dict({**whole.config.to_dict(), "num_hidden_layers": 1})
    monkeypatch.setattr(tf.logging.get_logger("transformers"), "propagate", True)
    for patterns, words in (([r"layers\.[1-9]"], False), ([], True)):
        caplog.clear()
        loaded, told = internals.read_weights(type(whole), str(tmp_path), unexpected=patterns, config=small)
        assert type(loaded) is type(whole)
        assert not told["missing_keys"]
        assert ("UNEXPECTED" in caplog.text) is words
        assert bool(told["unexpected_keys"]) is words
    torch.testing.assert_close(loaded.layers[0].state_dict(), whole.layers[0].state_dict())


def test_a_prefix_says_where_the_files_keep_the_model(tmp_path) -> None:
    whole = tf.WhisperModel(FAMILIES["Whisper"].make().config)
    whole.save_pretrained(tmp_path)
    kind = internals.encoder_part(whole.config).kind
    loaded, told = internals.read_weights(
        kind, str(tmp_path), unexpected=["^decoder"], prefix="encoder", config=whole.config
    )
    assert not told["missing_keys"]
    torch.testing.assert_close(loaded.state_dict(), whole.encoder.state_dict())
    assert kind.base_model_prefix == loaded.base_model_prefix != "encoder"
