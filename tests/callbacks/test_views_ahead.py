"""Views that a thread makes between the construction of a callback and its first run."""

import copy
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from midlayer_encoders.callbacks._settings import make_views

from midlayer_encoders.callbacks import LayerMetricsCallback, _settings
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.metrics.text_views import augment
from tests.callbacks.training import ADVICE, INPUTS, TOKENIZER, Boring, fit, generators, neox

pytestmark = ADVICE


@pytest.fixture
def made_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that made views."""
    names: list[str] = []

    def recorded(texts: Sequence[str], **options: Any) -> list[list[str]]:
        names.append(threading.current_thread().name)
        time.sleep(0.2)
        return augment(texts, **options)

    monkeypatch.setattr(_settings, "_augment", lru_cache(maxsize=8)(recorded))
    return names


def make_callback(texts: Any = INPUTS, **options: Any) -> LayerMetricsCallback:
    return LayerMetricsCallback(list(texts), TOKENIZER, figures=False, **options)


def wait_for(made_in: list[str]) -> None:
    deadline = time.monotonic() + 60
    while not made_in:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_thread_makes_the_views_once(made_in: list[str], tmp_path: Path) -> None:
    before = generators()
    callback = make_callback(dirpath=tmp_path)
    wait_for(made_in)
    assert make_views(callback.texts_or_dataloader, 2, 0) == augment(INPUTS, views=2)
    assert generators() == before
    fit(Boring(neox()), tmp_path, [callback], max_steps=1)
    assert made_in == ["midlayer-views"]


def test_views_are_those_of_the_texts_at_the_run(made_in: list[str]) -> None:
    callback = make_callback()
    wait_for(made_in)
    callback.texts_or_dataloader.append("one more text")  # type: ignore[union-attr]
    assert make_views(callback.texts_or_dataloader, 2, 0) == augment([*INPUTS, "one more text"], views=2)


@pytest.mark.parametrize("options", [{"metrics": "curvature"}, {"views": [INPUTS, INPUTS]}])
def test_no_thread_without_a_use_for_views(options: dict[str, Any], made_in: list[str]) -> None:
    make_callback(**options)
    time.sleep(0.05)
    assert not made_in


@pytest.mark.parametrize("copied", [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy])
def test_callback_can_be_copied_while_the_thread_works(copied: Any, made_in: list[str]) -> None:
    callback = make_callback()
    wait_for(made_in)
    assert make_views(copied(callback).texts_or_dataloader, 2, 0) == augment(INPUTS, views=2)
    assert made_in == ["midlayer-views"]


def test_error_is_raised_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failed_in: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        failed_in.append(threading.current_thread().name)
        raise MidlayerError("no views today")

    monkeypatch.setattr(_settings, "_augment", fail)
    callback = make_callback(dirpath=tmp_path)
    wait_for(failed_in)
    with pytest.raises(MidlayerError, match="no views today"):
        fit(Boring(neox()), tmp_path, [callback], max_steps=1)
    assert failed_in == ["midlayer-views", "MainThread"]
    assert "no views today" not in capfd.readouterr().err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_fork_waits_for_the_thread(made_in: list[str]) -> None:
    callback = make_callback()
    wait_for(made_in)
    assert _settings._augment.cache_info().currsize == 0  # the thread still works
    child = os.fork()
    if child == 0:
        is_made = _settings._augment.cache_info().currsize == 1
        os._exit(0 if is_made and len(make_views(callback.texts_or_dataloader, 2, 0)) == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(make_views(callback.texts_or_dataloader, 2, 0)) == 2


@pytest.mark.long
@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)"])
def test_unused_callback_neither_prints_nor_delays_the_exit(ending: str) -> None:
    program = f"""
import time
from midlayer_encoders.callbacks import _settings
_settings._augment = lambda *_, **__: time.sleep(600)
_settings.CallbackSettings(["one text", "another text"])
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3 if ending else 0, b"", b"")
