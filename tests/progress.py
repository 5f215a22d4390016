"""A progress callback that records the number of steps in each report."""

from __future__ import annotations

from midlayer_encoders._types import Progress


def record_steps(steps: list[int]) -> Progress:
    """Return a callback that appends the steps of each report to ``steps``."""
    done_by_stage: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        assert 0 <= done_by_stage.get(stage, 0) <= done <= total
        steps.append(done - done_by_stage.get(stage, 0))
        done_by_stage[stage] = done

    return progress
