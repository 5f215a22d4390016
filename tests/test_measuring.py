import math
from pathlib import Path

import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import app
from midlayer_encoders.encoder import spec
from midlayer_encoders.encoder.digests import weights_digest
from midlayer_encoders.encoder.whole_model import measure
from midlayer_encoders.errors import LayerIndexError, OptionError
from midlayer_encoders.metrics import (
    METRICS,
    TooFewTextsError,
    alignment,
    curvature,
    dataset_entropy,
    infonce,
    lidar,
    prompt_entropy,
    uniformity,
)
from midlayer_encoders.metrics.feeding import num_passes
from midlayer_encoders.metrics.text_views import augment, drop_words
from midlayer_encoders.reading.media_inputs import InputError
from tests.support.families import DEPTH
from tests.support.progress import num_tokens, record_steps
from tests.support.tiny_folders import Folder

TEXTS = [
    f"{start} and then number {n} {end}" for n in range(6) for start, end in (("first", "fox"), ("a dog", "barks!"))
]


def metric_values(frame: pl.DataFrame, name: str) -> torch.Tensor:
    return torch.tensor(frame.filter(pl.col("name") == name).sort("layer")["value"].to_list(), dtype=torch.float64)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama", "BERT", pytest.param("Mamba", marks=pytest.mark.slow)])
def test_metrics_match_the_functions_on_each_layer(name: str, tiny_folder: Folder) -> None:
    full_encoder = LayerEncoder(tiny_folder(name), -1, norm="none", device="cpu")
    metrics = ["prompt_entropy", "curvature", "dataset_entropy", "infonce"]
    frame = measure(full_encoder, TEXTS, metrics=metrics, token_budget=100, dataset="mine")
    assert set(frame["dataset"]) == {"mine"}
    views = augment(TEXTS, views=2, seed=0)
    for layer in range(DEPTH + 1):
        encoder = LayerEncoder(tiny_folder(name), layer, norm="none", device="cpu")
        states = [torch.as_tensor(t) for t in encoder.encode(TEXTS, output_value="token_embeddings")]
        masks = [torch.ones(1, len(t), dtype=torch.bool) for t in states]
        for metric, function in (("prompt_entropy", prompt_entropy), ("curvature", curvature)):
            text_values = torch.stack(
                [function(s[None], m).double().squeeze() for s, m in zip(states, masks, strict=True)]
            )
            torch.testing.assert_close(metric_values(frame, metric)[layer], text_values.mean(), rtol=1e-4, atol=1e-5)
        pooled = torch.from_numpy(encoder.encode(TEXTS))
        torch.testing.assert_close(
            metric_values(frame, "dataset_entropy")[layer], dataset_entropy(pooled).double(), rtol=1e-4, atol=1e-5
        )
        pair = [torch.from_numpy(encoder.encode(view)) for view in views]
        torch.testing.assert_close(
            metric_values(frame, "infonce")[layer], infonce(*pair).double(), rtol=1e-4, atol=1e-4
        )


