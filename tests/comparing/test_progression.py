import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import app
from midlayer_encoders.comparing import ProgressionResult, progression
from midlayer_encoders.comparing.checkpoints import find_checkpoints
from midlayer_encoders.encoder.whole_model import measure
from midlayer_encoders.errors import MidlayerError, ModelNotFoundError, OptionError
from tests.scaling.jobs import Jobs
from tests.support.families import DEPTH
from tests.support.tiny_folders import TEXTS, save_tiny

METRICS = ["curvature", "dataset_entropy", "infonce"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of three checkpoints and something else."""
    folder = tmp_path_factory.mktemp("run")
    for name, seed in (("checkpoint-16", 2), ("checkpoint-2", 1), ("step1", 0)):
        save_tiny("GPTNeoX", folder / name, seed=seed)
    (folder / "logs").mkdir()
    return folder


@pytest.fixture(scope="module")
def done(run: Path, tmp_path_factory: pytest.TempPathFactory) -> ProgressionResult:
    return progress(run, out=tmp_path_factory.mktemp("out"))


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the figures, which take longer than everything else; each step is saved anyway."""
    monkeypatch.setattr(ProgressionResult, "save", lambda self: self.folder)


def progress(run: Path | str, **options: object) -> ProgressionResult:
    settings = {"texts": TEXTS, "metrics": METRICS, "device": "cpu", "dataset": "mine"} | options
    return progression(str(run), **settings)  # type: ignore[arg-type]


def test_every_step_matches_a_separate_measurement(run: Path, done: ProgressionResult) -> None:
    assert done.frame["revision"].unique(maintain_order=True).to_list() == ["step1", "step2", "step16"]
    assert set(done.frame["model"]) == {f"local/{run.name}"}
    for name, step in (("step1", "step1"), ("checkpoint-2", "step2"), ("checkpoint-16", "step16")):
        frame = measure(
            LayerEncoder(str(run / name), -1, norm="none", device="cpu"), TEXTS, metrics=METRICS, dataset="mine"
        )
        own_rows = done.frame.filter(pl.col("revision") == step)
        assert_frame_equal(own_rows.drop("model", "revision"), frame.drop("model", "revision"), rel_tol=1e-12)
        assert len(own_rows) == (DEPTH + 1) * len(METRICS)


def test_alignment_uses_the_seed_of_the_progression(run: Path) -> None:
    steps: list[tuple[int, int]] = []
    options = {"metrics": ["infonce", "alignment"], "seed": 5}
    result = progress(run, revisions=["step1", "checkpoint-2"], progress=lambda _, *step: steps.append(step), **options)
    encoder = LayerEncoder(str(run / "checkpoint-2"), -1, norm="none", device="cpu")
    expected = measure(encoder, TEXTS, dataset="mine", **options)  # type: ignore[arg-type]
    own_rows = result.frame.filter(pl.col("revision") == "step2")
    assert_frame_equal(own_rows.drop("model", "revision"), expected.drop("model", "revision"), rel_tol=1e-12)
    assert steps[-1] == (8 * len(TEXTS), 8 * len(TEXTS)), "texts, copies and two views at two steps"
    assert steps == sorted(steps), "steps are never taken back"


def test_everything_is_written(done: ProgressionResult) -> None:
    assert done.folder is not None
    assert_frame_equal(pl.read_parquet(done.folder / "frame.parquet"), done.frame)
    assert pl.read_csv(done.folder / "changes.csv").height == 2 * (DEPTH + 1) * len(METRICS)
    assert {path.name for path in done.folder.glob("*.png")} == {"curves.png"}
    assert "GPTNeoX" not in (page := (done.folder / "report.html").read_text())
    assert all(name in page for name in METRICS)


@pytest.mark.long
@pytest.mark.usefixtures("unsaved")
def test_killed_run_continues_and_gives_the_same_result(run: Path, done: ProgressionResult, tmp_path: Path) -> None:
    reports: list[str] = []

    def killed(name: str, *_: int) -> None:
        reports.append(name)
        if name == "checkpoint-2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        progress(run, out=tmp_path, progress=killed)
    (saved,) = (tmp_path / "steps").iterdir()
    written = saved.stat().st_mtime_ns
    counts: dict[str, list[int]] = {}
    result = progress(run, out=tmp_path, progress=lambda name, done, _: counts.setdefault(name, []).append(done))
    assert_frame_equal(result.frame, done.frame)
    assert saved.stat().st_mtime_ns == written
    assert counts["step1"] == [3 * len(TEXTS)]  # reported at once: not measured again
    assert counts["checkpoint-2"][-1] == 6 * len(TEXTS)
    assert not list((tmp_path / "steps").glob(".*"))


@pytest.mark.long
@pytest.mark.usefixtures("unsaved")
def test_another_option_or_changed_checkpoint_is_measured_again(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    names = ["step1", "checkpoint-2"]
    options = {"metrics": "curvature", "out": tmp_path / "out"}
    before = progress(copied, revisions=names, **options)
    save_tiny("GPTNeoX", copied / "checkpoint-2", seed=5)
    after = progress(copied, revisions=names, **options)
    same = before.frame["value"] == after.frame["value"]
    assert same.to_list() == (before.frame["revision"] == "step1").to_list()
    progress(copied, revisions=names, **(options | {"texts": TEXTS[:4]}))
    assert len(list((tmp_path / "out" / "steps").iterdir())) == 2 + 1 + 2


@pytest.mark.long
def test_one_model_is_in_memory_at_a_time(run: Path, made: weakref.WeakSet[LayerEncoder]) -> None:
    alive: list[int] = []
    progress(run, metrics="curvature", progress=lambda *_: alive.append(len(made)))
    assert set(alive) == {1}
    assert len(alive) >= 3


@pytest.mark.long
@pytest.mark.usefixtures("unsaved")
def test_failed_revision_is_named_and_the_others_continue(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    (copied / "checkpoint-2" / "model.safetensors").write_bytes(b"torn")
    result = progress(copied, metrics="curvature", out=tmp_path / "out")
    assert list(result.failures) == ["checkpoint-2"]
    assert set(result.frame["revision"]) == {"step1", "step16"}
    assert "checkpoint-2 failed: " in result.to_html().read_text()
    for name in ("step1", "checkpoint-16"):
        (copied / name / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(MidlayerError, match=r"No revision could be measured. step1: .*checkpoint-16: "):
        progress(copied, metrics="curvature")


def test_revisions_are_names_steps_or_paths(run: Path) -> None:
    checkpoints = find_checkpoints(str(run), ["16", "step2", "step1"])
    assert [(item.name, item.step, item.revision) for item in checkpoints] == [
        ("step1", 1, None),
        ("checkpoint-2", 2, None),
        ("checkpoint-16", 16, None),
    ]
    paths = [str(run / "checkpoint-16"), str(run / "step1")]
    assert [item.source for item in find_checkpoints("anything", paths)] == paths[::-1]


def test_invalid_revisions_are_refused_before_reading_files(run: Path, tmp_path: Path) -> None:
    def refused(words: str, *, model: Path | str = run, revisions: list[str] | None = None) -> None:
        with pytest.raises(OptionError, match=words):
            progress(model, revisions=revisions, texts=TEXTS)

    refused("two or more, .*but got 'step1' alone", revisions=["step1"])
    refused("'step1' and 'step1' are both of step 1", revisions=["step1", "1"])
    refused("'step3' is none of them. There are: step1, checkpoint-2, checkpoint-16", revisions=["step1", "step3"])
    refused("must name a training step.*'main'", revisions=["step1", "main"])
    refused("must be a folder that contains checkpoints, .* holds config.json", model=run / "step1")
    refused("must be a folder that contains checkpoints, .* holds nothing", model=tmp_path)
    (tmp_path / "epoch=1-step=500.ckpt").touch()
    refused(r"holds epoch=1-step=500.ckpt", model=tmp_path)
    refused("is not a local folder", model=tmp_path / "epoch=1-step=500.ckpt")
    refused("`revisions` must be given for a model on the hub", model="EleutherAI/pythia-14m")
    with pytest.raises(OptionError, match=r"Write \['step1'\]"):
        find_checkpoints(str(run), "step1")
    with pytest.raises(ModelNotFoundError, match="'step1' is not cached"):
        progress("EleutherAI/pythia-no-such", revisions=["step1", "step2"])


def test_checkpoints_of_different_depth_are_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step1", tmp_path / "step1")
    config = tmp_path / "step2" / "config.json"
    config.parent.mkdir()
    text = (run / "step1" / "config.json").read_text()
    shutil.copy(run / "step1" / "tokenizer.json", config.parent)
    config.write_text(text.replace(f'"num_hidden_layers": {DEPTH}', '"num_hidden_layers": 9'))
    with pytest.raises(OptionError, match=f"as many blocks at every step, but step1 has {DEPTH}, step2 has 9"):
        progress(tmp_path)


def test_checkpoint_without_tokenizer_is_refused(run: Path, tmp_path: Path) -> None:
    for name in ("step1", "checkpoint-2"):
        shutil.copytree(run / name, tmp_path / name, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(OptionError, match=r"step1 has none\. .*save_pretrained.*processing_class=tokenizer"):
        progress(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"texts": ["one"]}, "must hold 2 texts or more, but got 1"),
        ({"texts": "a string"}, "but got one: 'a string'"),
        ({"metrics": "curvatur"}, "Did you mean 'curvature'"),
        ({"norm": "finale"}, "Did you mean 'final'"),
        ({"layers": [9]}, r"in \[0, 4\]"),
    ],
)
def test_invalid_arguments_are_not_counted_as_failures(run: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        progress(run, **options)


def test_result_without_a_folder_is_refused(run: Path, done: ProgressionResult, tmp_path: Path) -> None:
    separate = ProgressionResult(done.frame, None, {})
    with pytest.raises(OptionError, match="`folder` must be set here"):
        separate.to_html()
    assert separate.to_html(tmp_path / "page.html").is_file()


def test_command_prints_and_writes(run: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    out = tmp_path / "out"
    command = ["progression", str(run), "--texts", str(tmp_path / "t.txt"), "--out", str(out), "--device", "cpu"]
    command += ["--metrics", "curvature,first_token_share", "--revisions", "step1,step16"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "settled within 10 %" in result.output
    assert set(pl.read_csv(out / "frame.csv")["revision"]) == {"step1", "step16"}
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_revisions_on_the_hub_are_read_from_its_cache(run: Path, tmp_path: Path) -> None:
    """A cache as the hub's client lays it out: a reference for each branch, a folder of files for each commit."""
    home = tmp_path / "hub" / "models--some--model"
    for number, name in enumerate(("step1", "checkpoint-2")):
        commit = f"{number}" * 40
        shutil.copytree(run / name, home / "snapshots" / commit)
        (home / "refs").mkdir(parents=True, exist_ok=True)
        (home / "refs" / f"step{number + 1}").write_text(commit)
    (tmp_path / "t.txt").write_text("\n".join(TEXTS * 2))
    common = ["--texts", str(tmp_path / "t.txt"), "--metrics", "curvature", "--out"]
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def midlayer(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "midlayer_encoders.cli", *words], check=True, env=environment)

    midlayer("progression", "some/model", "--revisions", "step1,step2", *common, str(tmp_path / "out"))
    frame = pl.read_csv(tmp_path / "out" / "frame.csv")
    assert set(frame["model"]) == {"some/model"}
    assert set(frame["revision"]) == {"step1", "step2"}
    midlayer("compare", "some/model@step1", "some/model@step2", *common, str(tmp_path / "compared"))
    compared = pl.read_csv(tmp_path / "compared" / "frame.csv")
    keys = ["revision", "layer"]
    assert_frame_equal(compared.sort(keys), frame.with_columns(dataset=pl.lit("t")).sort(keys), rel_tol=1e-6)
    assert set(pl.read_csv(tmp_path / "compared" / "differences.csv")["model"]) == {"some/model@step2"}


@pytest.mark.long
def test_jobs_measure_the_steps_of_one_process(
    run: Path, done: ProgressionResult, tmp_path: Path, unsaved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reports: list[tuple[str, int, int]] = []
    jobs = Jobs(lost=[1])
    arguments: dict[str, Any] = {"out": "out", "progress": lambda *report: reports.append(report)}
    result = progress(run, executor=jobs, **arguments)
    assert result.frame.equals(done.frame)
    assert [job.label for job in jobs.calls] == ["step1", "checkpoint-2", "checkpoint-16", "checkpoint-2"]
    assert reports[-1] == ("units", 3, 3)
    again = Jobs()
    assert progress(run, executor=again, **arguments).frame.equals(done.frame)
    assert not again.calls, "every step is written"
    next((tmp_path / "out/steps").glob("step16.*")).unlink()
    assert progress(run, executor=again, **arguments).frame.equals(done.frame)
    assert [job.label for job in again.calls] == ["checkpoint-16"]


@pytest.mark.long
def test_failed_and_lost_jobs_are_failures(
    run: Path, done: ProgressionResult, tmp_path: Path, unsaved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(run, tmp_path / run.name)
    (folder / "checkpoint-2/model.safetensors").write_bytes(b"no weights")
    alone = progress(folder, out=tmp_path / "one")
    result = progress(folder, out=tmp_path / "jobs", executor=Jobs())
    assert result.frame.equals(alone.frame)
    assert result.failures == alone.failures
    lost = progress(folder, out=tmp_path / "lost", executor=Jobs(lost=[2, 3, 4]))
    assert lost.failures["checkpoint-16"].startswith("its process ended 3 times without a result: BrokenExecutor")
    assert set(lost.frame["revision"]) == {"step1"}
    with pytest.raises(MidlayerError, match=r"No revision could be measured\. step1: its process ended 3 times"):
        progress(folder, out=tmp_path / "none", executor=Jobs(lost=range(9)))


def test_wrong_arguments_of_jobs_are_refused(run: Path, tmp_path: Path) -> None:
    cases: dict[str, dict[str, object]] = {
        "`out` must be a folder with an executor": {"executor": Jobs()},
        "`executor` must have a method `submit`, as in": {"executor": "slurm", "out": tmp_path / "out"},
        "`executor` must have a method `submit`": {"executor": 3, "out": tmp_path / "out"},
    }
    for message, options in cases.items():
        with pytest.raises(OptionError, match=message):
            progress(run, **options)
