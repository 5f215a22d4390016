"""Models of timm, as they lie on the hub: timm's own settings and names of weights, read through transformers."""

from __future__ import annotations

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
from tests.tiny_configs import randomized

pytest.importorskip("torchvision", reason="what prepares images for a model of timm", exc_type=ImportError)
timm: Any = pytest.importorskip("timm", reason="models of timm need it")

EDGE = 56
SMALL = {"embed_dim": 32, "depth": 4, "num_heads": 2, "img_size": EDGE, "patch_size": 14}
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": SMALL,
    "eva02_tiny_patch14_224": SMALL,
    "vit_base_patch16_siglip_224": {**SMALL, "depth": 2},  # pools by attention
    "vit_small_patch16_224": {**SMALL, "depth": 2, "global_pool": "avg"},  # norms the pooled vector only
}


def save(name: str, folder: Path, **settings: Any) -> nn.Module:
    """Write a model of timm with random weights to a folder as timm itself does, and return it."""
    from safetensors.torch import save_file

    model = randomized(timm.create_model(name, num_classes=5, **settings))
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    images = {"input_size": [3, EDGE, EDGE], "crop_pct": 1.0, "mean": [0.5] * 3, "std": [0.5] * 3}
    sizes = {"num_classes": 5, "num_features": model.num_features}
    config = {"architecture": name, **sizes, "model_args": settings, "pretrained_cfg": images}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def pictures() -> list[Any]:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 255, (3, EDGE, EDGE, 3), dtype=np.uint8)
    return [Image.fromarray(picture) for picture in noise]


@torch.no_grad()
def uncut_vectors(model: Any) -> dict[str, list[Tensor]]:
    """Return the mean state of every layer by hooks on timm's own model, whose images are prepared by hand."""
    pixels = torch.stack([torch.as_tensor(np.array(one)).permute(2, 0, 1) / 127.5 - 1 for one in pictures()])
    seen: list[Tensor] = []
    hooks = [model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))]
    hooks += [block.register_forward_hook(lambda _, __, made: seen.append(made)) for block in model.blocks]
    last = model.forward_features(pixels)
    for hook in hooks:
        hook.remove()
    normed = [model.norm(states) for states in seen]
    assert torch.equal(normed[-1], last)
    return {"none": [one.mean(dim=1) for one in seen], "final": [one.mean(dim=1) for one in normed]}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_that_of_the_uncut_model(name: str, norm: Norm, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    expected = uncut_vectors(save(name, tmp_path, **MODELS[name]))
    for layer, vectors in enumerate(expected[norm]):
        encoder = LayerEncoder(str(tmp_path), layer, norm=norm, device="cpu")
        torch.testing.assert_close(torch.as_tensor(encoder.encode(pictures())), vectors)
        assert len(encoder.transformer.timm_model.blocks) == layer  # type: ignore[union-attr, arg-type]
        encoder.save_pretrained(str(tmp_path / "plain"))
        plain = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
        torch.testing.assert_close(torch.as_tensor(plain.encode(pictures())), vectors)
        kinds = [one["type"] for one in json.loads((tmp_path / "plain" / "modules.json").read_text())]
        assert all(kind.startswith("sentence_transformers.") for kind in kinds)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", list(MODELS)[:2])
def test_all_layers_come_from_one_pass_with_either_norm(name: str, norm: Norm, tmp_path: Path) -> None:
    expected = uncut_vectors(save(name, tmp_path, **MODELS[name]))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_features"]  # as transformers writes it for a model that was made, not read
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = LayerEncoder(str(tmp_path), -1, norm=norm, device="cpu")
    for wanted in NORMS:  # also that which the encoder itself does not apply
        made = layer_reader(encoder, norm=wanted).vectors(pictures(), batches_of(encoder, pictures()))
        torch.testing.assert_close(made, torch.stack(expected[wanted]))


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_several_stages_are_refused_and_the_advice_works(layer: int, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    save("convnext_atto", tmp_path, depths=(1, 1, 1, 1), dims=(8, 16, 32, 64))
    with pytest.raises(MidlayerError, match=r"several stages .* those of a plain SentenceTransformer"):
        LayerEncoder(str(tmp_path), layer, device="cpu")
    assert SentenceTransformer(str(tmp_path), device="cpu").encode(pictures()).shape == (3, 64)
