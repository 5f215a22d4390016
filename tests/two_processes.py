"""Two threads that stand for two processes: all code of the package runs, and only their messages stay in memory."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch

from midlayer_encoders.processes import sharing
from midlayer_encoders.processes.group import Group, ProcessLostError

T = TypeVar("T")


class _Meeting:
    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.letters: list[bytes] = [b"", b""]

    def exchange(self, rank: int, item: Any) -> list[Any]:
        self.letters[rank] = pickle.dumps(item)
        try:
            self.barrier.wait()
            letters = list(self.letters)
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ProcessLostError("the other thread ended or waits elsewhere") from error
        return [pickle.loads(letter) for letter in letters]


@dataclass(frozen=True)
class ThreadGroup(Group):
    """A group of two threads."""

    meeting: _Meeting = field(default_factory=_Meeting)

    def _gather(self, item: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, item)

    def _gather_in_first(self, item: Any) -> list[Any]:
        items = self.meeting.exchange(self.rank, item)
        return items if self.is_first else []


def in_two_processes(monkeypatch: pytest.MonkeyPatch, function: Callable[[Group], T]) -> list[T | Exception]:
    """Return what a function returns or raises in each of two processes, which ``devices=2`` joins."""
    meeting = _Meeting()
    groups = [ThreadGroup(rank, 2, torch.device("cpu"), meeting) for rank in range(2)]
    of_thread = threading.local()
    monkeypatch.setattr(sharing, "launch", lambda *_, **__: of_thread.group)

    def run(group: Group) -> T | Exception:
        of_thread.group = group
        try:
            return function(group)
        except Exception as error:
            if isinstance(error, ProcessLostError):
                meeting.barrier.abort()
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, groups))
