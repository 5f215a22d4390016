"""The training record's own parts: the objectives, the order of the data, and how the tasks are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from scipy.stats import spearmanr

from benchmarks.pretraining.corpus import MASK, VOCAB, Windows, encode, paragraphs, parts, train_tokenizer, write_tokens
from benchmarks.pretraining.findings import dip
from benchmarks.pretraining.finetuning import SameLabel, SamePassages
from benchmarks.pretraining.models import IGNORED, OBJECTIVES, Size, language_model, sees_ahead, task_of
from benchmarks.pretraining.module import rate
from benchmarks.pretraining.tasks import read_tasks
from benchmarks.pretraining.watching import METRICS, looks, stages

SMALL = Size(blocks=2, width=64, vocab=256, length=32)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_only_the_masked_model_sees_ahead(objective: str) -> None:
    assert sees_ahead(language_model(objective, SMALL).backbone.eval(), SMALL.vocab) == (objective == "masked")


def test_causal_and_masked_start_from_the_same_weights_and_leave_the_generator_alone() -> None:
    before = torch.get_rng_state()
    causal, masked = (language_model(objective, SMALL).state_dict() for objective in ("causal", "masked"))
    assert all(torch.equal(causal[name], masked[name]) for name in causal)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_matrix_mixer_is_the_same_function_as_transformers_own() -> None:
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    backbone = language_model("ssm", SMALL).backbone.eval()
    for parameter in backbone.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator())
    ids = torch.randint(3, SMALL.vocab, (3, 30), generator=generator())
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    with torch.no_grad():
        ours = backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        for block in backbone.layers:
            block.mixer.__class__ = Mamba2Mixer
        torch.testing.assert_close(ours, backbone(input_ids=ids, attention_mask=mask).last_hidden_state)


def test_targets_are_the_next_token_or_the_token_under_the_mask() -> None:
    windows = torch.randint(3, 200, (64, 33), generator=generator())
    inputs, targets = task_of("causal", windows, generator())
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    hidden, under = task_of("masked", windows, generator())
    assert torch.equal(hidden == MASK, under != IGNORED)
    assert torch.equal(torch.where(hidden == MASK, under, hidden), windows[:, :-1])
    assert 0.27 < (hidden == MASK).float().mean() < 0.33


def test_windows_cover_an_epoch_once_in_an_order_of_their_seed() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    first, again, other = (list(Windows(tokens, 6, 4, 32, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    starts = torch.cat(first)[:, 0].tolist()
    assert len(set(starts)) == 24
    assert torch.equal(first[0][0], torch.arange(33) + first[0][0, 0])


def test_held_out_text_is_apart_and_the_tokenizer_gives_the_text_back() -> None:
    text = "It was a dark night, said the café's owner.\n" * 50
    portions = paragraphs(text, size=200)
    assert "".join(portions) == text
    tokenizer = train_tokenizer(portions, 300)
    assert tokenizer.decode(encode(portions, tokenizer).tolist()) == text
    assert len(tokenizer) <= 300 < VOCAB
    train, held = parts(torch.arange(1000), stretch=5)
    assert not set(train.tolist()) & set(held.tolist())
    assert len(held) == 10


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_tasks_are_read_with_their_scores(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(12)]
    rows = [{"sentence1": texts[n], "sentence2": texts[(5 * n + 1) % 12], "score": n % 5} for n in range(12)]
    (tmp_path / "STSBenchmark").mkdir()
    (tmp_path / "STSBenchmark" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (task,) = read_tasks(tmp_path)
    assert (task.name, task.score_name, sorted(task.texts)) == ("STSBenchmark", "cosine_spearman", sorted(texts))
    vectors = torch.randn(2, 12, 6, generator=generator())
    place = {text: number for number, text in enumerate(task.texts)}
    first, second = (vectors[:, [place[row[side]] for row in rows]] for side in ("sentence1", "sentence2"))
    cosine = torch.nn.functional.cosine_similarity(first, second, dim=-1)
    expected = [spearmanr(found, [row["score"] for row in rows]).statistic for found in cosine]
    np.testing.assert_allclose(task.score(vectors), expected, atol=1e-6)


def test_pairs_are_the_same_passage_or_of_the_same_label() -> None:
    (batch,) = SamePassages(torch.arange(500), 1, batch=4, length=8)
    assert torch.equal(*batch["input_ids"].chunk(2))
    ids, labels = [[number] for number in range(3, 12)], [0, 0, 0, 1, 1, 1, 2, 2, 3]
    (batch,) = SameLabel(ids, labels, 1, torch.device("cpu"))
    first, second = ([labels[one - 3] for one in half[:, 0].tolist()] for half in batch["input_ids"].chunk(2))
    assert first == second == [0, 1, 2]  # label 3 has one text
    assert not torch.equal(*batch["input_ids"].chunk(2))


def test_looks_stages_rate_and_dip() -> None:
    assert looks(1024) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    assert stages(1024) == [0, 32, 128, 256, 512, 768, 1024]
    rates = [rate(step, steps=100, warmup=10) for step in range(100)]
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-2)
    assert dip([3.0, 1.0, 2.0]) == (1, 1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The '[a-z]+_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_a_run_records_every_layer_and_trains_as_it_would_without_the_callback(tmp_path: Path) -> None:
    from benchmarks.pretraining.run import main

    texts = [f"the {word} sat by the {other} all night" for word in ("cat", "dog", "owl") for other in ("sea", "fire")]
    tokenizer = train_tokenizer(texts, 300)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_tokens(tmp_path / "tokens.xz", encode(texts * 300, tokenizer))
    (tmp_path / "probes.json").write_text(json.dumps({"texts": texts, "views": [[text.upper() for text in texts]] * 4}))
    sts = tmp_path / "tasks" / "STSBenchmark"
    sts.mkdir(parents=True)
    rows = [{"sentence1": texts[0], "sentence2": text, "score": place} for place, text in enumerate(texts)]
    (sts / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = "--objective masked --steps 4 --blocks 2 --width 64 --batch 2 --length 16 --stretch 50".split()  # noqa: SIM905
    for out, more in (("with", []), ("without", ["--no-callback"])):
        main([str(tmp_path), str(tmp_path / out), *small, *more])
    watched, plain = (json.loads((tmp_path / out / "runs.json").read_text())["masked"] for out in ("with", "without"))
    assert watched["losses"] == plain["losses"]
    assert watched["held_out"] == plain["held_out"]
    frame = pl.read_csv(tmp_path / "with" / "masked.csv")
    metrics = frame.filter(pl.col("kind") == "metric").group_by("revision", "layer").agg(pl.col("name").n_unique())
    assert set(metrics["revision"]) == {"step0", "step1", "step2", "step4"}
    assert set(metrics["layer"]) == {0, 1, 2}
    assert set(metrics["name"]) == {len(METRICS)}
    assert set(frame.filter(pl.col("kind") == "score")["name"]) == {"cosine_spearman"}
