"""An executor of this process, some of whose calls are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future
from typing import Any


class Jobs:
    """Run calls at once in this process, but for those with the numbers in ``lost``, whose process seems to end."""

    def __init__(self, lost: Sequence[int] = ()) -> None:
        self.calls: list[Any] = []
        self.lost = set(lost)

    def submit(self, function: Callable[..., Any], unit: Any) -> Future[Any]:
        """Call the function with a unit."""
        future: Future[Any] = Future()
        if len(self.calls) in self.lost:
            future.set_exception(BrokenExecutor("killed"))
        else:
            future.set_result(function(unit))
        self.calls.append(unit)
        return future
