"""Requests kept in flight on several servers: bounded, retried elsewhere, never lost silently.

A waiting request goes to the server in use that has the fewest. A server that fails a request is
looked at: it is used again if it is well and has weights of this run. If not, or if it generates
nothing for too long, it is lost: its requests go to the others, and it is used again only when it
has confirmed another version. Without a server left, everything ends. All of this runs in one event
loop.
"""

import asyncio
import contextlib
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from grpo_replay.errors import SamplerError, ServersLost
from grpo_replay.recipe import ServersSection
from grpo_replay.sampling.server.routes import (
    UPDATING,
    Choice,
    Refused,
    Unreachable,
    VllmServer,
    background_loop,
)
from grpo_replay.sampling.vllm_requests import ADAPTERS_AT_ONCE, build_completion
from grpo_replay.types import Completion, GenerationRequest, Span

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""Time between two looks at a server that is being updated."""

HEALTH_SECONDS = 60.0
"""Longest wait for the answer to a look. A server that is gone refuses the connection at once; one
that is busy with hundreds of requests may answer late."""

MAX_RETRIES = 2
"""How often a failed request is sent again, to another server if there is one."""


@dataclass(slots=True, eq=False)
class Job:
    """One request. `version` is that of the server when the request was sent."""

    request: GenerationRequest
    tries: int = 0
    failed_at: set[str] = field(default_factory=set)
    version: int | None = None


J = TypeVar("J", bound=Job)


class Servers:
    """The servers of a run. `lost` maps the URL of one that is not used to the reason. Of several
    ranks that share them, each has its part of the requests in flight."""

    def __init__(
        self, servers: Iterable[VllmServer], section: ServersSection, ranks: int = 1
    ) -> None:
        self.all = list(servers)
        self.lost: dict[str, str] = {}
        self.in_flight_per_server = max(section.max_in_flight // ranks, 1)
        self.timeout_seconds = section.request_timeout_seconds

    def live(self) -> list[VllmServer]:
        return [server for server in self.all if server.url not in self.lost]

    def lose(self, server: VllmServer, reason: str) -> None:
        """Do without a server from now on."""
        if server.log is not None:  # the run started it
            reason = f"{reason}; its log is {server.log}"
        self.lost[server.url] = reason
        logger.warning(
            "the vLLM server %s is lost: %s; %d left", server.url, reason, len(self.live())
        )

    def refuse_none(self) -> None:
        """Raises ServersLost if all are lost."""
        if not self.live():
            reasons = "; ".join(f"{url}: {reason}" for url, reason in self.lost.items())
            raise ServersLost(
                f"no vLLM server is left ({reasons}). Check that those of sampling.servers.urls "
                "run, and resume with --resume, which starts those of sampling.servers.launch again"
            )


@dataclass(slots=True, eq=False)
class ServerState(Generic[J]):
    """One server. `version` is the newest policy version that it confirmed; `failure` says why it
    is being looked at, None if it is used or lost."""

    client: VllmServer
    version: int | None
    failure: str | None = None
    running: dict[asyncio.Task, J] = field(default_factory=dict)
    idle_seconds: float = 0.0
    used_seconds: float = 0.0
    since: float = field(default_factory=time.monotonic)


class Dispatcher(Generic[J]):
    """Sends jobs to servers. `admit()` gives further jobs, or none; `on_sampled` and `on_lost` are
    called with jobs that finished, or failed for good. The servers hold `version`; if it is None,
    they are asked before they are used. `failure` has the first error: ServersLost, SamplerError
    for what no other server would mend, or any of a callback."""

    def __init__(
        self,
        servers: Servers,
        stop_token_ids: Sequence[int],
        admit: Callable[[], Iterable[J]],
        on_sampled: Callable[[J, Completion, tuple[Span, ...]], None],
        on_lost: Callable[[J, str], None],
        version: int | None = None,
    ) -> None:
        self._servers = servers
        self._stop_token_ids = stop_token_ids
        self._admit, self._on_sampled, self._on_lost = admit, on_sampled, on_lost
        self.servers: dict[str, ServerState[J]] = {
            each.url: ServerState(each, version) for each in servers.all
        }
        self.waiting: deque[J] = deque()
        self.oldest_usable = 0  # policy version
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task] = set()
        for server in self.servers.values():
            self._spawn(self._watch_progress(server))
            if version is None and not self._is_lost(server):
                self._suspect(server, "not asked yet")

    def fill(self) -> None:
        """Send waiting jobs, and further ones, to the servers that have room."""
        room = [server for server in self.servers.values() if self._has_room(server)]
        while room:
            server = min(room, key=lambda each: len(each.running))
            job = self._next_job(server)
            if job is None:
                room.remove(server)
                continue
            self._account(server)
            job.version = server.version
            server.running[self._spawn(self._sample(job, server))] = job
            # `admit` may have changed which servers are used.
            room = [each for each in room if self._has_room(each)]

    def withdraw(self, jobs: Iterable[J]) -> None:
        """Cancel these, whether they run or wait."""
        gone = {id(job) for job in jobs}
        self.waiting = deque(job for job in self.waiting if id(job) not in gone)
        for server in self.servers.values():
            self._cancel(server, gone)

    def set_version(self, url: str, version: int | None) -> None:
        """A server confirmed a version, or (None) did not."""
        server = self.servers[url]
        if version is None:
            self._lose(server, "its weights could not be updated")
        else:
            self._use(server, version)

    def time_of_servers(self) -> tuple[float, float]:
        """Seconds without a request running, and all seconds, of the servers while in use."""
        for server in self.servers.values():
            self._account(server)
        idle = sum(server.idle_seconds for server in self.servers.values())
        return idle, sum(server.used_seconds for server in self.servers.values())

    async def close(self) -> None:
        """Cancel everything."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_lost(self, server: ServerState[J]) -> bool:
        return server.client.url in self._servers.lost

    def _is_used(self, server: ServerState[J]) -> bool:
        """One whose weights are too old for the next step waits for newer ones."""
        held = server.version
        is_well = server.failure is None and not self._is_lost(server)
        return is_well and held is not None and held >= self.oldest_usable

    def _has_room(self, server: ServerState[J]) -> bool:
        room = self._servers.in_flight_per_server - len(server.running)
        return room > 0 and self._is_used(server) and self._can_name_its_version(server)

    def _can_name_its_version(self, server: ServerState[J]) -> bool:
        """Whether vLLM would run a request with the newest adapter beside those of older versions.
        One that waited there might find its adapter gone, which ends the engine."""
        if not server.client.with_adapters:
            return True
        named = {server.version, *(job.version for job in server.running.values())}
        return len(named) <= ADAPTERS_AT_ONCE

    def _next_job(self, server: ServerState[J]) -> J | None:
        """The next waiting job that has not failed at this server, or failed at all that are used;
        else a further one."""
        used = {each.client.url for each in self.servers.values() if self._is_used(each)}
        for index, job in enumerate(self.waiting):
            if server.client.url not in job.failed_at or used <= job.failed_at:
                del self.waiting[index]
                return job
        if not self.waiting:
            self.waiting.extend(self._admit())
            return self.waiting.popleft() if self.waiting else None
        return None

    def _cancel(self, server: ServerState[J], gone: set[int]) -> list[J]:
        """Stop those of its jobs whose ids are in `gone`, and return them."""
        self._account(server)
        ended = [(task, job) for task, job in server.running.items() if id(job) in gone]
        for task, _ in ended:
            del server.running[task]
            task.cancel()
        return [job for _, job in ended]

    async def _sample(self, job: J, server: ServerState[J]) -> None:
        """One try of one job."""
        task = asyncio.current_task()
        assert task is not None
        failure: Exception | None = None
        try:
            answer = await server.client.generate(job.request, self._stop_token_ids, job.version)
            completion, spans = self._read(answer, job, server.client)
        except (Refused, Unreachable) as error:
            failure = error
        except (msgspec.DecodeError, IndexError) as error:
            raise SamplerError(
                f"{server.client.url} answers, but not like vLLM 0.32: {error}"
            ) from error
        if task not in server.running:
            return  # it was withdrawn while the answer was read
        self._account(server)
        del server.running[task]
        if failure is None:
            self._on_sampled(job, completion, spans)
        else:
            self._retry(job, server, failure)
        self.fill()

    def _read(
        self, answer: Choice, job: J, client: VllmServer
    ) -> tuple[Completion, tuple[Span, ...]]:
        """The validated completion and its spans. Raises Unreachable if it was aborted or is of
        other weights, SamplerError as `build_completion` does."""
        if answer.finish_reason == "abort":
            raise Unreachable("the server aborted the request")
        labelled = answer.weight_versions
        spans = tuple(
            (version, span.start, span.end)
            for span in labelled
            if (version := client.version_of(span.version)) is not None
        )
        if not spans or len(spans) < len(labelled):
            labels = [span.version for span in labelled]
            raise Unreachable(f"sampled by weights labelled {labels}, not of this run")
        completion = build_completion(
            job.request,
            answer.token_ids,
            [each.logprob for each in answer.logprobs.content],
            answer.finish_reason,
            (spans[0][0], spans[-1][0]),
            self._stop_token_ids,
        )
        return completion, spans

    def _retry(self, job: J, server: ServerState[J], error: Exception) -> None:
        """Let the job wait for another try, or give it up, and look at the server."""
        url = server.client.url
        if isinstance(error, Refused) and 400 <= error.status < 500:
            raise SamplerError(f"{url} refused request {tuple(job.request.key)}: {error}")
        job.tries += 1
        job.failed_at.add(url)
        if job.tries > MAX_RETRIES:
            self._on_lost(job, f"it failed {job.tries} times, last at {url}: {error}")
        else:
            self.waiting.appendleft(job)
        if server.failure is None and not self._is_lost(server):
            self._suspect(server, f"a request failed: {error}")

    def _suspect(self, server: ServerState[J], failure: str) -> None:
        """Send it nothing until it was looked at."""
        self._account(server)
        server.failure = failure
        self._spawn(self._look_at(server))

    async def _look_at(self, server: ServerState[J]) -> None:
        """Use it if it is well and has weights of this run, or lose it. One that is being updated
        is looked at until it has a version."""
        client = server.client
        while server.failure is not None:
            label, error = "", ""
            try:
                await client.check_health(HEALTH_SECONDS)
                label = await client.weight_label(HEALTH_SECONDS)
            except (Refused, Unreachable) as no_answer:
                error = str(no_answer)
            version = client.version_of(label)
            if server.failure is None:
                return  # an update has ended meanwhile, well or not
            if error:
                self._lose(server, f"{server.failure}; then {error}")
            elif version is not None:
                self._use(server, version)
            elif label == client.prefix + UPDATING:
                await asyncio.sleep(PROBE_SECONDS)
            else:
                why = "it was restarted" if label == "default" else "another run updates it"
                self._lose(server, f"its weights are labelled {label!r}, not of this run: {why}")

    def _use(self, server: ServerState[J], version: int) -> None:
        self._account(server)
        server.version, server.failure = version, None
        if self._servers.lost.pop(server.client.url, None):
            logger.warning("%s is back, with version %d", server.client.url, version)
        self.fill()

    def _lose(self, server: ServerState[J], reason: str) -> None:
        """Send its requests elsewhere. Raises ServersLost if it was the last."""
        self._account(server)
        server.failure = None
        if not self._is_lost(server):
            self._servers.lose(server.client, reason)
        for job in self._cancel(server, set(map(id, server.running.values()))):
            job.failed_at.add(server.client.url)  # others first
            self.waiting.appendleft(job)
        self._servers.refuse_none()
        self.fill()

    async def _watch_progress(self, server: ServerState[J]) -> None:
        """Lose a server that generates nothing for too long with requests outstanding, though
        /health may answer. Only a lack of progress counts: a completion may take as long as it
        needs."""
        limit = self._servers.timeout_seconds
        tokens: float | None = None
        since = time.monotonic()  # when it was last idle, or had another count of tokens
        while True:
            await asyncio.sleep(min(limit / 4, 5.0))
            found = tokens
            if server.running:
                with contextlib.suppress(Refused, Unreachable):
                    found = await server.client.generated_tokens(min(HEALTH_SECONDS, limit))
            if not server.running or found != tokens:
                tokens, since = found, time.monotonic()
            if time.monotonic() - since > limit:
                self._lose(
                    server,
                    f"it generated no token for {limit:g} s with {len(server.running)} requests "
                    "outstanding (sampling.servers.request_timeout_seconds)",
                )

    def _account(self, server: ServerState[J]) -> None:
        """Add the time since the last call to the times of use and idleness."""
        now = time.monotonic()
        if server.failure is None and not self._is_lost(server):
            server.used_seconds += now - server.since
            server.idle_seconds += (now - server.since) * (not server.running)
        server.since = now

    def _spawn(self, coroutine: Any) -> asyncio.Task:
        """A task whose error is the dispatcher's failure."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)


def sample(
    servers: Servers,
    requests: Sequence[GenerationRequest],
    stop_token_ids: Sequence[int],
    version: int,
) -> Iterator[Completion]:
    """Completions as they finish, all sampled by policy `version`: the dispatcher in the background
    loop, with nothing beyond these requests. Raises its error as soon as one cannot be had;
    requests still running are then cancelled, as they are when the iterator is closed."""
    results: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()

    def take(job: Job, completion: Completion, spans: tuple[Span, ...]) -> None:
        sampled_by = sorted({each for each, _, _ in spans})
        if sampled_by != [version]:
            raise SamplerError(
                f"completion {tuple(job.request.key)} was sampled by policy versions {sampled_by} "
                f"where {version} was asked for: something else updates the servers' weights"
            )
        results.put(completion)

    def give_up(job: Job, reason: str) -> None:
        raise SamplerError(f"request {tuple(job.request.key)} cannot be had: {reason}")

    async def dispatch() -> None:
        dispatcher: Dispatcher[Job] = Dispatcher(
            servers, stop_token_ids, tuple, take, give_up, version
        )
        try:
            dispatcher.waiting.extend(map(Job, requests))
            dispatcher.fill()
            await dispatcher.failure
        except Exception as error:
            results.put(error)
        finally:
            await dispatcher.close()

    servers.refuse_none()
    running = asyncio.run_coroutine_threadsafe(dispatch(), background_loop())
    try:
        for _ in requests:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        running.cancel()
