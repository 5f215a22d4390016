"""The fine-tunings of the training record: what is paired, the dropout, the loss, and a run from weights to frame."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import torch

from benchmarks.pretraining.corpus import encode, read_tokenizer, train_tokenizer, write_tokens
from benchmarks.pretraining.finetuning import TEMPERATURE, add_dropout, arguments, contrastive_loss, main, size_of
from benchmarks.pretraining.finetuning import supervised_pairs as pairs_of
from benchmarks.pretraining.models import Size, language_model
from benchmarks.pretraining.pairs import CROP, Crops, Pairs, adjacent_sentences, labeled_groups, without
from benchmarks.pretraining.variants import VARIANTS
from benchmarks.pretraining.vocabulary import BOS, PAD
from tests.callbacks.training import ADVICE

pytestmark = ADVICE

SMALL = Size(blocks=2, width=64, vocab=300)
WORDS = ("cat", "dog", "owl", "fox", "hen", "cow")
SENTENCES = [f"The {one} sat by the {other} all night long." for one in WORDS for other in WORDS]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Both labeled tasks, whole; some texts of the training parts are test texts in other letters too."""
    banking, sts = tmp_path / "tasks" / "Banking77Classification", tmp_path / "tasks" / "STSBenchmark"
    rows = [
        {"text": f"Question {k} about {word}?", "label": label} for label, word in enumerate(WORDS) for k in range(24)
    ]
    write_lines(banking / "train.jsonl", rows)
    write_lines(banking / "test.jsonl", [{**row, "text": row["text"].upper()} for row in rows[::24]])
    pairs = [
        {"sentence1": a, "sentence2": b, "score": k % 6}
        for k, (a, b) in enumerate(zip(SENTENCES, SENTENCES[1:], strict=False))
    ]
    write_lines(sts / "validation.jsonl", pairs)
    write_lines(
        sts / "test.jsonl",
        [{"sentence1": SENTENCES[4], "sentence2": text, "score": k} for k, text in enumerate(SENTENCES[30:])],
    )
    return tmp_path / "tasks"


@pytest.mark.parametrize("bos", [True, False])
def test_crops_are_two_different_spans_of_one_passage(bos: bool) -> None:
    length = 8  # so short that equal draws are common
    (batch,) = Crops(torch.arange(10, 5000), 1, batch=500, length=length, bos=bos)
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    assert torch.equal(ids != PAD, mask)
    if bos:
        assert (ids[:, 0] == BOS).all()
    spans = [row[real][bos:] for row, real in zip(ids, mask, strict=True)]
    for first, second in zip(spans[:500], spans[500:], strict=True):
        assert not torch.equal(first, second)
        combined = torch.cat([first, second])
        assert combined.max() - combined.min() < length  # one passage
        for span in (first, second):
            assert CROP[0] * length <= len(span) <= CROP[1] * length
            assert torch.equal(span, torch.arange(len(span)) + span[0])


