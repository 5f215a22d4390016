"""Models of proteins and DNA: every layer of ESM-2, ESM-C and k-mer models without special tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError
from tests.docs.desk import save_esm
from tests.support.pooled import pooled

DEPTH = 3
PROTEINS = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHMLEDPVDAFKRLLE", "ACDEF", "W"]
DNA = ["ACGTACGTAC", "TTTACGGGAC", "ACGT"]
EXACT = {"atol": 2e-5, "rtol": 1e-4}


def check_layers(folder: str, sequences: list[str], special: set[int], *, norm: str | None) -> None:
    """Compare every layer with the hidden states of the uncut model, sequence by sequence."""
    model = tf.AutoModel.from_pretrained(folder, **({"add_pooling_layer": False} if norm != "norm" else {})).eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    whole = LayerEncoder(folder, -1, pooling="mean+skip-special", device="cpu")
    expected = np.zeros((DEPTH + 1, len(sequences), 16), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        features = tokenizer([sequence], return_tensors="pt")
        with torch.no_grad():
            output = model(**features, output_hidden_states=True)
            for layer, states in enumerate(output.hidden_states):
                normed = model.get_submodule(norm)(states) if norm and layer < DEPTH else states
                kept = [int(token) not in special for token in features["input_ids"][0]]
                expected[layer, row] = pooled(normed[0][torch.tensor(kept)], "mean").numpy()
    np.testing.assert_allclose(whole.encode_layers(sequences), expected, **EXACT)
    for layer in range(DEPTH + 1):
        encoder = LayerEncoder(folder, layer, pooling="mean+skip-special", device="cpu")
        for batch_size in (1, 4):
            np.testing.assert_allclose(encoder.encode(sequences, batch_size=batch_size), expected[layer], **EXACT)


def test_esm2_is_exact_at_every_layer(tmp_path: Path) -> None:
    folder = save_esm(tmp_path, num_hidden_layers=DEPTH)
    check_layers(folder, PROTEINS, {0, 2}, norm="encoder.emb_layer_norm_after")


def test_dna_in_words_of_three_bases(tmp_path: Path) -> None:
    """Nucleotide Transformer is an ESM whose tokens are k-mers, without a token at the end."""
    bases = "ACGT"
    words = [*bases, *(a + b + c for a in bases for b in bases for c in bases)]
    folder = save_esm(tmp_path, words, num_hidden_layers=DEPTH, eos=None)
    check_layers(folder, DNA, {0}, norm="encoder.emb_layer_norm_after")


@pytest.mark.long
@pytest.mark.skipif(not hasattr(tf, "EsmcConfig"), reason="a later release of transformers has ESM-C")
def test_esmc_is_read_exactly_but_not_cut(tmp_path: Path) -> None:
    folder = save_esm(tmp_path, num_hidden_layers=DEPTH)
    torch.manual_seed(0)
    config = tf.EsmcConfig(
        vocab_size=33, hidden_size=16, num_hidden_layers=DEPTH, num_attention_heads=2, intermediate_size=16,
        pad_token_id=1, mask_token_id=32,
    )  # fmt: skip
    tf.EsmcModel(config).save_pretrained(folder)
    check_layers(folder, PROTEINS, {0, 2}, norm="norm")
    earlier = LayerEncoder(folder, 1, device="cpu")
    assert len(earlier.transformer.layers) == DEPTH  # type: ignore[arg-type]
    with pytest.raises(CutError, match="is not cut, because a cut would change its layers"):
        earlier.save_pretrained(str(tmp_path / "cut"))
    LayerEncoder(folder, -1, device="cpu").save_pretrained(str(tmp_path / "last"))


class Block(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.update = nn.Linear(8, 8)
        self.scale = depth**0.5

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        update = self.update(states) / self.scale
        return states + update, update


class Stack(nn.Module):
    """Blocks that return tuples and know the depth of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(128, 8)
        self.blocks = nn.ModuleList(Block(DEPTH) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        states = self.embed(input_ids)
        for block in self.blocks:
            states, _ = block(states)
        return self.norm(states)  # type: ignore[no-any-return]


def test_module_whose_blocks_return_tuples() -> None:
    def to_ids(sequences: list[str]) -> dict[str, Any]:
        longest = max(map(len, sequences))
        ids = torch.tensor([[*map(ord, sequence), *[0] * (longest - len(sequence))] for sequence in sequences])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    module = Stack().eval()
    for layer in range(DEPTH + 1):
        encoder = LayerEncoder.from_module(
            module, layer, processor=to_ids, medium="text", blocks="blocks", final=["norm"], device="cpu"
        )
        for sequence, vector in zip(PROTEINS, encoder.encode(PROTEINS), strict=True):
            with torch.no_grad():
                states = module.embed(to_ids([sequence])["input_ids"])
                for block in module.blocks[:layer]:
                    states, _ = block(states)
                np.testing.assert_allclose(vector, module.norm(states)[0].mean(0), **EXACT)
