"""Tiny models of every supported family, created in memory, with an input for each.

Norm weights and biases are perturbed so that a norm applied twice, or not at all, is detected.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

DEPTH = 4
WIDTH = 32
VOCAB = 99


@dataclass(frozen=True)
class Family:
    """How to create a tiny model of a family, and its inputs."""

    make: Callable[[], nn.Module]
    modality: str = "text"
    final: tuple[str, ...] = ()  # modules between the last block and `last_hidden_state`


def _text(config_class: Any, **options: Any) -> Any:
    common = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4}
    common |= {"intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
    return config_class(**(common | options))


def _vision(config_class: Any, **options: Any) -> Any:
    common = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "intermediate_size": 64}
    return config_class(**(common | {"image_size": 16, "patch_size": 4} | options))


def _speech(config_class: Any, **options: Any) -> Any:
    common = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "intermediate_size": 64}
    common |= {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    common |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 32}
    return config_class(**(common | {"apply_spec_augment": False} | options))


def _whisper_encoder() -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(
        tf.WhisperConfig(
            d_model=WIDTH, encoder_layers=DEPTH, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20, vocab_size=VOCAB,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, max_target_positions=20,
        )
    )  # fmt: skip


_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
_KV = {"num_key_value_heads": 2}

_CLIP_TEXT = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "intermediate_size": 64}
_CLIP_TEXT |= {
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 3,
    "pad_token_id": 0,
}
_CLIP_IMAGE = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
_CLIP_IMAGE |= {"image_size": 16, "patch_size": 4}

JOINT: dict[str, Callable[[], nn.Module]] = {  # a text and an image tower of different depth and width
    "CLIP": lambda: tf.CLIPModel(tf.CLIPConfig(text_config=_CLIP_TEXT, vision_config=_CLIP_IMAGE, projection_dim=16)),
    "SigLIP": lambda: tf.SiglipModel(
        tf.SiglipConfig(text_config=_CLIP_TEXT, vision_config=_CLIP_IMAGE | {"hidden_size": WIDTH})
    ),
    "AIMv2": lambda: tf.Aimv2Model(
        tf.Aimv2Config(text_config=_CLIP_TEXT, vision_config=_CLIP_IMAGE, projection_dim=16)
    ),
}

_BERT_TEXT = _CLIP_TEXT | {"type_vocab_size": 2}
_SIGLIP2_IMAGE = _CLIP_IMAGE | {"hidden_size": WIDTH, "num_patches": 256, "patch_size": 16}

MORE_JOINT: dict[str, Callable[[], nn.Module]] = {
    "MetaCLIP2": lambda: tf.MetaClip2Model(
        tf.MetaClip2Config(text_config=_CLIP_TEXT, vision_config=_CLIP_IMAGE, projection_dim=16)
    ),
    "SigLIP2": lambda: tf.Siglip2Model(tf.Siglip2Config(text_config=_CLIP_TEXT, vision_config=_SIGLIP2_IMAGE)),
    "AltCLIP": lambda: tf.AltCLIPModel(
        tf.AltCLIPConfig(text_config=_BERT_TEXT | {"project_dim": 16}, vision_config=_CLIP_IMAGE, projection_dim=16)
    ),
    "ChineseCLIP": lambda: tf.ChineseCLIPModel(
        tf.ChineseCLIPConfig(text_config=_BERT_TEXT, vision_config=_CLIP_IMAGE, projection_dim=16)
    ),
    "BLIP": lambda: tf.BlipModel(
        tf.BlipConfig(
            text_config=_BERT_TEXT | {"encoder_hidden_size": 24}, vision_config=_CLIP_IMAGE, projection_dim=16
        )
    ),
    "DualEncoder": lambda: tf.VisionTextDualEncoderModel(
        tf.VisionTextDualEncoderConfig.from_vision_text_configs(
            tf.ViTConfig(**_CLIP_IMAGE), tf.BertConfig(**_BERT_TEXT), projection_dim=16
        )
    ),
    "GroupViT": lambda: tf.GroupViTModel(
        tf.GroupViTConfig(
            text_config=_CLIP_TEXT,
            vision_config={
                "hidden_size": 24, "depths": [1, 1, 1], "num_hidden_layers": 3, "num_attention_heads": 4,
                "image_size": 16, "patch_size": 4, "num_group_tokens": [4, 2, 0], "num_output_groups": [4, 2, 0],
            },
            projection_dim=16,
        )
    ),
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "GPTNeoX": Family(lambda: tf.GPTNeoXModel(_text(tf.GPTNeoXConfig)), final=("final_layer_norm",)),
    "GPTNeoX-sequential": Family(
        lambda: tf.GPTNeoXModel(_text(tf.GPTNeoXConfig, use_parallel_residual=False)), final=("final_layer_norm",)
    ),
    "GPT2": Family(
        lambda: tf.GPT2Model(tf.GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=DEPTH, n_head=4, n_positions=64)),
        final=("ln_f",),
    ),
    "OPT": Family(
        lambda: tf.OPTModel(_text(tf.OPTConfig, ffn_dim=64, word_embed_proj_dim=WIDTH)),
        final=("decoder.final_layer_norm",),
    ),
    "OPT-350m": Family(  # post-norm blocks, and a projection instead of a final norm
        lambda: tf.OPTModel(_text(tf.OPTConfig, ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False)),
        final=("decoder.project_out",),
    ),
    "Llama": Family(lambda: tf.LlamaModel(_text(tf.LlamaConfig, **_KV)), final=("norm",)),
    "Mistral": Family(lambda: tf.MistralModel(_text(tf.MistralConfig, **_KV)), final=("norm",)),
    "Qwen2": Family(lambda: tf.Qwen2Model(_text(tf.Qwen2Config, **_KV)), final=("norm",)),
    "Qwen3": Family(
        lambda: tf.Qwen3Model(_text(tf.Qwen3Config, head_dim=8, use_sliding_window=True, **_KV, **_ALTERNATING)),
        final=("norm",),
    ),
    "Gemma2": Family(
        lambda: tf.Gemma2Model(_text(tf.Gemma2Config, head_dim=8, **_KV, **_ALTERNATING)), final=("norm",)
    ),
    "Phi3": Family(lambda: tf.Phi3Model(_text(tf.Phi3Config, **_KV)), final=("norm",)),
    "Mamba": Family(
        lambda: tf.MambaModel(
            tf.MambaConfig(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=DEPTH, state_size=8)
        ),
        final=("norm_f",),
    ),
    "Mamba2": Family(
        lambda: tf.Mamba2Model(
            tf.Mamba2Config(
                vocab_size=VOCAB,
                hidden_size=WIDTH,
                num_hidden_layers=DEPTH,
                state_size=8,
                num_heads=8,
                head_dim=8,
                n_groups=2,
                chunk_size=8,
            )
        ),
        final=("norm_f",),
    ),
    "BERT": Family(lambda: tf.BertModel(_text(tf.BertConfig))),
    "RoBERTa": Family(lambda: tf.RobertaModel(_text(tf.RobertaConfig))),
    "DistilBERT": Family(
        lambda: tf.DistilBertModel(
            tf.DistilBertConfig(
                vocab_size=VOCAB, dim=WIDTH, n_layers=DEPTH, n_heads=4, hidden_dim=64, max_position_embeddings=64
            )
        )
    ),
    "DeBERTaV2": Family(
        lambda: tf.DebertaV2Model(
            _text(tf.DebertaV2Config, relative_attention=True, pos_att_type="p2c|c2p", norm_rel_ebd="layer_norm")
        )
    ),
    "DeBERTaV2-conv": Family(  # a convolution after the first block, outside of it
        lambda: tf.DebertaV2Model(
            _text(tf.DebertaV2Config, relative_attention=True, pos_att_type="p2c|c2p", conv_kernel_size=3)
        )
    ),
    "ModernBERT": Family(
        lambda: tf.ModernBertModel(_text(tf.ModernBertConfig, global_attn_every_n_layers=3, local_attention=4)),
        final=("final_norm",),
    ),
    "ALBERT": Family(lambda: tf.AlbertModel(_text(tf.AlbertConfig, embedding_size=16))),
    "T5": Family(
        lambda: tf.T5EncoderModel(
            tf.T5Config(vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=DEPTH, num_heads=4)
        ),
        final=("encoder.final_layer_norm",),
    ),
    "CLIPText": Family(
        lambda: tf.CLIPTextModel(_text(tf.CLIPTextConfig, eos_token_id=2, bos_token_id=1)), final=("final_layer_norm",)
    ),
    "ViT": Family(lambda: tf.ViTModel(_vision(tf.ViTConfig)), "image", ("layernorm",)),
    "ViTMAE": Family(
        lambda: tf.ViTMAEModel(_vision(tf.ViTMAEConfig, mask_ratio=0.0, decoder_num_hidden_layers=1)),
        "image",
        ("layernorm",),
    ),
    "BEiT": Family(lambda: tf.BeitModel(_vision(tf.BeitConfig, use_relative_position_bias=True)), "image"),
    "DINOv2": Family(lambda: tf.Dinov2Model(_vision(tf.Dinov2Config)), "image", ("layernorm",)),
    "CLIPVision": Family(lambda: tf.CLIPVisionModel(_vision(tf.CLIPVisionConfig)), "image"),
    "SigLIP": Family(lambda: tf.SiglipVisionModel(_vision(tf.SiglipVisionConfig)), "image", ("post_layernorm",)),
    "AIMv2": Family(lambda: tf.Aimv2VisionModel(_vision(tf.Aimv2VisionConfig)), "image", ("rms_norm",)),
    "ImageGPT": Family(
        lambda: tf.ImageGPTModel(
            tf.ImageGPTConfig(vocab_size=VOCAB, n_embd=WIDTH, n_layer=DEPTH, n_head=4, n_positions=64)
        ),
        "pixels",
        ("ln_f",),
    ),
    "Wav2Vec2": Family(lambda: tf.Wav2Vec2Model(_speech(tf.Wav2Vec2Config)), "audio"),
    "Wav2Vec2-stable": Family(
        lambda: tf.Wav2Vec2Model(_speech(tf.Wav2Vec2Config, do_stable_layer_norm=True, feat_extract_norm="layer")),
        "audio",
        ("encoder.layer_norm",),
    ),
    "HuBERT": Family(lambda: tf.HubertModel(_speech(tf.HubertConfig)), "audio"),
    "WavLM": Family(lambda: tf.WavLMModel(_speech(tf.WavLMConfig, num_buckets=8, max_bucket_distance=16)), "audio"),
    "Whisper": Family(_whisper_encoder, "mel", ("layer_norm",)),
}


def tiny(name: str, seed: int = 0) -> nn.Module:
    """Return the named family's tiny model in eval mode, with perturbed norms and biases."""
    return _create(FAMILIES[name].make, seed)


def tiny_joint(name: str, seed: int = 0) -> nn.Module:
    """Return the named joint model in eval mode, with perturbed norms and biases."""
    return _create((JOINT | MORE_JOINT)[name], seed)


def _create(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def inputs(name: str) -> dict[str, Tensor]:
    """Return a batch for the forward pass of the named family."""
    generator = torch.Generator().manual_seed(1)
    match FAMILIES[name].modality:
        case "text":
            ids = torch.randint(5, VOCAB, (2, 9), generator=generator)
            ids[:, -1] = 2
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        case "pixels":
            return {"input_ids": torch.randint(0, VOCAB - 1, (2, 16), generator=generator)}
        case "image" if name == "ViTMAE":  # shuffles its patches by noise even without masking
            noise = torch.arange(16.0).expand(2, 16)
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "noise": noise}
        case "image":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
        case "audio":
            return {"input_values": torch.randn(2, 400, generator=generator)}
        case _:
            return {"input_features": torch.randn(2, 8, 40, generator=generator)}
