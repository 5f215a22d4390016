"""Upload an encoder to a hub over HTTP, with a model card of its source and scores."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import polars as pl
import pytest
import yaml
from huggingface_hub import ModelCard, constants
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.export import Exported, HubError, export_for, push_to_hub
from midlayer_encoders.export.upload import check_repository, score_results
from midlayer_encoders.frame.schema import NamedSubject, tidy_frame, tidy_rows
from midlayer_encoders.sweeping.best_layer import Notes
from midlayer_encoders.sweeping.sweep_result import SweepResult
from tests.cli.calls import run
from tests.export.hub_server import TOKEN, Hub, running_hub
from tests.tiny_folders import TEXTS, save_tiny

# The hub's own client, of its library for HTTP.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
Folder = Callable[[str], str]

CARD = "---\nlicense: apache-2.0\nlanguage: en\nbase_model: someone/whole\n---\n# The whole model\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_tiny("Llama", folder)
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture(scope="module")
def encoder(source: Path) -> LayerEncoder:
    return LayerEncoder(str(source), 2, device="cpu", recipe="one-word")


def frame(encoder: LayerEncoder, **more: Any) -> pl.DataFrame:
    subject = NamedSubject(encoder.name, None, 4)
    rows = tidy_rows({1: 0.1, 2: 0.5}, subject, kind="score", dataset="STSBenchmark", name="cosine_spearman")
    rows += tidy_rows({2: 0.51239}, subject, kind="confirmed", dataset="STSBenchmark", name="cosine_spearman")
    rows += tidy_rows({1: 0.3, 2: 0.25}, subject, kind="score", dataset="mine-0a1b2c3d", name="accuracy")
    rows += tidy_rows({2: 7.0}, subject, kind="metric", dataset="texts", name="dime")
    return tidy_frame(rows).with_columns(**{name: pl.lit(value) for name, value in more.items()})


def test_the_folder_is_uploaded_and_its_card_holds_layer_recipe_scores_license_and_source(
    hub: Hub, encoder: LayerEncoder, tmp_path: Path
) -> None:
    address = push_to_hub(encoder, "someone/cut", scores=frame(encoder, recipe="one-word"), private=True)
    assert address.startswith(f"{hub.url}/someone/cut/commit/")
    assert hub.private == {"someone/cut"}
    for name, content in hub.repositories["someone/cut"]["main"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path)).encode(TEXTS), encoder.encode(TEXTS))
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.language, card.data.base_model) == ("apache-2.0", ["en"], "someone/whole")
    assert card.data.model_name == "someone/cut"
    results = {
        entry.dataset_name: (entry.task_type, entry.dataset_type, entry.metric_type, entry.metric_value)
        for entry in card.data.eval_results or ()
    }
    assert results == {
        "MTEB STSBenchmark": ("STS", "mteb/stsbenchmark-sts", "cosine_spearman", 51.24),  # as mteb confirmed it
        "mine": ("feature-extraction", "mine", "accuracy", 25.0),
    }
    assert "| layer | 2 of 4 (0 = embeddings) |" in card.text
    assert '| template | `This sentence : "{text}" means in one word:"` |' in card.text
    assert "| MTEB STSBenchmark | cosine_spearman | 51.24 |" in card.text
    assert 'SentenceTransformer("someone/cut")' in card.text


def test_a_license_that_is_named_and_a_branch(hub: Hub, tiny_folder: Folder) -> None:
    plain = LayerEncoder(tiny_folder("Llama"), 1, device="cpu")
    push_to_hub(plain, "someone/cut", license="mit", branch="layer-1")
    text = hub.repositories["someone/cut"]["layer-1"]["README.md"].decode()
    assert "license: mit\n" in text
    assert 'SentenceTransformer("someone/cut", revision="layer-1")' in text
    assert "model-index" not in text
    assert plain.model_card_data.license is None  # the encoder is as before


@pytest.mark.parametrize(
    ("link", "expected"),
    [("LICENSE", "https://huggingface.co/someone/whole/blob/main/LICENSE"), ("https://a.b/c", "https://a.b/c")],
)
def test_a_license_of_its_own_keeps_its_name_and_link(
    link: str, expected: str, hub: Hub, tmp_path: Path, tiny_folder: Folder
) -> None:
    shutil.copytree(tiny_folder("Llama"), tmp_path / "whole")
    license_lines = f"license: other\nlicense_name: research\nlicense_link: {link}\nbase_model: someone/whole\n"
    odd = "language: [en, no]\nmodel-index: 5\n"  # YAML reads Norwegian as false; results that cannot be read
    (tmp_path / "whole" / "README.md").write_text(f"---\n{license_lines}{odd}---\n")
    push_to_hub(LayerEncoder(str(tmp_path / "whole"), 1, device="cpu"), "someone/cut")
    (tmp_path / "README.md").write_bytes(hub.repositories["someone/cut"]["main"]["README.md"])
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.license, data.license_name, data.license_link) == ("other", "research", expected)
    assert (data.language, data.base_model) == (["en", "no"], "someone/whole")
    push_to_hub(LayerEncoder(str(tmp_path / "whole"), 1, device="cpu"), "someone/cut", license="mit", overwrite=True)
    assert b"license_name" not in hub.repositories["someone/cut"]["main"]["README.md"]


def test_license_and_language_of_the_encoder_take_precedence_and_a_missing_license_is_warned_of(
    hub: Hub, source: Path, tiny_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = LayerEncoder(str(source), 1, device="cpu")
    encoder.model_card_data.license = "mit"
    encoder.model_card_data.language = ["de"]
    push_to_hub(encoder, "someone/cut")
    header = yaml.safe_load(hub.repositories["someone/cut"]["main"]["README.md"].decode().split("---\n")[1])
    assert (header["license"], header["language"]) == ("mit", ["de"])
    assert "license" not in caplog.text
    push_to_hub(LayerEncoder(tiny_folder("Llama"), 1, device="cpu"), "someone/other")
    assert "has no license. Pass `license` if you know it" in caplog.text


def test_an_unreadable_card_and_a_relative_link_without_a_base_are_left_out(
    hub: Hub, tmp_path: Path, tiny_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_folder("Llama"), tmp_path / "whole")
    encoder = LayerEncoder(str(tmp_path / "whole"), 1, device="cpu")
    (tmp_path / "whole" / "README.md").write_text("---\nlicense: other\nlicense_name: x\nlicense_link: LICENSE\n---\n")
    push_to_hub(encoder, "someone/cut")
    header = yaml.safe_load(hub.repositories["someone/cut"]["main"]["README.md"].decode().split("---\n")[1])
    assert header["license_name"] == "x"
    assert "license_link" not in header
    (tmp_path / "whole" / "README.md").write_text("---\nlicense: [\n---\n")
    push_to_hub(encoder, "someone/other")
    assert "The model card of local/whole cannot be read (" in caplog.text


def test_a_token_may_be_passed_instead_of_stored(
    hub: Hub, encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    check_repository("someone/cut", TOKEN)
    push_to_hub(encoder, "someone/cut", token=TOKEN)
    assert "modules.json" in hub.repositories["someone/cut"]["main"]


def test_results_have_the_split_and_revision_of_mteb_and_leave_the_generators_alone(
    source: Path, encoder: LayerEncoder
) -> None:
    state = random.getstate()
    entries = {entry.dataset_name: entry for entry in score_results(encoder, frame(encoder))}
    assert random.getstate() == state
    assert list(entries) == ["MTEB STSBenchmark", "mine"]
    task: Any = mteb.get_task("STSBenchmark").metadata
    sts = entries["MTEB STSBenchmark"]
    assert (sts.dataset_split, sts.dataset_revision) == ("test", task.dataset["revision"])
    assert (entries["mine"].dataset_split, entries["mine"].dataset_revision) == (None, None)
    other_model = frame(encoder).with_columns(model=pl.lit("other"))
    with pytest.raises(OptionError, match=r"`scores` must hold scores of local/.* at layer 2, but has none"):
        score_results(encoder, other_model)


def test_a_private_upload_never_goes_to_a_public_repository(hub: Hub, encoder: LayerEncoder) -> None:
    push_to_hub(encoder, "someone/new", private=True, overwrite=True)
    push_to_hub(encoder, "someone/new", private=True, overwrite=True)
    assert hub.private == {"someone/new"}
    hub.repositories["someone/seen"] = {"main": {}}
    with pytest.raises(OptionError, match=r"`private` must be left out for someone/seen, which exists and is public"):
        push_to_hub(encoder, "someone/seen", private=True, overwrite=True)
    assert hub.repositories["someone/seen"] == {"main": {}}


def test_invalid_arguments_are_reported_before_anything_is_written(
    encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch, hub: Hub
) -> None:
    with pytest.raises(OptionError, match="`repository` must contain the owner, such as 'owner/cut'"):
        push_to_hub(encoder, "cut")
    with pytest.raises(OptionError, match="`repository` must be a repository name, but got 'a/b/c'"):
        push_to_hub(encoder, "a/b/c")
    with pytest.raises(OptionError, match=r"must hold scores of .* at layer 2, but has none"):
        push_to_hub(encoder, "someone/cut", scores=frame(encoder, recipe="plain"))
    with pytest.raises(OptionError, match=r"`token` must contain only ASCII characters") as error:
        push_to_hub(encoder, "someone/cut", token="hf_s\u00e9cret")
    assert "cret" not in str(error.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(OptionError, match=r"must be a Hub token.*hf auth login.*HF_TOKEN"):
        push_to_hub(encoder, "someone/cut")
    for other_item in ("a folder", Exported("onnx", Path("a folder"))):
        with pytest.raises(OptionError, match=r"`exported` must be the result of export_for for .*tei, but got .*fold"):
            push_to_hub(encoder, "someone/cut", exported=other_item)  # type: ignore[arg-type]
    assert not hub.repositories


def test_a_rejection_by_the_hub_is_reported_with_the_cure(
    hub: Hub, encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HubError, match=r"rejected someone/cut \(status 401: .*hf auth login"):
        push_to_hub(encoder, "someone/cut", token="hf_of_another")
    hub.fails = ("/commit/", 403)
    with pytest.raises(HubError, match=r"status 403: .*the hub is full.*no write permission there"):
        push_to_hub(encoder, "someone/cut")
    assert hub.repositories["someone/cut"] == {"main": {}}
    hub.fails = None
    with pytest.raises(HubError, match=r"uploaded to someone/cut. The repository exists: pass overwrite=True"):
        push_to_hub(encoder, "someone/cut")
    hub.fails = ("/whoami", 429)  # who one is, it says a few times in a while
    push_to_hub(encoder, "someone/cut", overwrite=True)
    assert "modules.json" in hub.repositories["someone/cut"]["main"]
    hub.fails = None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE=1"):
        push_to_hub(encoder, "someone/cut", overwrite=True)


def test_a_hub_that_does_not_answer(encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(
        HubError, match=r"cannot be reached or closed the connection .*Check the network and HF_ENDPOINT"
    ):
        push_to_hub(encoder, "someone/cut")


def test_the_command_takes_the_scores_of_a_sweep_with_the_same_options(
    hub: Hub, source: Path, encoder: LayerEncoder, tmp_path: Path
) -> None:
    SweepResult(frame(encoder), tmp_path, Notes("a sweep", str(source), {}, options={"recipe": "one-word"})).save()
    line = ["export", str(source), "--layer", "2", "--push", "someone/cut", "--scores", str(tmp_path)]
    with pytest.raises(OptionError, match=r"`--scores` must be a sweep with the options of this encoder .*'one-word'"):
        run(*line)
    assert not hub.repositories
    notes = Notes("a sweep", str(source), {}, options={"recipe": "one-word"}, site="mlp")
    SweepResult(frame(encoder), tmp_path / "mlp", notes).save()
    with pytest.raises(OptionError, match=r"`--scores` must be a sweep with the options .*'site': 'mlp'"):
        run(*line[:-1], str(tmp_path / "mlp"), "--recipe", "one-word")
    output = run(*line, "--recipe", "one-word", "--for", "vllm")
    assert "vllm serve someone/cut --runner pooling" in output
    files = hub.repositories["someone/cut"]["main"]
    assert b"value: 51.24" in files["README.md"]
    assert "midlayer.json" in files


@pytest.mark.parametrize("target", ["sentence-transformers", "vllm"])
def test_other_files_in_the_folder_are_not_uploaded(
    target: Any, hub: Hub, encoder: LayerEncoder, tmp_path: Path
) -> None:
    result = export_for(encoder, target, tmp_path / "out")
    loaded = (tmp_path / "out/README.md").read_bytes()
    expected = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    (tmp_path / "out/.env").write_text("SECRET=1")
    (tmp_path / "out/1_Pooling/notes.txt").write_text("mine")
    push_to_hub(encoder, "someone/cut", exported=result)
    files = hub.repositories["someone/cut"]["main"]
    assert set(files) == expected
    assert files["model.safetensors"] == (tmp_path / "out/model.safetensors").read_bytes()
    assert b'SentenceTransformer("someone/cut")' in files["README.md"]
    assert (tmp_path / "out/README.md").read_bytes() == loaded  # of the folder, as it was
    assert export_for(encoder, target, tmp_path / "out", overwrite=True).files == result.files
    (tmp_path / "out/config.json").unlink()
    with pytest.raises(OptionError, match=r"`exported` must be unchanged, but .*out/config.json does not exist: exp"):
        push_to_hub(encoder, "someone/other", exported=result)


@pytest.mark.parametrize("name", ["config.json", "1_Pooling"])
def test_a_link_in_place_of_an_exported_file_or_folder_is_not_uploaded(
    name: str, hub: Hub, encoder: LayerEncoder, tmp_path: Path
) -> None:
    result = export_for(encoder, "sentence-transformers", tmp_path / "out")
    shutil.move(tmp_path / "out" / name, tmp_path / "secret")
    (tmp_path / "out" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(OptionError, match=rf"`exported` must be unchanged, but .*out/{name}.* is a link: export again"):
        push_to_hub(encoder, "someone/cut", exported=result)
    assert not hub.repositories


def test_an_exported_folder_may_be_behind_a_link(hub: Hub, encoder: LayerEncoder, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    push_to_hub(encoder, "someone/cut", exported=export_for(encoder, "sentence-transformers", tmp_path / "link"))
    assert "model.safetensors" in hub.repositories["someone/cut"]["main"]


@pytest.mark.parametrize("field", ["base_model", "license", "license_name", "license_link", "language"])
def test_the_card_of_the_source_adds_no_field_to_the_uploaded_card(
    field: str, hub: Hub, tmp_path: Path, tiny_folder: Folder
) -> None:
    shutil.copytree(tiny_folder("Llama"), tmp_path / "whole")
    hostile = "mit\nextra_gated_prompt: send money\n---\n# [Click](https://bad.example)"
    lines = {"base_model": "someone/whole", field: hostile, "extra_gated_prompt": "send money"}
    (tmp_path / "whole" / "README.md").write_text(f"---\n{yaml.safe_dump(lines)}---\n")
    push_to_hub(LayerEncoder(str(tmp_path / "whole"), 1, device="cpu"), "someone/cut")
    text = hub.repositories["someone/cut"]["main"]["README.md"].decode()
    _, header, body = re.split(r"^---$", text, flags=re.MULTILINE)
    allowed = {"pipeline_tag", "tags", "library_name", "base_model", "license", "license_name", "license_link"}
    assert set(yaml.safe_load(header)) <= allowed | {"language"}
    assert "bad.example" not in body


def test_values_of_the_source_card_that_are_not_names_are_left_out(
    hub: Hub, tmp_path: Path, tiny_folder: Folder
) -> None:
    shutil.copytree(tiny_folder("Llama"), tmp_path / "whole")
    (tmp_path / "whole" / "README.md").write_text("---\nbase_model: 5\nlanguage: [no, 2020-01-01, {a: b}]\n---\n")
    push_to_hub(LayerEncoder(str(tmp_path / "whole"), 1, device="cpu"), "someone/cut")
    text = hub.repositories["someone/cut"]["main"]["README.md"].decode()
    header = yaml.safe_load(text.split("---\n")[1])
    assert "base_model" not in header
    assert header["language"] == ["no"]


def test_the_card_has_no_field_of_a_hostile_branch_or_name(hub: Hub, tmp_path: Path, tiny_folder: Folder) -> None:
    folder = tmp_path / "a\n---\nextra_gated_prompt: send money"
    shutil.copytree(tiny_folder("Llama"), folder)
    push_to_hub(LayerEncoder(str(folder), 1, device="cpu"), "someone/cut")
    text = hub.repositories["someone/cut"]["main"]["README.md"].decode()
    assert "extra_gated_prompt: " not in text


def test_the_command_uploads_only_the_files_that_it_wrote(hub: Hub, source: Path, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SECRET=1")
    line = ["export", str(source), "--layer", "2", "--push", "someone/cut", "--out", str(tmp_path)]
    with pytest.raises(OptionError, match=r"`folder` must be a new or empty folder.*--overwrite"):
        run(*line)
    run(*line, "--overwrite")
    assert "modules.json" in hub.repositories["someone/cut"]["main"]
    assert ".env" not in hub.repositories["someone/cut"]["main"]


@pytest.mark.parametrize(
    ("fails", "role", "words", "why"),
    [
        (("/whoami", 401), "write", [], r"status 401: .*hf auth login"),
        (None, "read", [], r"no write permission there"),
        (None, "write", [], r"someone/cut. The repository exists: pass overwrite=True \(--overwrite\)"),
        (None, "write", ["--overwrite", "--private"], "someone/cut, which exists and is public"),
        (("/whoami", 503), "write", [], r"status 503"),
    ],
)
def test_the_command_queries_the_hub_before_reading_the_model(
    fails: tuple[str, int] | None, role: str, words: list[str], why: str, hub: Hub
) -> None:
    hub.repositories["someone/cut"] = {"main": {}}
    hub.fails, hub.role = fails, role
    with pytest.raises((HubError, OptionError), match=why):
        run("export", "no/such-model", "--layer", "2", "--push", "someone/cut", *words)
    assert hub.repositories["someone/cut"] == {"main": {}}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "`--out` must name a folder to write, unless --push"),
        (["--out", "out", "--private"], "must be left out without --push"),
        (["--push", "someone/cut", "--for", "onnx"], "`--push` must be left out with --for onnx"),
        (["--push", "cut"], "`repository` must contain the owner"),
    ],
)
def test_invalid_arguments_are_refused(hub: Hub, words: list[str], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        run("export", "no/such-model", "--layer", "2", *words)


@pytest.mark.slow
def test_the_command_uploads_to_the_endpoint_of_the_environment(source: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "midlayer_encoders.cli", "export", str(source), "--layer", "2", "--push"]
    with running_hub() as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
        result = subprocess.run([*line, "someone/cut"], env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert f"Uploaded: {hub.url}/someone/cut/commit/" in result.stdout
        assert 'SentenceTransformer("someone/cut")' in result.stdout
        files = hub.repositories["someone/cut"]["main"]
        assert {"README.md", "model.safetensors", "modules.json", "1_Pooling/config.json"} <= set(files)
        hub.fails = ("/api/repos/create", 503)
        result = subprocess.run([*line, "someone/other"], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert re.search(r"Hub (rejected|cannot be reached)", " ".join(result.stderr.split()))
    assert "Traceback" not in result.stderr
