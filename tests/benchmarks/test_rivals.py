"""Methods without training, against slow computations of one text at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.zoo import rival_tables, rivals
from midlayer_encoders import LayerEncoder, Recipe
from tests.recipes.test_template import TOKENIZERS

SIZES = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
MODELS: dict[str, Any] = {
    "llama": lambda: tf.LlamaModel(tf.LlamaConfig(**SIZES, **HEADS)),
    "gemma3": lambda: tf.Gemma3TextModel(
        tf.Gemma3TextConfig(
            **SIZES, **HEADS, sliding_window=6, layer_types=["full_attention", "sliding_attention"] * 2,
            query_pre_attn_scalar=8,
        )
    ),
}  # fmt: skip
TEXTS = ["a cat sat on the mat", "the cat", "a", "this sentence means the cat sat on a mat in one word"]
LAYERS = [2, 3, 4]


@pytest.fixture(scope="module", params=MODELS)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LayerEncoder:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = MODELS[request.param]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer = TOKENIZERS["byte level"]()
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(folder)
    return LayerEncoder(str(folder), -1)


def found(method: rivals.Method, encoder: LayerEncoder, texts: list[str] = TEXTS) -> dict[tuple[str, int], Tensor]:
    return {(name, layer): rows for name, layer, rows in method(encoder, texts, LAYERS)}


def ids_of(encoder: LayerEncoder, template: str, text: str) -> Tensor:
    """Return the tokens of one text, as the recipe makes them."""
    inputs = encoder.with_recipe(Recipe(name="one", template=template, pooling="last")).model_inputs([text])
    return inputs["input_ids"]


def visible(block: nn.Module, length: int) -> Tensor:
    """Return who sees whom, ``(T, T)``."""
    places = torch.arange(length)
    distance = places[:, None] - places
    window = getattr(block.self_attn, "sliding_window", None) or length
    return (distance >= 0) & (distance < window)


def written_out(model: Any, ids: Tensor, prefixed: range = range(0)) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states after each block and what the heads gathered in it, head by head, with a first key and value.

    The key and the value of the last token stand before those of the text in the blocks ``prefixed``.
    """
    kept: list[Any] = []
    handles = [
        block.self_attn.register_forward_pre_hook(lambda _, __, inputs: kept.append(inputs), with_kwargs=True)
        for block in model.layers
    ]
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    states, all_states, all_gathered = hidden[0], [], []
    for number, (block, inputs) in enumerate(zip(model.layers, kept, strict=True), 1):
        attention = block.self_attn
        normed = block.input_layernorm(states)
        query, key, value = (
            getattr(attention, f"{name}_proj")(normed).view(*ids.shape, -1, attention.head_dim).transpose(1, 2)
            for name in "qkv"
        )
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key, *inputs["position_embeddings"])
        seen = visible(block, ids.shape[1])
        if number in prefixed:
            key, value = (torch.cat([each[:, :, -1:], each], dim=2) for each in (key, value))
            seen = torch.cat([torch.ones(len(seen), 1).bool(), seen], dim=1)
        heads = []
        for head in range(query.shape[1]):
            shared = head // attention.num_key_value_groups
            products = attention.scaling * query[0, head] @ key[0, shared].T
            heads.append(products.masked_fill(~seen, -torch.inf).softmax(dim=1) @ value[0, shared])
        gathered = torch.cat(heads, dim=1)[None]
        added = attention.o_proj(gathered)
        if hasattr(block, "pre_feedforward_layernorm"):
            states = states + block.post_attention_layernorm(added)
            states = states + block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(states)))
        else:
            states = states + added
            states = states + block.mlp(block.post_attention_layernorm(states))
        all_states.append(states)
        all_gathered.append(gathered)
    if not prefixed:  # it is the model's own pass
        torch.testing.assert_close(model.norm(states), hidden[-1], rtol=1e-4, atol=1e-5)
    return all_states, all_gathered


