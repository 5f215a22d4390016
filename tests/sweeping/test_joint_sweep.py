"""Sweeps of joint models over tasks of texts and images, without naming a tower."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import transformers as tf
from torch import nn
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import app
from midlayer_encoders.errors import CutError, LayerIndexError, OptionError
from midlayer_encoders.extras.joint.loading import paired_layers
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.best_layer import export_lines
from tests.support.families import JOINT, MORE_JOINT, tiny_joint
from tests.support.made_media import IMAGES, image
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import TEXTS, Folder, save_joint
from tests.sweeping.scoring import mteb_score, sweep, write_sts_task

pytestmark = MTEB

COMBINED = [{"text": text, "image": image} for text, image in zip(TEXTS, IMAGES, strict=True)]


@pytest.fixture(scope="module")
def joint_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folders: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in folders:
            folders[name] = save_joint(name, tmp_path_factory.mktemp(f"joint-{name}"))
        return folders[name]

    return folder


def block_list(tower: nn.Module) -> Any:
    """Return the list of blocks of a tower: the only one with several entries."""
    (blocks,) = [part for part in tower.modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    return blocks


def features_without_later_blocks(name: str, folder: str, text: int, image: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the model's own features after its last blocks are removed, one input at a time."""
    model: Any = tiny_joint(name)
    del block_list(model.text_model)[text:], block_list(model.vision_model)[image:]
    processor = tf.AutoProcessor.from_pretrained(folder)
    padding = "max_length" if name in ("SigLIP", "SigLIP2", "AIMv2") else False  # required by their heads or masks
    tokens = [processor(text=[text], padding=padding, return_tensors="pt") for text in TEXTS]
    ids = [{key: batch[key] for key in ("input_ids", "attention_mask")} for batch in tokens]
    pixels = [processor(images=[item], return_tensors="pt") for item in IMAGES]
    with torch.no_grad():
        texts = [model.get_text_features(**batch).pooler_output for batch in ids]
        images = [model.get_image_features(**batch).pooler_output for batch in pixels]
    return torch.cat(texts).numpy(), torch.cat(images).numpy()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in (*JOINT, *MORE_JOINT) if name != "GroupViT"])
