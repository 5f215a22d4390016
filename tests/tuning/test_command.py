"""``midlayer tune`` from a shell."""

import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from midlayer_encoders.tasks.tables import TaskFileError
from tests.cli.calls import run
from tests.support.tiny_folders import Folder
from tests.tuning.rows import PAIRS


@pytest.mark.long
def test_command_tunes_and_names_its_files(tiny_folder: Folder, tmp_path: Path) -> None:
    pairs, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    process = run(
        "tune", tiny_folder("Llama"), "--layer", "0.5", "--pairs", str(pairs), "--out", str(out), "--tasks", "none",
        "--batch-size", "8", "--max-steps", "3", "--lora", "2", "--matryoshka", "8,4", "--device", "cpu", "--quiet",
    )  # fmt: skip
    assert process.startswith("The held-out loss went from")  # the callback prints nothing here
    assert f'SentenceTransformer("{out / "model"}")' in process
    assert len(SentenceTransformer(str(out / "model"), device="cpu")[0].model.layers) == 2
    data = json.loads((out / "tuning.json").read_text())
    assert (data["lora"], data["max_steps"], data["matryoshka"], data["batch_size"]) == (2, 3, [8, 4], 8)
    assert "LoRA of rank 2" in (out / "report.html").read_text()


def test_pairs_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("left,right\na,b\n")
    with pytest.raises(TaskFileError, match="must have the columns of pairs"):
        run(
            "tune",
            "no/such-model",
            "--layer",
            "2",
            "--pairs",
            str(tmp_path / "pairs.csv"),
            "--out",
            str(tmp_path / "o"),
        )
