"""A sweep in units: the same result as one process, and only what is missing is done."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polars.testing import assert_frame_equal

from midlayer_encoders import LayerEncoder, sweep, sweep_many
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.extras.scaling import units
from midlayer_encoders.extras.scaling.sweep_units import sweep_units
from midlayer_encoders.sweeping.embedder import Embedder
from midlayer_encoders.sweeping.sweeps import Sweep
from tests.scaling.jobs import Jobs

RECIPES = ["plain", "one-word", "plain+center"]
Folder = Callable[[str], str]
pytestmark = pytest.mark.filterwarnings("ignore")  # from mteb and datasets


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    words = ["red apple", "green pear", "fast car", "slow train", "blue plum", "old bus"]
    labeled = [{"text": f"{word} {n}", "label": int(n % 6 in (2, 3, 5))} for n in range(24) for word in [words[n % 6]]]
    pairs = [{"sentence1": f"{words[n % 6]} {n}", "sentence2": words[n * n % 6], "score": n % 5} for n in range(12)]
    paths = []
    for name, rows in {"labeled": labeled, "pairs": pairs}.items():
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("\n".join(map(json.dumps, rows)))
    return [str(path) for path in paths]


def steps(jobs: Jobs) -> list[tuple[str, str | None]]:
    return [(unit.step, unit.items[0] if unit.items else None) for unit in jobs.calls]


@pytest.mark.long
def test_units_give_the_result_of_one_process(
    tiny_folder: Folder, tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_MAX_INPUTS", 15)
    model = tiny_folder("Llama")
    arguments: dict[str, Any] = {"recipes": RECIPES, "device": "cpu", "layers": [2, -1], "metrics": ["curvature"]}
    expected = sweep(model, tasks, out=tmp_path / "one", **arguments)
    jobs = Jobs(lost=[1])
    reports: list[tuple[str, int, int]] = []
    arguments |= {"out": tmp_path / "many", "progress": lambda *report: reports.append(report)}
    result = sweep(model, tasks, executor=jobs, **arguments)
    assert_frame_equal(result.frame, expected.frame)
    assert (tmp_path / "many/frame.csv").read_bytes() == (tmp_path / "one/frame.csv").read_bytes()
    assert result.winner.notes.baselines == expected.winner.notes.baselines
    done = steps(jobs)
    assert done[0] == ("plan", None)
    counts = Counter(recipe for step, recipe in done if step == "embed")
    assert sum(counts.values()) == sum(counts[name] for name in RECIPES[:2]) > 4, "centering needs no other vectors"
    assert [step for step, _ in done[-7:]] == ["score"] * 6 + ["finish"]
    assert reports[-1] == ("units", len(done) - 1, len(done) - 1)
    again = Jobs()
    sweep(model, tasks, executor=again, **arguments)
    assert not again.calls, "everything is done"
    sweep(model, tasks, executor=again, **arguments | {"recipes": [*RECIPES, "echo"]})
    assert steps(again)[0] == ("plan", None)
    assert {recipe for _, recipe in steps(again)} == {"echo", None}, "the others are done"
    again.calls.clear()
    Path(tasks[0]).write_text(Path(tasks[0]).read_text() + '\n{"text": "new", "label": 1}')
    sweep(model, tasks, executor=again, **arguments)
    scored = [unit for unit in again.calls if unit.step == "score"]
    assert {unit.items[1] for unit in scored} == {0}, "the second task is done"


@pytest.mark.long
def test_blocks_are_embedded_and_the_other_units_only_read(
    tiny_folder: Folder, tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vector that no block held would be embedded when its task is scored."""
    embedded: list[str] = []
    step: list[str] = []
    original = Embedder.embed
    monkeypatch.setattr(Embedder, "embed", lambda self, *args: (embedded.append(step[-1]), original(self, *args))[1])

    class Watching(Jobs):
        def submit(self, function: Any, unit: Any) -> Any:
            step.append(unit.step)
            return super().submit(function, unit)

    arguments: dict[str, Any] = {"layers": [1, -1], "baselines": False, "device": "cpu", "recipes": RECIPES}
    sweep(tiny_folder("Llama"), tasks, executor=Watching(), out=tmp_path / "many", **arguments)
    assert set(embedded) == {"embed"}
    assert set(step) == {"plan", "embed", "score", "finish"}


