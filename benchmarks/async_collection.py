"""How many tokens a second one collector takes in, beside what its servers offer.

    python benchmarks/async_collection.py                           # 8 and 16 servers
    python benchmarks/async_collection.py --tokenizer FOLDER        # of a real model
    python benchmarks/async_collection.py --servers 16 --rate 400   # more than it can take

Rank 0's intake with its journal and ledger, a real collector and its verifiers, and servers that
answer what vLLM 0.32 would (token ids, log-probs, weight versions: 150 bytes a token) after as long
as `--rate` tokens a second take for each request. They sample nothing: all are one process. Texts
have a quarter to seven quarters of `--tokens`, differ from request to request, and end with a boxed
answer, which math-verify grades. Nothing trains: a step takes what has arrived, once a second.

CPU seconds tell where it saturates: the collector, rank 0 and the servers use one core each.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from aiohttp import web
from run_processes import free_port

from grpo_replay.collection.intake import Intake
from grpo_replay.collection.journal import Journal
from grpo_replay.collection.messages import CollectorSettings
from grpo_replay.engine.models import load_tokenizer
from grpo_replay.recipe import Recipe, resolve_recipe

RUN, GROUP, PROMPTS, TEXTS = "collection", 8, 512, 16
NUMBERED = 9  # digits that make every completion another text
SENTENCE = "So far the sum is {0}, and {0} times {1} is {2}; we go on with the next part of it. "


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--tokens", type=int, default=2000, help="mean of a completion")
    parser.add_argument("--in-flight", type=int, default=128, help="requests per server")
    parser.add_argument("--rate", type=float, default=100.0, help="tokens/s of each request")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, after a warm-up")
    parser.add_argument("--verifiers", type=int, default=2)
    parser.add_argument("--tokenizer", default="builtin:bytes")
    return parser.parse_args()


@dataclass(frozen=True)
class Answers:
    """What servers answer: token ids of the texts, those of the digits, and the end's."""

    texts: list[list[int]]
    digits: list[int]
    end: int

    @classmethod
    def of(cls, tokenizer: Any, tokens: int) -> "Answers":
        random = np.random.default_rng(0)
        lengths = np.linspace(0.25, 1.75, TEXTS) * tokens
        texts = []
        for length in lengths.astype(int).tolist():
            final = tokenizer.encode(f"The answer is \\boxed{{{random.integers(100)}}}.")
            room = max(length - len(final) - NUMBERED - 1, 0)
            body: list[int] = []
            while len(body) < room:
                a, b = random.integers(1, 1000, 2).tolist()
                body += tokenizer.encode(SENTENCE.format(a, b, a * b))
            texts.append(body[:room] + final)
        digits = [tokenizer.encode(str(digit))[-1] for digit in range(10)]
        return cls(texts, digits, tokenizer.eos_token_id)


class Body:
    """vLLM's answer with one text, of which only the first digits differ by request."""

    def __init__(self, text: list[int], answers: Answers) -> None:
        random = np.random.default_rng(1)
        ids = [*text, answers.end]
        logprobs = np.round(-random.exponential(0.3, NUMBERED + len(ids)), 6).tolist()
        content = []
        for token_id, logprob in zip([answers.digits[0]] * NUMBERED + ids, logprobs, strict=True):
            entry = {"token_id": token_id, "logprob": logprob, "rank": 1}
            content.append(entry | {"top_logprobs": [entry]})
        self.tokens = len(content)
        spans = [{"version": f"{RUN}/0", "start": 0, "end": self.tokens}]
        choice = {
            "index": 0, "finish_reason": "stop", "stop_reason": answers.end,
            "logprobs": {"content": content}, "weight_versions": spans,
        }  # fmt: skip
        rest = json.dumps(ids)[1:]
        front, back = json.dumps({"choices": [choice | {"token_ids": "HERE"}]}).split('"HERE"')
        self._front, self._back = f"{front}[".encode(), f"{rest}{back}".encode()

    def numbered(self, number: int, digits: list[int]) -> bytes:
        first = "".join(f"{digits[int(each)]}, " for each in f"{number:0{NUMBERED}d}")
        return self._front + first.encode() + self._back


def serve(ports: list[int], answers: Answers, rate: float) -> None:
    """All servers, until the process is ended."""
    bodies = [Body(text, answers) for text in answers.texts]
    random = np.random.default_rng(2)
    generated = dict.fromkeys(ports, 0)
    served = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal served
        await request.read()
        served += 1
        number, body = served, bodies[random.integers(len(bodies))]
        await asyncio.sleep(body.tokens / rate)
        generated[request.url.port] += body.tokens
        payload = body.numbered(number, answers.digits)
        return web.Response(body=payload, content_type="application/json")

    async def metrics(request: web.Request) -> web.Response:
        # A real server counts tokens as it generates, these when an answer is sent.
        moment = generated[request.url.port] + int(10 * time.monotonic())
        return web.Response(text=f"vllm:generation_tokens_total {moment}\n")

    async def describe(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": f"{RUN}/0"})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", generate)
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/weight_info", describe)
        app.router.add_get("/health", describe)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        for port in ports:
            await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        await asyncio.Event().wait()

    asyncio.run(run())


