"""mteb's tasks without a network: an error within seconds that names the cure, and no folder left behind."""

import time
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants as hub

from midlayer_encoders.sweeping.mteb_jobs import DataUnavailableError
from midlayer_encoders.tasks.sources import task_sources
from tests.cli.calls import run
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, sweep, write_sts_task

pytestmark = MTEB

MESSAGE = r"The data of STS1\d is not cached .* cannot be reached \(ConnectError.*Score your own data or 'builtin'"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the hub be a port at which nobody listens, without offline mode, as on a laptop in a train."""
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("out", [None, "runs/mine"])
def test_sweep_of_tasks_without_data_fails_before_it_starts(out: str | None) -> None:
    task_sources("STS12")  # imports mteb
    start = time.perf_counter()
    with pytest.raises(DataUnavailableError, match=MESSAGE):
        sweep("no-such-model", ["STS12", "STS13"], out=out)
    with pytest.raises(DataUnavailableError, match=MESSAGE):
        run("sweep", ".", "--tasks", "STS12", *(["--out", out] if out else []))
    assert time.perf_counter() - start < 15  # datasets alone waits for 23 seconds
    assert not list(Path().iterdir())


def test_one_task_without_data_is_a_failure_beside_the_others(tiny_folder: Folder, tmp_path: Path) -> None:
    tasks = ["STS12", write_sts_task(tmp_path)]
    result = sweep(tiny_folder("Llama"), tasks, layers=[1], out=tmp_path / "out", **QUICK)
    assert list(result.failures) == ["STS12"]
    assert "The data of STS12 is not cached on this machine" in result.failures["STS12"]
    assert len(result.frame.filter(kind="score")) == 1
