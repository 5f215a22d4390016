"""What the watching callbacks of every trainer share: what they score, and what they do about it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from midlayer_encoders._types import Norm
from midlayer_encoders.callbacks._cadence import EveryNSteps
from midlayer_encoders.callbacks._decline import by_step, collapse, decline
from midlayer_encoders.callbacks._measurement import LABEL_ACCURACY, Values
from midlayer_encoders.callbacks._recorder import Recorder
from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.validation import check_choice

__all__ = ["OnDecline", "Watch"]

_log = logging.getLogger("midlayer_encoders")

OnDecline: TypeAlias = Literal["warn", "stop", "checkpoint"]

_ENTROPY, _LABEL_FREE = "prompt_entropy", "half_match"


class Watch(Recorder):
    """Warns when the last layer gets worse while an earlier one improves, or when a layer's entropy collapses.

    The score of a layer is how well a ridge classifier reads ``labels`` from it, cross-validated, or, without labels,
    ``half_match``: whether the two halves of a text find each other.

    Args:
        texts_or_dataloader: the inputs, as for the metrics' callback.
        tokenizer: of the texts.
        labels: class of each input; at least 2 classes and 10 inputs. ``None`` for the label-free score.
        every_n_steps: optimizer steps between two measurements, a list of steps, or ``"log2"``.
        on_decline: ``"warn"`` only; ``"stop"`` the run too; or save a ``"checkpoint"`` too. Each event once.
        patience: number of measurements in a row at which the last layer must be worse.
        tolerance: what is not noise, in the score's unit (both scores lie in [0, 1]); by default ``1 / sqrt(N)`` for N
            inputs, two standard errors of a share near one half.
        collapse_share: share of a layer's highest entropy so far below which it has collapsed.
        norm: of the vectors that labels are read from.
        name: prefix of what is logged.
        options: the metrics' callback's own, such as ``module``, ``layers`` or ``dirpath``.
    """

    def __init__(
        self,
        texts_or_dataloader: Sequence[str] | Iterable[Any],
        tokenizer: Any = None,
        *,
        labels: Sequence[int | str] | None = None,
        every_n_steps: EveryNSteps = "log2",
        on_decline: OnDecline = "warn",
        patience: int = 2,
        tolerance: float | None = None,
        collapse_share: float = 0.2,
        norm: Norm = "final",
        name: str = "midlayer_decline",
        **options: Any,
    ) -> None:
        check_choice("on_decline", on_decline, ("warn", "stop", "checkpoint"))
        if patience < 1 or (tolerance or 0) < 0 or not 0 <= collapse_share < 1:
            raise OptionError(
                "`patience` must be 1 or more, `tolerance` 0 or more and `collapse_share` in [0, 1), "
                f"but got {patience}, {tolerance} and {collapse_share}."
            )
        metrics = [_ENTROPY] if labels is not None else [_ENTROPY, _LABEL_FREE]
        super().__init__(
            texts_or_dataloader, tokenizer, metrics=metrics, labels=labels, every_n_steps=every_n_steps, norm=norm,
            name=name, views=0, **options,
        )  # fmt: skip
        self.on_decline, self.patience, self.tolerance = on_decline, patience, tolerance
        self.collapse_share = collapse_share

    def _begin(self) -> None:
        super()._begin()
        self.events: list[str] = []
        """What was found, in words, in order."""
        self._kinds: set[str] = set()
        self._not_finite: NotFiniteError | None = None

    def _failed(self, error: Exception, step: int) -> None:
        if isinstance(error, NotFiniteError):
            self._not_finite = error  # what this callback warns of, so not a failure of it
            return
        super()._failed(error, step)

    def _resume(self, state: dict[str, Any]) -> bool:
        others = super()._resume(state)
        # What the run before found, and acted on, is not news to the run that goes on.
        steps = {} if self._history is None else self._history.steps
        for step in sorted(steps):
            self._news({seen: values for seen, values in steps.items() if seen <= step})
        return others

    def _judge(self, step: int) -> bool:
        """Return whether something new is wrong; it is logged as a warning and kept in ``events``."""
        news = self._news({} if self._history is None else self._history.steps)
        for words in news:
            _log.warning("Step %d: %s.", step, words)
        return bool(news)

    def _news(self, steps: Mapping[int, Values]) -> list[str]:
        """Return what is wrong at the last of ``steps`` and was not before, in words."""
        news = []
        for kind, words in self._found(steps).items():
            if words is not None and kind not in self._kinds:
                self._kinds.add(kind)
                news.append(words)
        self.events += news
        return news

    def _found(self, steps: Mapping[int, Values]) -> dict[str, str | None]:
        if self._history is None:
            return {}
        measurement = self._history.measurement
        layers, score = measurement.layers, _LABEL_FREE if measurement.labels is None else LABEL_ACCURACY
        scores, entropies = (by_step(steps, name, layers) for name in (score, _ENTROPY))
        noise: float = measurement.count**-0.5
        tolerance = noise if self.tolerance is None else self.tolerance
        return {
            "not finite": None if self._not_finite is None else str(self._not_finite).rstrip("."),
            "decline": decline(scores, layers, patience=self.patience, tolerance=tolerance, what=score),
            "collapse": collapse(entropies, layers, share=self.collapse_share),
        }
