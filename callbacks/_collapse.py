"""Detection of a training run that moves all texts to one point."""

from collections.abc import Mapping

UNIFORMITY = "raw_uniformity"
"""The metric that rises to 0 if texts move to one point; ``uniformity`` subtracts the mean and does not see it."""


def describe_lost_uniformity(
    uniformities: Mapping[int, float], losses: Mapping[int, float], *, patience: int = 2, share: float = 0.5
) -> str | None:
    """Return a description if texts move together while the training loss falls, otherwise ``None``.

    Since the step of the lowest uniformity, the uniformity rose above ``share`` of that value, toward 0, in each of the
    last ``patience`` measurements, while the last of two or more losses is below the first. Near 0, the uniformity is
    proportional to the mean squared distance of two texts, so a half of it is a half of that.

    Args:
        uniformities: ``raw_uniformity`` of the last layer by step.
        losses: training loss by step.
        patience: number of consecutive measurements, at least ``1``.
        share: share of the lowest uniformity, in (0, 1).

    Example:
        >>> losses = {2: 0.5, 4: 0.2, 8: 0.1}
        >>> describe_lost_uniformity({0: -2.0, 4: -0.8, 8: -0.2}, losses)
        'raw_uniformity rose from -2.000 at step 0 to -0.200 at step 8, while the loss fell from 0.5 to 0.1'
        >>> describe_lost_uniformity({0: -2.0, 4: -2.5, 8: -2.6}, losses)
    """
    lowest = min(uniformities, key=lambda step: (uniformities[step], step), default=0)
    recent = sorted(step for step in uniformities if step > lowest)[-patience:]
    if len(recent) < patience or any(uniformities[step] <= share * uniformities[lowest] for step in recent):
        return None
    since = [losses[step] for step in sorted(losses) if step > lowest]
    if len(since) < 2 or not since[-1] < since[0]:
        return None
    return (
        f"{UNIFORMITY} rose from {uniformities[lowest]:.3f} at step {lowest} to {uniformities[recent[-1]]:.3f} at step "
        f"{recent[-1]}, while the loss fell from {since[0]:.3g} to {since[-1]:.3g}"
    )
