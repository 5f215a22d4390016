"""A sweep over recipes: each matches the sweep of an encoder with that recipe, and the exported winner has the same score."""

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder, Recipe
from midlayer_encoders._types import Stage
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import dump_with_checksum, read_with_checksum
from midlayer_encoders.recipes import RECIPES, recipe_of
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.layer_sweep import _accumulate_progress, single_line_texts
from midlayer_encoders.tasks.sources import task_sources
from midlayer_encoders.tasks.text_lists import read_texts
from tests.support.families import DEPTH
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, mteb_score, sweep, write_reranking_task, write_sts_task
from tests.tasks.rows import ROWS, write

pytestmark = MTEB
CUSTOM = Recipe(name="yours", template='a "{text}" is:', pooling="last")


@pytest.fixture(scope="module")
def recipes_sweep(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepResult, list[Path]]:
    root = tmp_path_factory.mktemp("recipes")
    tasks = [write(root / "near.jsonl", ROWS["STS"] * 2), write_reranking_task(root)]
    recipes = ["plain", CUSTOM, "echo", "plain+center+normalize"]
    result = sweep(tiny_folder("Llama"), tasks, recipes=recipes, layers=[0, 1, 3], out=root / "out", **QUICK)
    assert result.parts
    return result, tasks


def test_scores_match_mteb_with_the_recipe(recipes_sweep: tuple[SweepResult, list[Path]], tiny_folder: Folder) -> None:
    result, tasks = recipes_sweep
    center = read_texts(result.folder / "center.txt")
    options: dict[str, dict[str, Any]] = {
        "plain": {}, "yours": {"recipe": CUSTOM}, "echo": {"recipe": "echo"},
        "plain+center+normalize": {"center": center, "normalize": True},
    }  # fmt: skip
    assert result.frame["recipe"].unique(maintain_order=True).to_list() == list(options)
    for (name, encoder_options), task in zip(
        options.items(), tasks * 2, strict=True
    ):  # each recipe on one task; every type occurs twice
        encoder = LayerEncoder(tiny_folder("Llama"), 3, device="cpu", **encoder_options)
        rows = result.frame.filter(pl.col("dataset").str.starts_with(task.stem), kind="score", layer=3, recipe=name)
        assert rows["value"].item() == pytest.approx(mteb_score(encoder, task), abs=2e-4), (name, task.stem)


@pytest.mark.long
def test_encoder_of_a_task_has_the_best_score_of_the_sweep(recipes_sweep: tuple[SweepResult, list[Path]]) -> None:
    result, tasks = recipes_sweep
    for task in tasks:
        best = result.best(task.stem)
        rows = result.scores.filter(pl.col("dataset").str.starts_with(task.stem))
        assert best.score == 100 * rows["value"].max()
        encoder = result.encoder(task.stem, device="cpu")
        assert encoder.layer == best
        assert mteb_score(encoder, task) == pytest.approx(best.score / 100, abs=2e-4)


def test_tokens_per_text_are_those_of_the_formatted_texts(recipes_sweep: tuple[SweepResult, list[Path]]) -> None:
    result, tasks = recipes_sweep
    texts = [row[name] for row in ROWS["STS"] for name in ("sentence1", "sentence2")]
    tokens = {name: part.notes.tokens for name, part in result.parts.items()}
    near = next(name for name in tokens["plain"] if name.startswith("near"))
    for name, template in {"plain": "{text}", "plain+center+normalize": "{text}", "yours": 'a "{text}" is:'}.items():
        lengths = [min(len(template.replace("{text}", text)), 64) for text in texts]  # a token is a letter
        assert tokens[name][near] == pytest.approx(sum(lengths) / len(lengths)), name
    assert len(tokens["plain"]) == len(tasks)
    loaded = SweepResult.load(result.folder)
    assert loaded.parts
    assert {name: part.notes.tokens for name, part in loaded.parts.items()} == tokens


def test_resumed_sweep_counts_tokens_that_an_older_one_did_not(tiny_folder: Folder, tmp_path: Path) -> None:
    task = write(tmp_path / "near.jsonl", ROWS["STS"] * 2)
    first = sweep(tiny_folder("Llama"), task, layers=[2], out=tmp_path / "out", **QUICK)
    assert (
        sweep(tiny_folder("Llama"), task, layers=[2], out=tmp_path / "out", **QUICK).notes.tokens == first.notes.tokens
    )
    (path,) = (tmp_path / "out" / "together").glob("*.json")
    content = read_with_checksum(path)
    del content["scores"]["tokens per text"]
    path.write_bytes(dump_with_checksum(content))
    again = sweep(tiny_folder("Llama"), task, layers=[2], out=tmp_path / "out", **QUICK)
    assert again.notes.tokens == first.notes.tokens != {}
    assert again.frame.equals(first.frame)


