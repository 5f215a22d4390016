"""Outputs of attention and MLP inside the blocks: available in every tool that reads layers, and labeled as sites."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder, measure, sweep
from midlayer_encoders.cli import app
from midlayer_encoders.errors import LayerIndexError, OptionError
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.capture import capture
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.sweeping import SweepResult, SweepSettings
from tests.families import FAMILIES, inputs, tiny
from tests.grouped import probe
from tests.others_warnings import MTEB
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]
pytestmark = MTEB


def vectors(encoder: LayerEncoder, site: Any, **options: Any) -> Tensor:
    reader = layer_reader(encoder, site=site, **options)
    return reader.vectors(TEXTS, batches_of(encoder, TEXTS))


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", pytest.param("OPT", marks=pytest.mark.slow)])
def test_attention_and_mlp_are_the_updates_of_a_block(family: str, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder(family), -1, norm="none", device="cpu")
    blocks, attention, mlp = (vectors(encoder, site) for site in ("block", "attention", "mlp"))
    assert attention.shape == mlp.shape == (4, len(TEXTS), 32)
    torch.testing.assert_close(blocks[:-1] + attention + mlp, blocks[1:], rtol=1e-4, atol=1e-6)


def test_norm_and_pooling_apply_to_the_site(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, pooling="last", device="cpu")
    model: Any = encoder.transformer
    actual: list[Tensor] = []
    hook = model.layers[2].mlp.down_proj.register_forward_hook(lambda _, __, output: actual.append(output))
    with torch.no_grad():
        model(**encoder.model_inputs([TEXTS[0]]))
        expected = model.norm(actual[0])[0, -1]
    hook.remove()
    torch.testing.assert_close(vectors(encoder, "mlp", layers=[3])[0, 0], expected, rtol=1e-4, atol=1e-5)


QUICK = ("Llama", "GPT2", "OPT", "Mamba", "BERT", "ALBERT", "ViT", "WavLM")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_gives_one_state_per_token_and_block(family: str) -> None:
    model = tiny(family).eval()
    anatomy = find_anatomy(model)
    layers = range(1, anatomy.num_layers + 1)
    for site in ("attention", "mlp") if "Mamba" not in family else ("attention",):
        recorded: list[tuple[int, tuple[int, ...]]] = []

        def receive(layer: int, _: str, states: Tensor, recorded: Any = recorded) -> None:
            recorded.append((layer, tuple(states.shape)))

        stream: list[tuple[int, ...]] = []
        with torch.no_grad():
            capture(model, inputs(family), receive, anatomy=anatomy, layers=layers, sites=(site,))
            capture(model, inputs(family), lambda _, __, s, to=stream: to.append(tuple(s.shape)), anatomy=anatomy, layers=layers)  # type: ignore[misc]  # fmt: skip
        assert recorded == list(zip(layers, stream, strict=True))


class Block(nn.Module):
    """A block whose MLP flattens texts and tokens, like mixtures of experts, or splits the tokens."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.fc, self.halves = nn.Linear(4, 4), halves

    def forward(self, x: Tensor) -> Tensor:
        parts = x.reshape(2 * len(x), -1, 4) if self.halves else x.reshape(-1, 4)
        return x + self.fc(parts).reshape(x.shape)


@pytest.mark.parametrize("halves", [False, True])
def test_flattened_tokens_are_restored_and_others_are_refused(halves: bool) -> None:
    model = nn.Sequential(nn.Sequential(Block(halves), Block(halves)))
    anatomy = find_anatomy(model, blocks="0", final=())
    x, result = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0)), []
    loaded = lambda: capture(  # noqa: E731
        model, {"input": x}, lambda _, __, states: result.append(states), anatomy=anatomy, layers=[1, 2], sites=("mlp",)
    )
    if halves:
        with pytest.raises(OptionError, match=r"`site` 'mlp' cannot be read .* \(6, 3, 4\).* 3 inputs of 6 tokens"):
            loaded()
    else:
        loaded()
        torch.testing.assert_close(x + result[0] + result[1], model(x))


# --- identity --------------------------------------------------------------------------------------------------------


def test_measure_names_the_site_and_omits_layer_0(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, norm="none", device="cpu")
    frames = [measure(encoder, TEXTS, metrics=["prompt_entropy"], site=site) for site in ("block", "attention", "mlp")]
    together = pl.concat(frames)
    counts = dict(together.group_by("revision").len().iter_rows())
    assert counts == {"default": 5, "default:attention": 4, "default:mlp": 4}
    assert together["value"].n_unique() == together.height
    assert frames[1]["depth"].to_list() == [0.25, 0.5, 0.75, 1.0]


