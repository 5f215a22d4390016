"""The packages of the extra `clients`, where they are installed."""

from typing import Any

import pytest

CLIENTS = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore"),  # theirs, of their use of one another
]


def client(module: str, package: str | None = None) -> Any:
    """Return the named module, or skip the test and say how to install its package."""
    reason = (
        f"{package or module} is not installed: run `make test-extras FOR=clients`, or `pip install -e '.[clients]'`"
    )
    return pytest.importorskip(module, reason=reason, exc_type=ModuleNotFoundError)
