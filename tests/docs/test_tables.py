"""Tables in pages, against the functions that print them from the committed frames."""

import re
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from benchmarks.data import RESULTS
from benchmarks.pretraining import first
from tests.docs.running import ROOT


def rows(text: str) -> Iterator[tuple[int, str]]:
    """Yield the rows of tables, without their heads, and the lines they stand on."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        following = lines[number] if number < len(lines) else ""
        if line.startswith("|") and not re.fullmatch(r"[|\s-]+", line) and not re.fullmatch(r"\|[|\s-]+", following):
            yield number, line


def test_the_first_training_record_has_the_rows_that_its_frames_give() -> None:
    """The page leaves some rows out, and says of InfoNCE which way is better."""
    given = {row for table in first.tables() for _, row in rows(table)}
    page = (ROOT / "benchmarks" / "results" / "training_first.md").read_text(encoding="utf8")
    found = list(rows(page.replace("infonce (lower: more invariant)", "infonce")))
    assert len(found) > 30
    said = [f"benchmarks/results/training_first.md:{line}: {row}" for line, row in found if row not in given]
    assert not said, "\n".join(said)


def test_the_page_of_the_zoo_is_the_one_that_its_results_give() -> None:
    from benchmarks.zoo import table

    assert (ROOT / "benchmarks" / "zoo" / "README.md").read_text(encoding="utf8") == table.page()


def test_the_page_of_speech_has_the_rows_that_its_scores_give() -> None:
    scores = pl.read_csv(RESULTS / "speech.csv")
    given = []
    for task in ("words", "voices"):
        for layer in range(5):
            cells = [str(layer)]
            for method in ("sweep", "probe"):
                one = scores.filter(task=task, method=method, layer=layer).row(0, named=True)
                cells.append(f"{one['accuracy']:.1f} ({one['low']:.1f} to {one['high']:.1f})")
                gain = f"{one['gain']:+.1f} ({one['gain_low']:+.1f} to {one['gain_high']:+.1f})"
                cells.append(gain if layer < 4 else "–")
            given.append(f"| {' | '.join(cells)} |")
    assert [row for _, row in rows((RESULTS / "speech.md").read_text(encoding="utf8"))] == given


def test_the_tables_of_smaller_vectors_are_those_that_their_scores_give() -> None:
    frame = pl.read_csv(RESULTS / "dims.csv")
    means = frame.group_by("layer", "dims", "precision").agg(pl.col("value").mean())
    measured = []
    for dims in (384, 256, 128, 64, 32):
        for precision, bits in (("float32", 32), ("int8", 8), ("binary", 1)):
            values = frame.filter(layer=6, dims=dims, precision=precision)["value"].to_list()
            best = means.filter(dims=dims, precision=precision).sort("value").row(-1, named=True)
            cells = [f"{value:.2f}" for value in (*values, sum(values) / len(values))]
            cells.append(f"{best['layer']}: {best['value']:.2f}")
            measured.append(f"| {dims} | {precision} | {dims * bits // 8} | {' | '.join(cells)} |")
    differences = (
        frame.drop_nulls("mteb")
        .group_by("dataset", maintain_order=True)
        .agg((pl.col("value") - pl.col("mteb")).abs().max())
    )
    compared = f"| {' | '.join(f'{value:.4f}' for value in differences['value'])} |"
    assert [row for _, row in rows((RESULTS / "dims.md").read_text(encoding="utf8"))] == [*measured, compared]
    _, _, part = (ROOT / "docs" / "dims.md").read_text(encoding="utf8").partition("<!-- measured -->")
    stated = [row for _, row in rows(part.partition("<!-- /measured -->")[0])]
    assert len(stated) > 5
    assert set(stated) <= set(measured)


@pytest.mark.docs
def test_the_training_record_has_the_tables_that_its_frames_give() -> None:
    from benchmarks.pages import part_of
    from benchmarks.pretraining.tables import tables

    for name, table in tables().items():
        assert part_of(ROOT / "benchmarks" / "results" / "training.md", name) == table, (
            f"benchmarks/results/training.md, {name}"
        )


@pytest.mark.docs
def test_the_tables_of_rules_are_what_the_script_writes(request: pytest.FixtureRequest) -> None:
    """Those of the paper's models only where its tables are: they are not in the repository."""
    from benchmarks.selection import run

    tables = _reference(request)
    page = (run.HERE / "README.md").read_text(encoding="utf8")
    for name, lines in run.parts(tables).items():
        stated = page.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0].splitlines()
        for there, made in zip(stated, lines, strict=True):
            assert there == made, f"benchmarks/selection/README.md, {name}"


def _reference(request: pytest.FixtureRequest) -> Path | None:
    try:
        tables = request.getfixturevalue("shared_data").parent / "reference"
    except pytest.skip.Exception:
        return None
    return tables if tables.is_dir() else None
