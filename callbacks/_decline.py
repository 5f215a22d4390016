"""Detection of a declining last layer and of collapsing layers, and the part of those callbacks that trainers share."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.validation import check_choice

from ._measurement import LABEL_ACCURACY, MetricValues
from ._recorder import MeasurementHistory, Recorder
from ._settings import EveryNSteps

_log = logging.getLogger("midlayer_encoders")

OnDecline: TypeAlias = Literal["warn", "stop", "checkpoint"]

_ENTROPY = "prompt_entropy"
_LABEL_FREE_SCORE = "half_match"


def describe_decline(
    scores: Mapping[int, Sequence[float]],
    layers: Sequence[int],
    *,
    patience: int,
    tolerance: float,
    score_name: str = "score",
) -> str | None:
    r"""Return a description if the last layer got worse while an earlier layer improved, otherwise ``None``.

    Since the step of the last layer's best score, that score fell by more than ``tolerance`` in each of the last
    ``patience`` measurements, while the score of an earlier layer rose by more than ``tolerance``.

    Args:
        scores: by step, the score of each layer; higher is better.
        layers: ascending layer numbers.
        patience: number of consecutive measurements, at least ``1``.
        tolerance: largest difference that counts as noise, in units of the score.
        score_name: name of the score in the description.

    Example:
        >>> scores = {1: [0.5, 0.5], 2: [0.5, 0.6], 4: [0.6, 0.5]}
        >>> print(describe_decline(scores, [0, 1], patience=1, tolerance=0.05).replace(", while", ",\nwhile"))
        the last layer (1) fell from a score of 0.600 at step 2 to 0.500 at step 4,
        while layer 0 rose from 0.500 to 0.600
        >>> describe_decline(scores, [0, 1], patience=2, tolerance=0.05)
    """
    steps = sorted(scores)
    peak = max(steps, key=lambda step: scores[step][-1], default=0)
    recent = [step for step in steps if step > peak][-patience:]
    if len(recent) < patience or any(scores[step][-1] >= scores[peak][-1] - tolerance for step in recent):
        return None
    last = recent[-1]
    gains = [scores[last][index] - scores[peak][index] for index in range(len(layers) - 1)]
    best = max(range(len(gains)), key=lambda index: gains[index], default=0)
    if not gains or gains[best] <= tolerance:
        return None
    return (
        f"the last layer ({layers[-1]}) fell from a {score_name} of {scores[peak][-1]:.3f} at step {peak} to "
        f"{scores[last][-1]:.3f} at step {last}, while layer {layers[best]} rose from {scores[peak][best]:.3f} to "
        f"{scores[last][best]:.3f}"
    )


def describe_collapse(entropies: Mapping[int, Sequence[float]], layers: Sequence[int], *, share: float) -> str | None:
    """Return a description if a layer's entropy fell below ``share`` of its highest value, otherwise ``None``.

    Example:
        >>> describe_collapse({1: [3.0, 2.0], 2: [3.0, 0.1]}, [0, 1], share=0.2)
        'the entropy of layer 1 collapsed from 2.000 nats at step 1 to 0.100 at step 2'
    """
    last = max(entropies, default=0)
    for index, layer in enumerate(layers):
        by_step = {step: values[index] for step, values in entropies.items()}
        highest = max(by_step, key=lambda step: by_step[step], default=0)
        if by_step and by_step[last] < share * by_step[highest]:
            return (
                f"the entropy of layer {layer} collapsed from {by_step[highest]:.3f} nats at step {highest} to "
                f"{by_step[last]:.3f} at step {last}"
            )
    return None


def _complete_steps(steps: Mapping[int, MetricValues], name: str, layers: Sequence[int]) -> dict[int, list[float]]:
    """Return a metric's values by step, for the steps that have a value for every layer."""
    by_step = {step: [values.get(name, {}).get(layer, math.nan) for layer in layers] for step, values in steps.items()}
    return {step: values for step, values in by_step.items() if not any(map(math.isnan, values))}


