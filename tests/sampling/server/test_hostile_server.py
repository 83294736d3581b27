"""Servers that lie: each answer ends with a clear error, after a bounded time and memory."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fake_server import FakeServer
from test_request_pool import STOP, make_pool
from tiny_policy import make_requests

from grpo_replay.errors import SamplerError
from grpo_replay.sampling.server import dispatcher, routes

Answer = dict[str, Any]


class Liar(FakeServer):
    """Changes a correct answer before it sends it."""

    def __init__(self, lie: Callable[[Answer], Any]) -> None:
        super().__init__()
        self.lie = lie

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        _, answer = super()._complete(body)
        changed = self.lie(answer["choices"][0])
        return 200, answer if changed is None else changed


def with_tokens(*tokens: Any) -> Callable[[Answer], None]:
    """Other tokens, each with its log-prob and of this run's weights."""

    def lie(choice: Answer) -> None:
        entries = [{"logprob": -0.5} for _ in tokens]
        choice.update(token_ids=list(tokens), logprobs={"content": entries})

    return lie


def with_logprob(value: Any) -> Callable[[Answer], None]:
    return lambda choice: choice["logprobs"]["content"][0].update(logprob=value)


LIES: dict[str, tuple[Callable[[Answer], Any], str]] = {
    "a token too few": (lambda c: c["token_ids"].pop(0) and None, "1 tokens came with 2 log-probs"),
    "a log-prob too few": (lambda c: c["logprobs"]["content"].pop() and None, "with 1 log-probs"),
    "no token": (with_tokens(), "0 tokens came with 0"),
    "more than asked for": (
        with_tokens(*[7] * 5000, 1),
        "finished by 'stop' after 5001 of at most",
    ),
    "no stop token": (with_tokens(7, 7), "finished by 'stop' after 2"),
    "a foreign token": (with_tokens(24, 1), "'24' is no id of 24 tokens"),
    "a negative token": (with_tokens(-1, 1), "'-1' is no id"),
    "a huge token": (with_tokens(10**30, 1), "is no id"),
    "a fraction": (with_tokens(7.5, 1), "'7.5' is no id"),
    "truth": (with_tokens(True, 1), "'True' is no id"),
    "text": (with_tokens("7", 1), "'7' is no id"),
    "NaN": (with_logprob(float("nan")), "token 0 is not finite"),
    "minus infinity": (with_logprob(float("-inf")), "token 0 is not finite"),
    "a probability": (with_logprob(0.9), "at most 0 is possible"),
    "a log-prob of text": (with_logprob("low"), "answers, but not like vLLM"),
    "null": (with_logprob(None), "token 0 is not finite|not like vLLM"),
    "no choices": (lambda c: {"choices": []}, "answers, but not like vLLM"),
    "a list": (lambda c: [1, 2], "answers, but not like vLLM"),
    "a number": (lambda c: 3, "answers, but not like vLLM"),
    "another version": (
        lambda c: c.update(weight_versions=[{"version": "x/1", "start": 0, "end": 2}]),
        "not of this run",
    ),
    "an endless version": (
        lambda c: c.update(
            weight_versions=[{"version": "run/" + "9" * 5000, "start": 0, "end": 2}]
        ),
        "answers, but not like vLLM",
    ),
    "spans of text": (lambda c: c.update(weight_versions="run/0"), "answers, but not like vLLM"),
}


@pytest.mark.parametrize("lie, message", LIES.values(), ids=list(LIES))
def test_a_lie_is_an_error_that_says_what_it_is(lie, message):
    server = Liar(lie)
    try:
        with pytest.raises(SamplerError, match=message):
            list(make_pool([server]).run(make_requests(count=1), STOP, 0))
    finally:
        server.stop()


def test_the_lies_are_counted():
    assert len(LIES) == 22


class RawServer:
    """Answers completions with whatever `write` puts on the connection."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = json.dumps({"weight_version": "run/0"}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    write(self)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads, self._http.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def endless(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 65536)


def slow(handler: Any) -> None:
    """One byte now and then, for ever."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    waits = threading.Event()
    while not waits.wait(0.05):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def nested(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b'{"request_id": ' + b"[" * 100_000)


def broken(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"{")


@pytest.fixture
def raw() -> Iterator[Callable[[Callable[[Any], None]], RawServer]]:
    made: list[RawServer] = []

    def make(write: Callable[[Any], None]) -> RawServer:
        made.append(RawServer(write))
        return made[0]

    yield make
    for server in made:
        server.stop()


@pytest.mark.parametrize(
    "write, message",
    [
        (endless, "is longer than 1000000 B"),
        (slow, "did not end in 0.4 s"),
        (nested, "did not answer in JSON"),
        (broken, "ClientPayloadError"),
    ],
)
def test_an_answer_without_an_end_is_given_up(raw, monkeypatch, write, message):
    monkeypatch.setattr(routes, "MOST_ANSWER_BYTES", 1_000_000)
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.4)
    monkeypatch.setattr(dispatcher, "MAX_RETRIES", 0)
    pool = make_pool([raw(write)])
    with pytest.raises(SamplerError, match=message):
        list(pool.run(make_requests(count=1), STOP, 0))
