import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub.constants as hub
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import ModelNotFoundError
from midlayer_encoders.models.hub import access_options, hub_access, local_only

CODES = {"norev": "RevisionNotFound", "norepo": "RepoNotFound", "nofile": "EntryNotFound", "gated": "GatedRepo"}


class Hub(BaseHTTPRequestHandler):
    """A server that answers with the headers of the real hub."""

    def do_HEAD(self) -> None:
        name = self.path.split("/")[2]
        if name == "private" and self.headers["Authorization"] != "Bearer hf_mine":
            name = "norepo"
        self.send_response(200 if name not in CODES else 404)
        if name in CODES:
            self.send_header("X-Error-Code", CODES[name])
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", "2")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", hub.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}")
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("hub_server")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/norev", "`revision` must be a branch, tag or commit of 'org/norev' on the hub, but it has no 'step7'"),
        ("org/norepo", "is neither. Check the spelling"),
        ("org/nofile", "has no config.json on the hub: it is not a transformers model"),
        ("org/gated", r"request access at http://127.0.0.1:\d+/org/gated, then run `hf auth login`"),
    ],
)
def test_hub_errors_name_the_fix(model: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        LayerEncoder(model, 2, revision="step7")


@pytest.mark.usefixtures("hub_server")
def test_model_on_the_hub_is_not_local_only() -> None:
    assert local_only("org/there") is False


@pytest.mark.usefixtures("hub_server")
def test_private_model_is_read_with_the_token() -> None:
    with pytest.raises(ModelNotFoundError, match="for a private model run"):
        local_only("org/private")
    with hub_access(token="hf_mine", cache_folder=None, local_files_only=False):
        assert local_only("org/private") is False
        assert access_options() == {"token": "hf_mine"}
    assert access_options() == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("builtin", "built-in"),
        ("built-in-minlm", "built-in-minilm"),
        ("Built-In", "built-in"),
        ("minilm", "built-in-minilm"),
    ],
)
def test_misspelled_built_in_model_is_suggested(name: str, expected: str) -> None:
    with pytest.raises(
        ModelNotFoundError, match=rf"^`model` must be a folder .*{name}' is neither\. Did you mean '{expected}'"
    ):
        LayerEncoder(name, 2)


def test_unreachable_hub_fails_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        hub, "HUGGINGFACE_CO_URL_TEMPLATE", f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    start = time.perf_counter()
    with pytest.raises(
        ModelNotFoundError, match=r"not cached on this machine and the hub cannot be reached.*hf download"
    ):
        LayerEncoder("EleutherAI/pythia-410m", 17)
    assert time.perf_counter() - start < 5


def test_offline_mode_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set"):
        LayerEncoder("EleutherAI/pythia-410m", 17)


def test_printed_download_quotes_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"`hf download EleutherAI/pythia-410m --revision 'a; touch pwned'`"):
        LayerEncoder("EleutherAI/pythia-410m", 17, revision="a; touch pwned")