def test_every_place_of_the_tokens_is_cropped_and_a_seed_decides_where() -> None:
    tokens = torch.arange(10, 40)
    first, repeated, second = (list(Crops(tokens, 2, batch=300, length=16, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, repeated, strict=True))
    assert not torch.equal(first[0]["input_ids"], second[0]["input_ids"])
    assert set(torch.cat([item["input_ids"] for item in first]).unique().tolist()) == {PAD, BOS, *range(10, 40)}


def test_groups_hold_no_text_of_a_test_part_and_no_text_twice(tasks: Path) -> None:
    groups = labeled_groups(tasks)
    assert [len(group) for group in groups["Banking77"]] == [23] * len(WORDS)  # the first question is a test text
    texts = [text for sample in groups.values() for group in sample for text in group]
    assert len(set(texts)) == len(texts)
    assert not {SENTENCES[4], *SENTENCES[30:]} & set(texts)
    assert groups["STSBenchmark"] == [[SENTENCES[k], SENTENCES[k + 1]] for k in (5, 10, 16, 22, 28)]  # 4 or 5 points
    assert without([["a b", "A, b!", "c"]], ["C"]) == []


def test_a_batch_is_of_one_kind_with_a_pair_of_each_group() -> None:
    ids = {"adjacent": [[[10 * group + k] for k in range(2)] for group in range(1, 9)],
           "Banking77": [[[1000 + 10 * intent + k] for k in range(5)] for intent in range(6)]}  # fmt: skip
    batches = Pairs(ids, 40, torch.device("cpu"), batch=7, width=3)
    assert set(batches.kinds) == set(ids)
    for kind, batch in zip(batches.kinds, batches, strict=True):
        assert batch["input_ids"].shape[1] == 3
        first, second = batch["input_ids"][:, 0].chunk(2)
        assert ((first < 1000) == (kind == "adjacent")).all()
        assert torch.equal(first // 10, second // 10)
        assert (first != second).all()
        assert len((first // 10).unique()) == len(first) == (7 if kind == "adjacent" else 6)


def test_adjacent_sentences_follow_each_other() -> None:
    text = " ".join(SENTENCES)
    tokenizer = train_tokenizer(SENTENCES, 300)
    pairs = adjacent_sentences(torch.from_numpy(encode([text], tokenizer).astype("int32")), tokenizer, number=50)
    assert len(pairs) > 10
    assert all(SENTENCES.index(second) == SENTENCES.index(first) + 1 for first, second in pairs)


def test_dropout_is_at_every_token_but_the_first_and_the_weights_keep_their_names() -> None:
    plain, model = (language_model(VARIANTS["base"], SMALL) for _ in range(2))
    assert list(add_dropout(model).state_dict()) == list(plain.state_dict())
    assert size_of(model.state_dict()) == SMALL
    ids = torch.randint(4, 300, (3, 9), generator=generator())
    with torch.no_grad():
        expected = plain.backbone.eval()(input_ids=ids).last_hidden_state
        assert torch.equal(model.backbone.eval()(input_ids=ids).last_hidden_state, expected)
        dropped = model.backbone.train()(input_ids=ids).last_hidden_state
    torch.testing.assert_close(dropped[:, 0], expected[:, 0])
    assert (dropped[:, 1:] - expected[:, 1:]).norm(dim=-1).min() > 0.1


def test_the_loss_is_its_formula() -> None:
    states = torch.randn(8, 5, 16, dtype=torch.float32, generator=generator())
    mask = torch.arange(5) < torch.randint(1, 6, (8, 1), generator=generator())
    vectors = [state[real].mean(dim=0) for state, real in zip(states, mask, strict=True)]
    vectors = [vector / vector.norm() for vector in vectors]
    similar = torch.tensor([[float(u @ v) for v in vectors[4:]] for u in vectors[:4]]) / TEMPERATURE
    ways = [-(table[k, k].exp() / table[k].exp().sum()).log() for table in (similar, similar.T) for k in range(4)]
    torch.testing.assert_close(contrastive_loss(states, mask.long()), torch.stack(ways).mean())


def test_none_of_the_scored_texts_is_trained_on(tasks: Path) -> None:
    data = write_data(tasks)
    inputs = arguments().parse_args([str(data), "out", "--tuning", "supervised", "--steps", "30"])
    tokens = torch.from_numpy(encode([" ".join(SENTENCES)], read_tokenizer(data)).astype("int32"))
    scored = ["question 5 about owl", SENTENCES[10]]
    pairs = pairs_of(inputs, VARIANTS["base"], tokens, scored)
    decoded = {
        read_tokenizer(data).decode(text[1:]) for sample in pairs.ids.values() for group in sample for text in group
    }
    assert "Question 4 about owl?" in decoded
    assert not {"Question 5 about owl?", SENTENCES[10]} & decoded
    assert all(text[0] == BOS for sample in pairs.ids.values() for group in sample for text in group)
    with pytest.raises(ValueError, match="of STSBenchmark it holds fewer"):
        pairs_of(inputs, VARIANTS["base"], tokens, SENTENCES[10:])


def write_data(tasks: Path) -> Path:
    """Return a folder like ``corpus.py``'s, around small tasks that it shortens."""
    data = tasks.parent
    tokenizer = train_tokenizer(SENTENCES, 300)
    tokenizer.backend_tokenizer.save(str(data / "tokenizer.json"))
    write_tokens(data / "tokens.xz", encode([" ".join(SENTENCES * 20)], tokenizer))
    probes = SENTENCES[:20]
    (data / "probes.json").write_text(json.dumps({"texts": probes, "views": [[text.upper() for text in probes]] * 4}))
    (data / "pairs.json").write_text(json.dumps(labeled_groups(tasks)))
    banking = tasks / "Banking77Classification" / "train.jsonl"
    banking.write_text("\n".join(banking.read_text().splitlines()[::3]))
    return data


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("tuning", ["simcse", "supervised"])
def test_a_tuning_goes_from_the_weights_of_a_run_to_its_frame(tasks: Path, tuning: str) -> None:
    data, out = write_data(tasks), tasks.parent / "out"
    out.mkdir()
    with pytest.raises(FileNotFoundError, match="--variant base"):
        main([str(data), str(out), "--variant", "base", "--tuning", tuning])
    before = language_model(VARIANTS["base"], SMALL).state_dict()
    torch.save(before, out / "base.pt")
    words = f"--variant base --tuning {tuning} --steps 6 --batch 4 --peak 1e-3 --stretch 50 --recipes plain"
    main([str(data), str(out), *words.split()])
    reports = json.loads((out / f"base-{tuning}.json").read_text())
    assert reports["command"].endswith(words)
    assert (reports["steps"], len(reports["losses"])) == (6, 6)
    assert reports["losses"][0] > 0.1
    frame = pl.read_parquet(out / f"base-{tuning}.parquet")
    assert set(frame["model"]) == {f"base-{tuning}"}
    for kind, steps in (("metric", {"step0", "step4", "step6"}), ("score", {"step0", "step6"})):
        assert set(frame.filter(kind=kind)["revision"]) == steps
        assert set(frame.filter(kind=kind)["layer"]) == {0, 1, 2}
    after = torch.load(out / f"base-{tuning}.pt", weights_only=True)
    language_model(VARIANTS["base"], SMALL).load_state_dict(after)
    assert all(not torch.equal(before[name], after[name]) for name in before)
