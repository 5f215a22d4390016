"""Distilling a teacher into a cut encoder, from texts alone."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sentence_transformers import SentenceTransformer

from midlayer_encoders import DistillResult, LayerEncoder, Recipe, distill
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.training import DistillSettings
from midlayer_encoders.extras.training.losses import DistillLoss
from midlayer_encoders.extras.training.tuning_page import tuning_words
from midlayer_encoders.frame import FRAME_SCHEMA
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import TEXTS, Folder
from tests.tuning.rows import PAIRS
from tests.tuning.test_tune import sts

pytestmark = MTEB

SENTENCES = [row["anchor"] for row in PAIRS]
QUICK: dict[str, Any] = {"max_steps": 12, "batch_size": 16, "learning_rate": 3e-3, "held_out": 0.1, "checkpoints": 3}


def distilled(folder: str, out: Path, layer: Any = 2, texts: Any = None, **options: Any) -> DistillResult:
    quick = {name: options.pop(name, value) for name, value in QUICK.items()}
    settings = DistillSettings(**quick, **{name: options.pop(name) for name in ("match", "lora") if name in options})
    arguments = {"out": out, "tasks": (), "settings": settings, "device": "cpu", **options}
    return distill(folder, layer, SENTENCES if texts is None else texts, **arguments)


def mean_cosine(first: Any, second: Any) -> float:
    vectors = [torch.from_numpy(encoder.encode(SENTENCES)) for encoder in (first, second)]
    return float(torch.cosine_similarity(*vectors).mean())


@pytest.mark.parametrize("lora", [False, 4])
def test_the_student_comes_closer_to_the_whole_model_and_is_a_plain_folder(
    lora: Any, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = tiny_folder("Llama")
    teacher = LayerEncoder(folder, -1, device="cpu")
    before = mean_cosine(LayerEncoder(folder, 2, device="cpu"), teacher)
    result = distilled(folder, tmp_path / "out", lora=lora)
    assert mean_cosine(result.encoder, teacher) > before + 0.2 * (1 - before)
    plain = SentenceTransformer(str(result.model_folder), device="cpu")
    np.testing.assert_array_equal(plain.encode(TEXTS), result.encoder.encode(TEXTS))
    assert len(plain[0].model.layers) == 2
    assert result.how["Teacher"].endswith("layer 4 of 4")
    assert result.how["Loss"] == "DistillLoss"


@pytest.mark.long
def test_a_student_that_reads_once_learns_from_a_teacher_that_reads_twice(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = tiny_folder("Llama")
    twice = Recipe(name="twice", template='{text}:"{read}"{text}', join="sum")
    result = distilled(folder, tmp_path / "out", -1, teacher_layer=3, teacher_recipe=twice)
    stored = np.load(tmp_path / "out" / "teacher_vectors" / "0.npy")
    teacher = LayerEncoder(folder, 3, recipe=twice, device="cpu")
    np.testing.assert_allclose(stored, teacher.encode(SENTENCES), atol=1e-5)
    plain = SentenceTransformer(str(result.model_folder), device="cpu")
    assert len(plain.tokenize(["a b"])["input_ids"][0]) < len(teacher.tokenize(["a b"])["input_ids"][0])
    untrained = LayerEncoder(folder, -1, device="cpu")
    assert mean_cosine(plain, teacher) > mean_cosine(untrained, teacher)


@pytest.mark.long
def test_the_options_of_the_student_are_those_of_a_teacher_that_is_the_same_model(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    distilled(tiny_folder("Llama"), tmp_path / "out", pooling="last", max_steps=1)
    stored = np.load(tmp_path / "out" / "teacher_vectors" / "0.npy")
    teacher = LayerEncoder(tiny_folder("Llama"), -1, pooling="last", device="cpu")
    np.testing.assert_allclose(stored, teacher.encode(SENTENCES), atol=1e-5)


@pytest.mark.long
def test_a_teacher_of_another_width_teaches_similarities(tiny_folder: Folder, tmp_path: Path) -> None:
    teacher = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    narrow = LayerEncoder(tiny_folder("Llama"), -1, truncate_dim=8, device="cpu")
    with pytest.raises(OptionError, match="`match` must be 'similarities' for vectors of different widths: 32"):
        distilled(tiny_folder("Llama"), tmp_path / "refused", teacher=narrow)
    result = distilled(tiny_folder("Llama"), tmp_path / "out", teacher=narrow, match="similarities")
    held_out = result.trained.losses.drop_nulls("held_out")["held_out"]
    assert held_out.min() < held_out[0]
    assert teacher.layer == 4


def test_the_loss_is_the_cosine_of_vectors_or_the_squared_difference_of_similarities() -> None:
    draw = torch.Generator().manual_seed(0)
    student, other = (torch.randn(5, 8, generator=draw) for _ in range(2))
    labels = torch.tensor([3, 0, 4])
    expected = 0.0
    for row, label in enumerate(labels):
        expected += (1 - float(torch.cosine_similarity(student[row], other[label], dim=0))) / 3
    differences = []
    for row in range(3):
        for column in range(row):
            pairs = ((student[row], student[column]), (other[labels[row]], other[labels[column]]))
            near = [float(torch.cosine_similarity(*pair, dim=0)) for pair in pairs]
            differences.append((near[0] - near[1]) ** 2)
    similarities = sum(differences) / len(differences)
    units = other / other.norm(dim=1, keepdim=True)
    centered = 0.0
    for row, label in enumerate(labels):
        centered += (1 - float(torch.cosine_similarity(student[row], units[label] - units.mean(0), dim=0))) / 3
    values = {
        "vectors": expected, "centered": centered, "similarities": similarities, "both": expected + similarities
    }  # fmt: skip
    for match, value in values.items():
        loss = DistillLoss(lambda features: features, other, match)  # type: ignore[arg-type]
        actual = loss([{"sentence_embedding": student[:3]}], labels)
        assert float(actual) == pytest.approx(value, abs=1e-6)


@pytest.mark.long
def test_every_layer_and_the_teacher_are_scored_and_shown(tiny_folder: Folder, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    result = distilled(
        tiny_folder("BERT"), tmp_path / "out", tasks=str(sts(tmp_path / "mine.jsonl")), max_steps=2,
        progress=lambda *report: stages.append(report),
    )  # fmt: skip
    assert result.frame.filter(pl.col("revision") == "after")["layer"].to_list() == [0, 1, 2]
    (teacher,) = result.frame.filter(pl.col("revision") == "teacher").iter_rows(named=True)
    whole = LayerEncoder(tiny_folder("BERT"), -1, device="cpu")
    assert teacher["layer"] == whole.layer
    page = (result.folder / "report.html").read_text()
    assert f"teacher</th><td>{100 * teacher['value']:.1f}</td>".replace("-", "−") in page
    assert re.search(r"<h1>.* and distilled</h1>", page)
    assert ("teacher", len(SENTENCES), len(SENTENCES)) in stages
    assert {"teacher: scoring", "before: scoring", "after: scoring"} <= {name for name, _, _ in stages}


def test_the_summary_says_which_share_of_the_lead_was_recovered() -> None:
    rows = [
        ("m", when, 2, 1.0, "score", task, "r", value)
        for when, value in (("before", 0.5), ("after", 0.65), ("teacher", 0.7))
        for task in ("A", "B")
    ]
    frame = pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row")
    losses = pl.DataFrame(schema={"step": pl.Int64, "loss": pl.Float64, "held_out": pl.Float64})
    words = tuning_words(frame, losses)
    assert words == (
        "The tasks' average at layer 2 went from 50.0 to 65.0 points (+15.0). The teacher has 70.0: training recovered "
        "75 % of its lead."
    )
    worse = frame.with_columns(
        pl.when(pl.col("revision") == "teacher").then(0.4).otherwise(pl.col("value")).alias("value")
    )
    assert tuning_words(worse, losses).endswith("The teacher, with 40.0, was not better.")
    better, lost = (
        frame.with_columns(pl.when(pl.col("revision") == "after").then(value).otherwise(pl.col("value")).alias("value"))
        for value in (0.8, 0.4)
    )
    assert tuning_words(better, losses).endswith("training recovered all of its lead.")
    assert tuning_words(lost, losses).endswith("training recovered 0 % of its lead.")
    rising = losses.vstack(
        pl.DataFrame({"step": [0, 2, 4], "loss": [None] * 3, "held_out": [0.1, 0.4, 0.3]}, losses.schema)
    )
    assert "went from 0.100 to 0.300 at its best. It did not fall" in tuning_words(frame, rising)


@pytest.mark.long
def test_a_stopped_run_reads_no_text_twice_and_ends_with_the_same_weights(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["midlayer_encoders.extras.training.tune"]
    monkeypatch.setattr(module, "_CHUNK", 16)
    through = distilled(tiny_folder("Llama"), tmp_path / "through")

    def stop_at(stage: str, count: int) -> Callable[..., None]:
        def report(name: str, done: int, _: int) -> None:
            if (name, done) == (stage, count):
                raise KeyboardInterrupt

        return report

    for stage, count in (("teacher", 32), ("training", 6)):
        with pytest.raises(KeyboardInterrupt):
            distilled(tiny_folder("Llama"), tmp_path / "out", progress=stop_at(stage, count))
    monkeypatch.setattr(module, "_BATCH", None)  # no text is left to encode
    resumed = distilled(tiny_folder("Llama"), tmp_path / "out")
    for ours, theirs in zip(resumed.encoder.parameters(), through.encoder.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.long
@pytest.mark.parametrize("damage", ["other numbers", "half of the file", "nothing left"])
def test_vectors_of_the_teacher_that_were_changed_are_computed_again(
    damage: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    def stop(stage: str, *_: int) -> None:
        if stage == "training":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distilled(tiny_folder("Llama"), tmp_path / "out", max_steps=1, progress=stop)
    file = tmp_path / "out" / "teacher_vectors" / "0.npy"
    vectors = np.load(file)
    if damage == "other numbers":
        np.save(file, vectors + 1)
    else:
        file.write_bytes(file.read_bytes()[: 200 if damage == "half of the file" else 0])
    distilled(tiny_folder("Llama"), tmp_path / "out", max_steps=1)
    np.testing.assert_array_equal(np.load(file), vectors)


def test_texts_are_read_from_a_column_of_a_table(tiny_folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("sentence,other\n" + "".join(f"{text},x\n" for text in SENTENCES))
    result = distilled(tiny_folder("BERT"), tmp_path / "out", 0, path, text_column="sentence", limit=20, max_steps=1)
    assert result.how["Texts"] == "rows.csv, 20 rows"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"truncate_dim": 8}, "`truncate_dim` must be left out.*Pass it to the trained encoder instead"),
        ({"layer": -1}, "`teacher` must differ from the student, but both are layer 4"),
        ({"texts": ["one"]}, "`texts` must have 2 texts or more"),
        ({"texts": [1, 2]}, r"`texts\[0\]` must be a string"),
        ({"match": "vector"}, "`match` must be one of 'vectors', 'centered', 'similarities', 'both'.*mean"),
        ({"teacher_layer": 9}, "9"),
        ({"teacher_recipe": "word-eco"}, "word-echo"),
        ({"center": ["a"]}, "`center` must be left out"),
        ({"teacher": "no such folder"}, "no such folder"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named(arguments: Any, message: str, tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises((OptionError, ValueError, OSError), match=message):
        distilled(tiny_folder("Llama"), tmp_path / "out", **arguments)


@pytest.mark.long
def test_an_encoder_needs_a_teacher_and_a_folder_belongs_to_one_teacher(tiny_folder: Folder, tmp_path: Path) -> None:
    student = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", dtype="float32")
    with pytest.raises(OptionError, match="`teacher` must be given if `model` is an encoder"):
        distill(student, None, SENTENCES, out=tmp_path / "out", tasks=())
    distilled(tiny_folder("Llama"), tmp_path / "out", max_steps=1)
    with pytest.raises(OptionError, match="other values of: teacher"):
        distilled(tiny_folder("Llama"), tmp_path / "out", max_steps=1, teacher_layer=3)


@pytest.mark.long
def test_a_student_that_approaches_a_narrow_teacher_has_not_collapsed(
    tiny_folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    distilled(tiny_folder("Llama"), tmp_path / "out")
    assert "move to one point" not in caplog.text


def test_a_teacher_whose_vectors_are_all_the_same_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    teacher = LayerEncoder(tiny_folder("BERT"), -1, device="cpu")
    torch.nn.init.zeros_(teacher.transformer.encoder.layer[-1].output.LayerNorm.weight)
    torch.nn.init.ones_(teacher.transformer.encoder.layer[-1].output.LayerNorm.bias)
    teacher.save_pretrained(str(tmp_path / "constant"))
    with pytest.raises(OptionError, match="`teacher` must return different vectors for different texts"):
        distilled(tiny_folder("BERT"), tmp_path / "out", teacher=str(tmp_path / "constant"), match="centered")
