"""A hub on this machine: what ``whoami``, ``model_info``, ``create_repo``, ``create_branch`` and ``upload_folder`` ask of the real one, over HTTP.

Weights go by Git LFS, other files inside the commit, as there.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_writes"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each with its files by branch; ``fails`` is the status that a path is answered with.

    ``role`` is that of the token.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.fails: tuple[str, int] | None = None
        self.role = "write"
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _answer(self, status: int, body: Any = None, **headers: str) -> None:
        content = json.dumps({} if body is None else body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts: list[bytes] = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _handle(self) -> None:
        body = self._body()
        path, _, _ = self.path.partition("?")
        self.server.asked.append(f"{self.command} {path}")
        if self.server.fails and self.server.fails[0] in path:
            return self._answer(self.server.fails[1], {"error": "the hub is full"}, X_Error_Message="the hub is full")
        if path.startswith("/objects/"):
            self.server.objects[path.removeprefix("/objects/")] = body
            return self._answer(200)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid username or password."})
        if path == "/api/whoami-v2":
            return self._answer(200, {"name": "someone", "auth": {"accessToken": {"role": self.server.role}}})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if actual := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._large(json.loads(body))
        if actual := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch|revision)/([^/]+)", path):
            return self._repository(*actual.groups(), body=body)
        if (actual := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)) and actual[1] in self.server.repositories:
            private = actual[1] in self.server.private
            return self._answer(200, {"id": actual[1], "private": private, "siblings": [], "tags": []})
        return self._answer(404, {"error": f"no {path}"}, X_Error_Code="RepoNotFound")

    do_GET = do_POST = do_PUT = _handle  # noqa: N815  (the names that the base class looks for)

    def _create(self, expected: dict[str, Any]) -> None:
        name = f"{expected.get('organization') or 'someone'}/{expected['name']}"
        if name in self.server.repositories:
            url = f"{self.server.url}/{name}"
            return self._answer(409, {"error": "You already created this model repo", "url": url})
        self.server.repositories[name] = {"main": {}}
        if expected.get("private") or expected.get("visibility") == "private":  # as older clients say it, and newer
            self.server.private.add(name)
        return self._answer(200, {"url": f"{self.server.url}/{name}", "name": name})

    def _large(self, expected: dict[str, Any]) -> None:
        objects = [
            {**item, "actions": {"upload": {"href": f"{self.server.url}/objects/{item['oid']}", "header": {}}}}
            for item in expected["objects"]
        ]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _repository(self, name: str, case: str, branch: str, body: bytes) -> None:
        branches = self.server.repositories.get(name)
        if branches is None:
            return self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if case == "branch":
            branches[branch] = {}
            return self._answer(200)
        if case == "revision":
            return self._answer(200, {"id": name, "sha": "0" * 40, "siblings": [], "tags": []})
        if case == "preupload":
            files = [
                {"path": item["path"], "uploadMode": _mode(item["path"]), "shouldIgnore": False}
                for item in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                branches[branch][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                branches[branch][value["path"]] = self.server.objects[value["oid"]]
        commit = "1" * 40
        return self._answer(
            200, {"success": True, "commitOid": commit, "commitUrl": f"{self.server.url}/{name}/commit/{commit}"}
        )


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".bin")) else "regular"
