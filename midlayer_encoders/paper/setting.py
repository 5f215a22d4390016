"""Models, texts and options of the paper's experiments, and the per-layer tables in its public repository."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from midlayer_encoders._types import Layer
from midlayer_encoders.comparing.checkpoints import files_fingerprint
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.files import read_artifact
from midlayer_encoders.frame.schema import FRAME_SCHEMA, check_frame, read_parquet, tidy_frame
from midlayer_encoders.measuring import measure_layers
from midlayer_encoders.report.results import kept_frame
from midlayer_encoders.tasks.sources import REFERENCE_DATASETS

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


_ENGLISH = ("default", "en", "en-ext", "en-en")

_METRICS = {
    "entropy_sentence": "prompt_entropy",
    "entropy_dataset": "dataset_entropy",
    "curvature": "curvature",
    "infonce": "infonce",
    "lidar": "lidar",
    "dime": "dime",
}
"""Our names of the metrics in the tables."""

_TASKS = {dataset: name for name, dataset in REFERENCE_DATASETS.items() if dataset is not None}
"""The mteb tasks of the datasets in the tables."""


def data_folder() -> Path | None:
    """Return the folder of corpora and tasks in the variable ``MIDLAYER_DATA``, or ``None`` if it is not set.

    The paper's tables are in the sibling folder ``reference``. A folder that does not exist is an error.
    """
    variable = os.environ.get("MIDLAYER_DATA")
    if not variable:
        return None
    folder = Path(variable).expanduser()
    if not folder.is_dir():
        raise OptionError(f"`MIDLAYER_DATA` must name a folder, but there is no {folder}. Correct it, or unset it.")
    return folder


def reference_scores(folder: Path | str) -> pl.DataFrame:
    """Return the tidy frame of the scores in the reference tables, of every model and revision.

    A model is called by family and size, as ``Pythia-410m``. Scores are of the test split, averaged over the English
    subsets of a task, for layers that have scores for all tasks of the model.

    Args:
        folder: folder of ``mteb_layer_scores.csv.xz``.
    """
    table = _read(folder, "mteb_layer_scores").filter(pl.col("subset").is_in(_ENGLISH), split="test")
    model = ["family", "size", "revision"]
    subsets = table.drop_nulls("main_score").group_by([*model, "num_layers", "layer", "task"], maintain_order=True)
    num_tasks = pl.col("task").n_unique()
    scores = subsets.agg(value=pl.col("main_score").mean())
    scores = scores.filter(num_tasks.over([*model, "layer"]) == num_tasks.over(model))
    return _tidy(scores.with_columns(dataset=pl.col("task"), name=pl.lit("main_score")), kind="score")


def reference_metrics(folder: Path | str) -> pl.DataFrame:
    """Return the tidy frame of the metrics in the reference tables: of test splits, or train where there is no test.

    Where the texts are a task's, ``dataset`` is the task's name, so that :func:`correlate` pairs them. A value that the
    reference code could not compute (most of its curvature) is left out. Entropies, LiDAR and DiME are shares of their
    largest value (``maxEntropy``). Mamba's layers are put right: transformers
    keeps no entry for its embeddings, so the tables' index 0 is layer 1.

    Args:
        folder: where ``layer_metrics.csv.xz`` lies. ``docs/replication.md`` says which of its values to doubt.
    """
    table = _read(folder, "layer_metrics").with_columns(pl.col("value").cast(pl.Float64, strict=False))
    form = pl.when(pl.col("metric").is_in(["infonce", "curvature"])).then(pl.lit("raw")).otherwise(pl.lit("maxEntropy"))
    rows = table.filter(pl.col("normalization") == form, pl.col("value").is_finite())
    tested = (pl.col("split") == "test").any().over("family", "size", "revision", "dataset", "metric")
    rows = rows.filter((pl.col("split") == "test") | ~tested)
    mamba, last = pl.col("family") == "mamba", pl.col("layer") == pl.col("num_layers")
    rows = rows.filter(~(mamba & (pl.col("layer") == pl.col("num_layers") - 1))).with_columns(
        layer=pl.when(mamba & ~last).then(pl.col("layer") + 1).otherwise(pl.col("layer")),
        name=pl.col("metric").replace_strict(_METRICS),
        dataset=pl.col("dataset").str.strip_prefix("mteb/").replace(_TASKS),
    )
    return _tidy(rows, kind="metric")


def _read(folder: Path | str, name: str) -> pl.DataFrame:
    path = Path(folder).expanduser() / f"{name}.csv.xz"
    if not path.is_file():
        raise OptionError(f"`folder` must hold the reference tables, but there is no {path.name} in {folder}.")
    try:
        return pl.read_csv(lzma.decompress(path.read_bytes()), infer_schema_length=None)
    except (lzma.LZMAError, EOFError, OSError, pl.exceptions.PolarsError) as reason:
        raise OptionError(
            f"{path} must be a table of the paper's, but cannot be read: {reason}. Fetch it again."
        ) from reason


def _tidy(table: pl.DataFrame, *, kind: str) -> pl.DataFrame:
    tidy = table.with_columns(
        model=pl.col("family") + "-" + pl.col("size"), depth=pl.col("layer") / pl.col("num_layers"), kind=pl.lit(kind)
    )
    return check_frame(tidy.select(list(FRAME_SCHEMA)).sort("model", "revision", "dataset", "name", "layer"))


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
    workers: int | None = None
    options: EncoderOptions = field(default_factory=EncoderOptions)
    _loaded: dict[tuple[str, str], LayerEncoder] = field(default_factory=dict, repr=False)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that differ whenever what is measured does, the files of models and tasks too."""
        frames = [frame.hash_rows().sort().to_list() for frame in self.swept]
        parts: list[Any] = [self.models, self.texts, self.solutions, str(self.reference), self.revisions, self.tasks]
        parts += [frames, self.layers, self.limit]
        parts += [self.max_length, self.seed, self.options.recreating()]
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

    def for_each_model(self, function: Callable[[LayerEncoder], pl.DataFrame]) -> pl.DataFrame:
        """Return the frames of a function of each model's encoder."""
        return pl.concat(function(self.encoder(model)) for model in self.required_models())

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
        tasks = self.tasks.split(",")
        result = sweep(self.encoder(model), tasks, layers=self.layers, metrics="paper", out=folder, settings=settings)
        if result.failures:
            reasons = "; ".join(f"{task}: {error}" for task, error in result.failures.items())
            raise MidlayerError(f"Some tasks failed. {reasons}")
        return result.frame

    def sweeps(self) -> list[pl.DataFrame]:
        """Return the frames in ``swept``, or else one sweep of each model."""
        return list(self.swept) or [self.sweep(model) for model in self.models]

    def metrics(self, model: str) -> pl.DataFrame:
        """Return the paper's metrics of every layer on the texts; kept in the folder."""
        path = self.out / "metrics" / f"{self.models.index(model)}-{self.digest}.parquet"
        options: dict[str, Any] = {"metrics": "paper", "views": 4, "seed": self.seed, "dataset": "texts"}
        return kept_frame(path, lambda: measure_layers(self.encoder(model), self.required_texts(4), **options))

    def with_reference(self, models: Sequence[str]) -> list[pl.DataFrame]:
        """Return the frames of sweeps, and one of the paper's own scores and metrics of some models, or raise."""
        paper = pl.concat(self.of_reference(read, models) for read in (reference_scores, reference_metrics))
        frames = [*self.sweeps(), *([paper] if paper["kind"].n_unique() == 2 else [])]
        if not frames:
            raise MissingInputError("It needs a model (--model) or the paper's tables (--reference DIR).")
        return frames

    def reference_metrics(self, models: Sequence[str], revision: str | None = "main") -> pl.DataFrame:
        """Return the paper's own metrics on WikiText, over the largest entropy, of some models.

        Its curvature is left out: it is NaN in most layers.
        """
        frame = self.of_reference(reference_metrics, models, revision)
        metrics = frame.filter(pl.col("dataset") == "wikitext", pl.col("name") != "curvature")
        return metrics.with_columns(pl.col("name") + REFERENCE)

    def of_reference(
        self, read: Callable[[Path], pl.DataFrame], models: Sequence[str], revision: str | None = "main"
    ) -> pl.DataFrame:
        """Return the paper's own numbers of some models at one revision or all; none where there are no tables."""
        if self.reference is None:
            return tidy_frame(())
        frame = read(self.reference)
        if revision is not None:
            frame = frame.filter(revision=revision)
        return pl.concat(frame.filter(model=model) for model in models).with_columns(pl.col("model") + REFERENCE)
