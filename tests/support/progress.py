"""A progress callback that records the number of steps in each report, and the tokens that reports count."""

from collections.abc import Iterable

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import Progress


def record_steps(steps: list[int], only: str | None = None) -> Progress:
    """Return a callback that appends the steps of each report, or of one stage, to ``steps``."""
    done_by_stage: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        assert 0 <= done_by_stage.get(stage, 0) <= done <= total
        if only in (None, stage):
            steps.append(done - done_by_stage.get(stage, 0))
        done_by_stage[stage] = done

    return progress


def num_tokens(encoder: LayerEncoder, *passes: Iterable[str]) -> int:
    """Return the number of tokens of all texts of some passes, without padding."""
    return sum(len(encoder.tokenizer(text)["input_ids"]) for texts in passes for text in texts)
