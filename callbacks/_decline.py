"""Detection of a declining last layer and of collapsing layers, and the part of those callbacks that trainers share."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.validation import check_choice

from ._measurement import LABEL_ACCURACY, MetricValues
from ._recorder import Recorder, complete_steps

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
    before, after = scores[peak], scores[recent[-1]]
    gains = {index: after[index] - before[index] for index in range(len(layers) - 1)}
    best = max(gains, key=lambda index: gains[index], default=None)
    if best is None or gains[best] <= tolerance:
        return None
    return (
        f"the last layer ({layers[-1]}) fell from a {score_name} of {before[-1]:.3f} at step {peak} to {after[-1]:.3f} "
        f"at step {recent[-1]}, while layer {layers[best]} rose from {before[best]:.3f} to {after[best]:.3f}"
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


@dataclass(eq=False, repr=False)
class DeclineRecorder(Recorder):
    """Warns if the last layer gets worse while an earlier layer improves, or if a layer's entropy collapses.

    The score of a layer is the cross-validated accuracy of a ridge classifier that predicts ``labels`` from it. Without
    labels it is ``half_match``: how often the two halves of a text are each other's nearest neighbors.

    The arguments of the metrics callback are accepted, except ``metrics`` and ``views``.

    Attributes:
        labels: class of each input; at least 2 classes and 10 inputs. ``None`` for the label-free score.
        norm: norm of the vectors that the classifier reads.
        name: prefix of the logged values.
        on_decline: ``"warn"``, or also ``"stop"`` the run, or also save a ``"checkpoint"``. Each event counts once.
        patience: number of consecutive measurements at which the last layer must be worse.
        tolerance: largest difference that counts as noise, in units of the score (both scores lie in [0, 1]). The
            default is ``1 / sqrt(N)`` for N inputs, two standard errors of a share near one half.
        collapse_share: a layer has collapsed below this share of its highest entropy so far.
    """

    metrics: str | Sequence[str] = field(default="paper", init=False)
    views: int | Sequence[Any] = field(default=0, init=False)
    _: KW_ONLY
    norm: Norm = "final"
    name: str = "midlayer_decline"
    on_decline: OnDecline = "warn"
    patience: int = 2
    tolerance: float | None = None
    collapse_share: float = 0.2

    def __post_init__(self) -> None:
        check_choice("on_decline", self.on_decline, ("warn", "stop", "checkpoint"))
        if self.patience < 1 or (self.tolerance or 0) < 0 or not 0 <= self.collapse_share < 1:
            raise OptionError(
                "`patience` must be 1 or more, `tolerance` 0 or more and `collapse_share` in [0, 1), "
                f"but got {self.patience}, {self.tolerance} and {self.collapse_share}."
            )
        self.metrics = [_ENTROPY] if self.labels is not None else [_ENTROPY, _LABEL_FREE_SCORE]
        super().__post_init__()

    _reacts = True

    def _begin(self) -> None:
        super()._begin()
        self._events: dict[str, str] = {}  # by kind
        self._not_finite: NotFiniteError | None = None

    @property
    def events(self) -> list[str]:
        """Descriptions of all events, in order."""
        return list(self._events.values())

    def _handle_failure(self, error: Exception, step: int) -> None:
        if isinstance(error, NotFiniteError):
            self._not_finite = error  # an event, not a failure of this callback
            return
        super()._handle_failure(error, step)

    def _resume(self, state: dict[str, Any]) -> bool:
        is_resumed = super()._resume(state)
        for step in sorted(self._steps):  # the previous run has already reported its events
            self._new_events({earlier: values for earlier, values in self._steps.items() if earlier <= step})
        return is_resumed

    def _warn_of_events(self, step: int) -> bool:
        """Log new events as warnings; return True if there are any."""
        events = self._new_events(self._steps)
        for description in events:
            _log.warning("Step %d: %s.", step, description)
        return bool(events)

    def _new_events(self, steps: Mapping[int, MetricValues]) -> list[str]:
        """Return descriptions of the events at the last of ``steps`` that have not been reported."""
        events = {kind: text for kind, text in self._detect(steps).items() if text and kind not in self._events}
        self._events.update(events)
        return list(events.values())

    def _detect(self, steps: Mapping[int, MetricValues]) -> dict[str, str | None]:
        if self._measurement is None:
            return {}
        layers = self._measurement.layers
        score_name = _LABEL_FREE_SCORE if self.labels is None else LABEL_ACCURACY
        scores = complete_steps(steps, score_name, layers)
        tolerance: float = self._measurement.count**-0.5 if self.tolerance is None else self.tolerance
        return {
            "not finite": None if self._not_finite is None else str(self._not_finite).rstrip("."),
            "decline": describe_decline(
                scores, layers, patience=self.patience, tolerance=tolerance, score_name=score_name
            ),
            "collapse": describe_collapse(complete_steps(steps, _ENTROPY, layers), layers, share=self.collapse_share),
        }
