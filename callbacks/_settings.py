"""``Settings``: the one list of arguments that the callbacks of every trainer take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from midlayer_encoders._types import NORMS, POOLINGS, Layer, Norm, Pooling
from midlayer_encoders.callbacks._cadence import EveryNSteps, make_cadence
from midlayer_encoders.errors import OptionError
from midlayer_encoders.measuring import make_for_views
from midlayer_encoders.metrics import LayerMetric
from midlayer_encoders.validation import check_choice, check_count, check_flag, check_path, check_seed, check_text

__all__ = ["Settings", "takes_settings"]

_P = ParamSpec("_P")
_Self = TypeVar("_Self")


@dataclass(frozen=True, eq=False)
class Settings:
    """What a callback measures, when, and where it writes; checked when it is made.

    Attributes:
        texts_or_dataloader: the inputs: texts, or batches of a model's inputs (dicts of tensors). Of a dataloader the
            first ``max_inputs`` are read, once.
        tokenizer: of the texts.
        metrics: ``"paper"``, ``"all"``, one name or several.
        layers: ``"all"`` or some.
        every_n_steps: optimizer steps between two measurements, a list of steps, or ``"log2"``: 0, 1, 2, 4, 8 …
        module: path of the transformer in what is trained; ``"auto"`` takes the one there is.
        blocks: path of the list of blocks within it, where it cannot be found by rule.
        norm: of the pooled vectors; ``"none"`` is the paper's.
        pooling: how token states become one vector.
        views: number of views of each text for LiDAR (InfoNCE and DiME take the first two), or the views themselves:
            V lists of texts, or V dataloaders. Made once.
        labels: class of each input; adds ``label_accuracy``, the cross-validated accuracy of a ridge classifier.
        seed: of the views and of the labels' folds.
        max_length: tokens after which a text is truncated.
        max_inputs: inputs read from a dataloader.
        token_budget: tokens in a batch of texts.
        figures: whether to draw heat maps and curves at the end: in a thread of their own, which the run does not wait
            for, but the interpreter does before it ends; at once where ``strict``, or where a logger takes them.
        dirpath: folder of ``history.parquet`` and the figures; by default beside the run's logs.
        name: prefix of what is logged, and of the files' folder; another for a second callback in one run.
        strict: whether an error in a measurement stops the run; else it is logged once and the run goes on.
    """

    texts_or_dataloader: Sequence[str] | Iterable[Any]
    tokenizer: Any = None
    _: KW_ONLY
    metrics: str | Sequence[str] = "paper"
    layers: Sequence[Layer] | str = "all"
    every_n_steps: EveryNSteps = "log2"
    module: str = "auto"
    blocks: str | None = None
    norm: Norm = "none"
    pooling: Pooling = "mean"
    views: int | Sequence[Any] = 2
    labels: Sequence[int | str] | None = None
    seed: int = 0
    max_length: int = 64
    max_inputs: int = 256
    token_budget: int = 16384
    figures: bool = True
    dirpath: str | Path | None = None
    name: str = "midlayer"
    strict: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.texts_or_dataloader, str):
            raise OptionError("`texts_or_dataloader` must be a list of texts, but got one text: write `[text]`.")
        check_choice("norm", self.norm, NORMS)
        check_choice("pooling", self.pooling, POOLINGS)
        for count in ("max_length", "max_inputs", "token_budget"):
            check_count(count, getattr(self, count))
        if not isinstance(self.views, Sequence) or isinstance(self.views, str):
            check_count("views", self.views, minimum=0)
        check_seed(self.seed)
        check_flag("figures", self.figures)
        check_flag("strict", self.strict)
        check_path("dirpath", self.dirpath)
        for word in ("module", "name"):
            check_text(word, getattr(self, word))
        make_cadence(self.every_n_steps)
        self.make_metrics([0])  # a wrong name is refused now

    def make_metrics(self, layers: Sequence[int]) -> dict[str, LayerMetric]:
        """Return the metrics by name, with nothing in them; none where labels alone are wanted."""
        views = self.views if isinstance(self.views, int) else len(self.views)
        return make_for_views(self.metrics, layers, views) if self.metrics else {}


def takes_settings(
    made: Callable[_P, Settings],
) -> Callable[[Callable[[_Self, Settings], None]], Callable[Concatenate[_Self, _P], None]]:
    """Return a decorator by which a constructor takes the fields of the settings as its own arguments."""

    def decorate(init: Callable[[_Self, Settings], None]) -> Callable[Concatenate[_Self, _P], None]:
        @functools.wraps(init)
        def taking(self: _Self, /, *args: _P.args, **keywords: _P.kwargs) -> None:
            init(self, made(*args, **keywords))

        own = next(iter(inspect.signature(init).parameters.values()))
        fields = inspect.signature(made)
        taking.__signature__ = fields.replace(parameters=[own, *fields.parameters.values()])  # type: ignore[attr-defined]
        return taking

    return decorate
