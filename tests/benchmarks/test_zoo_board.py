"""The board of docs/board.md: its parameters against transformers' own models, and its page against the command."""

from pathlib import Path

import pytest
import torch
import transformers as tf

from benchmarks.pages import part_of
from benchmarks.zoo.board import DOCS, MODELS, compare, write_sweeps

_BERT = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
CONFIGS = {
    "SmolLM2-135M": tf.LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536,
    ),
    "Gemma-3-270M": tf.Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, intermediate_size=2048,
    ),
    "all-MiniLM-L6-v2": tf.BertConfig(num_hidden_layers=6, **_BERT),
    "paraphrase-MiniLM-L3": tf.BertConfig(num_hidden_layers=3, **_BERT),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_architecture(name: str) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        expected = sum(weight.numel() for weight in tf.AutoModel.from_config(config).parameters())
    first, block = MODELS[name][1]
    assert first + config.num_hidden_layers * block == expected


@pytest.mark.long
def test_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    write_sweeps(tmp_path)
    result, lines = compare(tmp_path)
    assert len(result.runs) == 6
    assert part_of(DOCS / "board.md", "printed") == f"```text\n{lines}\n```\n"
