"""timm models in their hub format: timm's own settings and weight names, loaded through transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import NORMS, Norm
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader
from tests.support.tiny_configs import randomized

pytest.importorskip("torchvision", reason="prepares images for timm models", exc_type=ImportError)
timm: Any = pytest.importorskip("timm", reason="required by timm models")

EDGE = 56
SMALL = {"embed_dim": 32, "depth": 4, "num_heads": 2, "img_size": EDGE, "patch_size": 14}
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": SMALL,
    "eva02_tiny_patch14_224": SMALL,
    "vit_base_patch16_siglip_224": {**SMALL, "depth": 2},  # pools by attention
    "vit_small_patch16_224": {**SMALL, "depth": 2, "global_pool": "avg"},  # norms the pooled vector only
}


def save_timm_model(name: str, folder: Path, **settings: Any) -> nn.Module:
    """Save a timm model with random weights in timm's own format, and return it."""
    from safetensors.torch import save_file

    model = randomized(timm.create_model(name, num_classes=5, **settings))
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    images = {"input_size": [3, EDGE, EDGE], "crop_pct": 1.0, "mean": [0.5] * 3, "std": [0.5] * 3}
    sizes = {"num_classes": 5, "num_features": model.num_features}
    config = {"architecture": name, **sizes, "model_args": settings, "pretrained_cfg": images}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def make_images() -> list[Any]:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (3, EDGE, EDGE, 3), dtype=np.uint8)
    return [Image.fromarray(array) for array in pixels]


@torch.no_grad()
def uncut_vectors(model: Any) -> dict[str, list[Tensor]]:
    """Return the mean state of every layer from hooks on timm's own model, with images prepared by hand."""
    pixels = torch.stack([torch.as_tensor(np.array(image)).permute(2, 0, 1) / 127.5 - 1 for image in make_images()])
    captured: list[Tensor] = []
    hooks = [model.blocks[0].register_forward_pre_hook(lambda _, args: captured.append(args[0]))]
    hooks += [block.register_forward_hook(lambda _, __, output: captured.append(output)) for block in model.blocks]
    last = model.forward_features(pixels)
    for hook in hooks:
        hook.remove()
    normed = [model.norm(states) for states in captured]
    assert torch.equal(normed[-1], last)
    return {"none": [states.mean(dim=1) for states in captured], "final": [states.mean(dim=1) for states in normed]}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_matches_the_uncut_timm_model(name: str, norm: Norm, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    expected = uncut_vectors(save_timm_model(name, tmp_path, **MODELS[name]))
    for layer, vectors in enumerate(expected[norm]):
        encoder = LayerEncoder(str(tmp_path), layer, norm=norm, device="cpu")
        torch.testing.assert_close(torch.as_tensor(encoder.encode(make_images())), vectors)
        assert len(encoder.transformer.timm_model.blocks) == layer  # type: ignore[union-attr, arg-type]
        encoder.save_pretrained(str(tmp_path / "plain"))
        plain = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
        torch.testing.assert_close(torch.as_tensor(plain.encode(make_images())), vectors)
        kinds = [module["type"] for module in json.loads((tmp_path / "plain" / "modules.json").read_text())]
        assert all(kind.startswith("sentence_transformers.") for kind in kinds)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", list(MODELS)[:2])
def test_all_layers_come_from_one_pass_with_either_norm(name: str, norm: Norm, tmp_path: Path) -> None:
    expected = uncut_vectors(save_timm_model(name, tmp_path, **MODELS[name]))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_features"]  # as transformers writes it for a new model
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = LayerEncoder(str(tmp_path), -1, norm=norm, device="cpu")
    for other_norm in NORMS:  # also the norm that the encoder itself does not apply
        vectors = layer_reader(encoder, norm=other_norm).vectors(make_images(), batches_of(encoder, make_images()))
        torch.testing.assert_close(vectors, torch.stack(expected[other_norm]))


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_multi_stage_models_are_refused_and_the_suggested_fix_works(layer: int, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    save_timm_model("convnext_atto", tmp_path, depths=(1, 1, 1, 1), dims=(8, 16, 32, 64))
    with pytest.raises(MidlayerError, match=r"several stages .* those of a plain SentenceTransformer"):
        LayerEncoder(str(tmp_path), layer, device="cpu")
    assert SentenceTransformer(str(tmp_path), device="cpu").encode(make_images()).shape == (3, 64)
