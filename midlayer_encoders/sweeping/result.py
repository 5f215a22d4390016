"""What a sweep found: the frame, the best layer, figures, the page; kept in a folder and read back from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from midlayer_encoders.encoder.options import EncoderOptions, python_line, shell_line
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import json_object, read_kept, read_whole, write_file
from midlayer_encoders.frame import Summary, read_frame, summary
from midlayer_encoders.report import plot_scores, report_html
from midlayer_encoders.results import Result
from midlayer_encoders.tasks import task_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Notes", "SweepResult", "read_notes"]


@dataclass(frozen=True)
class Notes:
    """What stands beside the frame: how it was measured, what each layer costs, and what went wrong."""

    title: str
    model: str
    how: dict[str, str]
    parameters: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    scoring: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepResult(Result):
    """Scores and metrics of every layer.

    Attributes:
        frame: tidy: ``model, revision, layer, depth, kind, dataset, name, value``; beside ``score`` and ``metric`` rows
            of the kind ``confirmed`` hold mteb's own score of some layers that were scored together.
        folder: where the frame, mteb's result files, the embeddings and the page lie.
        notes: how it was measured.
    """

    folder: Path
    notes: Notes

    made_by: ClassVar[str] = "sweep"

    @property
    def failures(self) -> Mapping[str, str]:
        """Tasks that failed, and why."""
        return self.notes.failures

    def summary(self) -> Summary:
        """Return mean scores by layer, the best layer, the last, and the gain between them."""
        return summary(self.frame)

    def best(self) -> int:
        """Return the layer with the highest mean score over the tasks."""
        if self.frame.filter(pl.col("kind") == "score").is_empty():
            failed = [f"{task}: {error}" for task, error in self.failures.items()]
            reasons = " ".join([*failed, *self.notes.remarks])
            raise OptionError(f"There is no score to choose a layer by. {reasons or 'No task was asked for.'}")
        average = self.summary().average
        if average is None:
            raise OptionError("No layer was scored on every task, so none is the best: see `failures`, or sweep again.")
        return int(average.best_layer)

    def plot(self) -> Figure:
        """Return the figure of scores by depth."""
        return plot_scores(self.frame)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``scores``."""
        return {"scores": self.plot()}

    def html(self) -> str:
        """Return the self-contained page."""
        notes = self.notes
        scored = not self.frame.filter(pl.col("kind") == "score").is_empty()
        labels = _labels(self.frame["dataset"].unique().to_list())
        return report_html(
            self.frame.with_columns(pl.col("dataset").replace(labels)),
            title=notes.title,
            how=notes.how,
            parameters=notes.parameters or None,
            seconds=notes.seconds or None,
            export=_export(notes, self.best()) if scored else None,
            notes=[*notes.remarks, *(f"{task} failed: {error}" for task, error in notes.failures.items())],
            baselines={labels.get(task, task): score for task, score in notes.baselines.items()} or None,
        )

    def save(self, folder: Path | str | None = None) -> Path:
        """Write frame (parquet and CSV) and notes into a folder, by default the result's own, and return it."""
        home = self._write_tables(folder)
        write_file(home / "sweep.json", json.dumps(asdict(self.notes), indent=2).encode())
        return home

    @classmethod
    def load(cls, folder: Path | str) -> SweepResult:
        """Return the result that :meth:`save` wrote into a folder.

        Raises:
            OptionError: there is none that can be read; the sweep, called again, writes it from what it kept.
        """
        folder = Path(folder)
        frame = read_kept(folder / "frame.parquet", read_frame)
        notes = read_kept(folder / "sweep.json", read_notes)
        if frame is None or notes is None:
            raise OptionError(
                f"`folder` must be the --out of a sweep, but {folder} holds no frame.parquet and sweep.json that can "
                "be read. Run the sweep again: it goes on from what it kept."
            )
        return cls(frame, folder, notes)


def read_notes(path: Path) -> Notes:
    """Return the notes of a sweep from its ``sweep.json``."""
    kept = json_object(read_whole(path, OptionError), str(path), OptionError)
    for name in ("parameters", "seconds"):
        kept[name] = {int(layer): value for layer, value in kept[name].items()}
    if "export_options" in kept:  # written by 0.1, as flags
        flags = re.findall(r"--(\S+) (\S+)", kept.pop("export_options"))
        kept["options"] = {name.replace("-", "_"): value for name, value in flags}
    for one in fields(Notes):
        kind = str if one.name in ("title", "model") else list if one.name == "remarks" else dict
        if not isinstance(kept.get(one.name, kind()), kind):
            raise TypeError(f"{one.name} is not a {kind.__name__}")
    return Notes(**kept)


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Return names of tasks without the digest of their data, where that leaves them apart."""
    labels = {name: task_label(name) for name in names}
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in names}


def _export(notes: Notes, layer: int) -> dict[str, str]:
    """Return the lines that make the encoder of a layer."""
    options = EncoderOptions(**notes.options)
    return {
        "Python": f'{python_line(notes.model, layer, options)}.save_pretrained("layer-{layer}")',
        "shell": shell_line(notes.model, layer, options, out=f"layer-{layer}"),
    }
