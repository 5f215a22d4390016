"""Cutting, tuning and exporting a tiny model end to end."""

import json
import random
import re
import signal
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import LayerIndexError, NotFiniteError, OptionError
from midlayer_encoders.extras.training.tuning_page import tuning_words
from midlayer_encoders.tasks.tables import TaskFileError
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import TEXTS, Folder
from tests.tuning.rows import PAIRS, tuned

pytestmark = MTEB

SIX = {"max_steps": 6, "checkpoints": 3}


def sts(path: Path) -> Path:
    rows = [{"sentence1": text, "sentence2": TEXTS[n - 1], "score": float(n % 3)} for n, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_held_out_loss_falls_and_the_plain_folder_gives_the_same_vectors(
    lora: Any, tiny_folder: Folder, tmp_path: Path
) -> None:
    cut = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    result = tuned(tiny_folder("Llama"), tmp_path / "out", lora=lora)
    held_out = result.trained.losses.drop_nulls("held_out")
    assert held_out["step"][0] == 0
    assert held_out["held_out"].min() < 0.8 * held_out["held_out"][0]
    plain = SentenceTransformer(str(result.model_folder), device="cpu")
    np.testing.assert_array_equal(plain.encode(TEXTS), result.encoder.encode(TEXTS))
    assert np.abs(result.encoder.encode(TEXTS) - cut.encode(TEXTS)).max() > 1e-3
    assert result.encoder.spec.digest != cut.spec.digest
    assert len(plain[0].model.layers) == 2
    assert not (result.folder / "checkpoints").exists()
    linear = [module for module in plain.modules() if isinstance(module, torch.nn.Linear)]
    adapters = sum(16 * (module.in_features + module.out_features) for module in linear)
    trained = f"{adapters:,} (LoRA of rank 16)" if lora else f"{sum(p.numel() for p in plain.parameters()):,}"
    expected = {
        "Pairs": "`pairs`, 48 rows",
        "Trained on": "43 rows of pairs, 5 held out",
        "Loss": "MultipleNegativesRankingLoss",
        "Trained parameters": trained,
        "Batch size": "8",
        "Learning rate": "0.005",
        "Steps": f"{result.trained.steps} of at most 6",
        "Layer": "2 of 4",
    }
    assert {name: result.how[name] for name in expected} == expected


@pytest.mark.long
def test_every_layer_is_scored_before_and_after_and_the_page_shows_it(tiny_folder: Folder, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    result = tuned(
        tiny_folder("BERT"), tmp_path / 'my "best" run', tasks=str(sts(tmp_path / "mine.jsonl")), max_steps=4,
        progress=lambda *report: stages.append(report),
    )  # fmt: skip
    scores = result.frame.pivot(on="revision", index=["layer", "dataset"], values="value").sort("layer")
    assert scores["layer"].to_list() == [0, 1, 2]
    assert (scores["before"] != scores["after"]).any()
    last = scores.row(-1, named=True)
    assert f"went from {100 * last['before']:.1f} to {100 * last['after']:.1f} points" in result.words().replace(
        "−", "-"
    )
    page = (result.folder / "report.html").read_text()
    for old, new in ((100 * old, 100 * new) for old, new in scores.select("before", "after").iter_rows()):
        assert f"<td>{old:.1f} → {new:.1f} (".replace("-", "−") in page
    (line,) = re.findall(r"^(SentenceTransformer\(.*\))</code>", page, re.MULTILINE)
    assert eval(unescape(line), {"SentenceTransformer": str}) == str(result.model_folder)
    assert ("training", 4, 4) in stages
    assert {"before: scoring", "after: scoring"} <= {name for name, _, _ in stages}
    steps = result.trained.metrics["revision"].unique().to_list()
    assert {"step0", "step4"} <= set(steps)
    assert sorted(result.trained.metrics["layer"].unique()) == [0, 1, 2]


@pytest.mark.slow
def test_a_run_that_stops_goes_on_from_its_checkpoint_to_the_same_weights(tiny_folder: Folder, tmp_path: Path) -> None:
    through = tuned(tiny_folder("Llama"), tmp_path / "through", **SIX)

    def stop(stage: str, process: int, total: int) -> None:
        if process == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(tiny_folder("Llama"), tmp_path / "stopped", **SIX, progress=stop)
    (tmp_path / "stopped" / "checkpoints" / "checkpoint-5").mkdir()  # as a kill leaves it, half written
    recorded: list[int] = []
    resumed = tuned(
        tiny_folder("Llama"), tmp_path / "stopped", **SIX, progress=lambda _, process, __: recorded.append(process)
    )
    assert recorded[:3] == [0, 4, 5]
    np.testing.assert_array_equal(resumed.encoder.encode(TEXTS), through.encoder.encode(TEXTS))
    assert resumed.trained.losses.equals(through.trained.losses)
    repeated = tuned(tiny_folder("Llama"), tmp_path / "stopped", **SIX, progress=lambda *_: pytest.fail("trained anew"))
    np.testing.assert_array_equal(repeated.encoder.encode(TEXTS), through.encoder.encode(TEXTS))
    assert repeated.trained.losses.equals(through.trained.losses)
    assert repeated.how == resumed.how


KILLED = f"""
import os, signal, sys
from tests.tuning.rows import tuned
from pathlib import Path
def kill(stage, done, total):
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)
tuned(sys.argv[1], Path(sys.argv[2]), **{SIX}, lora=4, progress=kill)
"""


@pytest.mark.slow
def test_a_killed_process_loses_no_more_than_the_steps_since_its_checkpoint(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    through = tuned(tiny_folder("Llama"), tmp_path / "through", lora=4, **SIX)
    killed = [sys.executable, "-c", KILLED, tiny_folder("Llama"), str(tmp_path / "killed")]
    assert subprocess.run(killed, cwd=Path(__file__).parents[2], check=False).returncode == -signal.SIGKILL
    recorded: list[int] = []
    resumed = tuned(
        tiny_folder("Llama"),
        tmp_path / "killed",
        lora=4,
        **SIX,
        progress=lambda _, process, __: recorded.append(process),
    )
    assert recorded[:2] == [0, 4]
    np.testing.assert_allclose(resumed.encoder.encode(TEXTS), through.encoder.encode(TEXTS), atol=1e-5)


@pytest.mark.slow
def test_seed_determines_the_run(tiny_folder: Folder, tmp_path: Path) -> None:
    actual = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)
        options = {"lora": 4, "max_steps": 1, "held_out": 0, "checkpoints": 0, "seed": seed}
        actual.append(tuned(tiny_folder("Llama"), tmp_path / str(number), **options).encoder.encode(TEXTS))
    np.testing.assert_array_equal(actual[0], actual[1])
    assert np.abs(actual[0] - actual[2]).max() > 0


@pytest.mark.long
def test_it_stops_early_where_nothing_is_learned_and_leaves_the_generators_alone(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    random.seed(3)
    torch.manual_seed(3)
    expected = random.Random(3).random(), torch.rand(1, generator=torch.Generator().manual_seed(3))
    result = tuned(tiny_folder("Llama"), tmp_path / "out", epochs=6, learning_rate=0.0, patience=2)
    assert (random.random(), torch.rand(1)) == expected
    assert result.trained.steps == 3 * 3  # three evaluations of every third of 36 steps: one best, two no better
    assert result.trained.best_step == 3


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"layer": 5}, LayerIndexError, r"in \[0, 4\].*but got 5"),
        ({"layer": [1, 2]}, LayerIndexError, "`layer` must be in"),
        ({"center": ["a text"]}, OptionError, "`center` must be left out: it is fitted to vectors that training"),
        ({"skip_first": 1}, Exception, "a plain folder pools every token"),
        ({"batch_size": 1}, OptionError, "`batch_size` must be a positive number of rows"),
        ({"held_out": 0.6}, OptionError, "`held_out` must be a finite number, from 0 to 0.5"),
        ({"checkpoints": 0}, OptionError, "`held_out` must be 0 with checkpoints=0"),
        ({"layer": 0, "lora": 4}, OptionError, "`lora` must be False for layer 0"),
        ({"matryoshka": [4096]}, OptionError, "`matryoshka` must be at most"),
        ({"truncate_dim": 8}, OptionError, r"`truncate_dim` must be left out.* Pass matryoshka=\[8\]"),
        ({"out": None}, OptionError, "`out` must be a path, but got ''"),
        ({"pairs": ["a", "b"]}, OptionError, r"`pairs` must hold dicts, as .* but got \['a', 'b'\]"),
        ({"pairs": [{1: "a"}]}, TaskFileError, "`pairs` must have the columns of pairs, but has 1"),
    ],
)
def test_invalid_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], words: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    from tests.support.grouped import tune

    scored = {"tasks": str(sts(tmp_path / "mine.jsonl")), "progress": lambda *_: pytest.fail("not refused at once")}
    with pytest.raises(error, match=words):
        tune(
            tiny_folder("Llama"),
            device="cpu",
            **{"layer": 2, "pairs": PAIRS, "out": tmp_path / "out", **scored, **options},
        )


