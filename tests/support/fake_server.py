"""A fake vLLM server with the routes of completions. It fails exactly when told, and keeps what it
was asked; test_vllm_servers uses real servers."""

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from typing import Any
from urllib.parse import parse_qsl, urlsplit

GENERATE = "/inference/v1/generate"


@dataclass(frozen=True)
class Request:
    """What a client sent: `path` without its `query`, which has the last value of every name."""

    method: str
    path: str
    query: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """A completion: for every token its id, its log-prob and the label of its weights."""

    tokens: list[int]
    logprobs: list[float]
    labels: list[str]
    finish_reason: str = "stop"

    def spans(self) -> list[dict[str, Any]]:
        """Runs of tokens of one label, as vLLM names them."""
        spans, start = [], 0
        for label, tokens in groupby(self.labels):
            end = start + len(list(tokens))
            spans.append({"version": label, "start": start, "end": end})
            start = end
        return spans


class FakeServer:
    """Answers `tokens` with log-prob -0.5 each, from weights labelled `label`."""

    def __init__(self, label: str = "run/0", port: int = 0) -> None:
        self.label = label
        self.tokens = [7, 1]
        self.logprob = -0.5
        self.statuses: list[int] = []  # of the next completions; then 200
        self.aborts = 0  # of the next completions: finished by "abort"
        self.requests: list[Request] = []  # all, in the order of arrival
        self.seconds = 0.0
        self.generates: bool | None = True  # None: does not count tokens
        self.generated = 0
        self.engines = 1  # each counts its own tokens
        self.served = 0
        self.hung_up = 0  # completions whose client had closed the connection
        self.in_flight = self.most_in_flight = 0
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                server._open.append(self.connection)

            def do_GET(self) -> None:
                server._note("GET", self.path, None)
                if self.path == "/metrics":
                    self._send(200, server._metrics().encode())
                    return
                self._answer(200, server.describe(self.path))

            def do_POST(self) -> None:
                payload = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                body = json.loads(payload) if payload else None
                server._note("POST", self.path, body)
                if self.path != GENERATE:
                    self._answer(*server.control(self.path, body))
                    return
                answer = server._complete(body)
                self.connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if self.connection.recv(1, socket.MSG_PEEK) == b"":
                        server.hung_up += 1
                        self.close_connection = True
                        return
                self.connection.setblocking(True)
                self._answer(*answer)

            def _answer(self, status: int, value: Any) -> None:
                self._send(status, b"" if value is None else json.dumps(value).encode())

            def _send(self, status: int, payload: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def describe(self, path: str) -> Any:
        """The answer to a GET."""
        return {"/health": None, "/weight_info": {"weight_version": self.label}}[path]

    def control(self, path: str, body: Any) -> tuple[int, Any]:
        """The status and answer to a POST other than a completion."""
        return 404, {"error": {"message": path}}

    def sample(self, body: dict[str, Any]) -> Answer:
        """A completion."""
        count = len(self.tokens)
        return Answer(self.tokens, [self.logprob] * count, [self.label] * count)

    def asked(self, path: str) -> list[Request]:
        """The requests to one route."""
        return [request for request in self.requests if request.path == path]

    @property
    def seeds(self) -> list[int]:
        """Of all completions asked for."""
        return [request.body["sampling_params"]["seed"] for request in self.asked(GENERATE)]

    def _note(self, method: str, path: str, body: Any) -> None:
        parts = urlsplit(path)
        with self._lock:
            query = dict(parse_qsl(parts.query))
            self.requests.append(Request(method, parts.path, query, body))

    def _metrics(self) -> str:
        """As Prometheus prints a counter: one line for every engine."""
        if self.generates is None:
            return ""
        self.generated += 100 * (self.generates and self.in_flight > 0)
        name = "vllm:generation_tokens_total"
        each, rest = divmod(self.generated, self.engines)
        lines = [f"# TYPE {name} counter"]
        for engine in range(self.engines):
            tokens = each + (engine < rest)
            lines.append(f'{name}{{engine="{engine}",model_name="policy"}} {tokens}.0')
        return "\n".join([*lines, ""])

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            status = self.statuses.pop(0) if self.statuses else 200
            aborted = status == 200 and self.aborts > 0
            self.aborts -= aborted
        time.sleep(self.seconds * (status == 200))
        with self._lock:
            self.in_flight -= 1
            self.served += status == 200
        if status != 200:
            return status, {"error": {"message": "as told", "code": status}}
        answer = self.sample(body)
        self.generated += len(answer.tokens)
        choice = {
            "token_ids": answer.tokens,
            "logprobs": {"content": [{"logprob": value} for value in answer.logprobs]},
            "finish_reason": "abort" if aborted else answer.finish_reason,
            "weight_versions": answer.spans(),
        }
        return 200, {"choices": [choice]}

    def close_connections(self) -> None:
        """As vLLM closes those that nobody used for a while."""
        for connection in self._open:
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self.close_connections()
