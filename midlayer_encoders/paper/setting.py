"""Models, texts, tables and options of the paper's experiments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from midlayer_encoders._types import Layer
from midlayer_encoders.comparing.checkpoints import files_fingerprint
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.files import read_artifact
from midlayer_encoders.frame import tidy_frame
from midlayer_encoders.measuring import measure_layers
from midlayer_encoders.paper.reference import reference_metrics, reference_scores
from midlayer_encoders.report.results import kept_frame
from midlayer_encoders.tasks.docstrings import versions

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


REFERENCE = " (reference)"
"""What is added to the names of the paper's own models and numbers, so that they do not pass for measured ones."""


TENTHS: tuple[Layer, ...] = (0, *(tenth / 10 for tenth in range(1, 11)))
"""The embeddings and every tenth of the depth."""


class MissingInputError(MidlayerError):
    """An experiment lacks an input; the message says which, and how to pass it."""


@dataclass
class Setting:
    """Inputs and options of the experiments; one model is in memory at a time.

    Attributes:
        models: names or folders.
        load: makes the encoder of a whole model from its name.
        out: folder for everything that is written.
        texts: for metrics and prompts, such as WikiText's paragraphs.
        solutions: worked solutions, such as GSM8K's, for Figure 5.
        reference: folder of the paper's own tables; ``None`` where there is none.
        revisions: checkpoints of the first model, for Figures 4 and 11.
        tasks: to score layers on.
        layers: that are scored; by default every tenth of the depth, which takes a third of the time of all 31.
        swept: tidy frames of sweeps made elsewhere, taken as they are beside what is swept here.
        limit: how many texts a prompt experiment takes; metrics over texts take four times as many.
        max_length: tokens after which a text is truncated.
        seed: of every draw.
        pass_per_prefix: pass each prefix of a solution through the model by itself, for models that look ahead.
        workers: processes that score layers; ``None`` for all cores.
        options: that ``load`` makes an encoder with.
    """

    models: tuple[str, ...]
    load: Callable[[str], LayerEncoder]
    out: Path
    texts: tuple[str, ...] = ()
    solutions: tuple[str, ...] = ()
    reference: Path | None = None
    revisions: tuple[str, ...] = ()
    tasks: str = "builtin"
    layers: tuple[Layer, ...] | str = TENTHS
    swept: tuple[pl.DataFrame, ...] = ()
    limit: int = 8
    max_length: int = 64
    seed: int = 0
    pass_per_prefix: bool = False
    workers: int | None = None
    options: EncoderOptions = field(default_factory=EncoderOptions)
    _loaded: dict[tuple[str, str], LayerEncoder] = field(default_factory=dict, repr=False)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that differ whenever what is measured does, the files of models and tasks too."""
        frames = [frame.hash_rows().sort().to_list() for frame in self.swept]
        parts: list[Any] = [self.models, self.texts, self.solutions, str(self.reference), self.revisions, self.tasks]
        parts += [frames]
        parts += [self.layers, self.limit, self.max_length, self.seed, self.pass_per_prefix, self.options.recreating()]
        parts += [versions() if "builtin" in self.tasks.split(",") else {}]  # those tasks are made of their docstrings
        text = json.dumps([*parts, [files_fingerprint(place) for place in self._places()]])
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def _places(self) -> list[Path | str]:
        """Return the files and folders that numbers come from, and names that are none."""
        reference = [self.reference] if self.reference is not None else []
        homes = [Path(model).expanduser() for model in self.models[:1] if self.revisions]
        checkpoints = [sub for home in homes if home.is_dir() for sub in sorted(home.iterdir()) if sub.is_dir()]
        return [*self.models, *self.options.adapters, *self.tasks.split(","), *reference, *checkpoints]

    def encoder(self, model: str) -> LayerEncoder:
        """Return the encoder of a model, loaded until another one is requested."""
        key = (model, files_fingerprint(model))  # weights that changed on the disk are read again
        if key not in self._loaded:
            self._loaded.clear()
            self._loaded[key] = self.load(model)
        return self._loaded[key]

    def required_models(self, least: int = 1) -> tuple[str, ...]:
        """Return the models, or raise an error if there are too few."""
        if len(self.models) < least:
            words = "a model: pass --model" if least == 1 else f"{least} models: pass --model {least} times"
            raise MissingInputError(f"It needs {words}.")
        return self.models

    def required_texts(self, times: int = 1) -> tuple[str, ...]:
        """Return ``limit`` texts, or so many times as many, or raise where there are none."""
        if not self.texts:
            raise MissingInputError("It needs texts: pass --texts FILE (the paper's are WikiText's paragraphs).")
        return self.texts[: times * self.limit]

    def reference_folder(self, what: str) -> Path:
        """Return the folder of the paper's tables, or raise what else would do."""
        if self.reference is None:
            raise MissingInputError(f"It needs {what}, or the paper's tables: pass --reference DIR.")
        return self.reference

    def sweep(self, model: str) -> pl.DataFrame:
        """Return scores on the tasks, and metrics on their texts, of every layer; kept in the folder."""
        from midlayer_encoders.sweeping import SweepSettings, sweep
        from midlayer_encoders.sweeping.sweep_result import read_notes

        folder = self.out / "sweeps" / f"{self.models.index(model)}-{self.digest}"
        notes = read_artifact(folder / "sweep.json", read_notes)
        frame = read_artifact(folder / "frame.parquet", pl.read_parquet)
        if notes is not None and frame is not None and not notes.failures:
            return frame
        # The paper's numbers are mteb's, so mteb scores every layer.
        settings = SweepSettings(scoring="mteb", workers=self.workers, metric_texts=4 * self.limit, views=4)
        tasks = self.tasks.split(",")
        result = sweep(self.encoder(model), tasks, layers=self.layers, metrics="paper", out=folder, settings=settings)
        if result.failures:
            reasons = "; ".join(f"{task}: {error}" for task, error in result.failures.items())
            raise MidlayerError(f"Some tasks failed. {reasons}")
        return result.frame

    def sweeps(self) -> list[pl.DataFrame]:
        """Return the frames of sweeps: those given, or else one of each model."""
        return list(self.swept) or [self.sweep(model) for model in self.models]

    def metrics(self, model: str) -> pl.DataFrame:
        """Return the paper's metrics of every layer on the texts; kept in the folder."""
        path = self.out / "metrics" / f"{self.models.index(model)}-{self.digest}.parquet"
        options: dict[str, Any] = {"metrics": "paper", "views": 4, "seed": self.seed, "dataset": "texts"}
        return kept_frame(path, lambda: measure_layers(self.encoder(model), self.required_texts(4), **options))

    def with_reference(self, models: Sequence[str]) -> list[pl.DataFrame]:
        """Return the frames of sweeps, and one of the paper's own scores and metrics of some models, or raise."""
        paper = pl.concat([self.reference_scores(models), self._of_reference(reference_metrics, models)])
        frames = [*self.sweeps(), *([paper] if paper["kind"].n_unique() == 2 else [])]
        if not frames:
            raise MissingInputError("It needs a model (--model) or the paper's tables (--reference DIR).")
        return frames

    def reference_scores(self, models: Sequence[str]) -> pl.DataFrame:
        """Return the paper's own scores of some models at their last revision; none where there are no tables."""
        return self._of_reference(reference_scores, models)

    def reference_metrics(self, models: Sequence[str]) -> pl.DataFrame:
        """Return the paper's own metrics on WikiText, over the largest entropy, of some models.

        Its curvature is left out: it is NaN in most layers.
        """
        frame = self._of_reference(reference_metrics, models)
        metrics = frame.filter(pl.col("dataset") == "wikitext", pl.col("name") != "curvature")
        return metrics.with_columns(pl.col("name") + REFERENCE)

    def _of_reference(self, read: Callable[[Path], pl.DataFrame], models: Sequence[str]) -> pl.DataFrame:
        if self.reference is None:
            return tidy_frame(())
        frame = read(self.reference).filter(pl.col("revision") == "main")
        mine = pl.concat(frame.filter(pl.col("model") == model) for model in models)
        return mine.with_columns(pl.col("model") + REFERENCE)
