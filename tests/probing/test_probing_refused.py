"""``probe`` refuses values that cannot be trained with and arguments without effect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli._labeled_examples import read_examples
from midlayer_encoders.errors import OptionError
from midlayer_encoders.tasks import TaskFileError
from tests.cli.calls import run
from tests.support.grouped import probe

TEXTS = [f"text {number} about {word}" for number in range(6) for word in ("cats", "trains")]
LABELS = ["animal", "thing"] * 6


@pytest.fixture(scope="module")
def encoder(tiny_folder: Callable[[str], str]) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "`epochs` must be a positive number of epochs, but got 0"),
        ({"batch_size": 0}, "`batch_size` must be a positive number of examples, but got 0"),
        ({"patience": True}, "`patience` must be a positive number of epochs, but got True"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be a finite number, 0 or more, but got nan"),
        ({"weight_decay": float("inf")}, "`weight_decay` must be a finite number"),
        ({"keep_gb": -1}, "`keep_gb` must be a finite number, 0 or more, but got -1"),
        ({"heads": 0}, "`heads` must be a whole number, 1 or more"),
        ({"seed": "a"}, "`seed` must be a whole number"),
        ({"kind": "linear", "heads": 2}, "`heads` has no effect with kind='linear', which reads one vector"),
        ({"kind": "linear", "keep_gb": 1.0}, "`keep_gb` has no effect with kind='linear'"),
        ({"kind": "knn"}, "`kind` must be one of 'attentive', 'linear', but got 'knn'"),
        ({"labels": [["a"]] * 12}, r"`labels\[0\]` must be the name or the number of a class"),
        ({"labels": [float("nan")] * 12}, r"`labels\[0\]` must be the name or the number of a class"),
    ],
)
def test_invalid_options_are_refused(encoder: LayerEncoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        probe(encoder, **{"inputs": TEXTS, "labels": LABELS, "layers": [1], **options})


def test_numpy_labels_and_numbers_are_accepted(encoder: LayerEncoder) -> None:
    plain = probe(encoder, TEXTS, [0, 1] * 6, layers=[1], kind="linear", epochs=3)
    other_probe_result = probe(
        encoder, TEXTS, np.array([0, 1] * 6), layers=np.array([1]), kind="linear", epochs=np.int64(3)
    )  # type: ignore[arg-type]
    assert plain.frame.equals(other_probe_result.frame)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size 0", "`batch_size` must be a positive number of examples, but got 0"),
        ("--epochs -1", "`epochs` must be a positive number of epochs, but got -1"),
        ("--learning-rate nan", "`learning_rate` must be a finite number"),
        ("--keep-gb inf", "`keep_gb` must be a finite number"),
    ],
)
def test_command_refuses_them_before_the_model_is_loaded(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        run("probe", "no/such-model", "--data", ".", "--out", str(tmp_path), *words.split())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": 5, "label": 1}', "line 2: `text` must be a string that is not empty, but got 5"),
        ('{"text": "a", "label": 0.5}', "line 2: `label` must be a label, a string or a whole number, but got 0.5"),
        ('{"text": "a", "label": []}', "line 2: `label` must be a label, a string or a whole number"),
    ],
)
def test_invalid_rows_are_refused(row: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 1}\n' + row)
    with pytest.raises(TaskFileError, match=message):
        read_examples(tmp_path / "a.jsonl", ["text"])
