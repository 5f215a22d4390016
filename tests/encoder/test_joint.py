"""Joint models: a layer for each tower with the original heads after it, or one tower alone."""

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import app
from midlayer_encoders.encoder.whole_model import measure
from midlayer_encoders.errors import CutError, LayerIndexError, OptionError
from tests.support.families import JOINT, tiny_joint
from tests.support.made_media import IMAGES
from tests.support.tiny_folders import TEXTS, Folder, joint_image_processor, save_joint, tokenizer


@pytest.fixture(scope="module")
def joint_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folders = {name: save_joint(name, tmp_path_factory.mktemp(f"joint-{name}")) for name in JOINT}
    return folders.__getitem__


def features_by_hand(name: str, text: int, image: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of the full model's own heads after its last blocks are removed, one input at a time."""
    model = tiny_joint(name)
    del model.text_model.encoder.layers[text:], model.vision_model.encoder.layers[image:]  # type: ignore[union-attr]
    pixels = joint_image_processor()
    padding = "max_length" if name in ("SigLIP", "AIMv2") else False  # required by their heads or masks
    tokens = [tokenizer()(text, padding=padding, return_tensors="pt") for text in TEXTS]
    ids = [{key: batch[key] for key in ("input_ids", "attention_mask")} for batch in tokens]
    with torch.no_grad():
        texts = [model.get_text_features(**batch).pooler_output for batch in ids]  # type: ignore[operator]
        images = [model.get_image_features(**pixels([i], return_tensors="pt")).pooler_output for i in IMAGES]  # type: ignore[operator]
    return torch.cat(texts).numpy(), torch.cat(images).numpy()


@pytest.mark.parametrize(
    ("name", "text", "image"), [("CLIP", 4, 3), ("CLIP", 2, 1), ("CLIP", 0, 0), ("SigLIP", 2, 0), ("AIMv2", 0, 2)]
)
def test_each_tower_ends_at_its_layer_and_export_gives_the_same_vectors(
    name: str, text: int, image: int, joint_folder: Folder, tmp_path: Path
) -> None:
    encoder = LayerEncoder(joint_folder(name), {"text": text, "image": image}, device="cpu")
    assert (encoder.tower_layers, encoder.layer, encoder.num_layers) == ({"text": text, "image": image}, image, 3)
    expected = features_by_hand(name, text, image)
    vectors = encoder.encode(TEXTS), encoder.encode(IMAGES)
    for actual, reference in zip(vectors, expected, strict=True):
        np.testing.assert_allclose(actual, reference, atol=2e-5, rtol=1e-4)
    encoder.save_pretrained(str(tmp_path))
    assert all(
        module["type"].startswith("sentence_transformers.")
        for module in json.loads((tmp_path / "modules.json").read_text())
    )
    plain = SentenceTransformer(str(tmp_path), device="cpu")
    np.testing.assert_allclose(plain.encode(IMAGES), vectors[1], atol=1e-6)
    np.testing.assert_allclose(plain.encode(TEXTS), vectors[0], atol=1e-6)
    assert f"Layer text-{text}-image-{image} of" in (tmp_path / "README.md").read_text()


def test_one_layer_applies_to_both_towers_and_a_pair_is_the_sum(joint_folder: Folder) -> None:
    encoder = LayerEncoder(joint_folder("CLIP"), -1, device="cpu")
    assert encoder.tower_layers == {"text": 4, "image": 3}
    assert encoder.spec.pooling == "head"
    text_image_pairs = [{"text": text, "image": image} for text, image in zip(TEXTS, IMAGES, strict=True)]
    np.testing.assert_allclose(
        encoder.encode(text_image_pairs), encoder.encode(TEXTS) + encoder.encode(IMAGES), atol=1e-5
    )
    np.testing.assert_allclose(encoder.encode(text_image_pairs[0]), encoder.encode(text_image_pairs)[0], atol=1e-5)
    unit = encoder.encode(text_image_pairs, normalize_embeddings=True, convert_to_tensor=True)
    total = torch.tensor(encoder.encode(TEXTS) + encoder.encode(IMAGES))  # summed first, then scaled
    torch.testing.assert_close(unit, torch.nn.functional.normalize(total, dim=1), atol=1e-5, rtol=1e-4)
    other_encoder = LayerEncoder(joint_folder("CLIP"), {"text": 3, "image": 3}, device="cpu")
    assert other_encoder.spec.digest != encoder.spec.digest
    assert other_encoder.model_card_data.model_name.endswith("-layer-text-3-image-3")


@pytest.mark.parametrize("name", JOINT)
def test_tower_alone_pools_its_states(name: str, joint_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(joint_folder(name), 2, norm="none", tower="image", device="cpu")
    assert (encoder.media, encoder.num_layers, encoder.layers) == (["image"], 3, encoder.layer)
    captured: list[torch.Tensor] = []
    model = tiny_joint(name)
    model.vision_model.encoder.layers[1].register_forward_hook(  # type: ignore[union-attr, index]
        lambda _m, _a, out: captured.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model.vision_model(pixel_values=encoder.model_inputs(IMAGES)["pixel_values"])  # type: ignore[operator]
    np.testing.assert_allclose(encoder.encode(IMAGES), captured[0].mean(1).numpy(), atol=2e-5, rtol=1e-4)
    encoder.save_pretrained(str(tmp_path / "image"))
    plain = SentenceTransformer(str(tmp_path / "image"), device="cpu")
    np.testing.assert_allclose(plain.encode(IMAGES), encoder.encode(IMAGES), atol=1e-6)
    text_encoder = LayerEncoder(joint_folder(name), 2, tower="text", device="cpu")
    assert text_encoder.media == ["text"]
    np.testing.assert_allclose(
        text_encoder.encode(TEXTS), np.stack([text_encoder.encode(text) for text in TEXTS]), atol=2e-5
    )
    if name == "CLIP":
        text_encoder.save_pretrained(str(tmp_path / "text"))
        plain_text = SentenceTransformer(str(tmp_path / "text"), device="cpu")
        np.testing.assert_allclose(plain_text.encode(TEXTS), text_encoder.encode(TEXTS), atol=1e-6)
    else:
        with pytest.raises(CutError, match="has no automatic class in transformers"):
            text_encoder.save_pretrained(str(tmp_path / "text"))


def test_export_command_saves_both_towers_or_one(joint_folder: Folder, tmp_path: Path) -> None:
    for options, layer in (
        (["--layer", "text=2,image=1"], {"text": 2, "image": 1}),
        (["--layer", "2", "--tower", "image"], 2),
    ):
        out = tmp_path / str(len(options))
        result = CliRunner().invoke(app, ["export", joint_folder("CLIP"), "--out", str(out), *options])
        assert result.exit_code == 0, result.output
        tower = "image" if layer == 2 else None
        expected = LayerEncoder(joint_folder("CLIP"), layer, tower=tower, device="cpu").encode(IMAGES)  # type: ignore[arg-type]
        np.testing.assert_allclose(SentenceTransformer(str(out), device="cpu").encode(IMAGES), expected, atol=1e-6)


def test_unsupported_calls_of_a_joint_model_are_refused(joint_folder: Folder, tiny_folder: Folder) -> None:
    folder = joint_folder("CLIP")
    encoder = LayerEncoder(folder, -1, device="cpu")
    with pytest.raises(OptionError, match=r"has two\. Load one: tower='image'"):
        measure(encoder, IMAGES)
    for options, error, message in (
        ({"layer": {"text": 2}}, LayerIndexError, "has none for 'image'"),
        ({"layer": {"text": 2, "imgae": 1}}, OptionError, "Did you mean 'image'"),
        ({"layer": {"text": 5, "image": 1}}, LayerIndexError, r"\[0, 4\] for the text tower of"),
        ({"layer": 2, "pooling": "mean"}, OptionError, "`pooling` does not apply"),
        ({"layer": 2, "skip_first": 1}, OptionError, "`skip_first` does not apply"),
        ({"layer": 2, "skip_special": True}, OptionError, "`skip_special` does not apply"),
        ({"layer": 2, "norm": "none"}, OptionError, "`norm` does not apply to .* Pass tower='image' or tower='text'"),
        ({"layer": 2, "adapters": ["a/b"]}, OptionError, "`adapters` does not apply"),
        ({"layer": 2, "bidirectional": True}, OptionError, "`bidirectional` does not apply"),
        ({"layer": 4}, LayerIndexError, r"for each, such as layer=\{'text': 1, 'image': 1\}"),
        ({"layer": 2, "tower": "vision"}, OptionError, "`tower` must be one of 'text', 'image'"),
    ):
        with pytest.raises(error, match=message):
            LayerEncoder(folder, device="cpu", **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"`tower` must be None for .*not a joint model"):
        LayerEncoder(tiny_folder("ViT"), 2, tower="image", device="cpu")
    with pytest.raises(LayerIndexError, match="must be a number for"):
        LayerEncoder(tiny_folder("ViT"), {"image": 2}, device="cpu")


class OwnEncoder(LayerEncoder):
    """A user's subclass."""

    def encode(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return vectors with the other sign."""
        return -super().encode(inputs, *args, **kwargs)


def test_class_of_a_user_keeps_its_methods_in_copies_and_other_processes(joint_folder: Folder) -> None:
    pair = {"text": TEXTS[0], "image": IMAGES[0]}
    expected = LayerEncoder(joint_folder("CLIP"), -1, device="cpu")
    encoder = OwnEncoder(joint_folder("CLIP"), -1, device="cpu")
    for actual in (encoder, copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert isinstance(actual, OwnEncoder)
        assert actual.tower_layers == {"text": 4, "image": 3}
        np.testing.assert_array_equal(actual.encode(pair), -expected.encode(pair))
    assert repr(encoder) == repr(expected).replace("LayerEncoder", "OwnEncoder")
    assert repr(expected).startswith("LayerEncoder(")
    assert "layer={'text': 4, 'image': 3} of {'text': 4, 'image': 3}" in repr(expected)
    assert "sentence_transformers" in str(type(expected))


@pytest.mark.parametrize("later", [[], [Normalize()]])
def test_folder_of_sentence_transformers_has_its_vectors(
    later: list[Any], joint_folder: Folder, tmp_path: Path
) -> None:
    first = SentenceTransformer(joint_folder("CLIP"), device="cpu")[0]
    SentenceTransformer(modules=[first, *later], device="cpu").save_pretrained(str(tmp_path / "model"))
    encoder = LayerEncoder(str(tmp_path / "model"), -1, device="cpu")
    plain = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    for inputs in (TEXTS, IMAGES):
        np.testing.assert_array_equal(encoder.encode(inputs), plain.encode(inputs))
        lengths = np.linalg.norm(encoder.encode_layers(inputs), axis=-1)
        assert bool(np.allclose(lengths, 1, atol=1e-5)) == bool(later)


def test_model_in_a_subfolder_is_read_from_a_folder_and_from_the_cache(joint_folder: Folder, tmp_path: Path) -> None:
    commit = "0" * 40
    repository = tmp_path / "models--org--clip"
    folder = repository / "snapshots" / commit
    shutil.copytree(joint_folder("CLIP"), folder / "0_CLIPModel")  # as in sentence-transformers/clip-ViT-B-32
    modules = [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    expected = SentenceTransformer(str(folder), device="cpu").encode(IMAGES)
    np.testing.assert_array_equal(LayerEncoder(str(folder), -1, device="cpu").encode(IMAGES), expected)
    encoder = LayerEncoder("org/clip", -1, device="cpu", cache_folder=str(tmp_path), local_files_only=True)
    np.testing.assert_array_equal(encoder.encode(IMAGES), expected)
    assert encoder.name == "org/clip"


def test_siglip_pads_on_the_side_of_its_tokenizer(joint_folder: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(joint_folder("SigLIP"), tmp_path / "model")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"padding_side": "left"}))
    left = tokenizer()
    left.padding_side = "left"
    encoder, right = (LayerEncoder(str(path), -1, device="cpu") for path in (folder, joint_folder("SigLIP")))
    tokens = left(TEXTS, padding="max_length", return_tensors="pt")
    ids = {key: tokens[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = tiny_joint("SigLIP").get_text_features(**ids).pooler_output  # type: ignore[operator]
    np.testing.assert_allclose(encoder.encode(TEXTS), expected.numpy(), atol=2e-5, rtol=1e-4)
    assert encoder.spec.parts != right.spec.parts
