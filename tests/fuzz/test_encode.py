"""``encode`` of anything: a finite vector for each input, or an error of ours."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder
from tests.fuzz.running import Case, check_cases, seeds
from tests.fuzz.values import audio, image, one_of, several, strange, text
from tests.support.tiny_folders import Folder, save_joint


@pytest.fixture(scope="module")
def encoders(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayerEncoder]:
    folders = {name: tiny_folder(name) for name in ("Llama", "BERT", "ViT", "Wav2Vec2")}
    result = {name: LayerEncoder(folder, 1, device="cpu") for name, folder in folders.items()}
    return {**result, "CLIP": LayerEncoder(save_joint("CLIP", tmp_path_factory.mktemp("joint")), 1, device="cpu")}


def encode_case(encoders: dict[str, LayerEncoder]) -> Case:
    def case(random: Random) -> tuple[str, Callable[[], Any]]:
        name = random.choice(["Llama", "Llama", "BERT", "ViT", "Wav2Vec2", "CLIP"])
        medium = {"ViT": image, "Wav2Vec2": audio}.get(name, text)
        makers = [medium, medium, strange, image, audio, text, lambda r: {r.choice(["text", "image", "x"]): medium(r)}]
        inputs = one_of(random, lambda r: several(r, medium), lambda r: several(r, r.choice(makers)), *makers)
        options = random.choice([{}, {}, {"convert_to_tensor": True}, {"prompt": "q: "}, {"batch_size": 2}])
        return f"{name}.encode({inputs!r}, {options})", lambda: _check(encoders[name], inputs, options)

    return case


def _check(encoder: LayerEncoder, inputs: Any, options: dict[str, Any]) -> None:
    vectors = torch.as_tensor(np.asarray(encoder.encode(inputs, show_progress_bar=False, **options)))
    assert vectors.isfinite().all()
    single = encoder.is_singular_input(inputs)
    assert vectors.ndim == 1 if single else len(vectors) == len(inputs)


@seeds(150, 6, 1000)
def test_encode(encoders: dict[str, LayerEncoder], first: int, count: int) -> None:
    check_cases(encode_case(encoders), "encode", first, count)
