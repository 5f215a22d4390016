"""Each setting of a history alone decides whether a resumed run may continue it."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from midlayer_encoders.callbacks._measurement import Measurement
from midlayer_encoders.callbacks._settings import CallbackSettings
from tokenizers import normalizers
from torch import nn

from midlayer_encoders.callbacks import LayerMetricsTrainerCallback
from tests.callbacks.oracles import TEXTS, VIEWS
from tests.callbacks.training import ADVICE, TOKENIZER, neox
from tests.support.tiny_folders import tokenizer

pytestmark = ADVICE

BASE: dict[str, Any] = {
    "texts_or_dataloader": TEXTS, "tokenizer": TOKENIZER, "metrics": ["prompt_entropy"], "labels": [0, 1] * 6,
    "module": "student", "blocks": "gpt_neox.layers",
}  # fmt: skip
IDS = torch.randint(4, 99, (12, 6), generator=torch.Generator().manual_seed(0))
OTHER_TOKENIZER = tokenizer()
OTHER_TOKENIZER.backend_tokenizer.normalizer = normalizers.Replace("mat", "cat")
#: Field, its other value, and the settings that then differ.
CHANGES: list[tuple[str, Any, set[str]]] = [
    ("texts_or_dataloader", TEXTS[::-1], {"inputs"}),
    ("tokenizer", OTHER_TOKENIZER, {"inputs"}),
    ("metrics", ["curvature"], {"metrics"}),
    ("metrics", ["infonce"], {"metrics", "inputs"}),
    ("layers", [0, 2], {"layers"}),
    ("layers", [-1, -2, 1, 0], set()),  # the same layers in another form
    ("every_n_steps", 3, set()),
    ("module", "teacher", {"module"}),
    ("blocks", "gpt_neox.more", {"blocks"}),
    ("norm", "final", {"norm"}),
    ("pooling", "last", {"pooling"}),
    ("views", 3, set()),  # no metric reads them
    ("labels", None, {"labels"}),
    ("labels", [0, 0, 1] * 4, {"labels"}),
    ("labels", ["no", "yes"] * 6, set()),
    ("seed", 1, {"seed"}),
    ("max_length", 4, {"inputs"}),
    ("token_budget", 40, set()),
    ("figures", False, set()),
    ("dirpath", "elsewhere", set()),
    ("name", "other", set()),
    ("strict", True, set()),
]
OF_VIEWS: list[tuple[str, Any, set[str]]] = [("views", 3, {"inputs"}), ("views", VIEWS, {"inputs"})]
OF_LOADERS: list[tuple[str, Any, set[str]]] = [("max_inputs", 4, {"inputs"})]


def settings_of(**options: Any) -> dict[str, Any]:
    root = nn.ModuleDict({"student": neox(), "teacher": neox()})
    for model in root.values():
        model.gpt_neox.more = nn.ModuleList([*model.gpt_neox.layers])
    return Measurement(CallbackSettings(**options), root).identity


def changed_settings(base: dict[str, Any], field: str, value: Any) -> set[str]:
    before, after = settings_of(**base), settings_of(**base | {field: value})
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(("field", "value", "expected"), CHANGES)
def test_field_changed_alone_changes_its_settings(field: str, value: Any, expected: set[str]) -> None:
    assert changed_settings(BASE, field, value) == expected


@pytest.mark.parametrize(("field", "value", "expected"), OF_VIEWS)
def test_views_changed_alone_change_the_inputs(field: str, value: Any, expected: set[str]) -> None:
    assert changed_settings(BASE | {"metrics": ["lidar"]}, field, value) == expected


@pytest.mark.parametrize(("field", "value", "expected"), OF_LOADERS)
def test_number_of_inputs_changes_the_inputs(field: str, value: Any, expected: set[str]) -> None:
    loader: Iterable[Any] = [{"input_ids": IDS}]
    assert changed_settings(BASE | {"texts_or_dataloader": loader, "labels": None}, field, value) == expected


def test_every_field_and_every_setting_is_changed_above() -> None:
    changes = [*CHANGES, *OF_VIEWS, *OF_LOADERS]
    assert {field for field, _, _ in changes} == {field.name for field in fields(CallbackSettings)}
    assert set().union(*(expected for _, _, expected in changes)) == settings_of(**BASE).keys()


def test_resume_keeps_the_steps_up_to_the_checkpoint(tmp_path: Path) -> None:
    def callback() -> LayerMetricsTrainerCallback:
        options: dict[str, Any] = {"metrics": ["curvature"], "every_n_steps": 1, "strict": True, "dirpath": tmp_path}
        made = LayerMetricsTrainerCallback(TEXTS, TOKENIZER, **options)
        made._prepare(neox())
        return made

    before, resumed = callback(), callback()
    assert before._measurement is not None
    for step in (0, 1, 2, 3):
        before._steps[step] = {"curvature": {0: 0.5 + step}}
    before._write(tmp_path)
    resumed._resume_from(tmp_path / "history.parquet", 2)
    assert [(row["revision"], row["value"]) for row in resumed.history] == [
        ("step0", 0.5), ("step1", 1.5), ("step2", 2.5),
    ]  # fmt: skip
