"""The arguments of the callbacks: what they are, what they are by default, and what is refused when they are given."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midlayer_encoders.callbacks import LayerMetricsCallback, LayerMetricsTrainerCallback
from midlayer_encoders.errors import OptionError
from tests.callbacks.oracles import TEXTS
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, Shapes, fit, neox

pytestmark = ADVICE

DEFAULTS = {
    "tokenizer": None, "metrics": "paper", "layers": "all", "every_n_steps": "log2", "module": "auto", "blocks": None,
    "norm": "none", "pooling": "mean", "views": 2, "labels": None, "seed": 0, "max_length": 64, "max_inputs": 256,
    "token_budget": 16384, "figures": True, "dirpath": None, "name": "midlayer", "strict": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", [LayerMetricsCallback, LayerMetricsTrainerCallback])
def test_the_signature_lists_every_argument_and_its_default(kind: Any) -> None:
    first, tokenizer, *others = inspect.signature(kind).parameters.values()
    assert (first.name, first.default) == ("texts_or_dataloader", inspect.Parameter.empty)
    assert {one.name: one.default for one in (tokenizer, *others)} == DEFAULTS
    assert {one.kind for one in others} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError, match="unexpected keyword argument 'every_n_step'"):
        kind(TEXTS, TOKENIZER, every_n_step=3)


def test_by_default_steps_double_and_two_views_of_64_tokens_are_read(tmp_path: Path) -> None:
    texts = [*TEXTS, "a text that is longer than others, " * 3]  # a token is a character
    seen = LayerMetricsCallback(texts, TOKENIZER, figures=False, strict=True)
    module = Shapes(neox())
    fit(module, tmp_path, [seen], max_steps=5)
    steps = seen.frame["revision"].unique(maintain_order=True).to_list()
    assert steps == [f"step{step}" for step in (0, 1, 2, 4, 5)]  # 5 is the end
    assert sum(rows for rows, _ in module.shapes) == len(steps) * 3 * len(texts)  # the texts and two views
    assert max(tokens for _, tokens in module.shapes) == 64


@pytest.mark.parametrize(
    ("options", "text"),
    [({"norm": "last"}, "`norm` must be .*but got 'last'"), ({"pooling": "men"}, "`pooling` .*Did you mean 'mean'")],
)
def test_a_wrong_choice_is_refused_when_it_is_given(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        LayerMetricsCallback(TEXTS, TOKENIZER, **options)


def test_a_run_without_a_logger_or_a_folder_is_refused_unless_dirpath_is_given(tmp_path: Path) -> None:
    options: dict[str, Any] = {"metrics": "curvature", "figures": False, "strict": True}
    with pytest.raises(OptionError, match=r"no logger to log to.*`dirpath`"):
        fit(Boring(neox()), tmp_path, [LayerMetricsCallback(TEXTS, TOKENIZER, **options)], logger=False)
    seen = LayerMetricsCallback(TEXTS, TOKENIZER, dirpath=str(tmp_path / "kept"), **options)
    fit(Boring(neox()), tmp_path, [seen], logger=False, max_steps=1)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["history.parquet"]
    nowhere: Any = SimpleNamespace(fsdp=None, deepspeed=None, output_dir=None)
    with pytest.raises(OptionError, match="`dirpath` must be given where the trainer has no `output_dir`"):
        LayerMetricsTrainerCallback(TEXTS, **options).on_train_begin(nowhere, None, None, model=neox())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("views", -1), ("views", "2"), ("seed", -1), ("seed", "1"), ("max_length", 0), ("max_length", 6.5),
        ("max_inputs", None), ("token_budget", "many"), ("figures", "no"), ("strict", 1), ("dirpath", ""), ("name", 3),
    ],
)  # fmt: skip
def test_an_option_of_a_wrong_kind_is_refused_when_the_callback_is_made(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"`{option}` must be"):
        LayerMetricsCallback(TEXTS, TOKENIZER, **{option: value})
