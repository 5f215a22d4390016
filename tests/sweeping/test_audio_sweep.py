"""Sweeps of audio models over decoded waveforms."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from mteb.models.model_meta import ModelMeta

from midlayer_encoders import LayerEncoder
from midlayer_encoders.sweeping import SweepResult
from tests.support.made_media import RATE, waveform
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, sweep

pytestmark = MTEB
LABELS = [n % 3 for n in range(24)]


def decoded() -> list[dict[str, Any]]:
    return [{"array": waveform(n, 3000 + 400 * label)[0], "sampling_rate": RATE} for n, label in enumerate(LABELS)]


def audio_task() -> Any:
    """Return a new mteb task that classifies waveforms; the first half of the rows trains."""
    import datasets
    import mteb
    from mteb.abstasks.classification import AbsTaskClassification

    class Chords(AbsTaskClassification):
        metadata = mteb.TaskMetadata(
            name="Chords", description="chords", type="AudioClassification", category="a2c", modalities=["audio"],
            dataset={"path": "local/chords", "revision": "1"}, eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="accuracy",
        )  # fmt: skip
        input_column_name, label_column_name, samples_per_label, n_experiments = "audio", "label", 3, 4

        def load_data(self, **_: Any) -> None:
            rows = datasets.Dataset.from_dict({"audio": decoded(), "label": LABELS}).with_format("numpy")
            half = len(rows) // 2
            parts = {"train": rows.select(range(half)), "test": rows.select(range(half, len(rows)))}
            self.dataset = datasets.DatasetDict(parts)
            self.data_loaded = True

    return Chords()


class Plain:
    """An encoder for mteb as mteb's own, which needs torchaudio to resample."""

    def __init__(self, encoder: LayerEncoder) -> None:
        self.encoder = encoder
        self.similarity = encoder.similarity
        self.similarity_pairwise = encoder.similarity_pairwise
        meta = {"name": "local/plain", "revision": "1", "modalities": ["audio"]}
        self.mteb_model_meta = ModelMeta.create_empty(overwrites=meta)

    def encode(self, inputs: Any, **_: Any) -> Any:
        return self.encoder.encode([item for batch in inputs for item in batch["audio"]])


def scores(result: SweepResult) -> dict[int, float]:
    assert not result.failures
    return dict(result.frame.filter(pl.col("kind") == "score").select("layer", "value").iter_rows())


@pytest.mark.long
def test_layers_are_scored_as_mteb_scores_them_and_have_an_interval(tiny_folder: Folder, tmp_path: Path) -> None:
    import mteb

    result = sweep(tiny_folder("HuBERT"), audio_task(), layers=[0, 4], out=tmp_path, **QUICK)
    for layer, score in scores(result).items():
        encoder: Any = Plain(LayerEncoder(tiny_folder("HuBERT"), layer, device="cpu"))
        expected = mteb.evaluate(encoder, audio_task(), cache=None, show_progress_bar=False)
        assert score == pytest.approx(expected[0].get_score(), abs=1e-4)
    gain = result.gain(0)
    assert gain.low <= gain.points <= gain.high
    assert gain.low < gain.high


@pytest.mark.long
def test_metrics_are_measured_on_decoded_waveforms(tiny_folder: Folder, tmp_path: Path) -> None:
    result = sweep(
        tiny_folder("HuBERT"), audio_task(), layers=[4], metrics=["curvature"], metric_texts=8, out=tmp_path,
        **QUICK,
    )  # fmt: skip
    assert not result.failures
    measured = result.frame.filter(pl.col("kind") == "metric")
    assert set(measured["dataset"]) == {"8 waveforms of the tasks"}
    assert np.isfinite(measured["value"].to_numpy()).all()