@pytest.mark.long
def test_failed_models_are_named_and_the_others_are_not_repeated(
    tiny_folder: Folder, tasks: list[str], tmp_path: Path
) -> None:
    good, bad = tiny_folder("Llama"), str(tmp_path / "absent")
    arguments: dict[str, Any] = {"out": tmp_path / "many", "device": "cpu", "layers": [1], "baselines": False}
    with pytest.raises(MidlayerError, match=r"1 unit failed, such as .*absent.*, plan: .*Run the same call again"):
        sweep_many([good, bad], tasks, executor=Jobs(), **arguments)
    again = Jobs()
    with pytest.raises(MidlayerError, match="1 unit failed"):
        sweep_many([good, bad], tasks, executor=again, **arguments)
    assert [unit.step for unit in again.calls] == ["plan"]
    lost = Jobs(lost=range(9))
    with pytest.raises(MidlayerError, match="ended 3 times without a result"):
        sweep_many([good], tasks, executor=lost, **arguments | {"out": tmp_path / "lost"})
    assert len(lost.calls) == 3


@pytest.mark.long
def test_task_that_fails_is_in_the_result_and_is_repeated(
    tiny_folder: Folder, tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"out": tmp_path / "many", "device": "cpu", "layers": [1], "baselines": False}
    from midlayer_encoders.sweeping import mteb_jobs, task_scoring

    with monkeypatch.context() as patch:
        broken = lambda *_, **__: (_ for _ in ()).throw(ValueError("no such label"))  # noqa: E731
        patch.setattr(task_scoring, "record", broken)
        patch.setattr(mteb_jobs.mteb, "evaluate", broken)
        result = sweep(tiny_folder("Llama"), tasks, executor=Jobs(), **arguments)
    assert len(result.failures) == 2
    result = sweep(tiny_folder("Llama"), tasks, executor=(again := Jobs()), **arguments)
    assert not result.failures
    assert [unit.step for unit in again.calls] == ["score", "score", "finish"]


def test_identity_of_a_unit_changes_with_what_it_writes(tiny_folder: Folder, tasks: list[str], tmp_path: Path) -> None:
    model = tiny_folder("Llama")

    def identities(**changes: Any) -> dict[tuple[Any, ...], str]:
        given = {"recipes": ["plain", "echo"], "out": tmp_path / "out", "baselines": False, **changes}
        request = Sweep(given.pop("model", model), given.pop("tasks", tasks), **given)
        return {(unit.step, *unit.items): unit.outcome.name for unit in sweep_units("m", request)}

    before = identities()
    assert len(set(before.values())) == len(before) == 1 + 4 + 1
    for change in ({"pooling": "max"}, {"layers": [1]}, {"dims": [8]}, {"limit": 10}, {"store": "s"}):
        assert not set(identities(**change).values()) & set(before.values()), change
    scored = {key: each for key, each in before.items() if key[0] == "score"}
    assert scored.items() <= identities(recipes=["plain", "echo", "one-word"]).items()
    first = {key: each for key, each in identities(tasks=tasks[:1]).items() if key[0] == "score"}
    assert first.items() <= before.items()


def test_models_with_one_folder_and_other_mistakes_are_refused(
    tiny_folder: Folder, tasks: list[str], tmp_path: Path
) -> None:
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "`models` must have different names": (["org/model", "org_model"], {}),
        "`models` must be a list": ("org/model", {}),
        "`executor` must have a method `submit`, as in `open_executor`": (["m"], {"executor": "slurm"}),
    }
    for message, (models, options) in cases.items():
        with pytest.raises(OptionError, match=message):
            sweep_many(models, tasks, out=tmp_path / "many", **options)
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with pytest.raises(OptionError, match="`model` must be a folder or hub name with an executor"):
        sweep(encoder, tasks, executor=Jobs(), out=tmp_path / "out")