@pytest.mark.slow
def test_the_trainers_autocast_is_off_when_it_has_ended(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sentence_transformers

    result = sentence_transformers.SentenceTransformerTrainingArguments
    half = lambda **kwargs: result(**{**kwargs, "bf16": True})  # noqa: E731  (as on a GPU)
    monkeypatch.setattr(sentence_transformers, "SentenceTransformerTrainingArguments", half)
    encoder = tuned(tiny_folder("Llama"), tmp_path / "out", max_steps=1, held_out=0, checkpoints=0).encoder
    assert "forward" not in vars(encoder)


@pytest.mark.long
def test_unsupported_training_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match=r"became NaN or infinity in training with learning_rate=1e\+10\. Pass a"):
        tuned(tiny_folder("Llama"), tmp_path / "far", learning_rate=1e10, max_steps=20, held_out=0)


def test_a_model_that_peft_has_no_adapters_for_is_refused_before_it_is_scored(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    scored = {"tasks": str(sts(tmp_path / "mine.jsonl")), "progress": lambda *_: pytest.fail("not refused at once")}
    with pytest.raises(OptionError, match=r"`lora` must be False for .*Mamba.*, which PEFT refuses"):
        tuned(tiny_folder("Mamba"), tmp_path / "lora", lora=4, **scored)
    assert not (tmp_path / "lora").exists()


def test_model_with_merged_adapters_is_trained_completely(tiny_folder: Folder, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModel.from_pretrained(tiny_folder("Llama"))
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    result = tuned(
        tiny_folder("Llama"), tmp_path / "out", max_steps=1, held_out=0, adapters=[str(tmp_path / "adapter")]
    )
    assert (
        result.how["Trained parameters"] == f"{sum(parameter.numel() for parameter in result.encoder.parameters()):,}"
    )


@pytest.mark.slow
def test_texts_too_short_to_be_measured_are_tuned_on(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [{"anchor": f"{n}", "positive": f"a{n}"} for n in range(20)]
    result = tuned(tiny_folder("Llama"), tmp_path / "short", rows, max_steps=2, checkpoints=1)
    assert result.trained.metrics.is_empty()
    assert (result.model_folder / "modules.json").exists()
    repeated = tuned(tiny_folder("Llama"), tmp_path / "short", rows, max_steps=2, checkpoints=1)
    assert repeated.trained.metrics.is_empty()
    longer = [*rows, *({"anchor": row["anchor"], "positive": f"{row['positive']} is long"} for row in rows)]
    result = tuned(tiny_folder("Llama"), tmp_path / "some", longer, max_steps=2, checkpoints=1, held_out=0.05)
    assert not result.trained.metrics.is_empty()


def test_a_folder_at_home_or_with_a_lock_alone_is_taken(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "midlayer.lock").touch()  # of a run that was killed before it wrote anything
    result = tuned(tiny_folder("Llama"), "~/out", max_steps=1, held_out=0)  # type: ignore[arg-type]
    assert result.folder == tmp_path / "out"
    assert (tmp_path / "out" / "model" / "modules.json").exists()


def test_a_folder_of_something_else_or_of_another_run_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.doc").write_text("mine")
    with pytest.raises(OptionError, match=r"`out` must be a new or empty folder, or hold an earlier run, but .*taken"):
        tuned(tiny_folder("Llama"), tmp_path / "taken")
    tuned(tiny_folder("Llama"), tmp_path / "out", max_steps=1, held_out=0)
    with pytest.raises(OptionError, match=r"had other values of: max_steps, seed\. Choose another"):
        tuned(tiny_folder("Llama"), tmp_path / "out", max_steps=2, held_out=0, seed=1)


@pytest.mark.slow
def test_each_kind_of_rows_and_a_query_prompt_can_be_tuned_on(tiny_folder: Folder, tmp_path: Path) -> None:
    labels = [{"text": f"{text} {n}", "label": text[0]} for n in range(6) for text in TEXTS]
    scored = [{"sentence1": row["anchor"], "sentence2": row["positive"], "score": n % 4} for n, row in enumerate(PAIRS)]
    hard = [row | {"negative": "no such thing"} for row in PAIRS]
    folder = tiny_folder("Llama")
    for name, rows, options in (
        ("labels", labels, {}),
        ("scored", scored, {"matryoshka": [8]}),
        ("pairs", hard, {"prompts": {"query": "find: "}, "mini_batch": 4}),
    ):
        result = tuned(folder, tmp_path / name, rows, max_steps=3, checkpoints=1, **options)
        assert name in result.how["Trained on"]
        assert (result.model_folder / "modules.json").exists()


def test_text_is_about_the_layer_of_the_encoder() -> None:
    frame = pl.DataFrame(
        [("m", when, k, k / 2, "score", "STS", "r", v) for when, by in (("before", [0.1, 0.2]), ("after", [0.9, 0.5])) for k, v in enumerate(by)],
        schema=["model", "revision", "layer", "depth", "kind", "dataset", "name", "value"], orient="row",
    )  # fmt: skip
    losses = pl.DataFrame({"step": [0, 1, 2], "loss": [None, 2.0, 1.0], "held_out": [3.0, 1.0, 1.5]})
    assert tuning_words(frame, losses) == (
        "STS at layer 1 went from 20.0 to 50.0 points (+30.0). The held-out loss went from 3.000 to 1.000 at its best."
    )
