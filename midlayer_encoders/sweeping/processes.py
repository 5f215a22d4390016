"""Share a sweep among processes: divide the work, and exchange results and errors."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from midlayer_encoders._isolation import quiet_loggers
from midlayer_encoders.errors import DiskFullError, FolderError, MidlayerError, OptionError, error_summary

T = TypeVar("T")

_TIMEOUT = timedelta(days=2)  # for a busy process; one that has ended is noticed immediately
_LAUNCHER = "MIDLAYER_LAUNCHER"  # variable with the process that starts the others, which inherit it


class OtherProcessError(MidlayerError):
    """Another process failed in its share of the work."""


class ProcessLostError(MidlayerError):
    """Another process ended before its share of the work was done."""


FATAL = DiskFullError, FolderError, ProcessLostError
"""Errors that would also stop the next task."""


@dataclass(frozen=True)
class Group:
    """The processes that share a sweep; only this one by default.

    Attributes:
        rank: number of this process.
        world: number of processes.
        device: device of this process; ``None`` for the encoder's device.
    """

    rank: int = 0
    world: int = 1
    device: torch.device | None = None

    def part(self, items: Sequence[T]) -> list[T]:
        """Return this process's share of the items."""
        return list(items[self.rank :: self.world])

    def share(self, function: Callable[[], T], *, inside: bool = False) -> list[T]:
        """Call a function in every process and return all results; an error in one is raised in all.

        Every process must make this call, so code between two calls must not fail in one process only. While mteb
        evaluates a task inside an outer call, it requests vectors in an ``inside`` call. If a process fails before its
        ``inside`` call, it returns to the outer call, and the processes that wait inside raise an error.
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
                raise error or OtherProcessError(
                    "Another process could not evaluate the task, or already had its score."
                )
        if first_error := error or next((failure for _, _, failure in outcomes if failure is not None), None):
            raise first_error
        return [result for _, result, _ in outcomes]

    def first(self, function: Callable[[], T], *, inside: bool = False) -> T:
        """Call a function in the first process and return its result in every process."""
        return self.share(cast(Callable[[], T], function if self.rank == 0 else lambda: None), inside=inside)[0]

    def _gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(items, item)
        except RuntimeError as error:
            raise ProcessLostError(
                f"Another of the {self.world} processes ended. Finished embeddings and scores are saved. Look for its "
                "error, and run the same command again to resume."
            ) from error
        return items


def end_with_parent(parent: int) -> None:
    """End this process within a second of its parent, even if the parent is killed.

    Args:
        parent: process that started this one.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def launch(devices: int, num_nodes: int, *, cpu: bool) -> Group:
    """Join the processes that Fabric, torchrun or SLURM starts, and return their group; only this one by default."""
    if devices * num_nodes == 1:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0"))
        if "TORCHELASTIC_RUN_ID" in os.environ and rank > 0 and not dist.is_initialized():
            local = os.environ.get("LOCAL_WORLD_SIZE", str(world))
            raise OptionError(
                f"`devices` must be {local} and `num_nodes` {world // int(local)}, because torchrun started {world} "
                "processes, but got 1 and 1: each process would run the whole sweep."
            )
        return Group()
    if os.environ.get(_LAUNCHER) == str(os.getppid()):
        end_with_parent(os.getppid())
    else:
        os.environ[_LAUNCHER] = str(os.getpid())
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.ddp import DDPStrategy

    # Processes exchange small objects only, so gloo is sufficient for GPUs too.
    strategy = DDPStrategy(process_group_backend="gloo", timeout=_TIMEOUT)
    accelerator = "cpu" if cpu else "auto"
    try:
        with quiet_loggers("lightning.fabric", "lightning.pytorch", level=logging.WARNING):
            fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy)
            fabric.launch()
    except ValueError as error:  # torchrun or SLURM started a different number of processes
        raise OptionError(
            f"`devices` must be the number of processes per machine and `num_nodes` the number of machines that "
            f"torchrun or SLURM started, but got {devices} and {num_nodes}: {error}"
        ) from error
    return Group(fabric.global_rank, fabric.world_size, fabric.device)
