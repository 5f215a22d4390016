"""``push_to_hub`` uploads a card that names the repository and code that loads the model from it.

The hub is the only part that a test cannot run, so ``HfApi`` is mocked.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import CommitInfo, HfApi, RepoUrl

from midlayer_encoders import LayerEncoder
from tests.support.tiny_folders import TEXTS, Folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the uploaded folder and the options of the upload."""
    upload: dict[str, Any] = {"folder": tmp_path / "uploaded"}

    def upload_folder(self: HfApi, *, repo_id: str, folder_path: str, **options: Any) -> CommitInfo:
        shutil.copytree(folder_path, upload["folder"])
        upload.update(options)
        url = f"https://huggingface.co/{repo_id}/"
        return CommitInfo(url + "commit/1", "", "", "1", pr_url=url + "discussions/1")

    def create_repo(self: HfApi, repo_id: str, **_: Any) -> RepoUrl:
        full_name = repo_id if "/" in repo_id else f"someone/{repo_id}"  # as the hub completes it
        return RepoUrl(f"https://huggingface.co/{full_name}")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_branch", lambda *_, **__: None)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return upload


@pytest.mark.parametrize("branch", [None, "layer-2"])
def test_card_names_the_repository_and_its_code_runs(
    branch: str | None, hub: dict[str, Any], tiny_folder: Folder
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    encoder.push_to_hub("cut", revision=branch, replace_model_card=True)
    card = (hub["folder"] / "README.md").read_text()
    assert f"\nsomeone/cut is {Path(tiny_folder('Llama')).name} without" in card
    assert hub["commit_message"] == "Add new SentenceTransformer model"
    (lines,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    load_call = 'SentenceTransformer("someone/cut"' + (f', revision="{branch}")' if branch else ")")
    assert load_call in lines
    namespace: dict[str, Any] = {}
    exec(lines.replace(load_call, f'SentenceTransformer("{hub["folder"]}", device="cpu")'), namespace)
    np.testing.assert_array_equal(namespace["model"].encode(TEXTS), encoder.encode(TEXTS))


def test_saved_card_names_no_repository_after_a_push(hub: dict[str, Any], tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    encoder.push_to_hub("someone/cut", revision="b", replace_model_card=True)
    encoder.save_pretrained(str(tmp_path / "folder"))
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "someone" not in card
    assert f"model = SentenceTransformer({json.dumps(str(tmp_path / 'folder'))})" in card


def test_save_pretrained_card_holds_code_that_runs_as_printed(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    encoder.save_pretrained("a folder")
    (lines, *_) = re.findall(r"```python\n(.*?)```", Path("a folder/README.md").read_text(), re.DOTALL)
    assert 'SentenceTransformer("a folder")' in lines
    namespace: dict[str, Any] = {}
    exec(lines, namespace)
    assert namespace["embeddings"].shape == (2, encoder.get_embedding_dimension())


def test_pull_request_describes_how_to_load_the_model(hub: dict[str, Any], tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    url = encoder.push_to_hub("someone/cut", create_pr=True, replace_model_card=True)
    assert url.endswith("discussions/1")
    (lines,) = re.findall(r"```python\n(.*?)```", hub["commit_description"], re.DOTALL)
    assert '    "someone/cut",\n    revision=f"refs/pr/{pr_number}",\n' in lines
    lines = lines.replace('"someone/cut"', repr(str(hub["folder"]))).replace(
        '    revision=f"refs/pr/{pr_number}",\n', ""
    )
    namespace: dict[str, Any] = {}
    exec(lines, namespace)
    assert namespace["embeddings"].shape == (3, 32)
