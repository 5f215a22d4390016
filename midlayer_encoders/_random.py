"""A fence around what draws from the global generators, or seeds them as mteb does: the caller's own draws stay."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["isolated_random"]

_turn = threading.RLock()  # the generators are the process's: threads that use them wait for one another


def _start_anew() -> None:
    """Forget who holds the lock in the parent process: that thread, which would let it go, is not in this one."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


@contextmanager
def isolated_random() -> Iterator[None]:
    """Restore the states of ``random``, NumPy's and torch's global generators on leaving the block.

    One thread at a time is inside such a block, so that none draws from what another seeded.

    Example:
        >>> import random
        >>> random.seed(0)
        >>> with isolated_random():
        ...     random.seed(42)
        >>> round(random.random(), 4)
        0.8444
    """
    import random

    import numpy as np
    import torch  # before mteb: it seeds torch only where torch is already there

    with _turn:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
            if cuda:
                torch.cuda.set_rng_state_all(cuda)
