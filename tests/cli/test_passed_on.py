"""Every flag of the long commands is passed on; the calls are recorded, because each takes minutes."""

import importlib
import inspect
import json
from contextlib import nullcontext
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from midlayer_encoders import EncoderOptions
from midlayer_encoders.cli import _arguments, app
from midlayer_encoders.encoder.options import option_fields
from midlayer_encoders.extras import scaling
from midlayer_encoders.recipes import recipes_of
from midlayer_encoders.sweeping.compression import make_compressions
from midlayer_encoders.tasks.tables import Columns
from tests.cli.calls import option_flags, run

TITLES = [f"title {number}" for number in range(12)]


class RecordedError(Exception):
    """Ends a command at the call that it is about to make."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.arguments = arguments
        self.keywords = keywords


class EncoderName(str):
    """The name of a model that was not loaded."""

    def check_one_stack(self, argument: str) -> None:
        """Accept every argument."""


class Case(NamedTuple):
    """A command line, the function behind it, and the arguments of its call."""

    function: str
    models: list[str]
    flags: dict[str, Any]
    arguments: list[Any]
    keywords: dict[str, Any]


RECIPES = recipes_of("recipes", ["plain", "one-word"])
ENCODER = {"max_length": 9, "pooling": "max", "device": "cpu"}
SWEEP: dict[str, Any] = {
    "tasks": "near.csv", "text_column": "t", "label_column": "l", "drop_empty": True, "limit": 50, "no_baselines": True, "layers": "1,0.5,2-3", "recipes": "plain,one-word", "metrics": "lidar,dime",
    "half": True, "scoring": "mteb", "workers": 3,
}  # fmt: skip
SMALL = {"dims": "64,8", "precisions": "int8,binary"}
SWEPT: dict[str, Any] = {
    "model": "MODEL", "tasks": ["near.csv"], "options": {}, "compressions": make_compressions([64, 8], ["int8", "binary"]),
    "layers": [1, 0.5, 2, 3], "columns": Columns("t", "l", True), "limit": 50, "baselines": False, "recipes": RECIPES, "metrics": ["lidar", "dime"],
    "settings": {"scoring": "mteb", "workers": 3, "store_dtype": "float16"},
}  # fmt: skip
CASES = {
    "sweep": Case(
        "sweeping.layer_sweep.run_sweep",
        ["MODEL"],
        {**SWEEP, **SMALL, "out": "o", "store": "s"},
        [],
        {**SWEPT, "out": Path("o"), "store": Path("s")},
    ),
    "sweep name@revision": Case(
        "sweeping.layer_sweep.run_sweep",
        ["MODEL@step1"],
        {**SWEEP, **SMALL},
        [],
        {**SWEPT, "out": None, "store": None},
    ),
    "sweep --executor": Case(
        "sweeping.sweeps.sweep_models",
        ["MODEL", "m@step1"],
        {**SWEEP, **SMALL, "out": "o", "store": "s", "executor": "processes", "executor_option": "count=7"},
        [["MODEL", "m@step1"], Path("o")],
        {**SWEPT, "executor": ("processes", {"count": 7}), "options": ENCODER, "out": None, "store": Path("s")},
    ),
    "select": Case(
        "selection.select",
        ["MODEL"],
        {"texts": "rows.jsonl", "labels": "labels.txt", "rule": "last", "recipes": "plain,one-word", "all_rules": True,
         "out": "o", "text_column": "title", "drop_empty": True, "limit": 11, "max_texts": 7, "seed": 3},
        ["MODEL", TITLES[:11], (["a", None] * 6)[:11]],
        {"rule": "last", "recipes": RECIPES, "all_rules": True, "max_texts": 7, "seed": 3},
    ),
    "embed": Case(
        "extras.vectors.embed",
        ["MODEL"],
        {"texts": "rows.jsonl", "text_column": "title", "drop_empty": True, "limit": 5, "layers": "1,-1",
         "token_budget": "64", "out": "vectors.npy"},
        ["MODEL", TITLES[:5], Path("vectors.npy")],
        {"layers": [1, -1], "token_budget": 64},
    ),
    "embed --executor": Case(
        "extras.vectors.embed",
        ["MODEL"],
        {"texts": "rows.jsonl", "text_column": "title", "drop_empty": True, "limit": 5, "out": "vectors.npy",
         "executor": "processes", "executor_option": "count=7"},
        ["MODEL", TITLES[:5], Path("vectors.npy")],
        {"layers": "all", "token_budget": "auto", "executor": ("processes", {"count": 7}), **ENCODER},
    ),
    "metrics": Case(
        "measure",
        ["MODEL"],
        {"texts": "rows.jsonl", "text_column": "title", "drop_empty": True, "limit": 5, "layers": "1,-1", "metrics": "lidar,dime",
         "seed": 3, "out": "o"},
        ["MODEL", TITLES[:5]],
        {"metrics": ["lidar", "dime"], "layers": [1, -1], "seed": 3, "dataset": "rows"},
    ),
    "compare": Case(
        "comparing.compare",
        ["a", "b", "c"],
        {"texts": "rows.jsonl", "text_column": "title", "drop_empty": True, "limit": 11, "layers": "1,-1", "metrics": "lidar,dime", "views": 3,
         "resamples": 4, "seed": 3, "out": "o"},
        ["a", "b", "c"],
        {"texts": TITLES[:11], "layers": [1, -1], "metrics": ["lidar", "dime"], "views": 3, "seed": 3,
         "intervals": {"resamples": 4}, "dataset": "rows", "out": Path("o"), "norm": "none", **ENCODER},
    ),
    "progression": Case(
        "comparing.progression",
        ["m"],
        {"texts": "rows.jsonl", "text_column": "title", "drop_empty": True, "limit": 5, "layers": "1,-1", "metrics": "lidar,dime", "views": 3,
         "revisions": "step1, step2", "seed": 3, "out": "o", "executor": "slurm", "executor_option": "mem_gb=7"},
        ["m", ["step1", "step2"]],
        {"texts": TITLES[:5], "layers": [1, -1], "metrics": ["lidar", "dime"], "views": 3, "seed": 3,
         "dataset": "rows", "out": Path("o"), "norm": "none", "executor": ("slurm", {"mem_gb": 7}),
         **ENCODER},
    ),
    "tune": Case(
        "extras.training.tune",
        ["m"],
        {"layer": "0.5", "pairs": "p.csv", "out": "o", "tasks": "A,B", "lora": 2, "epochs": 2.5, "max_steps": 7,
         "batch_size": 5, "learning_rate": 0.25, "held_out": 0.3, "patience": 4, "checkpoints": 6, "mini_batch": 2,
         "matryoshka": "8,4", "seed": 3, "texts": "t.txt", "text_column": "title", "label_column": "kind", "drop_empty": True,
         "objective": "pairs"},
        ["m", 0.5, Path("p.csv")],
        {"out": Path("o"), "texts": Path("t.txt"), "text_column": "title", "label_column": "kind", "drop_empty": True, "tasks": ["A", "B"], "dtype": "float32", **ENCODER,
         "settings": {"lora": 2, "epochs": 2.5, "max_steps": 7, "batch_size": 5, "learning_rate": 0.25,
                      "held_out": 0.3, "patience": 4, "checkpoints": 6, "mini_batch": 2, "matryoshka": [8, 4],
                      "seed": 3, "objective": "pairs"}},
    ),
    "distill": Case(
        "extras.training.distill",
        ["m"],
        {"layer": "0.5", "texts": "t.txt", "text_column": "title", "label_column": "kind", "drop_empty": True, "limit": 9, "out": "o", "teacher": "other", "teacher_layer": "7",
         "teacher_recipe": "word-echo", "tasks": "A,B", "match": "both", "lora": 2, "epochs": 2.5, "max_steps": 7,
         "batch_size": 5, "learning_rate": 0.25, "held_out": 0.3, "patience": 4, "checkpoints": 6, "seed": 3},
        ["m", 0.5, Path("t.txt")],
        {"out": Path("o"), "text_column": "title", "label_column": "kind", "drop_empty": True, "limit": 9, "teacher": "other", "teacher_layer": 7, "teacher_recipe": "word-echo", "tasks": ["A", "B"],
         "dtype": "float32", **ENCODER,
         "settings": {"match": "both", "lora": 2, "epochs": 2.5, "max_steps": 7, "batch_size": 5,
                      "learning_rate": 0.25, "held_out": 0.3, "patience": 4, "checkpoints": 6, "seed": 3}},
    ),
}  # fmt: skip
NOT_HERE = {"out", "store", "images", "audio", "skip_bad", "wikitext", "label_column"}
"""Flags that only some of the cases have, or that texts refuse."""


@pytest.mark.parametrize("command", CASES)
def test_every_flag_is_passed_on(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"body": title[::-1], "title": title} for title in TITLES]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, [{"body": "a", "title": None}, *rows])))
    Path("near.csv").write_text("sentence1,sentence2,score,t,l\na,b,1,x,y\nc,d,0,x,y\n")
    Path("labels.txt").write_text("a\n\n" * 6)
    Path("MODEL").mkdir()
    case = CASES[command]
    loaded: list[EncoderOptions] = []

    def record(*arguments: Any, **keywords: Any) -> None:
        raise RecordedError(arguments, keywords)

    def load(model: str, options: EncoderOptions, **_: int) -> EncoderName:
        loaded.append(options)
        return EncoderName(model)

    module, _, function = f"midlayer_encoders.{case.function}".rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), function, record)
    monkeypatch.setattr("midlayer_encoders.models.hub.check_model", lambda *_, **__: None)
    monkeypatch.setattr(_arguments, "load_model", load)
    for check in ("read_rows", "read_training_texts", "scored_tasks"):  # the files and tasks do not exist
        monkeypatch.setattr(f"midlayer_encoders.tasks.training_rows.{check}", lambda *_, **__: Mock())
    monkeypatch.setattr(scaling, "open_executor", lambda name, _, options: nullcontext((name, options)))
    name = command.split()[0]
    with pytest.raises(RecordedError) as call:
        run(name, *case.models, *option_flags(case.flags | ENCODER))
    arguments, keywords = list(call.value.arguments), call.value.keywords
    if name == "sweep":
        keywords = vars(arguments.pop(0))
    assert arguments == case.arguments
    read = {"text_column", "label_column", "drop_empty", "dims", "precisions"} if name == "sweep" else set()
    left_out = {
        "progress",
        "sources",
        "center_texts",
        *read,
        *(["executor"] if keywords.get("executor") is None else []),
    }
    keywords = {key: value for key, value in keywords.items() if key not in left_out}
    assert set(keywords) == set(case.keywords)
    for key, expected in case.keywords.items():
        actual = keywords[key]
        if is_dataclass(actual) and not isinstance(actual, type):
            actual = {part: value for part, value in asdict(actual).items() if part in expected}
        assert actual == expected, key
    for options in loaded:
        assert {key: getattr(options, key) for key in ENCODER} == ENCODER
        assert options.revision == ("step1" if case.models == ["MODEL@step1"] else None)
    (callback,) = (item.callback for item in app.registered_commands if name in (item.name, item.callback.__name__))  # type: ignore[union-attr]
    assert callback is not None
    flags = (
        set(inspect.signature(callback).parameters) - set(option_fields()) - {"context", "as_json", "quiet", "help_all"}
    )
    renamed = {"metric_names": "metrics"}
    tried = {flag for other, case in CASES.items() if other.split()[0] == name for flag in case.flags}
    cases = {"model", "models", "base", "tuned", *tried, *NOT_HERE}
    assert {renamed.get(flag, flag) for flag in flags} <= cases, "a flag that no case passes"
