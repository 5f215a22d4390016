"""What a probe found at each step: kept in memory, in the run's checkpoints and in a file beside the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.callbacks._probe import Values
from midlayer_encoders.callbacks._settings import Settings

if TYPE_CHECKING:
    import polars as pl

__all__ = ["History", "read_state"]

_KEY = "midlayer_encoders"  # of the file's metadata


@dataclass
class History:
    """The values of every layer by step and metric.

    Attributes:
        model: what the frame calls the model.
        num_layers: number of blocks.
        layers: which layers were measured.
        dataset: what the frame calls the probe's inputs.
        steps: step, then metric, then one value per layer; NaN where a layer has none.
        settings: how each metric was measured.
        at_end: steps that were measured only because the run ended there.
        partial: steps of the run before that lack something of what is measured now.
    """

    model: str
    num_layers: int
    layers: Sequence[int]
    dataset: str
    settings: Settings
    steps: dict[int, Values] = field(default_factory=dict)
    at_end: set[int] = field(default_factory=set)
    partial: set[int] = field(default_factory=set)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the tidy frame; the revision names the step, as Pythia's do: ``step512``."""
        return [
            {
                "model": self.model,
                "revision": f"step{step}",
                "layer": layer,
                "depth": layer / self.num_layers,
                "kind": "metric",
                "dataset": self.dataset,
                "name": name,
                "value": value,
            }
            for step in sorted(self.steps)
            for name, values in self.steps[step].items()
            for layer, value in zip(self.layers, values, strict=True)
            if not math.isnan(value)  # the first layer of a comparison with the one before
        ]

    def frame(self) -> pl.DataFrame:
        """Return the tidy frame."""
        import polars as pl

        from midlayer_encoders.frame import FRAME_SCHEMA

        return pl.DataFrame(self.rows(), schema=FRAME_SCHEMA)

    def has(self, step: int) -> bool:
        """Return whether everything that is measured now was measured at ``step``."""
        return step in self.steps and step not in self.partial

    def add(self, step: int, values: Values, *, due: bool) -> None:
        """Keep what was found at ``step``, beside what the run before found there in other metrics."""
        self.steps[step] = {**self.steps.get(step, {}), **values}
        self.partial.discard(step)
        if not due:
            self.at_end.add(step)

    def state(self) -> dict[str, Any]:
        """Return the history as plain numbers and strings, for a checkpoint."""
        return {"steps": dict(self.steps), **self._notes()}

    def _notes(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "settings": self.settings, "at_end": sorted(self.at_end)}

    def resume(self, state: dict[str, Any], *, due: Callable[[int], bool]) -> list[str]:
        """Take up the history of the run before, less what was measured in another way, and return that in words.

        Args:
            state: from :meth:`state` or :func:`read_state`.
            due: whether a step is due now. A measurement at the end of the run before that was not due is no part of
                the run that goes on.
        """
        steps: dict[int, Values] = state["steps"]
        layers, then = state.get("layers", []), state.get("settings", {})
        names = dict.fromkeys(name for values in steps.values() for name in values)
        other = {name: _difference(then.get(name), self.settings.get(name)) for name in names}
        kept = [name for name, difference in other.items() if difference is None]
        now = set(self.settings)
        self.settings = {**{name: then[name] for name in kept}, **self.settings}
        self.steps, self.at_end, self.partial = {}, set(), set()
        for step, values in steps.items():
            found = {name: self._aligned(values[name], layers) for name in values if name in kept}
            if not found or (step in state.get("at_end", ()) and not due(step)):
                continue
            self.steps[step] = found
            if not now <= set(found) or not set(self.layers) <= set(layers):
                self.partial.add(step)
        words = [f"{name} (other {difference})" for name, difference in other.items() if difference is not None]
        gone = sorted(set(layers) - set(self.layers)) if kept else []
        return words + ([f"layers {', '.join(map(str, gone))} (not measured any more)"] if gone else [])

    def _aligned(self, values: Sequence[float], layers: Sequence[int]) -> list[float]:
        by_layer = dict(zip(layers, values, strict=True))
        return [by_layer.get(layer, math.nan) for layer in self.layers]

    def write(self, path: Path) -> None:
        """Write the frame at once or not at all: a killed run leaves the one before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        self.frame().write_parquet(beside, metadata={_KEY: json.dumps(self._notes())})
        beside.replace(path)


def _difference(then: dict[str, Any] | None, now: dict[str, Any] | None) -> str | None:
    """Return the names of the settings that differ; ``None`` where none does, or the metric is not measured now."""
    if then is None:
        return "settings, which were not kept"
    if now is None or then == now:
        return None
    return " and ".join(sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key)))


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of the history that :meth:`History.write` wrote."""
    import polars as pl

    frame = pl.read_parquet(path).select("revision", "name", "layer", "value")
    notes = json.loads(pl.read_parquet_metadata(path).get(_KEY, "{}"))
    layers = notes.get("layers", sorted(set(frame["layer"].to_list())))
    steps: dict[int, Values] = {}
    for revision, name, layer, value in frame.iter_rows():
        values = steps.setdefault(int(revision.removeprefix("step")), {})
        values.setdefault(name, [math.nan] * len(layers))[layers.index(layer)] = value
    return {**notes, "steps": steps, "layers": layers}
