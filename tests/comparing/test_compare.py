import math
import shutil
import weakref
from pathlib import Path

import polars as pl
import pytest
import torch
import transformers as tf
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import app
from midlayer_encoders.comparing import CompareResult
from midlayer_encoders.comparing.compare import COMPARABLE, comparable, half_width, random_halves
from midlayer_encoders.encoder.whole_model import measure
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import TooFewTextsError
from midlayer_encoders.report.comparison_page import DIFFERENCES, plot_differences
from tests.support.families import DEPTH, VOCAB, tiny
from tests.support.grouped import compare
from tests.support.tiny_folders import save_tiny, tokenizer

TEXTS = [f"{start} number {n} {end}" for n in range(6) for start, end in (("first the", "fox"), ("a dog", "barks!"))]
OPTIONS = {"texts": TEXTS, "views": 2, "resamples": 4, "device": "cpu"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("Llama", tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def tuned(base: str) -> str:
    """Return a model whose last block alone is another."""
    folder = Path(base).parent / "tuned"
    model = tiny("Llama")
    with torch.no_grad():
        for parameter in model.layers[-1].parameters():  # type: ignore[union-attr, operator]
            parameter.mul_(20)
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def done(base: str, tuned: str) -> CompareResult:
    return compare(base, tuned, metrics="all", **OPTIONS)  # type: ignore[arg-type]


@pytest.mark.slow
def test_metrics_match_each_model_measured_alone(base: str, tuned: str, done: CompareResult) -> None:
    assert done.frame["name"].unique(maintain_order=True).to_list() == list(COMPARABLE)
    for folder in (base, tuned):
        encoder = LayerEncoder(folder, -1, norm="none", device="cpu")
        frame = measure(encoder, TEXTS, metrics=list(COMPARABLE), views=2)
        own_rows = done.frame.filter(pl.col("model") == f"local/{Path(folder).name}")
        # The spectrum of the embeddings falls to rounding, which the slope of alpha_req follows, and LiDAR divides by a
        # covariance that is almost singular: both magnify the rounding of other batches.
        for steep, within in ((True, 1e-3), (False, 1e-5)):
            sample = pl.col("name").is_in(["alpha_req", "lidar"]) == steep
            assert_frame_equal(own_rows.filter(sample), frame.filter(sample), check_row_order=False, rel_tol=within)


def test_alignment_compares_with_the_shortened_texts_of_the_seed(base: str, tuned: str) -> None:
    names = ["alignment", "infonce", "uniformity"]
    steps: list[tuple[int, int]] = []
    result = compare(
        base, tuned, metrics=names, seed=3, layers=[-1], progress=lambda _, *step: steps.append(step), **OPTIONS
    )  # type: ignore[arg-type]
    for folder in (base, tuned):
        encoder = LayerEncoder(folder, -1, norm="none", device="cpu")
        expected = measure(encoder, TEXTS, metrics=names, views=2, seed=3, layers=[-1])
        own_rows = result.frame.filter(pl.col("model") == f"local/{Path(folder).name}")
        assert_frame_equal(own_rows, expected, rel_tol=1e-5)
    assert max(done for done, total in steps if total == 4 * len(TEXTS)) == 4 * len(TEXTS), "each text, copy and view"


def test_differences_match_the_frame_and_are_zero_for_unchanged_layers(done: CompareResult) -> None:
    keys = ["layer", "name"]
    wide = done.frame.pivot("model", index=keys, values="value")
    joined = done.differences.join(wide, on=keys)
    assert len(joined) == len(COMPARABLE) * (DEPTH + 1)
    expected = joined["local/tuned"] - joined["local/base"]
    torch.testing.assert_close(torch.tensor(joined["difference"].to_list()), torch.tensor(expected.to_list()))
    assert (joined["low"] <= joined["difference"]).all()
    assert (joined["difference"] <= joined["high"]).all()
    same = done.differences.filter(pl.col("layer") < DEPTH)
    assert same.select("difference", "low", "high").unique().rows() == [(0.0, 0.0, 0.0)]
    last = done.differences.filter((pl.col("layer") == DEPTH) & (pl.col("name") == "curvature"))
    assert last["difference"].item() != 0.0
    assert last["high"].item() > last["low"].item()


@pytest.mark.long
def test_everything_is_written(base: str, tuned: str, tmp_path: Path) -> None:
    comparison = compare(base, tuned, metrics=["curvature", "lidar"], out=tmp_path / "out", **OPTIONS)  # type: ignore[arg-type]
    assert comparison.folder == tmp_path / "out"
    assert_frame_equal(pl.read_parquet(comparison.folder / "differences.parquet"), comparison.differences)
    assert pl.read_csv(comparison.folder / "differences.csv").columns == list(DIFFERENCES)
    assert {path.name for path in comparison.folder.glob("*.png")} == {"metrics.png", "differences.png"}
    page = (comparison.folder / "report.html").read_text()
    assert page.count('<img class="chart"') == 2  # metrics and differences
    assert "random halves of 6 texts" in page
    assert "tuned differs from base" in page


def test_interval_is_the_spread_over_the_same_halves_of_both_models(base: str, tuned: str, done: CompareResult) -> None:
    """The oracle measures each half as if it were all the texts there are."""
    complete = [LayerEncoder(folder, -1, norm="none", device="cpu") for folder in (base, tuned)]
    spread = []
    for half in random_halves(len(TEXTS), 4).tolist():
        sample = [TEXTS[place] for place in half]
        values = [measure(item, sample, metrics="dataset_entropy", layers=[-1])["value"].item() for item in complete]
        spread.append(values[1] - values[0])
    row = (pl.col("name") == "dataset_entropy") & (pl.col("layer") == DEPTH)
    actual = done.differences.filter(row).row(0, named=True)
    expected = 1.959964 * float(torch.tensor(spread).std())
    assert (actual["high"] - actual["low"]) / 2 == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("count", [40, 11])
def test_interval_width_of_a_mean_is_its_standard_error(count: int) -> None:
    numbers = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    means = numbers[random_halves(count, 5_000)].mean(dim=1)
    usual = 1.959964 * float(numbers.std()) / math.sqrt(count)
    assert float(half_width(means, count)) == pytest.approx(usual, rel=0.04)


def test_halves_are_seeded_and_have_no_repeated_text() -> None:
    halves = random_halves(11, 6, seed=3)
    assert halves.shape == (6, 5)
    assert all(len(set(half)) == 5 for half in halves.tolist())
    assert torch.equal(halves, random_halves(11, 6, seed=3))
    assert not torch.equal(halves, random_halves(11, 6, seed=4))


@pytest.mark.long
def test_models_of_different_depth_and_width_are_compared_at_equal_depth(base: str, tmp_path: Path) -> None:
    config = tf.LlamaConfig(
        vocab_size=VOCAB + 1, hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    tf.LlamaModel(config).save_pretrained(tmp_path / "other")
    words = tokenizer()
    words.add_tokens(["number"])
    words.save_pretrained(tmp_path / "other")
    result = compare(base, str(tmp_path / "other"), metrics=["curvature", "anisotropy"], **OPTIONS)  # type: ignore[arg-type]
    pairs = result.differences.select("base_layer", "layer").unique(maintain_order=True).rows()
    assert pairs == [(0, 0), (2, 3), (4, 6)]
    assert result.differences["depth"].unique().sort().to_list() == [0.0, 0.5, 1.0]
    assert "differences are taken at the 3 depths that both have" in result.notes[0]
    assert "different tokenizers" in result.notes[1]
    assert "local/" not in result.html()
    page = result.to_html(tmp_path / "page.html").read_text()
    assert "relative depth in percent" in page
    figure = plot_differences(result.differences)
    assert figure.axes[0].get_xlabel() == "relative depth"
    assert figure.axes[0].lines[1].get_xdata().tolist() == [0.0, 0.5, 1.0]


def test_encoders_and_several_models_with_one_name(
    base: str, tuned: str, tmp_path: Path, made: weakref.WeakSet[LayerEncoder]
) -> None:
    shutil.copytree(tuned, tmp_path / "more" / "base")
    alive: list[int] = []
    stages: set[str] = set()
    encoder = LayerEncoder(base, -1, bidirectional=True, device="cpu")
    result = compare(
        base,
        str(tmp_path / "more" / "base"),
        encoder,
        metrics="first_token_share",
        progress=lambda stage, *_: (alive.append(len(made)), stages.add(stage)),
        **OPTIONS,
    )  # type: ignore[arg-type]
    names = ["base", "more/base", f"{Path(base).parent.name}/base"]
    assert stages == {f"{what} of {name}" for what in ("texts", "halves") for name in names}
    assert max(alive) == 2  # the one that was given, and one that was named
    assert result.differences["model"].unique(maintain_order=True).to_list() == [
        "local/more/base",
        f"local/{Path(base).parent.name}/base",
    ]
    assert len(result.words()) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"texts": TEXTS[:9]}, "10 to 2000 texts, .*but got 9"),
        ({"texts": ["a text"] * 2001}, "but got 2001"),
        ({"texts": "a string"}, "but got one: 'a string'"),
        ({"metrics": "curvatur"}, "Did you mean 'curvature'"),
        ({"metrics": ["cka"]}, "must be one of 'prompt_entropy'.*but got 'cka'"),
        ({"metrics": []}, "but got none"),
        ({"resamples": 1}, "`resamples` must be a whole number, 2 or more"),
        ({"confidence": 1.0}, "`confidence` must be a finite number, from 0.001 to 0.999"),
        ({"pooling": "maen"}, "Did you mean 'mean'"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_read(options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        compare("no/such-model", "no/other", **(OPTIONS | options))  # type: ignore[arg-type]


def test_model_is_not_compared_with_itself(base: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="`tuned` must be one or more"):
        compare(base, **OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="has the same weights and settings as base"):
        compare(base, f"{base}/", **OPTIONS)  # type: ignore[arg-type]
    shutil.copytree(base, tmp_path / "copy")
    with pytest.raises(OptionError, match="but copy has the same weights and settings as base"):
        compare(base, str(tmp_path / "copy"), metrics="first_token_share", **OPTIONS)  # type: ignore[arg-type]


def test_texts_too_short_for_a_metric_are_reported(base: str, tuned: str) -> None:
    short = list("abcdefghijkl")
    with pytest.raises(TooFewTextsError, match="no text long enough for curvature"):
        compare(base, tuned, metrics=["curvature"], **(OPTIONS | {"texts": short}))  # type: ignore[arg-type]


def test_repeated_names_are_numbered() -> None:
    assert comparable(["dime", "dime", "lidar"]) == ("dime", "lidar")
    assert set(comparable("paper")) <= set(comparable("all"))


def test_command_prints_and_writes(base: str, tuned: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    command = ["compare", base, tuned, "--texts", str(tmp_path / "t.txt"), "--out", str(tmp_path / "out")]
    command += ["--metrics", "curvature,anisotropy", "--resamples", "4", "--device", "cpu"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "tuned minus base; in brackets: " in result.output
    assert "have an interval that excludes zero" in " ".join(result.output.split())
    assert (tmp_path / "out" / "report.html").is_file()


def test_options_that_conflict_with_an_encoder_are_refused(base: str, tuned: str) -> None:
    encoders = [LayerEncoder(folder, -1, max_length=9, device="cpu") for folder in (base, tuned)]
    for name, value in {"max_length": 4, "truncate_dim": 3, "bidirectional": True}.items():
        with pytest.raises(OptionError, match=f"`{name}` must be the encoder's"):
            compare(*encoders, texts=TEXTS, metrics="anisotropy", **{name: value})  # type: ignore[arg-type]
