"""When a run goes wrong in its layers: the last gets worse while an earlier one improves, or a layer collapses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from midlayer_encoders.callbacks._measurement import Values

__all__ = ["by_step", "collapse", "decline"]


def decline(
    scores: Mapping[int, Sequence[float]],
    layers: Sequence[int],
    *,
    patience: int,
    tolerance: float,
    what: str = "score",
) -> str | None:
    r"""Return in words that the last layer got worse while an earlier one improved; ``None`` where it did not.

    Since the step at which the last layer was best, its score fell by more than ``tolerance`` and stayed so for
    ``patience`` measurements, while some earlier layer's is now higher, by more than ``tolerance``, than at that step.

    Args:
        scores: one value per layer by step, higher is better.
        layers: the layers' numbers, ascending.
        patience: number of measurements in a row, ``1`` or more.
        tolerance: what is not noise, in the score's own unit.
        what: what the words call the score.

    Example:
        >>> scores = {1: [0.5, 0.5], 2: [0.5, 0.6], 4: [0.6, 0.5]}
        >>> print(decline(scores, [0, 1], patience=1, tolerance=0.05).replace(", while", ",\nwhile"))
        the last layer (1) fell from a score of 0.600 at step 2 to 0.500 at step 4,
        while layer 0 rose from 0.500 to 0.600
        >>> decline(scores, [0, 1], patience=2, tolerance=0.05)
    """
    steps = sorted(scores)
    peak = max(steps, key=lambda step: scores[step][-1], default=0)
    after = [step for step in steps if step > peak][-patience:]
    if len(after) < patience or any(scores[step][-1] >= scores[peak][-1] - tolerance for step in after):
        return None
    now = after[-1]
    gains = [scores[now][place] - scores[peak][place] for place in range(len(layers) - 1)]
    best = max(range(len(gains)), key=lambda place: gains[place], default=0)
    if not gains or gains[best] <= tolerance:
        return None
    return (
        f"the last layer ({layers[-1]}) fell from a {what} of {scores[peak][-1]:.3f} at step {peak} to "
        f"{scores[now][-1]:.3f} at step {now}, while layer {layers[best]} rose from {scores[peak][best]:.3f} to "
        f"{scores[now][best]:.3f}"
    )


def collapse(entropies: Mapping[int, Sequence[float]], layers: Sequence[int], *, share: float) -> str | None:
    """Return in words that a layer's entropy fell below ``share`` of its highest so far; ``None`` where none did.

    Example:
        >>> collapse({1: [3.0, 2.0], 2: [3.0, 0.1]}, [0, 1], share=0.2)
        'the entropy of layer 1 collapsed from 2.000 nats at step 1 to 0.100 at step 2'
    """
    now = max(entropies, default=0)
    for place, layer in enumerate(layers):
        by_step = {step: values[place] for step, values in entropies.items()}
        highest = max(by_step, key=lambda step: by_step[step], default=0)
        if by_step and by_step[now] < share * by_step[highest]:
            return (
                f"the entropy of layer {layer} collapsed from {by_step[highest]:.3f} nats at step {highest} to "
                f"{by_step[now]:.3f} at step {now}"
            )
    return None


def by_step(steps: Mapping[int, Values], name: str, layers: Sequence[int]) -> dict[int, list[float]]:
    """Return one metric's values by step, of the steps that have one for every layer."""
    found = {step: [values.get(name, {}).get(layer, math.nan) for layer in layers] for step, values in steps.items()}
    return {step: values for step, values in found.items() if not any(map(math.isnan, values))}
