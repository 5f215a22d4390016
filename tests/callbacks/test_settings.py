"""The arguments of the callbacks, their defaults, and invalid values."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from midlayer_encoders.callbacks._measurement import find_backbone, make_batches
from midlayer_encoders.callbacks._settings import CallbackSettings
from midlayer_encoders.callbacks.trainer import _autocast

from midlayer_encoders.callbacks import (
    LastLayerDecline,
    LastLayerDeclineTrainerCallback,
    LayerMetricsCallback,
    LayerMetricsTrainerCallback,
)
from midlayer_encoders.errors import AnatomyError, OptionError
from tests.callbacks.oracles import TEXTS
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, Shapes, fit, neox

pytestmark = ADVICE

DEFAULTS = {
    "tokenizer": None, "metrics": "paper", "layers": "all", "every_n_steps": "log2", "module": "auto", "blocks": None,
    "norm": "none", "pooling": "mean", "views": 2, "labels": None, "seed": 0, "max_length": 64, "max_inputs": 256,
    "token_budget": 16384, "figures": True, "dirpath": None, "name": "midlayer", "strict": False,
}  # fmt: skip


@pytest.mark.parametrize("callback_class", [LayerMetricsCallback, LayerMetricsTrainerCallback])
def test_signature_lists_every_argument_and_its_default(callback_class: Any) -> None:
    first, tokenizer, *others = inspect.signature(callback_class).parameters.values()
    assert (first.name, first.default) == ("texts_or_dataloader", inspect.Parameter.empty)
    assert {parameter.name: parameter.default for parameter in (tokenizer, *others)} == DEFAULTS
    assert {parameter.kind for parameter in others} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError, match="unexpected keyword argument 'every_n_step'"):
        callback_class(TEXTS, TOKENIZER, every_n_step=3)


@pytest.mark.parametrize("callback_class", [LastLayerDecline, LastLayerDeclineTrainerCallback])
def test_defaults_and_limits_of_the_decline_callback(callback_class: Any) -> None:
    callback = callback_class(TEXTS, TOKENIZER)
    names = ("on_decline", "patience", "tolerance", "collapse_share", "name")
    assert [getattr(callback, name) for name in names] == ["warn", 2, None, 0.2, "midlayer_decline"]
    assert (callback.norm, callback.every_n_steps) == ("final", "log2")
    assert callback.metrics == ["prompt_entropy", "half_match"]
    assert callback_class(TEXTS, TOKENIZER, labels=[0] * len(TEXTS)).metrics == ["prompt_entropy"]
    callback_class(TEXTS, TOKENIZER, patience=1, tolerance=0, collapse_share=0)
    for option in ({"patience": 0}, {"tolerance": -0.1}, {"collapse_share": 1.0}, {"collapse_share": -0.1}):
        ((_, value),) = option.items()
        with pytest.raises(OptionError, match=rf"`collapse_share` in \[0, 1\), but got .*{value}"):
            callback_class(TEXTS, TOKENIZER, **option)


@pytest.mark.parametrize(("option", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_is_that_of_the_trainer(option: str, dtype: torch.dtype) -> None:
    args = SimpleNamespace(**{"bf16": False, "fp16": False, option: True})
    with _autocast(args, torch.nn.Linear(1, 1)):
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (True, dtype)


def test_messages_count_the_inputs_that_are_missing() -> None:
    with pytest.raises(OptionError, match="at least 2 texts of 4 tokens or more, but 1 of 3 are"):
        make_batches(CallbackSettings(["long enough", "abc", "x"], TOKENIZER, metrics="curvature"), neox(), None)
    loaders = [[{"input_ids": torch.ones(count, 5, dtype=torch.long)}] for count in (2, 2, 1)]
    for views, source in ((loaders[1:], "view 1 gave 1"), (loaders[:2], "the dataloader gave 1")):
        inputs = loaders[0] if "view" in source else loaders[2]
        with pytest.raises(OptionError, match=f"must give at least 2 inputs, but {source}"):
            make_batches(CallbackSettings(inputs, metrics=["infonce"], views=views), neox(), None)
    with pytest.raises(AnatomyError, match=r"but got 'model'\. Its Hugging Face models are: none"):
        find_backbone(torch.nn.Linear(1, 1), "model")


def test_default_cadence_views_and_length(tmp_path: Path) -> None:
    texts = [*TEXTS, "a text that is longer than others, " * 3]  # a token is a character
    callback = LayerMetricsCallback(texts, TOKENIZER, figures=False, strict=True)
    module = Shapes(neox())
    fit(module, tmp_path, [callback], max_steps=9)
    steps = callback.frame["revision"].unique(maintain_order=True).to_list()
    assert steps == [f"step{step}" for step in (0, 8, 9)]  # 9 is the end
    assert sum(rows for rows, _ in module.shapes) == len(steps) * 3 * len(texts)  # the texts and two views
    assert max(tokens for _, tokens in module.shapes) == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [({"norm": "last"}, "`norm` must be .*but got 'last'"), ({"pooling": "men"}, "`pooling` .*Did you mean 'mean'")],
)
def test_invalid_choice_is_refused_in_the_constructor(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LayerMetricsCallback(TEXTS, TOKENIZER, **options)


def test_run_without_a_logger_or_folder_needs_dirpath(tmp_path: Path) -> None:
    options: dict[str, Any] = {"metrics": "curvature", "figures": False, "strict": True}
    with pytest.raises(OptionError, match=r"no logger to log to.*`dirpath`"):
        fit(Boring(neox()), tmp_path, [LayerMetricsCallback(TEXTS, TOKENIZER, **options)], logger=False)
    callback = LayerMetricsCallback(TEXTS, TOKENIZER, dirpath=str(tmp_path / "kept"), **options)
    fit(Boring(neox()), tmp_path, [callback], logger=False, max_steps=1)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["history.parquet"]
    nowhere: Any = SimpleNamespace(output_dir=None)
    with pytest.raises(OptionError, match="`dirpath` must be given where the trainer has no `output_dir`"):
        LayerMetricsTrainerCallback(TEXTS, **options).on_train_begin(nowhere, None, None, model=neox())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("views", -1), ("views", "2"), ("seed", -1), ("seed", "1"), ("max_length", 0), ("max_length", 6.5),
        ("max_inputs", None), ("token_budget", "many"), ("figures", "no"), ("strict", 1), ("dirpath", ""), ("name", 3),
    ],
)  # fmt: skip
def test_option_of_the_wrong_type_is_refused_in_the_constructor(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"`{option}` must be"):
        LayerMetricsCallback(TEXTS, TOKENIZER, **{option: value})
