"""What was measured at each step: kept in memory, in the run's checkpoints and in a file beside the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from midlayer_encoders.callbacks._identity import Identities, identities
from midlayer_encoders.callbacks._measurement import Measurement, Values

if TYPE_CHECKING:
    import polars as pl

__all__ = ["History", "read_state"]

_DATASET = "probe"  # what the frame calls a callback's inputs
_KEY = "midlayer_encoders"  # of the file's metadata


class _Revision(NamedTuple):
    """The model at one step, named as Pythia's revisions are: ``step512``."""

    model: str
    revision: str
    num_layers: int


@dataclass
class History:
    """The values of every layer by step and metric.

    Attributes:
        measurement: what is measured at each step.
        identities: what the values of each metric depend on.
        steps: the values by step.
        at_end: steps that were measured only because the run ended there.
        partial: steps of the run before that lack something of what is measured now.
    """

    measurement: Measurement
    identities: Identities = field(init=False)
    steps: dict[int, Values] = field(default_factory=dict)
    at_end: set[int] = field(default_factory=set)
    partial: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.identities = identities(self.measurement)

    def frame(self) -> pl.DataFrame:
        """Return the tidy frame, step by step."""
        from midlayer_encoders.frame import tidy_frame, tidy_rows

        model, num_layers = self.measurement.model, self.measurement.anatomy.num_layers
        return tidy_frame(
            row
            for step in sorted(self.steps)
            for name, values in self.steps[step].items()
            for row in tidy_rows(
                values, _Revision(model, f"step{step}", num_layers), kind="metric", dataset=_DATASET, name=name
            )
        )

    def has(self, step: int) -> bool:
        """Return whether everything that is measured now was measured at ``step``."""
        return step in self.steps and step not in self.partial

    def add(self, step: int, values: Values, *, due: bool) -> None:
        """Keep the values of ``step``, beside what the run before measured there in other metrics."""
        self.steps[step] = {**self.steps.get(step, {}), **values}
        self.partial.discard(step)
        if not due:
            self.at_end.add(step)

    def state(self) -> dict[str, Any]:
        """Return the history as plain numbers and strings, for a checkpoint."""
        return {"steps": dict(self.steps), **self._notes()}

    def _notes(self) -> dict[str, Any]:
        return {"layers": list(self.measurement.layers), "identities": self.identities, "at_end": sorted(self.at_end)}

    def resume(self, state: dict[str, Any], *, due: Callable[[int], bool]) -> list[str]:
        """Take over the history of the run before and return, in words, what is left out: measured in another way.

        Args:
            state: from :meth:`state` or :func:`read_state`.
            due: whether a step is due now. A measurement at the end of the run before that was not due is no part of
                the run that goes on.
        """
        steps: dict[int, Values] = state["steps"]
        layers, then = set(state.get("layers", [])), state.get("identities", {})
        wanted = set(self.measurement.layers)
        names = dict.fromkeys(name for values in steps.values() for name in values)
        differences = {name: _difference(then.get(name), self.identities.get(name)) for name in names}
        kept = [name for name, difference in differences.items() if difference is None]
        now = set(self.identities)
        self.identities = {**{name: then[name] for name in kept}, **self.identities}
        self.steps, self.at_end, self.partial = {}, set(), set()
        for step, values in steps.items():
            found = {
                name: {layer: value for layer, value in by_layer.items() if layer in wanted}
                for name, by_layer in values.items()
                if name in kept
            }
            if not found or (step in state.get("at_end", ()) and not due(step)):
                continue
            self.steps[step] = found
            if not now <= set(found) or not wanted <= layers:
                self.partial.add(step)
        words = [f"{name} (other {difference})" for name, difference in differences.items() if difference is not None]
        gone = sorted(layers - wanted) if kept else []
        return words + ([f"layers {', '.join(map(str, gone))} (not measured any more)"] if gone else [])

    def write(self, path: Path) -> None:
        """Write the frame at once or not at all: a killed run leaves the one before."""
        from midlayer_encoders.report.results import write_frame

        write_frame(self.frame(), path, metadata={_KEY: json.dumps(self._notes())})


def _difference(then: dict[str, Any] | None, now: dict[str, Any] | None) -> str | None:
    """Return the names of what differs; ``None`` where nothing does, or the metric is not measured now."""
    if then is None:
        return "settings, which were not kept"
    if now is None or then == now:
        return None
    return " and ".join(sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key)))


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of the history that :meth:`History.write` wrote."""
    import polars as pl

    frame = pl.read_parquet(path).select("revision", "name", "layer", "value")
    steps: dict[int, Values] = {}
    for revision, name, layer, value in frame.iter_rows():
        steps.setdefault(int(revision.removeprefix("step")), {}).setdefault(name, {})[layer] = value
    notes = json.loads(pl.read_parquet_metadata(path).get(_KEY, "{}"))
    return {"layers": frame["layer"].unique().to_list(), **notes, "steps": steps}
