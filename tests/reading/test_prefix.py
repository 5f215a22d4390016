"""Tokens that all texts begin with pass once: the vectors are those of passes over all tokens, or all tokens pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.capture import STREAM, capture
from midlayer_encoders.reading.prefix import pays, shared_ids, shared_prefix
from midlayer_encoders.reading.reader import LayerReader, layer_reader
from tests.families import DEPTH, VOCAB, WIDTH, tiny
from tests.thinned import thinned
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]
FRONT, LENGTH = 7, 40
TEMPLATE = 'Now: "{text}" is'
_SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64}


def _llama(**options: Any) -> nn.Module:
    return tf.LlamaModel(tf.LlamaConfig(**_SIZES, num_key_value_heads=2, **options))


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "ALiBi": lambda: tf.BloomModel(tf.BloomConfig(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=DEPTH, n_head=4)),
    "MPT": lambda: tf.MptModel(tf.MptConfig(vocab_size=VOCAB, d_model=WIDTH, n_layers=DEPTH, n_heads=4)),
    "experts": lambda: tf.MixtralModel(tf.MixtralConfig(**_SIZES, num_key_value_heads=2, sliding_window=None)),
    "windows": lambda: tf.MistralModel(tf.MistralConfig(**_SIZES, num_key_value_heads=2, sliding_window=9)),
    "dynamic": lambda: _llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
}


def model_of(name: str) -> nn.Module:
    if name not in OTHERS:
        return tiny(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OTHERS[name]().eval()


def states(model: nn.Module, inputs: dict[str, Any], through: Callable[[Any], Any] = lambda receive: receive) -> Tensor:
    found: list[Tensor] = []
    capture(
        model, inputs, through(lambda _, __, one: found.append(one.clone())), anatomy=find_anatomy(model),
        layers=range(DEPTH + 1),
    )  # fmt: skip
    return torch.stack(found)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        *[(name, True) for name in ("Llama", "Qwen2", "GPT2", "GPTNeoX", "OPT")],
        *[(name, None) for name in ("ALiBi", "MPT", "experts")],  # either way, but not wrong
        *[(name, False) for name in ("windows", "dynamic", "Gemma2", "Qwen3", "Mamba", "Mamba2", "BERT", "T5")],
    ],
)
@torch.inference_mode()
def test_states_are_those_of_passes_over_all_tokens(
    name: str, shared: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    model, draw = model_of(name), torch.Generator().manual_seed(3)
    ids = torch.randint(5, VOCAB, (3, FRONT + LENGTH), generator=draw)
    ids[:, :FRONT] = ids[0, :FRONT]
    with caplog.at_level(logging.INFO, logger="midlayer_encoders.reading.prefix"):
        made = shared_prefix(
            model,
            find_anatomy(model),
            ids[0, :FRONT].tolist(),
            ids[0, FRONT:],
            layers=range(DEPTH + 1),
            sites=(STREAM,),
        )
    assert shared is None or (made is not None) is shared
    assert ("is read with all tokens of a template" in caplog.text) is (made is None)
    if made is not None:
        # Longer texts than those that were tried, and more of them.
        for _ in range(2):  # a pass leaves the prefix as it was
            again = states(model, made.rest(ids), made.whole)
        torch.testing.assert_close(again, states(model, {"input_ids": ids}), rtol=1e-4, atol=1e-5)


def test_a_batch_shares_it_where_each_text_begins_with_it_and_goes_on() -> None:
    model, ids = tiny("Llama"), torch.arange(5, 25).repeat(2, 1)
    made = shared_prefix(model, find_anatomy(model), [5, 6, 7], ids[0, 3:], layers=[0, 2], sites=(STREAM,))
    assert made is not None
    mask, other, ending = torch.ones_like(ids), ids.clone(), torch.ones_like(ids)
    other[1, 1], ending[1, 3:] = 9, 0
    assert made.begins(ids, mask)
    assert not made.begins(other, mask)
    assert not made.begins(ids, ending)
    assert not made.begins(ids[:, :3], mask[:, :3])


def seen_by(reader: LayerReader, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[int]]:
    """Return the vectors of texts, and how many tokens of a text each pass had."""
    widths: list[int] = []
    table = reader.model.get_input_embeddings()  # type: ignore[operator]
    forward = table.forward
    monkeypatch.setattr(table, "forward", lambda ids: widths.append(ids.shape[1]) or forward(ids))
    many = texts * 4  # enough of them to be worth it
    found = reader.vectors(many, [list(range(start, start + 2)) for start in range(0, len(many), 2)])
    monkeypatch.undo()
    return found, widths


@pytest.mark.parametrize("pooling", ["last", "mean", "weightedmean", "cls", "max"])
@pytest.mark.parametrize("options", thinned([{"skip_first": 2}, {"template_tokens": False}, {}], 3))
def test_vectors_are_the_same_whatever_is_pooled(
    pooling: Any, options: dict[str, Any], tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, template=TEMPLATE, pooling=pooling, device="cpu", **options)
    reader = layer_reader(encoder)
    assert len(reader.shared) == len('Now: "')
    expected, all_tokens = seen_by(replace(reader, shared=()), TEXTS, monkeypatch)
    found, fewer = seen_by(reader, TEXTS, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert fewer[-3:] == [width - len(reader.shared) for width in all_tokens[-3:]]


def test_prompts_are_shared_and_a_text_that_begins_otherwise_is_read_whole(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    assert layer_reader(encoder).shared == ()
    assert layer_reader(encoder, prompt="ab").shared == ()  # too few
    reader = layer_reader(encoder, prompt="query: ")
    assert len(reader.shared) == len("query: ")
    texts = ["a text", "another", " ", "and so on", "one", "more"]
    wrong = replace(reader, shared=(*reader.shared[:-1], 7))
    expected, _ = seen_by(replace(reader, shared=()), texts, monkeypatch)
    for one in (reader, wrong):
        torch.testing.assert_close(seen_by(one, texts, monkeypatch)[0], expected, rtol=1e-4, atol=1e-5)


def test_metrics_of_tokens_and_half_precision_read_all_tokens(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, template=TEMPLATE, pooling="last", device="cpu")
    reader, seen = layer_reader(encoder), set[int]()
    reader.vectors(TEXTS, batches_of(encoder, TEXTS), tokens=lambda _, states, *__: seen.add(states.shape[1]))
    assert seen == {max(map(len, TEXTS)) + len('Now: "" is')}
    model, ids = tiny("Llama").bfloat16(), torch.arange(5, 25)
    assert shared_prefix(model, find_anatomy(model), [5, 6, 7], ids, layers=[0, 4], sites=(STREAM,)) is None


def test_only_what_stands_before_every_text_is_shared() -> None:
    def inputs_of(texts: list[str]) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[1, 2, 3, *map(ord, text), 9, 9, 9] for text in texts])}

    def unknown(texts: list[str]) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[1, 2, 3, 0, 9, 9, 9] for _ in texts])}

    assert shared_ids(inputs_of) == (1, 2, 3)
    assert shared_ids(inputs_of, 2) == ()
    assert shared_ids(unknown, 3) == (1, 2, 3)


def test_few_texts_are_not_worth_a_pass_of_their_prefix(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("GPT2"), -1, template=TEMPLATE, pooling="last", device="cpu")
    reader, passed = layer_reader(encoder), list[int]()
    hook = reader.model.register_forward_pre_hook(
        lambda _, __, given: passed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    reader.vectors(TEXTS, [[0, 1], [2, 3, 4, 5]])
    hook.remove()
    assert len(reader.shared) not in passed
    assert [pays(reader.shared, count) for count in (len(TEXTS), 21, 22)] == [False, False, True]
