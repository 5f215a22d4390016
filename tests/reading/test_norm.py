"""The final norm of any layer matches the operations of the model after its last block."""

import pytest
import torch
import transformers as tf

from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.capture import final_norm


@pytest.mark.parametrize("width", [32, 16])
def test_every_module_after_the_last_block_is_applied(width: int) -> None:
    """If embeddings and blocks have different widths, a projection follows OPT's norm."""
    torch.manual_seed(0)
    config = tf.OPTConfig(
        vocab_size=50, hidden_size=32, word_embed_proj_dim=width, ffn_dim=64, num_hidden_layers=3, num_attention_heads=4
    )
    model = tf.OPTModel(config).eval()
    recorded: list[torch.Tensor] = []
    model.decoder.layers[-1].register_forward_hook(
        lambda _m, _a, out: recorded.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        expected = model(torch.arange(4, 12)[None]).last_hidden_state
        anatomy = find_anatomy(model)
        assert len(anatomy.final) == (1 if width == 32 else 2)
        torch.testing.assert_close(final_norm(model, anatomy, "final")(recorded[0]), expected)
        assert final_norm(model, anatomy, "none")(recorded[0]) is recorded[0]
