"""Keywords of the previous release, accepted for one more release."""

from collections.abc import Mapping, MutableMapping
from typing import Any

from midlayer_encoders.errors import did_you_mean, warn_deprecated


def take_deprecated(
    keywords: MutableMapping[str, Any], replacements: Mapping[str, str], *, function: str | None = None
) -> dict[str, Any]:
    """Remove deprecated keywords from ``keywords`` and return their values under the names that replace them.

    Each one issues a ``DeprecationWarning`` that points to the caller's line.

    Args:
        keywords: the ``**deprecated`` or ``**options`` of a function; modified in place.
        replacements: the new name of each old keyword; ``"settings.field"`` if it is now a field of grouped settings.
        function: name of the function; if given, a keyword that remains raises a ``TypeError``. Leave it out if the
            remaining keywords are encoder options, which ``make_options`` verifies.

    Returns:
        The values by new name; the fields of grouped settings in a dict of their own, for ``dataclasses.replace``.

    Example:
        >>> import warnings
        >>> old = {"texts": 8, "epochs": 3}
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", DeprecationWarning)
        ...     take_deprecated(old, {"texts": "metric_texts", "epochs": "training.epochs"}, function="probe")
        {'metric_texts': 8, 'training': {'epochs': 3}}
    """
    values: dict[str, Any] = {}
    for name, replacement in replacements.items():
        if name in keywords:
            warn_deprecated(f"`{name}` is now `{replacement}`; the old keyword will be removed in 0.4.")
            settings, _, field = replacement.rpartition(".")
            target = values.setdefault(settings, {}) if settings else values
            target[field] = keywords.pop(name)
    if function is not None and keywords:
        unknown = next(iter(keywords))
        raise TypeError(
            f"{function}() got an unexpected keyword argument {unknown!r}.{did_you_mean(unknown, replacements)}"
        )
    return values
