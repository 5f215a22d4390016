"""The options that all callbacks share, and the schedule of their measurements."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import RLock, Thread
from typing import Any, Literal, TypeAlias

from midlayer_encoders import validation
from midlayer_encoders._types import NORMS, POOLINGS, Layer, Norm, Pooling
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.metrics import LayerMetric, make_metrics
from midlayer_encoders.metrics.feeding import num_views
from midlayer_encoders.metrics.text_views import augment

#: A number of steps, a list of steps, or ``"log2"``: steps 8, 16, 32, 64 …
EveryNSteps: TypeAlias = int | Sequence[int] | Literal["log2"]

# Outside the settings, so that a spawned process can receive a callback as a pickle.
_augment = lru_cache(maxsize=8)(augment)
_lock = RLock()  # held while views are made
if hasattr(os, "register_at_fork"):  # a child would wait forever for the imports of a thread that it does not have
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def is_due(every_n_steps: EveryNSteps, step: int) -> bool:
    """Return True if a measurement is due after ``step`` optimizer steps; step ``0`` is due unless steps are listed.

    Example:
        >>> [step for step in range(20) if is_due("log2", step)]
        [0, 8, 16]
        >>> [step for step in range(20) if is_due(5, step)]
        [0, 5, 10, 15]
    """
    if every_n_steps == "log2":
        return step & (step - 1) == 0 and step not in (1, 2, 4)  # 0 or a power of two
    if isinstance(every_n_steps, int):
        return step % every_n_steps == 0
    return step in every_n_steps


def _check_cadence(every_n_steps: Any) -> None:
    is_list = isinstance(every_n_steps, Sequence) and not isinstance(every_n_steps, str)
    steps = every_n_steps if is_list else [every_n_steps]
    are_steps = all(isinstance(step, int) and not isinstance(step, bool) and step >= 1 - is_list for step in steps)
    if every_n_steps != "log2" and not (steps and are_steps):
        raise OptionError(
            "`every_n_steps` must be a number of steps of 1 or more, a list of steps of 0 or more, or 'log2', but got "
            f"{short_repr(every_n_steps)}."
        )


@dataclass(eq=False, repr=False)
class CallbackSettings:
    """Options of a callback: what it measures, at which steps, and where it writes.

    Attributes:
        texts_or_dataloader: the inputs: texts, or a dataloader of model inputs (dicts of tensors), from which the
            callback reads the first ``max_inputs`` inputs once.
        tokenizer: tokenizer of the texts.
        metrics: ``"paper"``, ``"all"``, a metric name or a list of names.
        layers: layers to measure, or ``"all"``.
        every_n_steps: number of optimizer steps between measurements, a list of steps, or ``"log2"``.
        module: path of the transformer inside the trained module; ``"auto"`` finds the only Hugging Face model.
        blocks: path of the block list inside the transformer, if it is not detected automatically.
        norm: norm applied to the pooled vectors; the paper uses ``"none"``.
        pooling: how token states become one vector.
        views: number of views of each text for LiDAR (InfoNCE and DiME use the first two), or the views themselves:
            V lists of texts or V dataloaders (``alignment`` uses the first dataloader). They are created once.
        labels: class of each input; adds ``label_accuracy``, the cross-validated accuracy of a ridge classifier.
        seed: seed of the views and of the cross-validation folds.
        max_length: number of tokens after which texts are truncated.
        max_inputs: number of inputs to read from a dataloader.
        token_budget: number of tokens in a batch of texts.
        figures: draw curves over layers and write the page when training ends. A background thread does it, unless
            ``strict`` is set; the interpreter waits for that thread before it exits.
        dirpath: folder for ``history.parquet`` and the figures; the default is next to the run's logs.
        name: prefix of the logged values and name of the folder; choose another name for a second callback in a run.
        strict: stop the run if a measurement fails. Otherwise the first failure is logged and training continues.
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
        if not isinstance(self.views, Sequence) or isinstance(self.views, str):
            validation.check_count("views", self.views, minimum=0)
        validation.check_fields(
            self,
            norm=partial(validation.check_choice, choices=NORMS),
            pooling=partial(validation.check_choice, choices=POOLINGS),
            seed=lambda _, seed: validation.check_seed(seed),
            **dict.fromkeys(("max_length", "max_inputs", "token_budget"), validation.check_count),
            **dict.fromkeys(("figures", "strict"), validation.check_flag),
            **dict.fromkeys(("module", "name"), validation.check_text),
        )
        validation.check_path("dirpath", self.dirpath)
        _check_cadence(self.every_n_steps)
        metrics = layer_metrics(self, [0])  # raises for an unknown metric
        if num_views(metrics) and isinstance(self.views, int) and isinstance(self.texts_or_dataloader, list):
            arguments = self.texts_or_dataloader, num_views(metrics), self.seed
            Thread(target=_make_views_ahead, args=arguments, name="midlayer-views", daemon=True).start()


def layer_metrics(settings: CallbackSettings, layers: Sequence[int]) -> dict[str, LayerMetric]:
    """Return new metrics by name; empty if the callback only reads labels."""
    count = settings.views if isinstance(settings.views, int) else len(settings.views)
    return make_metrics(settings.metrics, layers, views=count) if settings.metrics else {}


def make_views(texts: Sequence[str], count: int, seed: int) -> list[list[str]]:
    """Return ``count`` views of the texts; a thread begins to make them when the settings are created."""
    with _lock:
        return _augment(tuple(texts), views=count, seed=seed)


def _make_views_ahead(texts: Sequence[str], count: int, seed: int) -> None:
    with suppress(Exception):  # the run raises it
        make_views(texts, count, seed)