@pytest.mark.parametrize("where", rivals.REROUTED)
def test_kv_embedding_is_attention_over_one_more_token(encoder: LayerEncoder, where: str) -> None:
    model, start, end = encoder.transformer, *rivals.REROUTED[where]
    blocks = range(round(start * 4 + 1e-9) + 1, round(end * 4) + 1)
    actual = found(lambda *each: rivals.kv_embedding(where, *each), encoder)
    for row, text in enumerate(TEXTS):
        with torch.no_grad():
            states, _ = written_out(model, ids_of(encoder, rivals.COMPRESS, text), blocks)
            for layer in LAYERS:
                normed = model.norm(states[layer - 1])[0]
                expected = (normed.mean(dim=0) + normed[-1]) / 2
                torch.testing.assert_close(actual[f"KV-Embedding, {where}", layer][row], expected, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_aligned_wva_is_the_mean_of_projected_values(encoder: LayerEncoder) -> None:
    model, actual = encoder.transformer, found(rivals.aligned_wva, encoder)
    assert len(actual) == len(LAYERS) + 2  # from the middle on, two layers follow
    for row, text in enumerate(TEXTS):
        with torch.no_grad():
            _, gathered = written_out(model, ids_of(encoder, 'This sentence : "{text}" means in one word:"', text))
            outputs = [block.self_attn.o_proj(each)[0, -1] for block, each in zip(model.layers, gathered, strict=True)]
        for start, first in zip(rivals.AGGREGATED_FROM, (0, 2), strict=True):
            expected = torch.stack(outputs[first:3]).mean(dim=0)
            torch.testing.assert_close(actual[f"AlignedWVA from {start}", 3][row], expected, rtol=1e-4, atol=1e-5)


def test_meta_eol_is_the_mean_of_eight_encodings(encoder: LayerEncoder) -> None:
    vectors = [
        encoder.with_recipe(Recipe(name="one", template=template, pooling="last")).encode_layers(TEXTS, [3])[0]
        for template in rivals.META_TASKS
    ]
    assert len(vectors) == 8
    expected = torch.as_tensor(sum(vectors) / 8)
    torch.testing.assert_close(found(rivals.meta_eol, encoder)["MetaEOL", 3], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("times", [None, 2])
def test_contrastive_prompting_steers_the_last_token(encoder: LayerEncoder, times: float | None) -> None:
    model: Any = encoder.transformer
    ((name, _), *_), actual = (lambda each: (list(each), each))(
        found(lambda *each: rivals.contrastive_prompting(times, *each), encoder)
    )
    for row, text in enumerate(TEXTS):
        normal = ids_of(encoder, 'This sentence : "{text}" means in one word:"', text)
        with torch.no_grad():
            before, against = (
                written_out(model, ids)[1][0][:, -1] for ids in (normal, ids_of(encoder, rivals.IRRELEVANT, text))
            )
            difference = before - against
            steered = 2 * difference if times else difference * before.norm() / difference.norm()

            def hook(_: Any, states: Any, steered: Tensor = steered) -> Any:
                return (torch.cat([states[0][:, :-1], steered[:, None]], dim=1),)

            handle = model.layers[0].self_attn.o_proj.register_forward_pre_hook(hook)
            hidden = model(input_ids=normal, output_hidden_states=True).hidden_states
            handle.remove()
        for layer in LAYERS:
            expected = hidden[layer] if layer == 4 else model.norm(hidden[layer])
            torch.testing.assert_close(actual[name, layer][row], expected[0, -1], rtol=1e-4, atol=1e-5)


METHODS = {f"{name}-{number}": method for name, group in rivals.METHODS.items() for number, method in enumerate(group)}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_text_alone_has_the_vector_that_it_has_in_a_batch(encoder: LayerEncoder, method: rivals.Method) -> None:
    many = TEXTS * 4  # enough to center on
    together = found(method, encoder, many)
    for place, rows in found(method, encoder, many[::-1]).items():
        torch.testing.assert_close(rows.flip(0), together[place], rtol=1e-4, atol=1e-5)
    if any("+center" in name for name, _ in together):
        return  # one text is not enough to center on
    for place, rows in found(method, encoder, TEXTS[:1]).items():
        torch.testing.assert_close(rows[0], together[place][0], rtol=1e-4, atol=1e-5)


def test_tokens_count_the_passes_through_the_blocks(encoder: LayerEncoder) -> None:
    one_word = sum(ids_of(encoder, 'This sentence : "{text}" means in one word:"', text).shape[1] for text in TEXTS)
    against = sum(ids_of(encoder, rivals.IRRELEVANT, text).shape[1] for text in TEXTS)
    with rivals.counted(encoder) as counts:
        found(rivals.METHODS["recipes"][1], encoder)
    assert counts[0] == pytest.approx(one_word)
    with rivals.counted(encoder) as counts:
        found(rivals.METHODS["contrastive"][0], encoder)
    assert counts[0] == pytest.approx(one_word + against / 4)


def test_a_run_writes_scores_draws_and_costs(
    encoder: LayerEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    import numpy as np
    import polars as pl

    for name in ("One", "Two"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
        pairs = [{"sentence1": f"a cat {n}", "sentence2": f"the mat {n * n % 7}", "score": n % 5} for n in range(20)]
        (tmp_path / "tasks" / name / "test.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    monkeypatch.setattr(rivals, "open_model", lambda *_, **__: encoder)
    arguments = ["rivals", str(tmp_path / "tasks"), "--models", "tiny", "--out", str(tmp_path / "out"), "--methods"]
    monkeypatch.setattr("sys.argv", [*arguments, "recipes", "word-echo", "kv"])
    rivals.main()
    frame = pl.read_csv(tmp_path / "out" / "tiny-One-rivals.csv")
    draws = np.load(tmp_path / "out" / "tiny-One-rivals.npz")["draws"]
    assert draws.shape == (len(frame), 200)
    row = frame.filter(variant="word-echo+center", layer=4).row(0, named=True)
    assert row["low"] < row["score"] < row["high"]
    assert frame.filter(variant="word-echo")["tokens"][0] > 2 * frame.filter(variant="plain")["tokens"][0]
    monkeypatch.setattr(rival_tables, "FOLDER", tmp_path / "packed")
    monkeypatch.setattr(rival_tables, "MODELS", ("tiny",))
    rival_tables.pack(tmp_path / "out")
    rival_tables.results.cache_clear()
    of, tasks = rival_tables.results("tiny"), ["One", "Two"]
    means = (
        frame.group_by("variant", "layer")
        .agg(pl.col("score").mean())
        .filter(pl.col("variant").str.starts_with("plain"))
    )
    gain, low, high = of.gain(tasks, of.default)
    assert of.default == ("word-echo+center", 4)
    assert abs(gain - (row["score"] - means["score"].max())) < 0.02  # both tasks have the same texts and scores
    assert low < gain < high
    assert of.gain(tasks, of.best(tasks, "plain")) == (0, 0, 0)
