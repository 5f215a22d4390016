"""Vectors reused from a killed run or from a sweep."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from midlayer_encoders import LayerEncoder, embed
from midlayer_encoders.errors import FolderError, OptionError
from midlayer_encoders.files import folder_lock
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder

pytestmark = MTEB

TEXTS = [f"text number {number} of several" for number in range(40)]


@contextmanager
def passed(encoder: LayerEncoder) -> Iterator[list[int]]:
    """Collect how many inputs pass through the model at a time."""
    recorded: list[int] = []
    hook = encoder[0].model.register_forward_pre_hook(
        lambda _, __, kwargs: recorded.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    yield recorded
    hook.remove()


@pytest.fixture
def encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


class StopError(Exception):
    """Ends a run in the middle."""


def stop_after(count: int) -> Callable[[str, int, int], None]:
    def progress(stage: str, process: int, _: int) -> None:
        if stage == "embedding" and process >= count:
            raise StopError

    return progress


def test_stopped_run_continues_and_gives_the_same_file(encoder: LayerEncoder, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layers": [0, 3], "token_budget": 256}
    out = tmp_path / "v.npy"
    with passed(encoder) as recorded:
        complete = embed(encoder, TEXTS, tmp_path / "whole.npy", **options)
    once = sum(recorded)
    with passed(encoder) as recorded:
        with pytest.raises(StopError):
            embed(encoder, TEXTS, out, progress=stop_after(16), **options)
        assert not out.exists()
        first = sum(recorded)
    with passed(encoder) as recorded:
        embed(encoder, TEXTS, out, **options)
    assert first < once
    assert sum(recorded) < once - 8  # what was stored did not pass again
    assert out.read_bytes() == complete.read_bytes()
    assert not (tmp_path / "v.npy.part").exists()


def test_another_model_does_not_reuse_vectors_of_the_first(
    encoder: LayerEncoder, tiny_folder: Folder, tmp_path: Path
) -> None:
    with pytest.raises(StopError):
        embed(encoder, TEXTS, tmp_path / "v.npy", progress=stop_after(16), token_budget=256)
    other_encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", norm="none")
    loaded = np.load(embed(other_encoder, TEXTS, tmp_path / "v.npy", token_budget=256))
    np.testing.assert_allclose(loaded, other_encoder.encode_layers(TEXTS), atol=1e-5)


def test_second_run_to_the_same_path_is_refused(encoder: LayerEncoder, tmp_path: Path) -> None:
    with folder_lock(tmp_path / "v.npy.part"), pytest.raises(FolderError, match="is in use"):
        embed(encoder, TEXTS, tmp_path / "v.npy")


def test_folder_of_a_run_is_never_a_link_or_a_folder_of_other_files(encoder: LayerEncoder, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine.txt").write_text("mine")
    part = tmp_path / "v.npy.part"
    part.symlink_to(tmp_path / "home")
    with pytest.raises(OptionError, match=r"must not be next to a link v.npy.part.*: remove it"):
        embed(encoder, TEXTS[:2], tmp_path / "v.npy")
    part.unlink()
    part.mkdir()
    (part / "0").symlink_to(tmp_path / "home")
    with pytest.raises(OptionError, match=r"but .*v.npy.part holds other files, such as '0'"):
        embed(encoder, TEXTS[:2], tmp_path / "v.npy")
    (part / "0").unlink()
    (part / "mine.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"but .*v.npy.part holds other files, such as 'mine.txt': choose another"):
        embed(encoder, TEXTS[:2], tmp_path / "v.npy")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["mine.txt"]
    assert (part / "mine.txt").read_text() == "mine"


@pytest.mark.slow
def test_killed_command_can_be_resumed(tiny_folder: Folder, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "v.safetensors"
    texts.write_text("\n".join(TEXTS))
    killed = (
        "import os, signal, sys; from midlayer_encoders import embed\n"
        "def progress(stage, done, total):\n"
        "    if done >= 16: os.kill(os.getpid(), signal.SIGKILL)\n"
        "embed(sys.argv[1], open(sys.argv[2]).read().splitlines(), sys.argv[3], device='cpu', token_budget=256,"
        " progress=progress)"
    )
    process = subprocess.run([sys.executable, "-c", killed, tiny_folder("Llama"), str(texts), str(out)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    assert list((tmp_path / "v.safetensors.part").rglob("*.safetensors"))
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with passed(encoder) as recorded:
        embed(encoder, TEXTS, out, token_budget=256)
    assert 0 < sum(recorded) < 36
    with safe_open(out, "np") as file:
        stacked = np.stack([file.get_tensor(f"layer.{layer}") for layer in range(5)])
    np.testing.assert_allclose(stacked, encoder.encode_layers(TEXTS), atol=1e-5)
    assert not (tmp_path / "v.safetensors.part").exists()
