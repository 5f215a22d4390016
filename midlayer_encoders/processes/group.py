"""The processes that share some work: its division, and the exchange of results and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from midlayer_encoders._types import Progress
from midlayer_encoders.errors import DiskFullError, FolderError, MidlayerError, error_summary
from midlayer_encoders.files import folder_lock


class Placed(Protocol):
    """A model that can be moved to a device."""

    @property
    def device(self) -> torch.device:
        """Where it is."""

    def to(self, device: torch.device) -> Any:
        """Move it to a device."""


T = TypeVar("T")


class OtherProcessError(MidlayerError):
    """Another process failed in its share of the work."""


class ProcessLostError(MidlayerError):
    """Another process ended before its share of the work was done."""


#: Errors that would also stop the next task.
FATAL = DiskFullError, FolderError, ProcessLostError


@dataclass(frozen=True)
class Group:
    """The processes that share some work; only this one by default.

    Attributes:
        rank: number of this process.
        world: number of processes.
        device: device of this process; ``None`` for the encoder's device.
    """

    rank: int = 0
    world: int = 1
    device: torch.device | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0

    def progress(self, progress: Progress | None) -> Progress | None:
        """Return the callback in the first process, and ``None`` in the others."""
        return progress if self.is_first else None

    def place(self, model: Placed) -> None:
        """Move a model to the device of this process."""
        if self.device is not None:
            model.to(self.device)

    def part(self, items: Sequence[T]) -> list[T]:
        """Return this process's share of the items."""
        return list(items[self.rank :: self.world])

    def share(self, function: Callable[[], T], *, inside: bool = False) -> list[T]:
        """Call a function in every process and return all results; an error in one is raised in all.

        Every process must make this call, so code between two calls must not fail in one process only, unless it runs
        inside an outer call: while mteb evaluates a task there, it requests vectors in an ``inside`` call. If a process
        fails before its ``inside`` call, it returns to the outer call, and the processes that wait inside raise an
        error.
        """
        if self.world == 1:
            return [function()]
        result: Any = None
        error: Exception | None = None
        failure: MidlayerError | None = None  # the error that the other processes raise
        try:
            result = function()
        except ProcessLostError:
            raise
        except Exception as raised:
            error = raised
            kinds = (kind for kind in (DiskFullError, FolderError) if isinstance(raised, kind))
            failure = next(kinds, OtherProcessError)(f"In process {self.rank}: {error_summary(raised)}")
        while True:
            outcomes = self._gather((inside, result, failure))
            if all(level == inside for level, _, _ in outcomes):
                break
            if inside:  # the processes outside wait until all have left the inside call
                raise (
                    error
                    or _first_failure(outcomes)
                    or OtherProcessError("Another process could not evaluate the task, or already had its score.")
                )
        if first_error := error or _first_failure(outcomes):
            raise first_error
        return [result for _, result, _ in outcomes]

    def first(self, function: Callable[[], T], *, inside: bool = False) -> T:
        """Call a function in the first process and return its result in every process."""
        return self.share(cast(Callable[[], T], function if self.rank == 0 else lambda: None), inside=inside)[0]

    def in_order(self, results: Iterator[T]) -> Iterator[T]:
        """Yield the results of all processes in turn, in the first process; the others only compute theirs.

        The results of ``map(function, group.part(items))`` come in the order of the items. Call it inside a
        :meth:`share` of every process, which raises an error of the loop around it in all of them.
        """
        if self.world == 1:
            yield from results
            return
        turn: list[T] = []

        def advance() -> int:
            turn[:] = islice(results, 1)
            return len(turn)

        while any(self.share(advance, inside=True)):
            for other in self._gather_in_first(turn):
                yield from other

    @contextmanager
    def lock(self, folder: Path) -> Iterator[None]:
        """Lock a folder in the first process, before any process writes to it."""
        with ExitStack() as stack:
            self.first(partial(stack.enter_context, folder_lock(folder)))
            yield

    def _gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.world
        self._exchange(dist.all_gather_object, items, item)
        return items

    def _gather_in_first(self, item: Any) -> list[Any]:
        items: list[Any] | None = [None] * self.world if self.is_first else None
        self._exchange(dist.gather_object, item, items)
        return items or []

    def _exchange(self, collective: Callable[..., None], *arguments: Any) -> None:
        try:
            collective(*arguments)
        except RuntimeError as error:
            raise ProcessLostError(
                f"Another of the {self.world} processes ended. Finished embeddings and scores are saved. Look for its "
                "error, and run the same command again to resume."
            ) from error


#: Only this process.
ALONE = Group()


def _first_failure(outcomes: Sequence[tuple[bool, Any, MidlayerError | None]]) -> MidlayerError | None:
    return next((failure for _, _, failure in outcomes if failure is not None), None)