def test_probe_reads_the_site(tiny_folder: Folder) -> None:
    texts = [f"{word} {number}" for number in range(10) for word in ("apple pie", "iron ore")]
    labels = ["food", "metal"] * 10
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    for kind in ("knn", "attentive"):
        epochs = {} if kind == "knn" else {"epochs": 1}
        probe_result = probe(encoder, texts, labels, kind=kind, site="mlp", **epochs)
        assert list(probe_result.layers) == [1, 2, 3, 4]
        assert probe_result.frame["revision"].unique().to_list() == ["default:mlp"]
    with pytest.raises(LayerIndexError, match=r"`layers` must be 1 or higher with site='mlp'"):
        probe(encoder, texts, labels, layers=[0, 2], site="mlp")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of pairs of texts with scores."""
    folder = tmp_path_factory.mktemp("site-pairs")
    rows = [
        {"sentence1": f"{one} {n}", "sentence2": f"{two} {n % 7}", "score": n % 5}
        for n, (one, two) in enumerate(zip(TEXTS * 3, TEXTS[::-1] * 3, strict=True))
    ]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def test_sweep_of_a_site_has_its_own_store_names_and_scores(tiny_folder: Folder, pairs: str, tmp_path: Path) -> None:
    options: Any = {"out": tmp_path, "device": "cpu", "baselines": False}
    stream = sweep(tiny_folder("Llama"), pairs, **options)
    attention = sweep(tiny_folder("Llama"), pairs, site="attention", metrics=["prompt_entropy"], **options)
    stores = [path for path in (tmp_path / "embeddings").iterdir() if path.is_dir()]
    assert len(stores) == 2
    assert attention.frame["revision"].unique().to_list() == ["default:attention"]
    combined = {
        name: actual.frame.filter(kind="score").sort("layer") for name, actual in (("b", stream), ("a", attention))
    }
    assert combined["b"]["layer"].to_list() == [0, 1, 2, 3, 4]
    assert combined["a"]["layer"].to_list() == [1, 2, 3, 4]
    assert not np.allclose(combined["a"]["value"], combined["b"]["value"][1:])
    # mteb confirmed the jointly computed scores, in files whose names contain the site
    confirmed = attention.frame.filter(kind="confirmed").join(combined["a"], on="layer")
    np.testing.assert_allclose(confirmed["value"], confirmed["value_right"], atol=1e-6)
    assert {path.name for path in (tmp_path / "mteb").rglob("*layer-4*") if "attention" in path.name}
    assert "midlayer export" not in attention.html()
    assert "midlayer export" in stream.html()
    assert SweepResult.load(tmp_path).notes.site == "attention"


def test_stored_vectors_of_a_site_match_the_reader(tiny_folder: Folder, pairs: str, tmp_path: Path) -> None:
    from midlayer_encoders.store import EmbeddingStore, text_key

    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    sweep(encoder, pairs, site="mlp", out=tmp_path, baselines=False)
    (folder,) = (path for path in (tmp_path / "embeddings").iterdir() if path.is_dir())
    store = EmbeddingStore(tmp_path / "embeddings", key=folder.name, layers=[1, 2, 3, 4], dim=32)
    text = f"{TEXTS[0]} 0"
    expected = layer_reader(encoder, site="mlp").vectors([text], [[0]])[:, 0]
    for place, layer in enumerate([1, 2, 3, 4]):
        np.testing.assert_allclose(store.read(layer, [text_key(text)])[0], expected[place], rtol=1e-4, atol=1e-6)


# --- invalid calls ---------------------------------------------------------------------------------------------------


def test_missing_sites_are_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    mamba = LayerEncoder(tiny_folder("Mamba"), -1, device="cpu")
    with pytest.raises(OptionError, match=r"`sites` must be one of 'residual_in', .*, but got 'mlp'"):
        measure(mamba, TEXTS, site="mlp")
    with pytest.raises(OptionError, match=r"`site` must be one of 'block', 'attention', 'mlp', but got 'mpl'.*'mlp'"):
        sweep(mamba, site="mpl", out=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(LayerIndexError, match=r"layer 0 of .* is its embeddings"):
        sweep(mamba, site="attention", layers=[0, 1], out=tmp_path)
    with pytest.raises(OptionError, match="`compile` must be False with site='attention'"):
        sweep(mamba, site="attention", settings=SweepSettings(compile=True), out=tmp_path)


def test_encoder_of_a_site_is_refused_with_the_reason(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a cut model ends after a block"):
        LayerEncoder(tiny_folder("Llama"), 2, site="mlp", device="cpu")  # type: ignore[call-arg]
    words = ["export", tiny_folder("Llama"), "--layer", "2", "--site", "mlp", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, words).exit_code == 2  # no such option


def test_commands_accept_a_site(tiny_folder: Folder, pairs: str, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    words = ["metrics", tiny_folder("Llama"), "--texts", str(tmp_path / "texts.txt"), "--metrics", "prompt_entropy"]
    result = CliRunner().invoke(app, [*words, "--site", "mlp", "--device", "cpu", "--out", str(tmp_path / "metrics")])
    assert result.exit_code == 0, result.output
    assert pl.read_parquet(tmp_path / "metrics/metrics.parquet")["revision"].unique().to_list() == ["default:mlp"]
    words = ["sweep", tiny_folder("Llama"), "--tasks", pairs, "--metrics", "none", "--device", "cpu", "--workers", "1"]
    result = CliRunner().invoke(app, [*words, "--site", "attention", "--out", str(tmp_path / "sweep")])
    assert result.exit_code == 0, result.output
    assert "cannot be exported as an encoder" in result.output
    assert "Export it:" not in result.output
