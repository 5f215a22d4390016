"""Versions of the packages behind a report."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("midlayer-encoders", "torch", "transformers", "sentence-transformers")


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the version of Python and of each package.

    Example:
        >>> versions(["no-such-package"])["no-such-package"]
        'not installed as a package'
    """
    return {"Python": platform.python_version(), **{package: _version(package) for package in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
