"""The package ``ray``, and a cluster that prints nothing."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from midlayer_encoders.errors import OptionError
from midlayer_encoders.processes import ProcessLostError

_CONNECT_SECONDS = 10.0


def import_ray() -> Any:
    """Return the package ``ray`` with Ray Data."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise OptionError("`ray` must be installed with Ray Data: pip install 'midlayer-encoders[ray]'.") from error
    return ray


@contextmanager
def quiet_cluster(ray: Any) -> Iterator[None]:
    """Connect to a cluster, or start one on this machine if there is none; Ray shows neither logs nor progress."""
    is_ours = not ray.is_initialized()
    if is_ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        with _hidden_stderr():  # which has a line about this level
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    settings = context.enable_progress_bars, context.print_on_execution_start
    context.enable_progress_bars = context.print_on_execution_start = False
    try:
        yield
    finally:
        context.enable_progress_bars, context.print_on_execution_start = settings
        logger.setLevel(level)
        if is_ours:
            ray.shutdown()


@contextmanager
def _hidden_stderr() -> Iterator[None]:
    """Hide what this process writes to standard error, from C++, too."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "wb") as null:  # noqa: PTH123
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _check_address(address: str) -> None:
    """Raise if the cluster of ``RAY_ADDRESS`` does not answer: Ray would try for minutes."""
    match = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)
    if match is None:  # none, "auto" or "local"
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ProcessLostError(
            f"The cluster at RAY_ADDRESS={address} cannot be reached: {error}. Start it with `ray start`, or unset "
            "RAY_ADDRESS to use this machine."
        ) from error
