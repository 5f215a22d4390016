"""Assumptions of `models/transformers_internals.py` about transformers: each test fails when a release changes one."""

import pickle

import pytest
import torch
import transformers as tf
from transformers.utils import output_capturing

from midlayer_encoders.models import transformers_internals as internals
from tests.support.families import DEPTH, FAMILIES, inputs, tiny

_BLOCKS = {"GPTNeoX": "GPTNeoXLayer", "Llama": "LlamaDecoderLayer", "BERT": "BertLayer", "ViT": "ViTLayer"}


@pytest.mark.parametrize("name", _BLOCKS)
def test_unsplit_class_is_the_block(name: str) -> None:
    assert _BLOCKS[name] in internals.unsplit_classes(tiny(name))


def test_plain_module_has_no_unsplit_class_and_is_not_pretrained() -> None:
    assert internals.unsplit_classes(torch.nn.Linear(2, 2)) == set()
    assert not internals.is_pretrained(torch.nn.Linear(2, 2))


def test_model_inside_another_is_found_by_its_prefix() -> None:
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
def test_state_mask_counts_the_states_of_each_waveform(name: str) -> None:
    model = tiny(name)
    assert internals.has_mask_of_states(model)
    mask = torch.zeros(2, 400, dtype=torch.int32)
    mask[0, :], mask[1, :105] = 1, 1

    def num_states(samples: int) -> int:  # of a single waveform without padding
        with torch.no_grad():
            return model(input_values=torch.randn(1, samples)).last_hidden_state.shape[1]

    state_mask = internals.mask_of_states(model, num_states(400), mask)
    assert state_mask.dtype == torch.bool
    assert state_mask.sum(dim=1).tolist() == [num_states(400), num_states(105)]
    assert state_mask[1, : num_states(105)].all()


def test_a_text_model_has_no_mask_of_states() -> None:
    assert not internals.has_mask_of_states(tiny("BERT"))


@pytest.mark.parametrize("model_type", internals.ENCODERS)
def test_standalone_encoder_is_a_model_of_its_family(model_type: str) -> None:
    model_class = internals.encoder_part(tf.AutoConfig.for_model(model_type)).kind
    assert issubclass(model_class, tf.PreTrainedModel)
    assert model_class.config_class.model_type == model_type


def test_family_without_a_decoder_has_no_standalone_encoder() -> None:
    assert internals.encoder_part(tf.BertConfig()) is None


@pytest.mark.parametrize("name", ["BEiT", "DINOv2"])
def test_backbone_stages_are_recomputed_for_another_depth(name: str) -> None:
    config = tiny(name).config
    fields = config.to_dict()
    assert set(internals.BACKBONE_STAGES) & {*fields, *vars(config)}
    remaining = {key: value for key, value in fields.items() if key not in internals.BACKBONE_STAGES}
    new_config = type(config).from_dict({**remaining, "num_hidden_layers": DEPTH - 2})
    assert len(new_config.stage_names) == DEPTH - 2 + 1
    assert new_config.out_indices == [DEPTH - 2]


@pytest.mark.parametrize("name", ["Llama", "BERT", "ViT"])
def test_model_without_recording_hooks_can_be_pickled_and_records_again(name: str) -> None:
    model = tiny(name)
    expected = model(**inputs(name), output_hidden_states=True).hidden_states
    with pytest.raises(AttributeError, match="output_capturing_hook"):
        pickle.dumps(model)
    internals.drop_recording_hooks(model)
    for model_or_copy in (model, pickle.loads(pickle.dumps(tiny(name)))):
        states = model_or_copy(**inputs(name), output_hidden_states=True).hidden_states
        assert len(states) == len(expected) == DEPTH + 1
        for actual_states, expected_states in zip(states, expected, strict=True):
            torch.testing.assert_close(actual_states, expected_states)


def test_models_without_weights_are_built_once_for_equal_configs() -> None:
    class OwnConfig(tf.LlamaConfig):
        """A config whose code may change."""

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    model = internals.empty_model(tf.LlamaModel, tf.LlamaConfig(**sizes, num_hidden_layers=2))
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert internals.empty_model(tf.LlamaModel, tf.LlamaConfig(**sizes, num_hidden_layers=2)) is model
    assert len(internals.empty_model(tf.LlamaModel, tf.LlamaConfig(**sizes, num_hidden_layers=1)).layers) == 1
    own = OwnConfig(**sizes, num_hidden_layers=2)
    assert internals.empty_model(tf.LlamaModel, own) is not internals.empty_model(tf.LlamaModel, own)


def test_class_is_registered_as_recording_when_a_model_is_created() -> None:
    model = tiny("BERT")
    output_capturing._CAN_RECORD_REGISTRY.pop(str(type(model)))  # as in a process without such a model
    assert model(**inputs("BERT"), output_hidden_states=True).hidden_states is None
    internals.register_recordable_outputs(model)
    assert len(model(**inputs("BERT"), output_hidden_states=True).hidden_states) == DEPTH + 1


def test_loading_is_silent_and_returns_its_report(
    tmp_path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_model = tiny("Llama")
    full_model.save_pretrained(tmp_path)
    small = type(full_model.config).from_dict({**full_model.config.to_dict(), "num_hidden_layers": 1})
    monkeypatch.setattr(tf.logging.get_logger("transformers"), "propagate", True)
    type(full_model).from_pretrained(tmp_path, config=small)
    assert "Loading weights" in capfd.readouterr().err
    assert "UNEXPECTED" in caplog.text
    caplog.clear()
    loaded, info = internals.read_weights(type(full_model), str(tmp_path), config=small)
    assert (*capfd.readouterr(), caplog.text) == ("", "", "")
    assert type(loaded) is type(full_model)
    assert not info["missing_keys"]
    assert info["unexpected_keys"]
    torch.testing.assert_close(loaded.layers[0].state_dict(), full_model.layers[0].state_dict())


def test_prefix_locates_the_model_in_the_files(tmp_path) -> None:
    full_model = tf.WhisperModel(FAMILIES["Whisper"].make().config)
    full_model.save_pretrained(tmp_path)
    encoder_class = internals.encoder_part(full_model.config).kind
    loaded, info = internals.read_weights(encoder_class, str(tmp_path), prefix="encoder", config=full_model.config)
    assert not info["missing_keys"]
    torch.testing.assert_close(loaded.state_dict(), full_model.encoder.state_dict())
    assert encoder_class.base_model_prefix == loaded.base_model_prefix != "encoder"
