"""The training record's own parts: the variants, the order of the data, when it is measured, and how the tasks are read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from benchmarks.pretraining.corpus import (
    BOS,
    MASK,
    SPECIAL,
    VOCAB,
    Windows,
    encode,
    paragraphs,
    parts,
    read_tokenizer,
    train_tokenizer,
)
from benchmarks.pretraining.models import IGNORED, VARIANTS, Size, Variant, language_model, rate, sees_ahead, task_of
from benchmarks.pretraining.tasks import Evaluation, read_tasks
from benchmarks.pretraining.watching import looks, stages

SMALL = Size(blocks=2, width=64, vocab=320, length=32)
KINDS = {"llama": "LlamaModel", "gpt_neox": "GPTNeoXModel"}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_makes_a_model_of_its_kind_that_sees_ahead_only_where_masked(name: str) -> None:
    variant = VARIANTS[name]
    model = language_model(variant, SMALL)
    backbone = model.backbone.eval()
    assert type(backbone).__name__ == KINDS[variant.blocks]
    assert (model.head.weight is backbone.get_input_embeddings().weight) == variant.tied
    assert sees_ahead(backbone, SMALL.vocab) == (variant.objective == "masked")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["base", "masked", "first-causal", "first-masked"])
def test_padding_changes_no_state_and_not_what_is_seen(name: str, attention: str) -> None:
    """Training has no mask, the measurements have one; those of attention weights are eager."""
    variant = VARIANTS[name]
    backbone = language_model(variant, SMALL).backbone.eval()
    backbone.set_attn_implementation(attention)
    ids = torch.randint(len(SPECIAL), SMALL.vocab, (2, 12), generator=generator())
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad():
        combined = backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        for row, length in ((0, 12), (1, 9)):
            separate = backbone(input_ids=ids[row : row + 1, :length]).last_hidden_state[0]
            torch.testing.assert_close(combined[row, :length], separate)
        ids[1, 8] = (ids[1, 8] + 1) % SMALL.vocab
        changed = backbone(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(combined[1, 0], changed[1, 0]) == (variant.objective == "causal")


def test_models_of_the_same_blocks_start_from_the_weights_of_their_seed() -> None:
    before = torch.get_rng_state()
    base, *same = (language_model(VARIANTS[name], SMALL).state_dict() for name in ("base", "no-bos", "masked"))
    assert all(torch.equal(base[name], item[name]) for item in same for name in base)
    other_item = language_model(VARIANTS["base-seed1"], SMALL).state_dict()
    assert not torch.equal(base["head.weight"], other_item["head.weight"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("bos", [0.0, 0.5, 1.0])
def test_the_target_is_the_next_token_and_bos_stands_before_a_share_of_the_windows(bos: float) -> None:
    windows = torch.randint(len(SPECIAL), 200, (64, 33), generator=generator())
    inputs, targets = task_of(Variant(bos=bos), windows, generator())
    assert inputs.shape == targets.shape == (64, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    started = inputs[:, 0] == BOS
    assert torch.equal(targets[started], windows[started, :-1])
    assert torch.equal(targets[~started], windows[~started, 1:])
    assert not (inputs[:, 1:] == BOS).any()
    assert {0.0: started.sum() == 0, 0.5: 20 < started.sum() < 44, 1.0: started.all()}[bos]


@pytest.mark.parametrize("bos", [0.0, 0.5, 1.0])
def test_the_target_is_the_token_under_the_mask_and_bos_is_never_under_it(bos: float) -> None:
    windows = torch.randint(len(SPECIAL), 200, (64, 33), generator=generator())
    plain, _ = task_of(Variant(bos=bos), windows, generator())
    hidden, under = task_of(Variant(bos=bos, objective="masked"), windows, generator())
    assert torch.equal(hidden == MASK, under != IGNORED)
    assert torch.equal(torch.where(hidden == MASK, under, hidden), plain)
    assert not (under == BOS).any()
    assert 0.27 < (hidden == MASK).float().mean() < 0.33


def test_windows_cover_an_epoch_once_in_an_order_of_their_seed() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    first, repeated, second = (list(Windows(tokens, 6, 4, 32, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    assert not torch.equal(first[0], second[0])
    starts = torch.cat(first)[:, 0].tolist()
    assert len(set(starts)) == 24
    assert torch.equal(first[0][0], torch.arange(33) + first[0][0, 0])


def test_held_out_text_is_apart_and_the_tokenizer_gives_the_text_back(tmp_path: Path) -> None:
    text = "It was a dark night, said the café's owner.\n" * 50
    portions = paragraphs(text, size=200)
    assert "".join(portions) == text
    tokenizer = train_tokenizer(portions, 300)
    assert tokenizer.decode(encode(portions, tokenizer).tolist()) == text
    assert len(tokenizer) <= 300 < VOCAB
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (plain,), (begun,) = (read_tokenizer(tmp_path, bos=bos)(["dark"])["input_ids"] for bos in (False, True))
    assert begun == [BOS, *plain]
    train, stored = parts(torch.arange(1000), stretch=5)
    assert not set(train.tolist()) & set(stored.tolist())
    assert len(stored) == 10


TEXTS = [f"text {number}" for number in range(12)]
ROWS = [{"sentence1": TEXTS[n], "sentence2": TEXTS[(5 * n + 1) % 12], "score": n % 5} for n in range(12)]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    (tmp_path / "STSBenchmark").mkdir()
    (tmp_path / "STSBenchmark" / "test.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_tasks_are_read_with_their_scores(tasks: Path) -> None:
    (task,) = read_tasks(tasks)
    assert (task.name, task.score_name, sorted(task.texts)) == ("STSBenchmark", "cosine_spearman", sorted(TEXTS))
    vectors = torch.randn(2, 12, 6, generator=generator())
    place = {text: number for number, text in enumerate(task.texts)}
    first, second = (vectors[:, [place[row[side]] for row in ROWS]] for side in ("sentence1", "sentence2"))
    cosine = torch.nn.functional.cosine_similarity(first, second, dim=-1)
    expected = [spearmanr(actual, [row["score"] for row in ROWS]).statistic for actual in cosine]
    np.testing.assert_allclose(task.score(vectors), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_texts_are_asked_plain_and_for_one_word_with_bos_before_either(tasks: Path) -> None:
    train_tokenizer(TEXTS, 300).backend_tokenizer.save(str(tasks / "tokenizer.json"))
    tokenizer = read_tokenizer(tasks, bos=True)
    evaluation = Evaluation(read_tasks(tasks), tokenizer, longest=128)
    backbone = language_model(VARIANTS["base"], Size(blocks=2, width=64, vocab=320, length=128)).backbone
    backbone.layers[0].eval()
    modes = {module: module.training for module in backbone.modules()}
    plain, options = (evaluation.embed(backbone, recipe) for recipe in ("plain", "one-word"))
    assert {module: module.training for module in backbone.modules()} == modes
    for row, text in enumerate(evaluation.texts):
        template = f'This sentence : "{text}" means in one word:"'
        for vectors, words, pooled in ((plain, text, lambda x: x.mean(0)), (options, template, lambda x: x[-1])):
            torch.testing.assert_close(vectors[-1, row], pooled(states(backbone, tokenizer(words)["input_ids"])))
    short = Evaluation(
        read_tasks(tasks), tokenizer, recipes=["one-word"], longest=len(tokenizer(template)["input_ids"]) - 2
    )
    assert {len(ids) for ids in short.ids["one-word"]} == {len(tokenizer(template)["input_ids"]) - 2}
    assert all(ids[0] == BOS and ids[-5:] == tokenizer(template)["input_ids"][-5:] for ids in short.ids["one-word"])


@torch.no_grad()
def states(backbone: Any, ids: list[int]) -> torch.Tensor:
    actual: torch.Tensor = backbone(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return actual


def test_measurements_are_dense_where_the_valley_forms_and_every_stage_has_one() -> None:
    assert looks(1000)[:9] == [0, 1, 2, 4, 8, 16, 32, 64, 128]
    assert looks(2000)[8:] == [
        128,
        152,
        181,
        215,
        256,
        304,
        362,
        431,
        512,
        609,
        724,
        861,
        1024,
        1218,
        1448,
        1536,
        1792,
        2000,
    ]
    assert stages(2000) == [0, 128, 256, 512, 724, 1024, 1448, 2000]
    for brief in (False, True):
        for steps in (1, 20, *(variant.steps for variant in VARIANTS.values())):
            measured, scored = looks(steps, brief=brief), stages(steps, brief=brief)
            assert set(scored) <= set(measured)
            assert measured[0] == 0
            assert measured[-1] == scored[-1] == steps
    assert looks(2000, brief=True) == [0, 64, 256, 362, 512, 724, 1024, 1448, 2000]
    assert stages(2000, brief=True) == [512, 1024, 2000]
    assert looks(4100, brief=True)[-4:] == [2048, 3072, 4096, 4100]
    assert stages(4100, brief=True) == [512, 1024, 2048, 4096, 4100]


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth() -> None:
    rates = [rate(step, steps=100, warmup=10) for step in range(100)]
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-2)
