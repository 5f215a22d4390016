"""Models, texts and options of the paper's experiments."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import polars as pl

from midlayer_encoders._types import Layer, Progress, Stage, content_digest
from midlayer_encoders.comparing.checkpoints import files_fingerprint
from midlayer_encoders.comparing.compare import without_local
from midlayer_encoders.encoder.build import encoder_name
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import MidlayerError, ModelNotFoundError
from midlayer_encoders.files import read_artifact
from midlayer_encoders.frame.schema import read_parquet
from midlayer_encoders.frame.tidy_result import kept_frame
from midlayer_encoders.metrics.measuring import measure_layers
from midlayer_encoders.tasks.sources import task_sources
from midlayer_encoders.tasks.tables import USUAL_NAMES, Columns

#: The embeddings and every tenth of the depth.
TENTHS: tuple[Layer, ...] = (0, *(tenth / 10 for tenth in range(1, 11)))


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
        texts_note: what the texts have in common and of how many they are, such as ``64 words or more, of 120``.
        solutions: worked solutions, such as GSM8K's, for Figure 5.
        revisions: checkpoints of the first model, for Figures 4 and 11.
        tasks: to score layers on.
        columns: how to read tasks of your own.
        layers: that are scored; by default every tenth of the depth, which takes a third of the time of all 31.
        swept: tidy frames of sweeps made elsewhere, taken as they are beside what is swept here.
        limit: how many texts a prompt experiment takes; metrics over texts take four times as many.
        max_length: tokens after which a text is truncated.
        seed: of every draw.
        workers: processes that score layers; ``None`` for all cores.
        progress: called with a stage, its finished steps and all of its steps.
        options: that ``load`` makes an encoder with.
    """

    models: tuple[str, ...]
    load: Callable[[str], LayerEncoder]
    out: Path
    texts: tuple[str, ...] = ()
    texts_note: str = ""
    solutions: tuple[str, ...] = ()
    revisions: tuple[str, ...] = ()
    tasks: str = "builtin"
    columns: Columns = USUAL_NAMES
    layers: tuple[Layer, ...] | str = TENTHS
    swept: tuple[pl.DataFrame, ...] = ()
    limit: int = 8
    max_length: int = 64
    seed: int = 0
    workers: int | None = None
    progress: Progress | None = None
    options: EncoderOptions = field(default_factory=EncoderOptions)
    _loaded: dict[tuple[str, str], LayerEncoder] = field(default_factory=dict, repr=False)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that differ whenever what is measured does, the files of models and tasks too."""
        frames = [frame.hash_rows().sort().to_list() for frame in self.swept]
        parts: list[Any] = [self.models, self.texts, self.solutions, self.revisions, self.tasks, self.columns]
        parts += [frames, self.layers, self.limit]
        parts += [self.max_length, self.seed, self.options.recreating()]
        return content_digest(json.dumps([*parts, [files_fingerprint(place) for place in self._places()]]))

    def _places(self) -> list[Path | str]:
        """Return the files and folders that numbers come from, and names that are none."""
        homes = [Path(model).expanduser() for model in self.models[:1] if self.revisions]
        checkpoints = [sub for home in homes if home.is_dir() for sub in sorted(home.iterdir()) if sub.is_dir()]
        return [*self.models, *self.options.adapters, *self.tasks.split(","), *checkpoints]

    def encoder(self, model: str) -> LayerEncoder:
        """Return the encoder of a model, loaded until another one is requested."""
        key = (model, files_fingerprint(model))  # weights that changed on the disk are read again
        if key not in self._loaded:
            self._loaded.clear()
            self._loaded[key] = self.load(model)
        return self._loaded[key]

    def with_typed_names(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return a frame to show: its models have the names that were typed, and other folders no prefix."""
        typed: dict[str, str] = {}
        for model in self.models:
            with suppress(ModelNotFoundError):  # a figure may read no model
                typed[encoder_name(model, self.options).removeprefix("local/")] = self.options.shown_name(model)
        return without_local(frame).with_columns(pl.col("model").replace(typed))

    def required_models(self, least: int = 1) -> tuple[str, ...]:
        """Return the models, or raise an error if there are too few."""
        if len(self.models) < least:
            words = "a model: pass --model" if least == 1 else f"{least} models: pass --model {least} times"
            raise MissingInputError(f"It needs {words}.")
        return self.models

    def required_texts(self, times: int = 1) -> tuple[str, ...]:
        """Return ``limit`` texts times a factor, or raise where there are none."""
        if not self.texts:
            raise MissingInputError("It needs texts: pass --texts FILE (the paper's are WikiText's paragraphs).")
        return self.texts[: times * self.limit]

    def used_inputs(self, kind: Literal["texts", "solutions"], times: int) -> str:
        """Return how many texts or solutions an experiment takes that reads so many times ``limit``, and why."""
        given = self.texts if kind == "texts" else self.solutions
        first = f"the first {times * self.limit} (--limit {self.limit}" + (f", {times} times)" if times > 1 else ")")
        note = f" ({self.texts_note})" if kind == "texts" and self.texts_note else ""
        count = len(given[: times * self.limit])
        return f"{count} of {len(given)} {kind}{note}" + (f": {first}" if count < len(given) else "")

    def for_each_model(self, function: Callable[[LayerEncoder], pl.DataFrame]) -> pl.DataFrame:
        """Return the frames of a function of each model's encoder."""
        models = self.required_models()
        stage = Stage(self.progress, "models")
        stage.expect(len(models))
        frames = []
        for model in models:
            frames.append(function(self.encoder(model)))
            stage.step()
        return pl.concat(frames)

    def sweep(self, model: str) -> pl.DataFrame:
        """Return scores on the tasks, and metrics on their texts, of every layer; kept in the folder."""
        from midlayer_encoders.sweeping import SweepSettings, sweep
        from midlayer_encoders.sweeping.best_layer import read_notes

        folder = self.out / "sweeps" / f"{self.models.index(model)}-{self.digest}"
        notes = read_artifact(folder / "sweep.json", read_notes)
        frame, _ = read_artifact(folder / "frame.parquet", read_parquet) or (None, {})
        if notes is not None and frame is not None and not notes.failures:
            return frame
        # The paper's numbers are mteb's, so mteb scores every layer.
        settings = SweepSettings(scoring="mteb", workers=self.workers, metric_texts=4 * self.limit, views=4)
        tasks = task_sources(self.tasks.split(","), self.columns)
        options: dict[str, Any] = {"metrics": "paper", "out": folder, "progress": self.progress}
        result = sweep(self.encoder(model), tasks, layers=self.layers, settings=settings, **options)
        if result.failures:
            reasons = "; ".join(f"{task}: {error}" for task, error in result.failures.items())
            raise MidlayerError(f"Some tasks failed. {reasons}")
        return result.frame

    def sweeps(self) -> list[pl.DataFrame]:
        """Return the frames in ``swept``, or else one sweep of each model; raise if there is neither."""
        if not self.swept and not self.models:
            raise MissingInputError("It needs a model: pass --model, or --swept FILE.")
        return list(self.swept) or [self.sweep(model) for model in self.models]

    def metrics(self, model: str) -> pl.DataFrame:
        """Return the paper's metrics of every layer on the texts; kept in the folder."""
        path = self.out / "metrics" / f"{self.models.index(model)}-{self.digest}.parquet"
        options: dict[str, Any] = {
            "metrics": "paper",
            "views": 4,
            "seed": self.seed,
            "dataset": "texts",
            "progress": self.progress,
        }
        return kept_frame(path, lambda: measure_layers(self.encoder(model), self.required_texts(4), **options))


def model_label(frame: pl.DataFrame, model: object, revision: object, separator: str = " ") -> str:
    """Return the model's name, and its revision if the frame holds several."""
    several = frame.filter(pl.col("model") == model)["revision"].n_unique() > 1
    return f"{model}{separator}{revision}" if several else str(model)