def test_every_metric_is_measured_independently_of_batches_and_order(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    frame = measure(encoder, TEXTS, metrics="all")
    assert set(frame["name"]) == set(METRICS)
    assert frame.columns == ["model", "revision", "layer", "depth", "kind", "dataset", "name", "value"]
    small_batches = measure(encoder, TEXTS, metrics="all", token_budget=40)
    for name in METRICS:
        torch.testing.assert_close(
            metric_values(small_batches, name),
            metric_values(frame, name),
            rtol=2e-3,
            atol=1e-4,
            msg=lambda m: f"{name}: {m}",
        )


@pytest.mark.long
def test_alignment_reads_one_more_pass_and_leaves_other_metrics_unchanged(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    names = ["infonce", "dataset_entropy"]
    steps: list[int] = []
    options = {"token_budget": 60, "layers": [0, 3], "seed": 2}
    metrics = ["alignment", *names, "uniformity"]
    frame = measure(encoder, TEXTS, metrics=metrics, progress=record_steps(steps, "measuring"), **options)  # type: ignore[arg-type]
    passes = [TEXTS, drop_words(TEXTS, seed=2), *augment(TEXTS, views=2, seed=2)]
    assert sum(steps) == num_tokens(encoder, *passes)
    assert len(passes) == num_passes(metrics)
    assert frame.filter(pl.col("name").is_in(names)).equals(measure(encoder, TEXTS, metrics=names, **options))  # type: ignore[arg-type]
    for layer in (0, 3):
        layer_encoder = LayerEncoder(tiny_folder("Llama"), layer, device="cpu")
        rows, copies = (torch.from_numpy(layer_encoder.encode(texts)) for texts in (TEXTS, drop_words(TEXTS, seed=2)))
        actual = dict(frame.filter(layer=layer).select("name", "value").iter_rows())
        assert actual["alignment"] == pytest.approx(float(alignment(rows, copies)), abs=1e-5)
        assert actual["uniformity"] == pytest.approx(float(uniformity(rows)), abs=1e-5)
    assert num_passes("alignment") == 2
    assert num_passes("paper") == 17
    assert num_passes("all") == 18


def test_weights_are_digested_once_for_all_metrics(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest reads all weights, which takes seconds for a large model."""
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    digests: list[str] = []

    def counted_digest(module: torch.nn.Module) -> str:
        digests.append(weights_digest(module))
        return digests[-1]

    monkeypatch.setattr(spec, "weights_digest", counted_digest)
    measure(encoder, TEXTS, metrics=["anisotropy", "effective_rank", "curvature"])
    assert len(digests) == 1


def test_measure_views_are_of_the_part_of_a_text_that_is_read(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), -1, max_length=16, device="cpu")
    texts = [f"{text} " * 40 for text in TEXTS]
    beyond = [text[: 8 * 16] + " other words of a long text" * 400 for text in texts]
    values = [measure(encoder, some, metrics="infonce", layers=[1])["value"].to_list() for some in (texts, beyond)]
    assert values[0] == values[1]


def test_copies_do_not_replace_a_missing_view(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with pytest.raises(TooFewTextsError, match="all 2 views of every text"):
        measure(encoder, TEXTS, metrics=["alignment", "infonce"], views=[TEXTS])


def test_passes_are_counted_and_reported(tiny_folder: Folder) -> None:
    reports: list[tuple[str, int, int]] = []
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    measure(
        encoder,
        TEXTS,
        metrics=["infonce", "curvature"],
        layers=[1, -1],
        progress=lambda *report: reports.append(report),
    )
    passes = [TEXTS, *augment(TEXTS, views=num_passes(["infonce", "curvature"]) - 1, seed=0)]
    total = sum(len(ids) for texts in passes for ids in encoder.tokenizer(list(texts))["input_ids"])
    tokens = [(done, count) for stage, done, count in reports if stage == "measuring"]
    assert {count for _, count in tokens} == {total}
    assert [done for done, _ in tokens] == sorted(done for done, _ in tokens)
    assert tokens[-1][0] == total
    assert reports[len(tokens) :] == [("computing", done, 2) for done in range(3)]


def test_invalid_input_is_refused(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with pytest.raises(OptionError, match="at least one text"):
        measure(encoder, [])
    with pytest.raises(OptionError, match="must be a folder, a hub name or a LayerEncoder, but got 3"):
        measure(3, TEXTS)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="Did you mean 'curvature'"):
        measure(encoder, TEXTS, metrics="curvatur")
    with pytest.raises(LayerIndexError, match=r"in \[0, 4\]"):
        measure(encoder, TEXTS, layers=[9])


def test_model_name_is_measured_on_raw_states(tiny_folder: Folder) -> None:
    raw = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", norm="none")
    by_name = measure(tiny_folder("Llama"), TEXTS, metrics="dataset_entropy", device="cpu")
    assert by_name.equals(measure(raw, TEXTS, metrics="dataset_entropy"))
    normed = measure(tiny_folder("Llama"), TEXTS, metrics="dataset_entropy", device="cpu", norm="final")
    assert not normed.equals(by_name)


def test_encoder_without_blocks_has_no_layers_to_measure(tiny_folder: Folder) -> None:
    with pytest.raises(OptionError, match=r"was cut at layer 0\. Pass layer=-1"):
        measure(LayerEncoder(tiny_folder("Llama"), 0, device="cpu"), TEXTS, metrics="curvature")


def test_conflict_with_the_settings_of_the_encoder_is_refused(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, pooling="last", device="cpu")
    for option in ({"norm": "none"}, {"pooling": "mean"}):
        with pytest.raises(OptionError, match=r"must be the encoder's, .* create the encoder with"):
            measure(encoder, TEXTS, metrics="dataset_entropy", **option)  # type: ignore[arg-type]
    equal_settings = measure(encoder, TEXTS, metrics="dataset_entropy", norm="final", pooling="last")
    assert equal_settings.equals(measure(encoder, TEXTS, metrics="dataset_entropy"))


def test_command_writes_frame_and_figure(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    command = ["metrics", tiny_folder("Llama"), "--texts", str(tmp_path / "t.txt"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(
        app, [*command, "--layers", "0,0.5,-1", "--metrics", "curvature,alignment,uniformity", "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    frame = pl.read_parquet(tmp_path / "out/metrics.parquet")
    assert frame.equals(pl.read_csv(tmp_path / "out/metrics.csv").cast(frame.schema))
    assert sorted(set(frame["layer"])) == [0, 2, 4]
    assert (tmp_path / "out/metrics.png").stat().st_size > 1000
    page = (tmp_path / "out/report.html").read_text()
    assert "<h1>Metrics of every layer of Llama0</h1>" in page
    assert "Metrics by layer" in page
    assert set(frame["name"]) == {"curvature", "alignment", "uniformity"}
    assert all(name in result.output for name in frame["name"].unique())


def test_metrics_of_a_group_that_need_more_texts_are_left_out_with_a_warning(
    tiny_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    frame = measure(encoder, TEXTS[:4], metrics="all", views=2)
    assert set(METRICS) - set(frame["name"]) == {"alpha_req", "neighbor_overlap"}
    assert "alpha_req is left out. Eigenvalues" in caplog.text
    with pytest.raises(TooFewTextsError, match="Eigenvalues"):
        measure(encoder, TEXTS[:4], metrics="alpha_req")


def test_unsupported_inputs_are_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with pytest.raises(InputError, match="must each be a text"):
        measure(encoder, [tmp_path / "a.png"], metrics="curvature")


def test_default_prompt_precedes_texts_and_views(tiny_folder: Folder) -> None:
    prompts = {"ask": "find: ", "other": "of no use: "}
    prompted = LayerEncoder(tiny_folder("Llama"), -1, prompts=prompts, default_prompt_name="ask", device="cpu")
    plain = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    views = augment(TEXTS, views=2, seed=1)
    names = ["prompt_entropy", "half_match", "dataset_entropy", "infonce"]
    frame = measure(prompted, TEXTS, metrics=names, views=views)
    prompted_texts, *prompted_views = ([f"find: {text}" for text in texts] for texts in (TEXTS, *views))
    expected = measure(plain, prompted_texts, metrics=names, views=prompted_views)
    without = measure(plain, TEXTS, metrics=names, views=views)
    for name in names:
        torch.testing.assert_close(metric_values(frame, name), metric_values(expected, name), rtol=1e-4, atol=1e-5)
        assert (metric_values(frame, name) - metric_values(without, name)).abs().max() > 1e-3, (
            f"{name}: a lost prompt would be detected"
        )


def test_exp_lidar_is_the_exponential_of_lidar_for_any_number_of_views(tiny_folder: Folder) -> None:
    full_encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    views = augment(TEXTS, views=3, seed=1)
    frame = measure(full_encoder, TEXTS, metrics=["exp_lidar", "lidar"], views=views, layers=[1, 3])
    for layer, layer_rows in frame.group_by("layer"):
        layer_encoder = LayerEncoder(tiny_folder("Llama"), int(layer[0]), device="cpu")  # type: ignore[call-overload]
        entropy = float(lidar(torch.stack([torch.from_numpy(layer_encoder.encode(view)) for view in views]).double()))
        actual = dict(layer_rows.select("name", "value").iter_rows())
        assert actual == {
            "lidar": pytest.approx(entropy, rel=1e-4),
            "exp_lidar": pytest.approx(math.exp(entropy), rel=1e-3),
        }
    assert set(frame["layer"]) == {1, 3}