def test_texts_to_center_on_are_read_back_from_their_file(tmp_path: Path) -> None:
    texts = ["one line", "two\nlines", "a\rreturn", "both\r\nof them", "a separator\u2028inside", "the end"]
    task = write(tmp_path / "mine.jsonl", [{"text": text, "label": n % 2} for n, text in enumerate(texts * 2)])
    lines = single_line_texts(task_sources(task), Stage(None, "reading"))
    (tmp_path / "center.txt").write_text("\n".join(lines) + "\n", encoding="utf8", newline="")
    assert read_texts(tmp_path / "center.txt") == lines
    assert set(lines) == {"one line", "the end"}


def test_at_most_512_texts_are_centered_on_whatever_their_order(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(600)]
    paths = [write(tmp_path / f"{name}.jsonl", [{"text": text} for text in part]) for name, part in
             (("first", texts[:400]), ("second", texts[300:]))]  # fmt: skip
    reports: list[tuple[str, int, int]] = []
    stage = Stage(lambda *report: reports.append(report), "reading")
    lines = single_line_texts(task_sources(paths), stage)
    assert len(lines) == len(set(lines) & set(texts)) == 512
    assert single_line_texts(task_sources(paths[::-1]), Stage(None, "")) == lines
    assert reports[-1] == ("reading", 2, 2)


def test_progress_of_recipes_is_added_up() -> None:
    reports: list[tuple[str, int, int]] = []
    latest: dict[str, tuple[int, int]] = {}
    for sweeps_left in (2, 1):
        progress = _accumulate_progress(lambda *report: reports.append(report), latest, sweeps_left)
        for done in (0, 3):
            progress("embedding", done, 5)
        progress("scoring", 1, 2)
    assert reports == [
        ("embedding", 0, 5),
        ("embedding", 3, 5),
        ("scoring", 1, 4),  # the layers of both recipes are known from the start
        ("embedding", 3, 10),
        ("embedding", 6, 10),
        ("scoring", 2, 4),
    ]


def test_layer_with_a_constant_last_token_has_no_score(recipes_sweep: tuple[SweepResult, list[Path]]) -> None:
    part = recipes_sweep[0].parts["yours"]
    assert 0 not in part.frame["layer"].to_list()
    assert any(remark.startswith("No score at layer 0 of ") for remark in part.notes.remarks)


@pytest.mark.long
def test_page_names_the_best_recipe_and_is_reproducible(
    recipes_sweep: tuple[SweepResult, list[Path]], tiny_folder: Folder
) -> None:
    result, _ = recipes_sweep
    summaries = result.summaries()
    best = max(summaries, key=lambda name: summaries[name].average.best)  # type: ignore[union-attr]
    assert (result.recipe, result.best()) == (best, summaries[best].average.best_layer)  # type: ignore[union-attr]
    page = result.html()
    assert "Recipes and layers" in page
    assert f"{best} at layer {result.best()} of {DEPTH} scores" in page
    loaded = SweepResult.load(result.folder)
    assert loaded.parts
    assert loaded.frame.equals(result.frame)
    assert loaded.html() == page
    assert set(result.plots()) == {"recipes", "scores"}


@pytest.mark.slow
def test_recipes_with_similar_or_unusual_names_have_separate_folders(tiny_folder: Folder, tmp_path: Path) -> None:
    names = ["my recipe", "my_recipe", "My recipe", "..", "x" * 300, "\u8981\u7d04"]
    recipes = [Recipe(name=name, template=f'{position} "{{text}}" is:') for position, name in enumerate(names)]
    task = write(tmp_path / "near.jsonl", ROWS["STS"] * 2)
    result = sweep(tiny_folder("Llama"), task, recipes=recipes, layers=[2], out=tmp_path / "out", **QUICK)
    folders = [path.name.lower() for path in (tmp_path / "out" / "recipes").iterdir()]
    assert len(set(folders)) == len(names)
    for folder in (result.folder, result.save(tmp_path / "elsewhere")):
        assert SweepResult.load(folder).frame.equals(result.frame)


