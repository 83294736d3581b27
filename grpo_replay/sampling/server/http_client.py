"""JSON over HTTP with a deadline for the whole exchange. Standard library only: connections are
kept per thread, and can be cut from another one."""

import http.client
import json
import os
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16
API_KEY_VARIABLE = "VLLM_API_KEY"


class Unreachable(Exception):
    """No answer: the connection failed or was cut."""


class TooSlow(Unreachable):
    """No complete answer within the time allowed."""


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


class HttpClient:
    """Talks to one server. Safe to use from many threads, each with a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://10.0.0.5:8000")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._cuts = 0

    def get(self, path: str, timeout_seconds: float) -> Any:
        """The JSON answer, or None if the body is empty. Raises Unreachable or Refused."""
        return _parsed(path, self._exchange("GET", path, None, timeout_seconds))

    def get_text(self, path: str, timeout_seconds: float) -> str:
        """The answer as text. Raises Unreachable or Refused."""
        return self._exchange("GET", path, None, timeout_seconds).decode("utf-8", "replace")

    def post(self, path: str, body: Any, timeout_seconds: float | None) -> Any:
        """The JSON answer, or None if the body is empty; without a time limit, however long it
        takes. Raises Unreachable or Refused."""
        return _parsed(path, self._exchange("POST", path, body, timeout_seconds))

    def cut(self) -> None:
        """Break every connection, so that threads that wait for an answer stop waiting."""
        with self._lock:
            self._cuts += 1
            connections = list(self._open)
        for connection in connections:
            sock = connection.sock
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the server was faster

    def _exchange(self, method: str, path: str, body: Any, timeout_seconds: float | None) -> bytes:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        payload = None if body is None else json.dumps(body).encode()
        reused = getattr(self._mine, "connection", None) is not None
        cuts = self._cuts
        try:
            try:
                status, answer = self._send(method, path, payload, deadline)
            except (http.client.RemoteDisconnected, ConnectionError):
                # A kept connection may have been closed by the server in the meantime.
                if not reused or self._cuts != cuts:
                    raise
                status, answer = self._send(method, path, payload, deadline)
        except TimeoutError as error:
            raise TooSlow(f"no answer to {path} within {timeout_seconds:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{type(error).__name__} at {path}: {error}") from error
        if status != 200:
            raise Refused(status, _error_message(answer))
        return answer

    def _send(
        self, method: str, path: str, payload: bytes | None, deadline: float | None
    ) -> tuple[int, bytes]:
        connection = self._connection(deadline)
        try:
            connection.request(method, self._prefix + path, payload, _headers())
            response = connection.getresponse()
            pieces = []
            while piece := response.read(CHUNK_BYTES):
                pieces.append(piece)
                if connection.sock is not None:  # None once the server said it will close
                    connection.sock.settimeout(_remaining(deadline))
            return response.status, b"".join(pieces)
        except BaseException:
            self._drop(connection)
            raise

    def _connection(self, deadline: float | None) -> http.client.HTTPConnection:
        connection = getattr(self._mine, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            connection = kind(self._host, self._port)
            with self._lock:
                self._open.add(connection)
            self._mine.connection = connection
        connection.timeout = _remaining(deadline)
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        self._mine.connection = None
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def release(self) -> None:
        """Close this thread's connection."""
        connection = getattr(self._mine, "connection", None)
        if connection is not None:
            self._drop(connection)


def _parsed(path: str, answer: bytes) -> Any:
    try:
        return json.loads(answer) if answer else None
    except ValueError as error:
        raise Unreachable(f"{path} did not answer in JSON: {answer[:100]!r}") from error


def _remaining(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(API_KEY_VARIABLE)
    return headers | {"Authorization": f"Bearer {key}"} if key else headers


def _error_message(answer: bytes) -> str:
    """What a vLLM or FastAPI error says, in one short line."""
    text = answer.decode("utf-8", errors="replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:300]
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    message = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]