def wait_for(port: int) -> None:
    """Returns when something listens there."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.1)


@contextmanager
def servers(count: int, answers: Answers, rate: float) -> Iterator[tuple[list[str], int]]:
    """URLs of servers, and the id of their process."""
    ports = [free_port() for _ in range(count)]
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(ports, answers, rate), daemon=True)
    process.start()
    try:
        wait_for(ports[-1])  # which is opened last
        yield [f"http://127.0.0.1:{port}" for port in ports], process.pid
    finally:
        process.terminate()
        process.join()


def recipe_of(options: argparse.Namespace, urls: list[str], folder: Path) -> Recipe:
    problems = folder / "problems.jsonl"
    rows = [
        {"id": str(i), "problem": f"What is {i} + {i % 7}?", "answer": str((i * 7) % 100)}
        for i in range(PROMPTS)
    ]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return resolve_recipe([{
        "name": "collection",
        "model": {
            "path": "builtin:qwen3-0.6b", "tokenizer": options.tokenizer,
            "random_init": {"num_hidden_layers": 1},
        },
        "prompts": {
            "source": str(problems), "id_field": "id", "template": "plain",
            "user_template": "{problem}", "max_prompt_length": 256,
        },
        "sampling": {
            "backend": "vllm_server", "group_size": GROUP,
            "max_completion_length": 2 * options.tokens,
            "servers": {"urls": urls, "max_in_flight": options.in_flight},
        },
        "reward": {"function": "math_verify", "workers": options.verifiers},
        "replay": {"preset": "fifo", "capacity_rollouts": 1_000_000},
        "loss": {"behavior_logprobs": "sampler"},
        "run": {"mode": "async", "steps": 1_000_000},
    }])  # fmt: skip


class Clock:
    """CPU seconds of the collector, its verifiers, rank 0 and the servers, by name."""

    def __init__(self, serving: int) -> None:
        self._me, self._serving = psutil.Process(), psutil.Process(serving)

    def read(self) -> dict[str, float]:
        found = dict.fromkeys(("collector", "verifiers", "rank 0", "servers"), 0.0)
        for process in self._me.children(recursive=True):
            words = " ".join(process.cmdline())
            of_verifier = "verifier_worker" in words
            if of_verifier or "collector_process" in words:
                found["verifiers" if of_verifier else "collector"] += sum(process.cpu_times()[:2])
        found["rank 0"] = sum(self._me.cpu_times()[:2])
        found["servers"] = sum(self._serving.cpu_times()[:2])
        return found


def measure(options: argparse.Namespace, count: int, folder: Path) -> dict[str, Any]:
    """One number of servers. The ledger is checked at every step, which raises LedgerError."""
    tokenizer = load_tokenizer(recipe_of(options, ["http://127.0.0.1:1"], folder).model)
    answers = Answers.of(tokenizer, options.tokens)
    with servers(count, answers, options.rate) as (urls, serving):
        recipe = recipe_of(options, urls, folder)
        journal, records = Journal.open(folder / "journal")
        intake = Intake(recipe, journal, records, 0)
        log = folder / "collector.log"
        settings = CollectorSettings(recipe, RUN, urls, (answers.end,), None, log)
        intake.go_live(settings, PROMPTS, 0)
        try:
            return take_in(options, intake, Clock(serving), folder / "journal")
        finally:
            intake.close()
            journal.close()


def take_in(
    options: argparse.Namespace, intake: Intake, clock: Clock, journal: Path
) -> dict[str, Any]:
    step, rollouts = 0, 0

    def collect(seconds: float) -> None:
        """Steps of a second each, as many as fit."""
        nonlocal step, rollouts
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            until = time.monotonic() + 1.0
            while (left := until - time.monotonic()) > 0:
                intake.poll(0, left)
            step += 1
            rollouts += len(intake.cut(step))

    while intake.arrivals.arrived_groups == 0:
        intake.poll(0, 1.0)
    collect(2 * options.tokens / options.rate)  # until requests no longer end together
    counted, before, started = intake.arrivals.ledger.generated, clock.read(), time.monotonic()
    collect(options.seconds)
    seconds = time.monotonic() - started
    generated = intake.arrivals.ledger.generated.minus(counted)
    cpu = {name: value - before[name] for name, value in clock.read().items()}
    return {
        "tokens": generated.tokens, "rollouts": generated.rollouts, "seconds": seconds, "cpu": cpu,
        "steps": step, "taken_in_all": rollouts,
        "journal_bytes": sum(file.stat().st_size for file in journal.iterdir()),
    }  # fmt: skip


def show(count: int, options: argparse.Namespace, found: dict[str, Any]) -> None:
    offered = count * options.in_flight * options.rate
    collected = found["tokens"] / found["seconds"]
    shares = " | ".join(f"{100 * cpu / found['seconds']:.0f} %" for cpu in found["cpu"].values())
    capacity = found["tokens"] / found["cpu"]["collector"]
    print(
        f"| {count} | {offered:,.0f} | {collected:,.0f} | {100 * collected / offered:.0f} % | "
        f"{shares} | {capacity:,.0f} |", flush=True,
    )  # fmt: skip


def main() -> int:
    options = parse_options()
    print("| servers | offered, tokens/s | collected | share | collector, of a core | verifiers | "
          "rank 0 | servers | tokens a CPU second of the collector |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for count in options.servers:
        with tempfile.TemporaryDirectory() as name:
            show(count, options, measure(options, count, Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
