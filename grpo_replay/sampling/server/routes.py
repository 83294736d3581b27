"""Client of one vLLM server: the routes of vLLM 0.27 to 0.33 that a run uses.

Completions come from /inference/v1/generate (token ids in; token ids, log-probs and, since 0.32,
the weight version of every token out). Weights are updated through the routes of
VLLM_SERVER_DEV_MODE=1.
"""

import asyncio
import atexit
import functools
import json
import os
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from grpo_replay.sampling.vllm_requests import sampling_parameters
from grpo_replay.types import GenerationRequest

API_KEY_VARIABLE = "VLLM_API_KEY"

KEPT_SECONDS = 2.0
"""How long an unused connection is kept: less than vLLM does (5 s), which then closes it."""

MOST_ANSWER_BYTES = 2**26
"""Longest answer that is read: about ten times that of a completion of 32,768 tokens."""

BODY_SECONDS = 60.0
"""Longest time for the body of an answer, which vLLM sends when it has all of it."""

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
        except (ValueError, RecursionError) as error:
            raise _no_json(path, answer) from error

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
                answer = (await _body(response, path)).decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and timeout_seconds is not None:
                raise Unreachable(f"no answer to {path} within {timeout_seconds:g} s") from error
            raise Unreachable(f"{type(error).__name__} at {path}: {error}") from error
        if response.status != 200:
            raise Refused(response.status, _error_message(answer))
        return answer


def _no_json(path: str, answer: str) -> Unreachable:
    return Unreachable(f"{path} did not answer in JSON: {answer[:100]!r}")


async def _body(response: aiohttp.ClientResponse, path: str) -> bytes:
    """Raises Unreachable if it is too long, or comes too slowly."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in response.content.iter_any():
                body += part
                if len(body) > MOST_ANSWER_BYTES:
                    raise Unreachable(f"the answer to {path} is longer than {MOST_ANSWER_BYTES} B")
    except TimeoutError as error:
        raise Unreachable(f"the answer to {path} did not end in {BODY_SECONDS:g} s") from error
    return bytes(body)


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


CONTROL_SECONDS = 30.0
"""Time limit of a route that answers at once."""

TOKEN_COUNTER = "vllm:generation_tokens_total"


class TokenLogprob(msgspec.Struct):
    logprob: float


class TokenLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class WeightSpan(msgspec.Struct):
    """Output tokens that were sampled by weights of one label."""

    version: Any
    start: int
    end: int


class Choice(msgspec.Struct):
    """A completion as vLLM answers it. What else the answer has is not read: per token it has the
    id and the log-prob twice, and parsing all of it takes several times as long."""

    token_ids: list[Any]
    logprobs: TokenLogprobs
    finish_reason: str | None
    weight_versions: list[WeightSpan] | msgspec.UnsetType | None = msgspec.UNSET


class _Answer(msgspec.Struct):
    choices: list[Choice]


_answers = msgspec.json.Decoder(_Answer)


def _read_choice(answer: str, path: str) -> Choice:
    """Raises Unreachable for what is no JSON, LookupError or ValueError for any other."""
    try:
        try:
            return _answers.decode(answer).choices[0]
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # NaN and infinity are Python's JSON, and get their own error
            return msgspec.convert(json.loads(answer), _Answer).choices[0]
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise _no_json(path, answer) from error


class VllmServer:
    """Methods raise http_client's Unreachable or Refused. The coroutines run in the loop of the
    dispatcher that calls them."""

    def __init__(self, url: str, run: str, log: Path | None = None) -> None:
        """`run` identifies this run in weight labels, so that version 3 of another run is told
        apart. `log` is the log file of a launched server."""
        self.url = url.rstrip("/")
        self.http = HttpClient(self.url)
        self.log = log
        self.prefix = f"{run}/"

    def label(self, policy_version: int) -> str:
        """The server's label for the weights of a policy version of this run."""
        return f"{self.prefix}{policy_version}"

    async def check_health(self, timeout_seconds: float) -> None:
        """Returns if the server is healthy."""
        await self.http.request("GET", "/health", None, timeout_seconds)

    async def generated_tokens(self, timeout_seconds: float) -> float | None:
        """Tokens generated since the server started, for all clients (a Prometheus counter); None
        if it does not count them (`--disable-log-stats`)."""
        text = await self.http.request_text("GET", "/metrics", None, timeout_seconds)
        lines = text.splitlines()
        counts = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(TOKEN_COUNTER)]
        return sum(map(float, counts)) if counts else None

    def vllm_version(self) -> str:
        return self.http.get("/version", CONTROL_SECONDS)["version"]

    def models(self) -> list[dict[str, Any]]:
        """The models it serves. `generate` samples from the first."""
        return self.http.get("/v1/models", CONTROL_SECONDS)["data"]

    def settings(self) -> dict[str, Any]:
        """The vLLM configuration that the server was started with."""
        answer = self.http.get("/server_info?config_format=json", CONTROL_SECONDS)
        return answer["vllm_config"]

    def model_outline(self) -> str:
        """The module tree of the model, as the first worker prints it."""
        body = {"method": "get_model_inspection"}
        return self.http.post("/collective_rpc", body, CONTROL_SECONDS)["results"][0]

    def world_size(self) -> int:
        """Number of workers: tensor, pipeline and data parallel."""
        return self.http.get("/get_world_size", CONTROL_SECONDS)["world_size"]

    async def generate(self, request: GenerationRequest, stop_token_ids: Sequence[int]) -> Choice:
        """vLLM's answer to one request, without a time limit. Cancelling closes the connection, and
        vLLM then aborts the request. Raises LookupError or ValueError for an answer that is not
        one of vLLM 0.32."""
        body = {
            "token_ids": request.prompt_token_ids.tolist(),
            "sampling_params": sampling_parameters(request, stop_token_ids),
        }
        path = "/inference/v1/generate"
        answer = await self.http.request_text("POST", path, body, None, repeatable=True)
        return _read_choice(answer, path)

    def version_of(self, label: Any) -> int | None:
        """The policy version that `label` names; None if it is not a label of this run."""
        if not isinstance(label, str) or not label.startswith(self.prefix):
            return None
        version = label.removeprefix(self.prefix)
        return int(version) if version.isdecimal() else None

    async def weight_label(self, timeout_seconds: float = CONTROL_SECONDS) -> str:
        """The label of its current weights; "default" if none was set."""
        answer = await self.http.request("GET", "/weight_info", None, timeout_seconds)
        return answer["weight_version"]

    def set_weight_label(self, label: str) -> None:
        body = {"new_version": label}
        self.http.post("/update_weight_version", body, CONTROL_SECONDS)

    def pause(self, timeout_seconds: float) -> None:
        """Freeze running requests in place."""
        self.http.post("/pause?mode=keep", None, timeout_seconds)

    def resume(self) -> None:
        self.http.post("/resume", None, CONTROL_SECONDS)

    def reload_weights(self, folder: str, timeout_seconds: float) -> None:
        """Replace all weights by the safetensors files in `folder`, a path on the server."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self.http.post("/collective_rpc", body, timeout_seconds)

    def drop_cached_prompts(self) -> bool:
        """Empty the prefix cache; frozen requests recompute their keys. True on success."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        return self.http.post(path, None, CONTROL_SECONDS)["success"]
