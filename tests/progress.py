"""A progress callback that keeps how many steps came with each report."""

from __future__ import annotations

from midlayer_encoders._types import Progress


def counted(steps: list[int]) -> Progress:
    """Return a callback that appends the steps of each report to ``steps``."""
    before: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        assert 0 <= before.get(stage, 0) <= done <= total
        steps.append(done - before.get(stage, 0))
        before[stage] = done

    return progress
