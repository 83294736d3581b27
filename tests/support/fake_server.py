"""A fake vLLM server with the routes that the request pool uses. It fails exactly when told;
test_vllm_servers uses real servers."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """Answers `tokens` with log-prob -0.5 each, from weights labelled `label`."""

    def __init__(self, label: str = "run/0", port: int = 0) -> None:
        self.label = label
        self.tokens = [7, 1]
        self.logprob = -0.5
        self.statuses: list[int] = []  # of the next completions; then 200
        self.aborts = 0  # of the next completions: finished by "abort"
        self.spans: list[tuple[str, int, int]] | None = None  # instead of one of `label`
        self.labels_tokens = True  # as vLLM does since 0.32
        self.seeds: list[int] = []  # of all completions asked for
        self.seconds = 0.0
        self.health_seconds = 0.0
        self.generates: bool | None = True  # None: does not count tokens
        self.generated = 0
        self.served = 0
        self.hung_up = 0  # completions whose client had closed the connection
        self.in_flight = self.most_in_flight = 0
        self.connections = 0  # made so far
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                server.connections += 1
                server._open.append(self.connection)

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._send(200, server._metrics().encode())
                    return
                time.sleep(server.health_seconds * (self.path == "/health"))
                self._answer(200, server.describe(self.path))

            def do_POST(self) -> None:
                payload = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                body = json.loads(payload) if payload else None
                if self.path != "/inference/v1/generate":
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

    def sample(self, body: dict[str, Any]) -> list[int]:
        """The tokens of a completion."""
        return self.tokens

    def _metrics(self) -> str:
        """As Prometheus prints a counter."""
        if self.generates is None:
            return ""
        self.generated += 100 * (self.generates and self.in_flight > 0)
        name = "vllm:generation_tokens_total"
        return (
            f'# TYPE {name} counter\n{name}{{engine="0",model_name="policy"}} {self.generated}.0\n'
        )

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            status = self.statuses.pop(0) if self.statuses else 200
            aborted = status == 200 and self.aborts > 0
            self.aborts -= aborted
            self.seeds.append(body["sampling_params"]["seed"])
        time.sleep(self.seconds * (status == 200))
        with self._lock:
            self.in_flight -= 1
            self.served += status == 200
        if status != 200:
            return status, {"error": {"message": "as told", "code": status}}
        tokens = self.sample(body)
        spans = self.spans or [(self.label, 0, len(tokens))]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": self.logprob} for _ in tokens]},
            "finish_reason": "abort" if aborted else "stop",
        }
        if self.labels_tokens:
            choice["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in spans]
        return 200, {"choices": [choice], "seed": body["sampling_params"]["seed"]}

    def close_connections(self) -> None:
        """As vLLM closes those that nobody used for a while."""
        for connection in self._open:
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self.close_connections()