def test_layers_are_the_features_of_the_model_without_later_blocks(name: str, joint_folder: Folder) -> None:
    folder = joint_folder(name)
    encoder = LayerEncoder(folder, -1, device="cpu")
    assert encoder.tower_depths == {"text": 4, "image": 3}
    texts, images, sums = encoder.encode_layers(TEXTS), encoder.encode_layers(IMAGES), encoder.encode_layers(COMBINED)
    for layer, text_layer in enumerate((0, 1, 3, 4)):  # the same relative depth
        expected = features_without_later_blocks(name, folder, text_layer, layer)
        np.testing.assert_allclose(texts[layer], expected[0], atol=5e-5, rtol=1e-4)
        np.testing.assert_allclose(images[layer], expected[1], atol=5e-5, rtol=1e-4)
        np.testing.assert_allclose(sums[layer], expected[0] + expected[1], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(encoder.encode(TEXTS), texts[-1], atol=1e-6)  # the model is restored
    np.testing.assert_array_equal(encoder.encode_layers(IMAGES, [-1, 0]), images[[0, 3]])


def test_fraction_reads_both_towers_at_the_same_depth(joint_folder: Folder) -> None:
    whole = LayerEncoder(joint_folder("CLIP"), -1, device="cpu")
    for layer in (1, 2, 3):
        encoder = LayerEncoder(joint_folder("CLIP"), layer / 3, device="cpu")
        assert encoder.layer == layer
        np.testing.assert_allclose(encoder.encode(TEXTS), whole.encode_layers(TEXTS, [layer])[0], atol=1e-5)


# --- sweeps ----------------------------------------------------------------------------------------------------------


def mock_tasks(*names: str) -> list[Any]:
    """Return new mock tasks of mteb by the names of their classes."""
    from mteb.mocks import mock_run

    return [type(task)() for task in mock_run.ALL_MOCK_TASK_TEST_GRID if type(task).__name__ in names]


def zero_shot_task() -> Any:
    """Return a new mteb task with enough images for the scores of layers to differ."""
    import datasets

    (task,) = mock_tasks("MockZeroShotClassificationTask")
    labels = [TEXTS[n] for n in range(4)]

    class ManyImages(type(task)):  # type: ignore[misc]
        def load_data(self, **_: Any) -> None:
            kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
            columns = {"image": [image(n) for n in range(40)], "label": [n % 4 for n in range(40)]}
            self.dataset = datasets.DatasetDict(test=datasets.Dataset.from_dict(columns, features=kinds))
            self.data_loaded = True

        def get_candidate_labels(self) -> list[str]:
            return labels

    return ManyImages()


@pytest.mark.long
def test_scores_equal_those_of_mteb_at_each_layer(joint_folder: Folder, tmp_path: Path) -> None:
    import mteb

    names = (
        "MockAny2AnyRetrievalT2ITask", "MockMultiChoiceTask", "MockImageTextPairClassificationTask",
        "MockSTSTask",
    )  # fmt: skip

    def tasks() -> list[Any]:
        return [*mock_tasks(*names), zero_shot_task()]

    folder = joint_folder("SigLIP")
    result = sweep(folder, tasks(), out=tmp_path, device="cpu", workers=1)
    assert not result.failures
    rows = result.frame.filter(pl.col("kind") == "score").iter_rows(named=True)
    scores = {(row["dataset"], row["layer"]): row["value"] for row in rows}
    for layer in (1, 2):  # at layer 0, the last position of SigLIP's texts is always the same
        encoder = LayerEncoder(folder, layer / 3, device="cpu").for_mteb()
        results = mteb.evaluate(encoder, tasks(), cache=None, show_progress_bar=False)
        expected = {task.task_name: task.get_score() for task in results.task_results}
        assert len(expected) == 5
        assert {task: scores[task, layer] for task in expected} == pytest.approx(expected, abs=1e-4)
    assert len({scores["MockZeroShotClassification", layer] for layer in (1, 2, 3)}) > 1
    line = export_lines(result.notes, 2)["Python"]
    assert "layer={'text': 3, 'image': 2}" in line
    assert set(result.notes.baselines["TF-IDF"]) == {"MockSTSTask"}
    assert result.notes.parameters[2] == sum(weight.numel() for weight in LayerEncoder(folder, 2 / 3).parameters())
    assert SweepResult.load(tmp_path).notes.layers[2] == {"text": 3, "image": 2}


@pytest.mark.long
def test_command_sweeps_both_towers(joint_folder: Folder, tmp_path: Path) -> None:
    task = write_sts_task(tmp_path)
    out = tmp_path / "out"
    arguments = ["sweep", joint_folder("CLIP"), "--tasks", str(task), "--workers", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    sweep_result = SweepResult.load(out)
    layer = sweep_result.best()
    scores = sweep_result.frame.filter(pl.col("kind") == "score", pl.col("layer") == layer)
    towers = paired_layers(layer, {"text": 4, "image": 3})
    encoder = LayerEncoder(joint_folder("CLIP"), towers, device="cpu")
    assert scores["value"].item() == pytest.approx(mteb_score(encoder, task), abs=1e-4)
    assert f"--layer text={towers['text']},image={layer}" in result.output


def test_unreadable_layers_are_refused(joint_folder: Folder, tmp_path: Path) -> None:
    folder = joint_folder("CLIP")
    encoder = LayerEncoder(folder, -1, device="cpu")
    for keywords, message in (
        (
            {"metrics": ["curvature"]},
            "`metrics` cannot be combined with the two towers of .* Pass tower='image' or tower='text'",
        ),
        ({"recipes": ["plain"]}, "`recipe` applies to one tower, .* Pass tower='text'"),
        ({"layers": [4]}, r"`layer` must be in \[0, 3\] for the image tower of"),
    ):
        with pytest.raises(OptionError, match=message):
            sweep(encoder, write_sts_task(tmp_path), out=tmp_path / "out", **keywords)
    with pytest.raises(LayerIndexError, match=r"must have layer 4 of its text tower, but .* was cut at layer 2"):
        LayerEncoder(folder, {"text": 2, "image": 3}, device="cpu").encode_layers(TEXTS)
    with pytest.raises(
        LayerIndexError, match=r"for the image tower .* pass a fraction .* layer=\{'text': 1, 'image': 1"
    ):
        LayerEncoder(folder, 4, device="cpu")
    with pytest.raises(CutError, match=r"the states of vision_model\.encoder\.stages change their shape"):
        LayerEncoder(joint_folder("GroupViT"), -1, device="cpu").encode_layers(IMAGES)
