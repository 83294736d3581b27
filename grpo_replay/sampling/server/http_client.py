"""JSON over HTTP with aiohttp. All requests run in one event loop, in a background thread."""

import asyncio
import atexit
import functools
import json
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

API_KEY_VARIABLE = "VLLM_API_KEY"

KEPT_SECONDS = 2.0
"""How long an unused connection is kept: less than vLLM does (5 s), which then closes it."""

T = TypeVar("T")

_kept: dict[asyncio.AbstractEventLoop, aiohttp.TCPConnector] = {}


class Unreachable(Exception):
    """No complete answer: the connection failed, or the time was up."""


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all requests of this process. The first call starts its thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    atexit.register(lambda: block_on(close_kept_connections()))
    return loop


def block_on(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the background loop and wait for its result. Not for use in that loop."""
    future = asyncio.run_coroutine_threadsafe(coroutine, background_loop())
    try:
        return future.result()
    finally:
        future.cancel()  # after an interrupt; does nothing to a finished one


async def close_kept_connections() -> None:
    """Those of the running loop, which makes no more requests."""
    if connector := _kept.pop(asyncio.get_running_loop(), None):
        await connector.close()


class HttpClient:
    """Talks to one server. The blocking methods may be called from any thread."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://10.0.0.5:8000")
        self._url = url.rstrip("/")

    def get(self, path: str, timeout_seconds: float) -> Any:
        """Blocking form of `request`."""
        return block_on(self.request("GET", path, None, timeout_seconds))

    def post(self, path: str, body: Any, timeout_seconds: float) -> Any:
        """Blocking form of `request`."""
        return block_on(self.request("POST", path, body, timeout_seconds))

    async def request(
        self,
        method: str,
        path: str,
        body: Any,
        timeout_seconds: float | None,
        repeatable: bool = False,
    ) -> Any:
        """The JSON answer, or None if it is empty. Without a time limit it waits until it is
        cancelled, which closes the connection. A `repeatable` request may take a connection that
        others had, which is faster. Raises Unreachable or Refused."""
        answer = await self.request_text(method, path, body, timeout_seconds, repeatable)
        try:
            return json.loads(answer) if answer else None
        except ValueError as error:
            raise Unreachable(f"{path} did not answer in JSON: {answer[:100]!r}") from error

    async def request_text(
        self,
        method: str,
        path: str,
        body: Any,
        timeout_seconds: float | None,
        repeatable: bool = False,
    ) -> str:
        """The answer as text. Raises Unreachable or Refused."""
        try:
            # The server may close a kept connection at any moment, and the client then does not
            # know whether the request was carried out. Those that must not be sent twice get a
            # connection of their own.
            async with aiohttp.request(
                method,
                self._url + path,
                data=None if body is None else json.dumps(body).encode(),
                headers=_headers(),
                timeout=aiohttp.ClientTimeout(total=timeout_seconds),
                allow_redirects=False,
                connector=_kept_connections() if repeatable else None,
            ) as response:
                answer = (await response.read()).decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and timeout_seconds is not None:
                raise Unreachable(f"no answer to {path} within {timeout_seconds:g} s") from error
            raise Unreachable(f"{type(error).__name__} at {path}: {error}") from error
        if response.status != 200:
            raise Refused(response.status, _error_message(answer))
        return answer


def _kept_connections() -> aiohttp.TCPConnector:
    """Of the running loop; any number."""
    loop = asyncio.get_running_loop()
    if loop not in _kept:
        _kept[loop] = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS)
    return _kept[loop]


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(API_KEY_VARIABLE)
    return headers | {"Authorization": f"Bearer {key}"} if key else headers


def _error_message(answer: str) -> str:
    """The message of a vLLM or FastAPI error, in one short line."""
    try:
        parsed = json.loads(answer)
    except ValueError:
        return " ".join(answer.split())[:300]
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    message = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]
