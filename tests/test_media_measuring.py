"""Metrics, sweeps and mteb on images and audio."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy.io import wavfile
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import app
from midlayer_encoders.encoder.whole_model import measure
from midlayer_encoders.metrics import METRICS, alignment, curvature, dataset_entropy, infonce, prompt_entropy
from midlayer_encoders.metrics.media_views import augment_media
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.sweeping import SweepSettings, sweep
from midlayer_encoders.sweeping.embedder import Embedder
from midlayer_encoders.sweeping.mteb_jobs import Prompts, StoredLayer
from midlayer_encoders.sweeping.store import EmbeddingStore
from tests.support.families import DEPTH
from tests.support.made_media import IMAGES, WAVEFORMS, image, waveform
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder, save_joint
from tests.test_measuring import metric_values

pytestmark = MTEB

LONG = [waveform(n, 6000 + 900 * n) for n in range(6)]  # a state of the tiny Whisper covers 800 samples


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "items"), [("ViT", IMAGES), ("ViTMAE", IMAGES), ("Wav2Vec2", WAVEFORMS), ("Whisper", LONG)]
)
def test_metrics_match_the_functions_on_each_layer(name: str, items: list[Any], tiny_folder: Folder) -> None:
    full_encoder = LayerEncoder(tiny_folder(name), -1, norm="none", device="cpu")
    frame = measure(full_encoder, items, metrics=["prompt_entropy", "curvature", "dataset_entropy", "infonce"])
    views = augment_media(items, full_encoder.media[0], views=2, seed=0)  # type: ignore[arg-type]
    for layer in (0, 2, DEPTH):
        encoder = LayerEncoder(tiny_folder(name), layer, norm="none", device="cpu")
        states = encoder.encode(items, output_value="token_embeddings")
        for metric, function in (("prompt_entropy", prompt_entropy), ("curvature", curvature)):
            item_values = [
                function(s[None], torch.ones(1, len(s), dtype=torch.bool)).double().squeeze() for s in states
            ]
            expected = torch.stack(item_values).mean()
            torch.testing.assert_close(metric_values(frame, metric)[layer], expected, rtol=1e-4, atol=1e-5)
        pooled = torch.from_numpy(encoder.encode(items))
        entropy = dataset_entropy(pooled).double()
        torch.testing.assert_close(metric_values(frame, "dataset_entropy")[layer], entropy, rtol=1e-4, atol=1e-5)
        pair = [torch.from_numpy(encoder.encode(list(view))) for view in views]
        torch.testing.assert_close(
            metric_values(frame, "infonce")[layer], infonce(*pair).double(), rtol=1e-4, atol=1e-4
        )


def test_every_metric_is_measured_on_images_independently_of_batches(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("CLIPVision"), -1, device="cpu")
    items = [image(n, (20 + n % 3, 22)) for n in range(12)]
    frame = measure(encoder, items, metrics="all", views=3, layers=[0, 2, 4], dataset="made")
    assert set(frame["dataset"]) == {"made"}
    assert {"infonce", "lidar", "dime", "curvature", "dataset_entropy"} <= set(frame["name"]) <= set(METRICS)
    small_batches = measure(encoder, items, metrics="all", views=3, layers=[0, 2, 4], token_budget=5)
    for name in frame["name"].unique():
        torch.testing.assert_close(
            metric_values(small_batches, name), metric_values(frame, name), rtol=2e-3, atol=1e-4, msg=str(name)
        )


@pytest.mark.parametrize(("name", "items"), [("ViT", IMAGES), ("Wav2Vec2", WAVEFORMS)])
def test_alignment_compares_images_and_audio_with_their_first_view(
    name: str, items: list[Any], tiny_folder: Folder
) -> None:
    full_encoder = LayerEncoder(tiny_folder(name), -1, device="cpu")
    first, second = (list(view) for view in augment_media(items, full_encoder.media[0], views=2, seed=3))  # type: ignore[arg-type]
    rows, *view_rows = (torch.from_numpy(full_encoder.encode(inputs)) for inputs in (items, first, second))
    for views, copies in ((2, view_rows[0]), ([second, first], view_rows[1])):
        for names in (["alignment"], ["infonce", "alignment"]):
            frame = measure(full_encoder, items, metrics=names, layers=[-1], views=views, seed=3)  # type: ignore[arg-type]
            expected = {"alignment": float(alignment(rows, copies)), "infonce": float(infonce(*view_rows))}
            actual = dict(frame.select("name", "value").iter_rows())
            assert actual == pytest.approx({metric: expected[metric] for metric in names}, abs=1e-4)


def test_waveforms_changed_by_padding_share_a_batch_only_at_equal_length(tiny_folder: Folder) -> None:
    lengths = [1500, 1900, 1500, 2300, 1900, 1500]
    waveforms = [waveform(n, length) for n, length in enumerate(lengths)]
    for name, separate in (("Wav2Vec2", True), ("Wav2Vec2-stable", False)):
        batches = batches_of(LayerEncoder(tiny_folder(name), -1, device="cpu"), waveforms)
        assert sorted(position for batch in batches for position in batch) == list(range(6))
        assert all(len({lengths[position] for position in batch}) == 1 for batch in batches) == separate


@pytest.mark.long
def test_command_measures_a_folder_of_images_or_audio(
    tiny_folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, (picture, (samples, rate)) in enumerate(zip(IMAGES, WAVEFORMS, strict=True)):
        picture.save(tmp_path / f"{number}.png")
        wavfile.write(tmp_path / f"{number}.wav", rate, samples)
    options = ["--out", str(tmp_path / "out"), "--metrics", "curvature,prompt_entropy", "--device", "cpu"]
    for name, option in (("ViT", "--images"), ("Wav2Vec2", "--audio")):
        result = CliRunner().invoke(app, ["metrics", tiny_folder(name), option, str(tmp_path), *options])
        assert result.exit_code == 0, result.output
        assert len(pl.read_parquet(tmp_path / "out/metrics.parquet")) == 2 * (DEPTH + 1)
    (tmp_path / "bad.png").write_bytes(b"damaged")
    command = ["metrics", tiny_folder("ViT"), "--images", str(tmp_path), *options]
    assert "bad.png cannot be read" in str(CliRunner().invoke(app, command).exception)
    with caplog.at_level(logging.WARNING):
        assert CliRunner().invoke(app, [*command, "--skip-bad"]).exit_code == 0
    assert re.search(r"Skipped: .*bad\.png cannot be read", caplog.text)
    assert CliRunner().invoke(app, ["metrics", tiny_folder("ViT"), *options]).exit_code == 2


# --- mteb ----------------------------------------------------------------------------------------------------------


def image_task() -> Any:
    """Return a new mteb task: classification of images of two kinds."""
    import datasets
    import mteb
    from mteb.abstasks.classification import AbsTaskClassification

    class TinyImages(AbsTaskClassification):
        metadata = mteb.TaskMetadata(
            name="TinyImages", description="two kinds", reference=None, type="ImageClassification", category="i2c",
            modalities=["image"], dataset={"path": "local/tiny", "revision": "1"}, eval_splits=["test"],
            eval_langs=["eng-Latn"], main_score="accuracy", date=("2024-01-01", "2024-01-02"), domains=["Web"],
            task_subtypes=[], license="mit", annotations_creators="derived", dialect=[], sample_creation="found",
            bibtex_citation="",
        )  # fmt: skip
        input_column_name, label_column_name, samples_per_label, n_experiments = "image", "label", 4, 2

        def load_data(self, **_: Any) -> None:
            def rows(start: int) -> Any:
                dark = [np.asarray(image(n)) // (1 + n % 2) for n in range(start, start + 12)]
                columns = {"image": dark, "label": [n % 2 for n in range(12)]}
                kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
                return datasets.Dataset.from_dict(columns, features=kinds)

            self.dataset = datasets.DatasetDict({"train": rows(0), "test": rows(12)})
            self.data_loaded = True

    return TinyImages()


@pytest.mark.long
def test_sweep_over_images_scores_like_mteb_at_each_layer(tiny_folder: Folder, tmp_path: Path) -> None:
    import mteb

    result = sweep(
        tiny_folder("ViT"), image_task(), layers=[0, 2, 4], metrics=["curvature", "infonce"], out=tmp_path,
        device="cpu", settings=SweepSettings(metric_texts=8, workers=1),
    )  # fmt: skip
    assert not result.failures
    scores = result.frame.filter(pl.col("kind") == "score").sort("layer")
    for layer, score in zip([0, 2, 4], scores["value"].to_list(), strict=True):
        encoder = LayerEncoder(tiny_folder("ViT"), layer, device="cpu").for_mteb()
        reference = mteb.evaluate(encoder, image_task(), cache=None, show_progress_bar=False)
        assert score == pytest.approx(reference[0].get_score(), abs=1e-3)
    measured = result.frame.filter(pl.col("kind") == "metric")
    assert set(measured["name"]) == {"curvature", "infonce"}
    assert set(measured["dataset"]) == {"8 images of the tasks"}
    assert "TinyImages" in result.to_html().read_text()


def test_stored_layer_identifies_audio_by_its_samples(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("HuBERT"), -1, device="cpu")
    store = EmbeddingStore(tmp_path, key="e", layers=[2], dim=32)
    embedder = Embedder(encoder, store)
    stored = StoredLayer(store, 2, encoder.spec, Prompts(encoder), encoder.media, ensure=embedder)
    items = [{"array": samples, "sampling_rate": rate} for samples, rate in WAVEFORMS]
    batches: Any = [{"audio": items[:4], "id": range(4)}, {"audio": items[4:], "id": range(2)}]
    vectors = stored.encode(batches, task_metadata=None, hf_split="", hf_subset="")  # type: ignore[arg-type]
    expected = LayerEncoder(tiny_folder("HuBERT"), 2, device="cpu").encode(items)
    np.testing.assert_allclose(vectors, expected, atol=2e-5, rtol=1e-4)
    assert len(store) == 6
    for samples, rate in WAVEFORMS[:2]:  # a file is identified by its samples as well, not by its path
        wavfile.write(tmp_path / "a.wav", rate, samples)
        files: Any = [{"audio": [str(tmp_path / "a.wav")]}]
        decoded: Any = [{"audio": [{"array": samples, "sampling_rate": rate}]}]
        assert stored.keys(files, task_metadata=None, prompt_type=None) == stored.keys(
            decoded, task_metadata=None, prompt_type=None
        )
    assert len(store) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("name", "min_tasks"), [("ViT", 8), ("CLIP", 15)])
def test_mteb_mock_suite_of_image_tasks_passes(name: str, min_tasks: int, tiny_folder: Folder, tmp_path: Path) -> None:
    import mteb
    from mteb.mocks import mock_run

    if name == "CLIP":
        encoder = LayerEncoder(save_joint("CLIP", tmp_path), {"text": 2, "image": 1}, device="cpu").for_mteb()
    else:
        encoder = LayerEncoder(tiny_folder(name), 2, device="cpu").for_mteb()
    tasks = [task for task in mock_run.get_compatible_mock_tasks(encoder) if "image" in task.metadata.modalities]
    results = mteb.evaluate(encoder, tasks, cache=None, raise_error=False, show_progress_bar=False)
    assert not results.exceptions, results.exceptions
    assert len(results.task_results) == len(tasks) >= min_tasks


def test_audio_tasks_name_their_missing_decoder(tiny_folder: Folder) -> None:
    import importlib.util

    import mteb

    if importlib.util.find_spec("torchcodec") is not None:
        pytest.skip("torchcodec is installed")
    results = mteb.mock_run(LayerEncoder(tiny_folder("Wav2Vec2"), 2, device="cpu").for_mteb())
    failed = [result.exception for result in results.task_results.values() if result is not None]  # type: ignore[union-attr]
    assert len(failed) >= 7
    assert all("install 'torchcodec'" in reason for reason in failed)
