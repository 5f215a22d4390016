"""The processes that share a sweep: each does its part, and what one found or met is known to all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from midlayer_encoders.errors import DiskFullError, FolderError, MidlayerError, OptionError, error_summary

__all__ = ["FATAL", "Group", "OtherProcessError", "ProcessLostError", "launch"]

_T = TypeVar("_T")
_PATIENCE = timedelta(days=2)  # for a process that is still at work; one that ended is noticed at once


class OtherProcessError(MidlayerError):
    """Another process that shares the work could not do its part."""


class ProcessLostError(MidlayerError):
    """Another process that shares the work ended before its part was done."""


FATAL = DiskFullError, FolderError, ProcessLostError
"""Errors that are not the fault of one task: the next would fail for them too."""


@dataclass(frozen=True)
class Group:
    """The processes that share a sweep; by default this one alone.

    Attributes:
        rank: number of this process.
        world: number of processes.
        device: of this process, ``None`` for the encoder's own.
    """

    rank: int = 0
    world: int = 1
    device: torch.device | None = None

    def part(self, items: Sequence[_T]) -> list[_T]:
        """Return the items that are this process's to do."""
        return list(items[self.rank :: self.world])

    def share(self, do: Callable[[], _T], *, inside: bool = False) -> list[_T]:
        """Return what came of a call in every process; an error in one of them is raised in all.

        Every process must come here, so nothing that may fail in one process alone belongs between two calls. A task's
        evaluation by mteb asks for vectors ``inside`` of such a call: a process that failed before it asked is at the
        outer call already, and the others, who wait for it inside, are told so.
        """
        if self.world == 1:
            return [do()]
        mine: Any = None
        error: Exception | None = None
        try:
            mine = do()
        except ProcessLostError:
            raise
        except Exception as raised:
            error = raised
        while True:
            everyone = self._gather((inside, mine, _told(error, self.rank)))
            if all(level == inside for level, _, _ in everyone):
                break
            if inside:  # those outside wait until nobody is here any more
                raise error or OtherProcessError(
                    "Another process could not evaluate the task, or had its score already."
                )
        if failed := error or next((told for _, _, told in everyone if told is not None), None):
            raise failed
        return [found for _, found, _ in everyone]

    def _gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(everyone, mine)
        except RuntimeError as error:
            raise ProcessLostError(
                f"Another of the {self.world} processes ended. What was embedded and scored is kept: look for its "
                "error, and run the same command again to go on."
            ) from error
        return everyone


def _told(error: Exception | None, rank: int) -> MidlayerError | None:
    """Return an error as the other processes raise it."""
    if error is None:
        return None
    words = f"In process {rank}: {error_summary(error)}"
    kind = next((kind for kind in (DiskFullError, FolderError) if isinstance(error, kind)), OtherProcessError)
    return kind(words)


def launch(devices: int, num_nodes: int, *, cpu: bool) -> Group:
    """Join the other processes, started by Fabric itself, torchrun or SLURM, when there are to be several."""
    if devices * num_nodes == 1:
        _check_alone()
        return Group()
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.ddp import DDPStrategy

    # Only small objects travel between processes, so gloo serves GPUs too.
    strategy = DDPStrategy(process_group_backend="gloo", timeout=_PATIENCE)
    loggers = {name: logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")}
    levels = {name: logger.level for name, logger in loggers.items()}
    for logger in loggers.values():
        logger.setLevel(logging.WARNING)  # each process would say that it was started
    try:
        fabric = Fabric(
            accelerator="cpu" if cpu else "auto", devices=devices, num_nodes=num_nodes, strategy=strategy
        )  # fmt: skip
        fabric.launch()
    except ValueError as error:  # torchrun or SLURM started another number of processes
        raise OptionError(
            f"`devices` must be the number of processes on a machine, and `num_nodes` that of machines, as torchrun or "
            f"SLURM started them, but got {devices} and {num_nodes}: {error}"
        ) from error
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
    return Group(fabric.global_rank, fabric.world_size, fabric.device)


def _check_alone() -> None:
    """Raise in all but the first of several processes that torchrun started for one sweep each."""
    world, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if "TORCHELASTIC_RUN_ID" in os.environ and rank > 0 and not dist.is_initialized():
        local = os.environ.get("LOCAL_WORLD_SIZE", str(world))
        raise OptionError(
            f"`devices` must be {local} and `num_nodes` {world // int(local)}, because torchrun started {world} "
            "processes, but got 1 and 1: so each would do the whole sweep."
        )
