"""A whole run of the record at toy size: what it writes, and that measuring it changes nothing."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars
import pytest
import torch

from benchmarks.pretraining import corpus, record
from benchmarks.pretraining.corpus import STRETCH, Windows, encode, parts, read_tokens, train_tokenizer, write_tokens
from benchmarks.pretraining.models import VARIANTS, Pretraining, Size, language_model, pl
from benchmarks.pretraining.run import main
from benchmarks.pretraining.watching import Progress
from tests.callbacks.training import ADVICE

pytestmark = [*ADVICE, pytest.mark.filterwarnings("ignore:To copy construct from a tensor")]
STEPS, SMALL = 4, "--steps 4 --blocks 2 --width 64 --batch 8 --length 16 --stretch 50"
QUICK, SLOW = "half-bos", ("base", "masked", "first-causal")
DRAW = random.Random(2)
TEXTS = ["".join(DRAW.choices("abcdefghijklm nopq rst", k=length)) for length in range(8, 28)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    write_tokens(folder / "tokens.xz", encode(TEXTS * 20, tokenizer))
    views = [[text[cut:] + " x" for text in TEXTS] for cut in range(1, 5)]
    (folder / "probes.json").write_text(json.dumps({"texts": TEXTS, "views": views}))
    sts = folder / "tasks" / "STSBenchmark"
    sts.mkdir(parents=True)
    rows = [{"sentence1": TEXTS[0], "sentence2": text, "score": place} for place, text in enumerate(TEXTS)]
    (sts / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("variant", [QUICK, *(pytest.param(item, marks=pytest.mark.slow) for item in SLOW)])
def test_a_run_writes_all_rows_and_is_the_run_that_is_not_measured(
    variant: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(data), str(tmp_path), "--variant", variant, *SMALL.split()])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.partition(" of")[0] for line in lines] == ["step 0", "step 1", "step 2", "step 4"]
    report = json.loads((tmp_path / "runs.json").read_text())[variant]
    assert f"loss {report['losses'][1]:.3f}, first token's share 0." in lines[2]
    plain, weights = unmeasured(data, variant), torch.load(tmp_path / f"{variant}.pt")
    assert [round(float(loss), 4) for loss in plain.losses] == report["losses"]
    assert all(torch.equal(weights[name], weight) for name, weight in plain.model.state_dict().items())
    assert_complete(polars.read_parquet(tmp_path / f"{variant}.parquet"))
    assert list(report["held_out"]) == ["0", str(STEPS)]
    assert report["command"] == f"python -m benchmarks.pretraining.run DATA OUT --variant {variant} {SMALL}"
    assert report["tokens"] == STEPS * 8 * 16


@pytest.mark.long
def test_runs_of_a_folder_are_read_as_the_record_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variant in ("base", QUICK):
        main([str(data), str(tmp_path), "--variant", variant, "--recipes", "plain", *SMALL.split()])
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    record.read_run.cache_clear()
    try:
        runs = record.known("base", "masked", QUICK)
        assert [run.name for run in runs] == ["base", QUICK]
        assert all(run.metric("prompt_entropy_raw").steps == (0, 1, 2, 4) for run in runs)
        assert runs[0].held_out == runs[0].told["held_out"][str(STEPS)]
    finally:
        record.read_run.cache_clear()


@pytest.mark.long
def test_a_run_that_is_stopped_is_not_taken_for_one_that_is_done(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Progress.look

    def stopping(self: Progress, trainer: Any, module: Any) -> list[dict[str, Any]]:
        trainer.should_stop = trainer.global_step == 2  # what is left of a Ctrl-C that Lightning keeps to itself
        return usual(self, trainer, module)

    monkeypatch.setattr(Progress, "look", stopping)
    with pytest.raises(RuntimeError, match="half-bos stopped at step 2 of 4: run the command again"):
        main([str(data), str(tmp_path), "--variant", QUICK, "--recipes", "plain", *SMALL.split()])
    assert not list(tmp_path.glob("*.json*"))


@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_number_of_steps_is_one_or_more(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "out", "--steps", number])
    assert f"--steps: must be 1 or more, but got {number}" in capsys.readouterr().err


def test_a_folder_without_the_data_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"tokenizer.json is not there: `python -m benchmarks.pretraining.corpus "
    ):
        main([str(tmp_path), str(tmp_path / "out")])


def test_the_held_out_part_is_the_one_that_the_texts_to_measure_are_from(data: Path, tmp_path: Path) -> None:
    other_item = shutil.copytree(data, tmp_path / "data")
    probes = json.loads((data / "probes.json").read_text())
    for stretch in ({}, {"stretch": 1000}):
        (other_item / "probes.json").write_text(json.dumps(probes | stretch))
        expected = stretch.get("stretch", STRETCH)
        with pytest.raises(
            ValueError, match=f"`--stretch` must leave 48 tokens or more to hold out, but {expected} leaves 0"
        ):
            main([str(other_item), str(tmp_path / "out"), *SMALL.replace("--stretch 50", "").split()])


@pytest.mark.slow
def test_a_text_of_one_s_own_is_enough_to_see_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "DATA", tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"give a text of your own by `--texts`, or set MIDLAYER_DATA"):
        corpus.main([str(tmp_path / "data")])
    assert not (tmp_path / "data").exists()
    (tmp_path / "mine.txt").write_text("".join(f"{text}\n" for text in TEXTS * 1600), encoding="utf8")
    words = ["--texts", str(tmp_path / "mine.txt"), "--characters", "500000", "--vocab", "300", "--probes", "20"]
    corpus.main([str(tmp_path / "data"), *words])
    assert "Runs will be measured, and not scored." in capsys.readouterr().out
    main(
        [
            str(tmp_path / "data"),
            str(tmp_path / "out"),
            *["--steps", "1", "--blocks", "2", "--width", "64", "--batch", "8", "--length", "16"],
        ]
    )
    assert set(polars.read_parquet(tmp_path / "out" / "base.parquet")["kind"]) == {"metric"}


def unmeasured(data: Path, name: str) -> Any:
    """Return the run without any callback."""
    variant = replace(VARIANTS[name], steps=STEPS)
    module = Pretraining(language_model(variant, Size(2, 64, length=16)), variant)
    ids, _ = parts(torch.from_numpy(read_tokens(data / "tokens.xz")), stretch=50)
    trainer = pl.Trainer(
        max_steps=STEPS, max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, Windows(ids, STEPS, 8, 16))
    return module


def assert_complete(frame: polars.DataFrame) -> None:
    """Look for all rows: four measurements of three layers, the tasks asked twice at the start and the end."""
    metrics = frame.filter(kind="metric")
    assert set(metrics["revision"]) == {"step0", "step1", "step2", "step4"}
    assert set(metrics["layer"]) == {0, 1, 2}
    assert frame.select("revision", "layer", "dataset", "name").is_unique().all()
    scores = frame.filter(kind="score")
    assert set(scores["revision"]) == {"step0", "step4"}
    assert set(scores.group_by("dataset", "name").len().iter_rows()) == {
        ("STSBenchmark", "cosine_spearman", 6), ("STSBenchmark one-word", "cosine_spearman", 6)
    }  # fmt: skip
