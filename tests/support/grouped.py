"""``probe``, ``compare``, ``tune`` and ``sweep`` with the fields of their settings as keywords, for shorter tests."""

from dataclasses import fields
from typing import Any

import midlayer_encoders
from midlayer_encoders.comparing import CompareResult, IntervalSettings
from midlayer_encoders.extras.probing import ProbeResult, ProbeSettings
from midlayer_encoders.extras.training import TuneResult, TuneSettings
from midlayer_encoders.sweeping import SweepResult, SweepSettings


def _grouped(argument: str, settings: type[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(settings) if field.name in keywords]
    values = {name: keywords.pop(name) for name in names}
    return keywords | {argument: settings(**values)}


def probe(*args: Any, **keywords: Any) -> ProbeResult:
    return midlayer_encoders.probe(*args, **_grouped("settings", ProbeSettings, keywords))


def compare(*args: Any, **keywords: Any) -> CompareResult:
    return midlayer_encoders.compare(*args, **_grouped("intervals", IntervalSettings, keywords))


def tune(*args: Any, **keywords: Any) -> TuneResult:
    return midlayer_encoders.tune(*args, **_grouped("settings", TuneSettings, keywords))


def sweep(*args: Any, **keywords: Any) -> SweepResult:
    return midlayer_encoders.sweep(*args, **_grouped("settings", SweepSettings, keywords))