class DeclineRecorder(Recorder):
    """Warns if the last layer gets worse while an earlier layer improves, or if a layer's entropy collapses.

    The score of a layer is the cross-validated accuracy of a ridge classifier that predicts ``labels`` from it. Without
    labels it is ``half_match``: how often the two halves of a text are each other's nearest neighbors.

    Args:
        texts_or_dataloader: the inputs, as in the metrics callback.
        tokenizer: tokenizer of the texts.
        labels: class of each input; at least 2 classes and 10 inputs. ``None`` for the label-free score.
        every_n_steps: number of optimizer steps between measurements, a list of steps, or ``"log2"``.
        on_decline: ``"warn"``, or also ``"stop"`` the run, or also save a ``"checkpoint"``. Each event counts once.
        patience: number of consecutive measurements at which the last layer must be worse.
        tolerance: largest difference that counts as noise, in units of the score (both scores lie in [0, 1]). The
            default is ``1 / sqrt(N)`` for N inputs, two standard errors of a share near one half.
        collapse_share: a layer has collapsed below this share of its highest entropy so far.
        norm: norm of the vectors that the classifier reads.
        name: prefix of the logged values.
        options: other options of the metrics callback, such as ``module``, ``layers`` or ``dirpath``.
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
        super().__init__(
            texts_or_dataloader,
            tokenizer,
            metrics=[_ENTROPY] if labels is not None else [_ENTROPY, _LABEL_FREE_SCORE],
            labels=labels,
            every_n_steps=every_n_steps,
            norm=norm,
            name=name,
            views=0,
            **options,
        )
        self.on_decline = on_decline
        self.patience = patience
        self.tolerance = tolerance
        self.collapse_share = collapse_share

    _reacts = True

    def _begin(self) -> None:
        super()._begin()
        #: Descriptions of all events, in order.
        self.events: list[str] = []
        self._event_kinds: set[str] = set()
        self._not_finite: NotFiniteError | None = None

    def _failed(self, error: Exception, step: int) -> None:
        if isinstance(error, NotFiniteError):
            self._not_finite = error  # an event, not a failure of this callback
            return
        super()._failed(error, step)

    def _resume(self, history: MeasurementHistory, state: dict[str, Any]) -> bool:
        is_resumed = super()._resume(history, state)
        # The previous run has already reported its events.
        for step in sorted(history.steps):
            self._new_events({earlier: values for earlier, values in history.steps.items() if earlier <= step})
        return is_resumed

    def _warn_of_events(self, step: int) -> bool:
        """Log new events as warnings; return True if there are any."""
        events = self._new_events({} if self._history is None else self._history.steps)
        for description in events:
            _log.warning("Step %d: %s.", step, description)
        return bool(events)

    def _new_events(self, steps: Mapping[int, MetricValues]) -> list[str]:
        """Return descriptions of the events at the last of ``steps`` that have not been reported."""
        events = []
        for kind, description in self._detect(steps).items():
            if description is not None and kind not in self._event_kinds:
                self._event_kinds.add(kind)
                events.append(description)
        self.events += events
        return events

    def _detect(self, steps: Mapping[int, MetricValues]) -> dict[str, str | None]:
        if self._history is None:
            return {}
        measurement = self._history.measurement
        layers = measurement.layers
        score_name = _LABEL_FREE_SCORE if measurement.labels is None else LABEL_ACCURACY
        scores = _complete_steps(steps, score_name, layers)
        noise: float = measurement.count**-0.5
        tolerance = noise if self.tolerance is None else self.tolerance
        return {
            "not finite": None if self._not_finite is None else str(self._not_finite).rstrip("."),
            "decline": describe_decline(
                scores, layers, patience=self.patience, tolerance=tolerance, score_name=score_name
            ),
            "collapse": describe_collapse(_complete_steps(steps, _ENTROPY, layers), layers, share=self.collapse_share),
        }
