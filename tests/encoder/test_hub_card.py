"""What ``push_to_hub`` uploads: a card that names the repository, and lines that load it from there.

The hub itself is the one part that a test cannot run: ``HfApi`` is stood in for where it would reach it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import CommitInfo, HfApi, RepoUrl
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what was uploaded: the folder, and the options of the upload."""
    seen: dict[str, Any] = {"folder": tmp_path / "uploaded"}

    def upload_folder(self: HfApi, *, repo_id: str, folder_path: str, **options: Any) -> CommitInfo:
        shutil.copytree(folder_path, seen["folder"])
        seen.update(options)
        url = f"https://huggingface.co/{repo_id}/"
        return CommitInfo(url + "commit/1", "", "", "1", pr_url=url + "discussions/1")

    def create_repo(self: HfApi, repo_id: str, **_: Any) -> RepoUrl:
        named = repo_id if "/" in repo_id else f"someone/{repo_id}"  # as the hub completes it
        return RepoUrl(f"https://huggingface.co/{named}")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_branch", lambda *_, **__: None)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return seen


@pytest.mark.parametrize("branch", [None, "layer-2"])
def test_the_card_names_the_repository_and_its_lines_run(
    branch: str | None, hub: dict[str, Any], tiny_folder: Folder
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    encoder.push_to_hub("cut", revision=branch, replace_model_card=True)
    card = (hub["folder"] / "README.md").read_text()
    assert "\nsomeone/cut is local/" in card
    assert hub["commit_message"] == "Add new SentenceTransformer model"
    (lines,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    place = 'SentenceTransformer("someone/cut"' + (f', revision="{branch}")' if branch else ")")
    assert place in lines
    found: dict[str, Any] = {}
    exec(lines.replace(place, f'SentenceTransformer("{hub["folder"]}", device="cpu")'), found)
    np.testing.assert_array_equal(found["model"].encode(TEXTS), encoder.encode(TEXTS))


def test_the_card_of_a_folder_names_no_repository_after_a_push(
    hub: dict[str, Any], tiny_folder: Folder, tmp_path: Path
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    encoder.push_to_hub("someone/cut", revision="b", replace_model_card=True)
    encoder.save_pretrained(str(tmp_path / "folder"))
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "someone" not in card
    assert 'model = SentenceTransformer("sentence_transformers_model_id")' in card


def test_a_folder_that_is_pushed_later_by_sentence_transformers_alone_names_the_repository_too(
    hub: dict[str, Any], tiny_folder: Folder, tmp_path: Path
) -> None:
    LayerEncoder(tiny_folder("Llama"), 2, device="cpu").save_pretrained(str(tmp_path / "folder"))
    plain = SentenceTransformer(str(tmp_path / "folder"), device="cpu")
    plain.push_to_hub("cut", replace_model_card=True)
    assert 'model = SentenceTransformer("someone/cut")' in (hub["folder"] / "README.md").read_text()


def test_a_pull_request_says_how_to_load_what_it_adds(hub: dict[str, Any], tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    url = encoder.push_to_hub("someone/cut", create_pr=True, replace_model_card=True)
    assert url.endswith("discussions/1")
    (lines,) = re.findall(r"```python\n(.*?)```", hub["commit_description"], re.DOTALL)
    assert '    "someone/cut",\n    revision=f"refs/pr/{pr_number}",\n' in lines
    lines = lines.replace('"someone/cut"', repr(str(hub["folder"]))).replace(
        '    revision=f"refs/pr/{pr_number}",\n', ""
    )
    found: dict[str, Any] = {}
    exec(lines, found)
    assert found["embeddings"].shape == (3, 32)
