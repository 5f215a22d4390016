"""A sweep over recipes: each is the sweep of an encoder with that recipe, and the exported winner scores as it said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder, Recipe
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError
from midlayer_encoders.media.text_lists import read_texts
from midlayer_encoders.recipes import recipe_of
from midlayer_encoders.sweeping import RecipesResult, SweepResult
from tests.families import DEPTH
from tests.others_warnings import MTEB
from tests.sweeping.scoring import QUICK, mteb_score, near, ranks, sweep
from tests.tasks.rows import ROWS, write

Folder = Callable[[str], str]
pytestmark = MTEB
YOURS = Recipe(name="yours", template='a "{text}" is:', pooling="last")


@pytest.fixture(scope="module")
def swept(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[RecipesResult, list[Path]]:
    home = tmp_path_factory.mktemp("recipes")
    tasks = [write(home / "near.jsonl", ROWS["STS"] * 6), ranks(home)]
    recipes = ["plain", YOURS, "echo", "plain+whiten+normalize"]
    result = sweep(tiny_folder("Llama"), tasks, recipes=recipes, layers=[0, 1, 3], out=home / "out", **QUICK)
    assert isinstance(result, RecipesResult)
    return result, tasks


def test_scores_are_those_of_encoders_with_the_recipe_by_mteb(
    swept: tuple[RecipesResult, list[Path]], tiny_folder: Folder
) -> None:
    result, tasks = swept
    center = read_texts(result.folder / "center.txt")
    options: dict[str, dict[str, Any]] = {
        "plain": {}, "yours": {"recipe": YOURS}, "echo": {"recipe": "echo"},
        "plain+whiten+normalize": {"center": center, "whiten": True, "normalize": True},
    }  # fmt: skip
    assert result.frame["recipe"].unique(maintain_order=True).to_list() == list(options)
    for (name, given), task in zip(options.items(), tasks * 2, strict=True):  # each on one: both types are there twice
        encoder = LayerEncoder(tiny_folder("Llama"), 3, device="cpu", **given)
        rows = result.frame.filter(pl.col("dataset").str.starts_with(task.stem), kind="score", layer=3, recipe=name)
        assert rows["value"].item() == pytest.approx(mteb_score(encoder, task), abs=2e-4), (name, task.stem)


def test_the_layer_whose_last_token_is_always_the_same_has_no_score(swept: tuple[RecipesResult, list[Path]]) -> None:
    part = swept[0].parts["yours"]
    assert 0 not in part.frame["layer"].to_list()
    assert any(remark.startswith("No score at layer 0 of ") for remark in part.notes.remarks)


def test_the_page_names_the_best_recipe_and_the_lines_that_make_it(
    swept: tuple[RecipesResult, list[Path]], tiny_folder: Folder
) -> None:
    result, _ = swept
    found = result.summaries()
    best = max(found, key=lambda name: found[name].average.best)  # type: ignore[union-attr]
    assert (result.recipe, result.best()) == (best, found[best].average.best_layer)  # type: ignore[union-attr]
    page = result.html()
    assert "Recipes and layers" in page
    assert f"{best} at layer {result.best()} of {DEPTH} scores" in page
    again = SweepResult.load(result.folder)
    assert isinstance(again, RecipesResult)
    assert again.frame.equals(result.frame)
    assert again.html() == page
    assert set(result.plots()) == {"recipes", "scores"}


@pytest.mark.slow
def test_recipes_of_like_or_odd_names_lie_apart_and_load_from_wherever_they_are_saved(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    names = ["my recipe", "my_recipe", "My recipe", "..", "x" * 300, "\u8981\u7d04"]
    recipes = [Recipe(name=name, template=f'{place} "{{text}}" is:') for place, name in enumerate(names)]
    task = write(tmp_path / "near.jsonl", ROWS["STS"] * 6)
    result = sweep(tiny_folder("Llama"), task, recipes=recipes, layers=[2], out=tmp_path / "out", **QUICK)
    folders = [path.name.lower() for path in (tmp_path / "out" / "recipes").iterdir()]
    assert len(set(folders)) == len(names)
    for folder in (result.folder, result.save(tmp_path / "elsewhere")):
        assert SweepResult.load(folder).frame.equals(result.frame)


def test_too_few_texts_to_center_on_are_refused_before_a_recipe_is_scored(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [{"sentence1": a, "sentence2": b, "score": n} for n, (a, b) in enumerate(["ab", "cd", "ef"])]
    task = write(tmp_path / "few.jsonl", rows)
    with pytest.raises(
        OptionError, match=r"must not include 'plain\+center' .* at least 16 single-line texts, and the tasks have 6"
    ):
        sweep(tiny_folder("Llama"), task, recipes=["plain", "plain+center"], out=tmp_path / "out", **QUICK)
    assert not (tmp_path / "out").exists()


def test_a_centered_winner_is_exported_by_its_line(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midlayer_encoders.sweeping.sweep_result import export_lines

    task = write(tmp_path / "near.jsonl", ROWS["STS"] * 6)
    monkeypatch.chdir(tmp_path)
    result = sweep(tiny_folder("Llama"), task, recipes=["one-word+center"], layers=[2], out="out", **QUICK)
    lines = export_lines(result.notes, 2)
    assert lines["shell"].endswith("--layer 2 --recipe one-word --center out/center.txt --out layer-2")
    exec("from midlayer_encoders import *\n" + lines["Python"], {})  # every name in it is there for whoever copies it
    plain = SentenceTransformer("layer-2", device="cpu")
    ours = LayerEncoder(tiny_folder("Llama"), 2, recipe="one-word", center=read_texts("out/center.txt"), device="cpu")
    np.testing.assert_allclose(plain.encode(["a text"]), ours.encode(["a text"]), atol=1e-5)


def test_a_sweep_of_recipes_goes_on_where_it_was_and_reads_nothing_again(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"recipes": ["plain", "one-word", "one-word+center"], "out": tmp_path / "out", **QUICK}
    task = write(tmp_path / "near.jsonl", ROWS["STS"] * 6)
    first = sweep(tiny_folder("Llama"), task, **how)
    seen: list[tuple[str, int, int]] = []
    again = sweep(tiny_folder("Llama"), task, progress=lambda *report: seen.append(report), **how)
    assert again.frame.equals(first.frame)
    assert not [report for report in seen if report[0] == "embedding" and report[1]]
    done = [report for report in seen if report[0] == "scoring"]
    assert done[-1][1:] == (3 * (DEPTH + 1),) * 2
    assert [report[1] for report in done] == sorted(report[1] for report in done)  # over all recipes


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ([], "`recipes` must name a recipe, but got none"),
        (["plain", "plain"], "`recipes` must have different names, but got 'plain' twice"),
        (["plain+cented"], "but got 'plain[+]cented'. Did you mean 'center'"),
        ("nothing", "`recipes` must be a Recipe or one of 'plain'"),
        (5, "`recipes` must be a Recipe or one of 'plain', .* but got 5"),
        (["plain+filter"], "`embed_filter` must be False for"),
    ],
)
def test_what_is_no_recipe_is_refused(recipes: Any, message: str, tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        sweep(tiny_folder("Llama"), near(tmp_path), recipes=recipes, out=tmp_path / "out", **QUICK)


def test_names_with_additions_make_what_they_say() -> None:
    assert recipe_of("recipe", "one-word+whiten").changed() == {
        **recipe_of("recipe", "one-word").changed(), "center": True, "whiten": True,
    }  # fmt: skip
    assert EncoderOptions(recipe="plain+last").recreating() == {"recipe": "plain+last"}
    bare = recipe_of("recipe", "one-word+center+filter").before_vectors()
    assert bare == recipe_of("recipe", "one-word")


def test_a_frame_of_several_recipes_is_to_be_filtered(swept: tuple[RecipesResult, list[Path]]) -> None:
    from midlayer_encoders.frame.summaries import summary

    frame = swept[0].frame
    with pytest.raises(
        OptionError, match=r"must hold one recipe here, but has plain, yours, .* frame.filter\(recipe='plain'\)"
    ):
        summary(frame)
    assert summary(frame.filter(recipe="yours")) == swept[0].summaries()["yours"]
