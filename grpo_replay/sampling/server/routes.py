"""Client of one vLLM server: the routes of vLLM 0.32 and 0.33 that a run uses.

Completions come from /inference/v1/generate (token ids in; token ids, log-probs and the weight
version of every token out). Weights are updated through the routes of VLLM_SERVER_DEV_MODE=1.
"""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import threading
from collections.abc import Coroutine, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from grpo_replay.sampling.vllm_requests import sampling_parameters
from grpo_replay.types import GenerationRequest

API_KEY_VARIABLE = "VLLM_API_KEY"

CONTROL_SECONDS = 30.0
"""Time limit of a route that answers at once."""

KEEPALIVE_SECONDS = 2.0
"""Seconds that an unused connection stays open: less than the 5 s after which vLLM closes it."""

TOKEN_COUNTER = "vllm:generation_tokens_total"

UPDATING = "updating"
"""Label of a server that loads weights, after the prefix of the run; not a version."""

T = TypeVar("T")

_connectors: dict[asyncio.AbstractEventLoop, aiohttp.TCPConnector] = {}


class Unreachable(Exception):
    """There is no complete answer of this run: the connection failed, the time limit passed, the
    server aborted the request, or it had weights of another run."""


class Refused(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        key = f" (its key is read from {API_KEY_VARIABLE})" if status == 401 else ""
        super().__init__(f"HTTP {status}: {message}{key}")
        self.status = status


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all requests of this process, in a thread that the first call starts."""
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
    """Close the kept connections of the running loop, after its last request."""
    if connector := _connectors.pop(asyncio.get_running_loop(), None):
        await connector.close()


class TokenLogprob(msgspec.Struct):
    logprob: float


class TokenLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class WeightSpan(msgspec.Struct):
    """Consecutive output tokens that were sampled by weights of one label."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    """A completion in vLLM's answer. Other fields are not parsed: the answer has the id and
    log-prob of each token twice, and parsing all of it takes several times as long."""

    token_ids: list[int]
    logprobs: TokenLogprobs
    finish_reason: str | None
    weight_versions: list[WeightSpan]


class _Answer(msgspec.Struct):
    choices: list[Choice]


_answers = msgspec.json.Decoder(_Answer)


class VllmServer:
    """Client of one server. Coroutines run in the loop of their caller; other methods block, and
    may be called from any thread. All raise Unreachable or Refused, and KeyError, TypeError or
    ValueError for an answer that is not one of vLLM 0.32."""

    def __init__(
        self, url: str, run: str, log: Path | None = None, with_adapters: bool = False
    ) -> None:
        """`run` is the prefix of this run's weight labels, which tells its versions from those of
        other runs. `log` is the log file of a launched server. With `with_adapters`, a version is a
        LoRA adapter named by its label."""
        self.url = url.rstrip("/")
        self.log, self.with_adapters = log, with_adapters
        self.prefix = f"{run}/"

    async def request(
        self, method: str, path: str, body: Any, seconds: float | None, repeatable: bool = False
    ) -> bytes:
        """Send a request, and return the body of the answer. With `seconds` None it waits until it
        is cancelled, which closes the connection. `repeatable` requests reuse connections. Raises
        Unreachable without an answer, Refused for another status than 200."""
        # A server may close a kept connection at any moment, and then it is unknown whether the
        # request was carried out. Requests that must not be sent twice use a new connection.
        try:
            async with aiohttp.request(
                method,
                self.url + path,
                data=None if body is None else json.dumps(body).encode(),
                headers=_headers(),
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
                connector=_kept_connector() if repeatable else None,
            ) as response:
                answer = await response.read()
        except TimeoutError as error:
            raise Unreachable(f"no answer to {path} within {seconds} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{type(error).__name__} at {path}: {error}") from error
        if response.status != 200:
            raise Refused(response.status, _error_message(answer.decode("utf-8", "replace")))
        return answer

    def get(self, path: str) -> Any:
        """Return the JSON answer of a GET request."""
        return json.loads(block_on(self.request("GET", path, None, CONTROL_SECONDS)))

    def post(self, path: str, body: Any = None, seconds: float = CONTROL_SECONDS) -> bytes:
        """Return the body of the answer to a POST request."""
        return block_on(self.request("POST", path, body, seconds))

    async def generate(
        self,
        request: GenerationRequest,
        stop_token_ids: Sequence[int],
        version: int | None = None,
    ) -> Choice:
        """Sample one completion, without a time limit. Cancelling closes the connection, and vLLM
        then aborts the request. With adapters, `version` samples all tokens, on a base with any
        label of this run. Raises msgspec.DecodeError or IndexError if the answer is not that of
        vLLM 0.32.
        """
        body: dict[str, Any] = {
            "token_ids": request.prompt_token_ids.tolist(),
            "sampling_params": sampling_parameters(request, stop_token_ids),
        }
        if self.with_adapters:
            assert version is not None, "a server that is used has a version"
            body["model"] = self.label(version)
        path = "/inference/v1/generate"
        try:
            answer = await self.request("POST", path, body, None, repeatable=True)
        except Refused as error:
            if self.with_adapters and error.status == HTTPStatus.NOT_FOUND:
                raise Unreachable(f"it does not have the adapter: {error}") from error
            raise
        choice = _answers.decode(answer).choices[0]
        if self.with_adapters:
            labels = [span.version for span in choice.weight_versions]
            if None not in map(self.version_of, labels):
                choice.weight_versions = [WeightSpan(body["model"], 0, len(choice.token_ids))]
        return choice

    async def check_health(self, seconds: float) -> None:
        """Raises Unreachable or Refused if the server is not healthy."""
        await self.request("GET", "/health", None, seconds)

    async def generated_tokens(self, seconds: float) -> float | None:
        """Tokens generated since the server started, for all clients (a Prometheus counter); None
        if it does not count them (`--disable-log-stats`)."""
        text = (await self.request("GET", "/metrics", None, seconds)).decode()
        lines = text.splitlines()
        counts = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(TOKEN_COUNTER)]
        return sum(map(float, counts)) if counts else None

    def label(self, policy_version: int) -> str:
        """Returns the server's label for the weights of a policy version of this run."""
        return f"{self.prefix}{policy_version}"

    def version_of(self, label: str) -> int | None:
        """Returns the policy version that `label` names; None if it is not a label of this run."""
        version = label.removeprefix(self.prefix)
        return int(version) if label.startswith(self.prefix) and version.isdecimal() else None

    async def weight_label(self, seconds: float = CONTROL_SECONDS) -> str:
        """Returns the label of the server's current weights; "default" if none was set."""
        answer = await self.request("GET", "/weight_info", None, seconds)
        return _json_value(answer, "weight_version", "/weight_info")

    def set_weight_label(self, label: str) -> None:
        self.post("/update_weight_version", {"new_version": label})

    def pause(self, seconds: float) -> None:
        """Freeze running requests in place."""
        self.post("/pause?mode=keep", None, seconds)

    def resume(self) -> None:
        self.post("/resume")

    def reload_weights(self, folder: str, seconds: float) -> None:
        """Replace all weights by the safetensors files in `folder`, a path on the server."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self.post("/collective_rpc", body, seconds)

    def load_adapter(self, name: str, folder: str, seconds: float) -> None:
        """Load the adapter in `folder`, a path on the server, for requests that name it."""
        body = {"lora_name": name, "lora_path": folder}
        _ = block_on(self.request("POST", "/v1/load_lora_adapter", body, seconds))

    def drop_cached_prompts(self) -> bool:
        """Empty the prefix cache; frozen requests are prefilled again. True on success."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        return _json_value(self.post(path), "success", path)


def _json_value(answer: bytes, name: str, path: str) -> Any:
    """Read a value of a JSON answer. Raises Unreachable if another program answers, for example one
    that took the port of a lost server."""
    try:
        return json.loads(answer)[name]
    except (ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"its answer to {path} is not that of vLLM 0.32") from error


def _kept_connector() -> aiohttp.TCPConnector:
    """Returns the connector of the running loop, without a limit on the number of connections."""
    loop = asyncio.get_running_loop()
    if loop not in _connectors:
        _connectors[loop] = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    return _connectors[loop]


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(API_KEY_VARIABLE)
    return headers | {"Authorization": f"Bearer {key}"} if key else headers


def _error_message(answer: str) -> str:
    """Returns the message of a vLLM error, or the answer itself, in one short line."""
    # Errors of FastAPI, and of a proxy before the server, are shown unchanged.
    with contextlib.suppress(ValueError, KeyError, TypeError):
        answer = str(json.loads(answer)["error"]["message"])
    return " ".join(answer.split())[:300]
