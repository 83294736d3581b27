"""A local server that stands for the Hugging Face hub: accounts, repositories, uploads.

It has the routes that huggingface_hub uses to push a model, weights through Git LFS. Its client is
the real one; the transfer through Xet is not covered.
"""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REGULAR_SUFFIXES = (".md", ".json", ".txt", ".jinja")


class FakeHub:
    """`repositories` maps OWNER/NAME to its visibility and files; `failing` maps a path's ending to
    the status and message that its requests get."""

    def __init__(self, accounts: dict[str, str]) -> None:
        self.accounts = accounts  # name by token
        self.repositories: dict[str, dict[str, Any]] = {}
        self.failing: dict[str, tuple[int, str]] = {}
        self.requests: list[str] = []
        self._large: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, user: str | None, body: bytes) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        for ending, refusal in self.failing.items():
            if path.endswith(ending):
                return refusal
        if path.startswith("/lfs/"):  # signed addresses: no token
            self._large[path.rpartition("/")[2]] = body
            return 200, {}
        if user is None:
            return 401, "Invalid credentials in Authorization header"
        if path == "/api/whoami-v2":
            return 200, {"name": user, "type": "user"}
        if path == "/api/validate-yaml":
            return 200, {"warnings": []}
        if path == "/api/repos/create":
            return self._create(user, json.loads(body))
        return self._in_repository(path, user, body)

    def _create(self, user: str, wanted: dict[str, Any]) -> tuple[int, Any]:
        name = f"{wanted['organization'] or user}/{wanted['name']}"
        url = {"url": f"{self.url}/{name}"}
        if name in self.repositories:
            return 409, url
        if not name.startswith(f"{user}/"):
            return 403, f"You don't have the rights to create a model under {name}"
        private = wanted.get("visibility") == "private"
        self.repositories[name] = {"private": private, "files": {}, "messages": []}
        return 200, url

    def _in_repository(self, path: str, user: str, body: bytes) -> tuple[int, Any]:
        name = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        name = name.removesuffix(".git")
        repository = self.repositories.get(name)
        if repository is None:
            return 404, "Repository not found"
        if path == f"/api/models/{name}":
            return 200, {"id": name, "private": repository["private"]}
        if not name.startswith(f"{user}/"):
            return 403, f"You don't have the rights to write to {name}"
        if path.endswith("/preupload/main"):
            return 200, {"files": [_upload_mode(file) for file in json.loads(body)["files"]]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [self._lfs_action(o) for o in objects]}
        if path.endswith("/commit/main"):
            return self._commit(name, body)
        return 404, f"no route {path}"

    def _lfs_action(self, each: dict[str, Any]) -> dict[str, Any]:
        return {**each, "actions": {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        repository = self.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository["messages"].append(value["summary"])
            elif line["key"] == "file":
                repository["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository["files"][value["path"]] = self._large[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40}


def _upload_mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "regular" if file["path"].endswith(REGULAR_SUFFIXES) else "lfs"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            path = self.path.partition("?")[0]
            status, answer = hub.answer(self.command, path, hub.accounts.get(token), body)
            payload = json.dumps(answer if isinstance(answer, dict) else {"error": answer}).encode()
            self.send_response(status)
            if isinstance(answer, str):
                self.send_header("X-Error-Message", answer)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, *_: object) -> None:
            pass

    return Handler