def test_too_few_texts_to_center_on_are_refused_before_scoring(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [{"sentence1": a, "sentence2": b, "score": n} for n, (a, b) in enumerate(["ab", "cd", "ef"])]
    task = write(tmp_path / "few.jsonl", rows)
    with pytest.raises(
        OptionError, match=r"must not include 'plain\+center' .* at least 16 single-line texts, and the tasks have 6"
    ):
        sweep(tiny_folder("Llama"), task, recipes=["plain", "plain+center"], out=tmp_path / "out", **QUICK)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_printed_code_exports_a_centered_winner(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midlayer_encoders.sweeping.best_layer import export_lines

    task = write(tmp_path / "near.jsonl", ROWS["STS"] * 2)
    monkeypatch.chdir(tmp_path)
    result = sweep(tiny_folder("Llama"), task, recipes=["one-word+center"], layers=[2], out="out", **QUICK)
    lines = export_lines(result.notes, 2)
    assert lines["shell"].endswith("--layer 2 --recipe one-word --center out/center.txt --out layer-2")
    (code, shell) = map(html.unescape, re.findall(r"<pre><code>(.*?)</code></pre>", result.html(), re.DOTALL))
    assert (code.splitlines()[1:], shell) == ([lines["Python"]], lines["shell"])
    exec(code, {})  # as copied from the page
    plain = SentenceTransformer("layer-2", device="cpu")
    encoder = LayerEncoder(
        tiny_folder("Llama"), 2, recipe="one-word", center=read_texts("out/center.txt"), device="cpu"
    )
    np.testing.assert_allclose(plain.encode(["a text"]), encoder.encode(["a text"]), atol=1e-5)


@pytest.mark.long
def test_repeated_sweep_of_recipes_embeds_nothing(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"recipes": ["plain", "one-word", "one-word+center"], "out": tmp_path / "out", **QUICK}
    task = write(tmp_path / "near.jsonl", ROWS["STS"] * 2)
    first = sweep(tiny_folder("Llama"), task, **options)
    reports: list[tuple[str, int, int]] = []
    repeated = sweep(tiny_folder("Llama"), task, progress=lambda *report: reports.append(report), **options)
    assert repeated.frame.equals(first.frame)
    assert not [report for report in reports if report[0] == "embedding" and report[1]]
    scoring = [report for report in reports if report[0] == "scoring"]
    assert scoring[-1][1:] == (3 * (DEPTH + 1),) * 2
    assert [report[1] for report in scoring] == sorted(report[1] for report in scoring)  # over all recipes


@pytest.mark.long
def test_repeated_sweep_of_recipes_measures_nothing(tiny_folder: Folder, tmp_path: Path) -> None:
    task = write(tmp_path / "near.jsonl", ROWS["STS"] * 2)
    stages: set[str] = set()

    def run(**changes: Any) -> SweepResult:
        stages.clear()
        options: dict[str, Any] = {
            "recipes": ["plain", "one-word"], "layers": [1, 2], "metrics": ["prompt_entropy"], "views": 2,
            "metric_texts": 6, "workers": 1, "baselines": False, "out": tmp_path / "out", "device": "cpu", **changes,
        }  # fmt: skip
        return sweep(tiny_folder("Llama"), task, progress=lambda name, *_: stages.add(name), **options)

    first = run()
    assert {"embedding", "measuring"} <= stages
    assert first.num_kept == 0
    repeated = run()
    assert repeated.frame.equals(first.frame)
    assert stages == {"planning", "scoring", "confirming"}
    assert repeated.num_kept == 4
    changes = {
        "layers": [1, 3],
        "metrics": ["curvature"],
        "views": 3,
        "metric_texts": 5,
        "norm": "none",
        "max_length": 9,
    }
    for name, value in changes.items():
        changed = run(**{name: value})
        assert "measuring" in stages, name
        assert changed.num_kept == {"layers": 2, "norm": 0, "max_length": 0}.get(name, 4)


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ([], "`recipes` must name a recipe, but got none"),
        (["plain", "plain"], "`recipes` must have different names, but got 'plain' twice"),
        (["plain+cented"], "but got 'plain[+]cented'. Did you mean 'center'"),
        ("nothing", "`recipes` must be a Recipe or one of 'plain'"),
        (5, "`recipes` must be a Recipe or one of 'plain', .* but got 5"),
        (["plain+whiten"], "but got 'plain[+]whiten'"),
    ],
)
def test_invalid_recipes_are_refused(recipes: Any, message: str, tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        sweep(tiny_folder("Llama"), write_sts_task(tmp_path), recipes=recipes, out=tmp_path / "out", **QUICK)


def test_recipe_names_with_suffixes() -> None:
    assert recipe_of("recipe", "one-word+center").non_defaults() == {
        **RECIPES["one-word"].non_defaults(),
        "center": True,
    }
    assert EncoderOptions(recipe="plain+last").recreating() == {"recipe": "plain+last"}
    bare = recipe_of("recipe", "one-word+center+normalize").before_vectors()
    assert bare == recipe_of("recipe", "one-word")


def test_frame_of_several_recipes_must_be_filtered(recipes_sweep: tuple[SweepResult, list[Path]]) -> None:
    from midlayer_encoders.frame.summaries import summary

    frame = recipes_sweep[0].frame
    with pytest.raises(
        OptionError, match=r"must hold one recipe here, but has plain, yours, .* frame.filter\(recipe='plain'\)"
    ):
        summary(frame)
    assert summary(frame.filter(recipe="yours")) == recipes_sweep[0].summaries()["yours"]
