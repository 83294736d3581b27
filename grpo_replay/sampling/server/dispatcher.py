"""Keeps requests in flight on several servers: bounded, retried elsewhere, never lost silently.

A waiting request goes to the used server with the fewest running requests. A server that fails a
request is checked: it is used again if it is healthy and has weights of this run. If not, or if it
generates nothing for too long, it is lost: its requests go to other servers, and it is used again
only after it has confirmed another version. If no server is left, the dispatcher fails. All of this
runs in one event loop.
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
"""Seconds between two checks of a server that is being updated."""

HEALTH_SECONDS = 60.0
"""Maximum wait for the answer to a check. A server that has ended refuses the connection at once;
one with hundreds of requests may answer late."""

MAX_RETRIES = 2
"""Maximum retries of a failed request, on another server if possible."""


@dataclass(slots=True, eq=False)
class Job:
    """One request. `version` is the server's policy version when it was sent."""

    request: GenerationRequest
    tries: int = 0
    failed_at: set[str] = field(default_factory=set)
    version: int | None = None


J = TypeVar("J", bound=Job)


class Servers:
    """The servers of a run. `lost` maps the URLs of lost servers to reasons. `ranks` that share the
    servers divide the requests in flight."""

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
        """Mark a server as lost: it is not used any more."""
        if server.log is not None:  # the run started it
            reason = f"{reason}; its log is {server.log}"
        self.lost[server.url] = reason
        logger.warning(
            "the vLLM server %s is lost: %s; %d left", server.url, reason, len(self.live())
        )

    def refuse_all_lost(self) -> None:
        """Raises ServersLost if all are lost."""
        if not self.live():
            reasons = "; ".join(f"{url}: {reason}" for url, reason in self.lost.items())
            raise ServersLost(
                f"no vLLM server is left ({reasons}). Check that those of sampling.servers.urls "
                "run, and resume with --resume, which starts those of sampling.servers.launch again"
            )


@dataclass(slots=True, eq=False)
class ServerState(Generic[J]):
    """The state of one server. `version` is the newest policy version that it confirmed; `failure`
    is the reason why it is being checked, None if it is used or lost."""

    client: VllmServer
    version: int | None
    failure: str | None = None
    running: dict[asyncio.Task, J] = field(default_factory=dict)
    idle_seconds: float = 0.0
    used_seconds: float = 0.0
    since: float = field(default_factory=time.monotonic)


class Dispatcher(Generic[J]):
    """Sends jobs to servers. `admit()` returns further jobs, if any; `on_sampled` is called with
    finished jobs, `on_lost` with jobs that failed for good. The servers have `version`; if it is
    None, they are asked for theirs first. `failure` has the first error: ServersLost, SamplerError
    where another server would fail too, or an error of a callback."""

    def __init__(
        self,
        servers: Servers,
        stop_token_ids: Sequence[int],
        admit: Callable[[], Iterable[J]],
        on_sampled: Callable[[J, Completion, tuple[Span, ...]], None],
        on_lost: Callable[[J, str], None],
        version: int | None = None,
    ) -> None:
        """Called in the event loop. Watches every server; without `version` checks each first."""
        self._servers = servers
        self._stop_token_ids = stop_token_ids
        self._admit, self._on_sampled, self._on_lost = admit, on_sampled, on_lost
        self.servers: dict[str, ServerState[J]] = {
            server.url: ServerState(server, version) for server in servers.all
        }
        self.waiting: deque[J] = deque()
        self.oldest_usable = 0  # policy version
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task] = set()
        for state in self.servers.values():
            self._spawn(self._watch_progress(state))
            if version is None and not self._is_lost(state):
                self._start_check(state, "its version is not known yet")

    def fill(self) -> None:
        """Send waiting jobs, then further ones of `admit`, to used servers with room, always the
        one with the fewest running; each job notes the version that its server has."""
        free = [server for server in self.servers.values() if self._has_room(server)]
        while free:
            server = min(free, key=lambda server: len(server.running))
            job = self._next_job(server)
            if job is None:
                free.remove(server)
                continue
            self._account(server)
            job.version = server.version
            server.running[self._spawn(self._sample(job, server))] = job
            # `admit` may have changed which servers are used.
            free = [server for server in free if self._has_room(server)]

    def withdraw(self, jobs: Iterable[J]) -> None:
        """Cancel running and waiting jobs."""
        ids = {id(job) for job in jobs}
        self.waiting = deque(job for job in self.waiting if id(job) not in ids)
        for server in self.servers.values():
            self._cancel(server, ids)

    def set_version(self, url: str, version: int | None) -> None:
        """Record the version that a server confirmed after a push; None: it did not confirm."""
        server = self.servers[url]
        if version is None:
            self._lose(server, "its weights could not be updated")
        else:
            self._use(server, version)

    def server_seconds(self) -> tuple[float, float]:
        """Seconds without a running request, and all seconds, in which servers were in use."""
        for server in self.servers.values():
            self._account(server)
        idle = sum(server.idle_seconds for server in self.servers.values())
        return idle, sum(server.used_seconds for server in self.servers.values())

    async def close(self) -> None:
        """Cancel all tasks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_lost(self, server: ServerState[J]) -> bool:
        return server.client.url in self._servers.lost

    def _is_used(self, server: ServerState[J]) -> bool:
        """Whether the server is healthy, and its weights are not too old for the next step."""
        version = server.version
        is_healthy = server.failure is None and not self._is_lost(server)
        return is_healthy and version is not None and version >= self.oldest_usable

    def _has_room(self, server: ServerState[J]) -> bool:
        room = self._servers.in_flight_per_server - len(server.running)
        return room > 0 and self._is_used(server) and self._has_adapter_slot(server)

    def _has_adapter_slot(self, server: ServerState[J]) -> bool:
        """Returns whether vLLM would run a request with the newest adapter at once. If it waited
        inside vLLM, its adapter might be removed meanwhile, which ends the engine."""
        if not server.client.with_adapters:
            return True
        versions = {server.version, *(job.version for job in server.running.values())}
        return len(versions) <= ADAPTERS_AT_ONCE

    def _next_job(self, server: ServerState[J]) -> J | None:
        """Takes the next waiting job that has not failed at this server, or has failed at all used
        servers; if no job waits at all, a further one of `admit`. None if there is none."""
        used = {other.client.url for other in self.servers.values() if self._is_used(other)}
        for index, job in enumerate(self.waiting):
            if server.client.url not in job.failed_at or used <= job.failed_at:
                del self.waiting[index]
                return job
        if self.waiting:
            return None
        self.waiting.extend(self._admit())
        return self.waiting.popleft() if self.waiting else None

    def _cancel(self, server: ServerState[J], ids: set[int]) -> list[J]:
        """Cancel the server's running jobs whose `id` is in `ids`, and return them."""
        self._account(server)
        cancelled = [(task, job) for task, job in server.running.items() if id(job) in ids]
        for task, _ in cancelled:
            del server.running[task]
            task.cancel()
        return [job for _, job in cancelled]

    async def _sample(self, job: J, server: ServerState[J]) -> None:
        """Tries a job once at a server: `on_sampled` gets its completion, or a failure is retried.
        Nothing happens if the job was cancelled meanwhile. Then fills the servers again."""
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
            return  # the job was withdrawn meanwhile
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
        """Validate an answer, and return the completion and its spans. Raises Unreachable if the
        server aborted it or has weights of another run, SamplerError as `build_completion` does."""
        if answer.finish_reason == "abort":
            raise Unreachable("the server aborted the request")
        spans = tuple(
            (version, span.start, span.end)
            for span in answer.weight_versions
            if (version := client.version_of(span.version)) is not None
        )
        if not spans or len(spans) < len(answer.weight_versions):
            labels = [span.version for span in answer.weight_versions]
            raise Unreachable(f"sampled by weights labelled {labels}, not of this run")
        completion = build_completion(
            job.request,
            answer.token_ids,
            [token.logprob for token in answer.logprobs.content],
            answer.finish_reason,
            (spans[0][0], spans[-1][0]),
            self._stop_token_ids,
        )
        return completion, spans

    def _retry(self, job: J, server: ServerState[J], error: Exception) -> None:
        """Queue a failed job for another try, or give it up after `MAX_RETRIES`; and check the
        server. Raises SamplerError for a 4xx answer, which every server would give."""
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
            self._start_check(server, f"a request failed: {error}")

    def _start_check(self, server: ServerState[J], failure: str) -> None:
        """Send the server no jobs until it is checked."""
        self._account(server)
        server.failure = failure
        self._spawn(self._check_server(server))

    async def _check_server(self, server: ServerState[J]) -> None:
        """Use the server again if it is healthy and has weights of this run, else lose it. A server
        that is being updated is checked until it has a version."""
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
                return  # a push has used or lost it meanwhile
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
        """Lose a server, and send its jobs to others. Raises ServersLost if it was the last one."""
        self._account(server)
        server.failure = None
        if not self._is_lost(server):
            self._servers.lose(server.client, reason)
        for job in self._cancel(server, set(map(id, server.running.values()))):
            job.failed_at.add(server.client.url)  # prefer other servers
            self.waiting.appendleft(job)
        self._servers.refuse_all_lost()
        self.fill()

    async def _watch_progress(self, server: ServerState[J]) -> None:
        """Lose a server that has requests but generates no token for too long, even if /health
        answers. A single completion may take as long as it needs."""
        limit = self._servers.timeout_seconds
        tokens: float | None = None
        since = time.monotonic()  # when it was last idle, or its token count last changed
        while True:
            await asyncio.sleep(min(limit / 4, 5.0))
            count = tokens
            if server.running:
                with contextlib.suppress(Refused, Unreachable):
                    count = await server.client.generated_tokens(min(HEALTH_SECONDS, limit))
            if not server.running or count != tokens:
                tokens, since = count, time.monotonic()
            if time.monotonic() - since > limit:
                self._lose(
                    server,
                    f"it generated no token for {limit:g} s with {len(server.running)} requests "
                    "outstanding (sampling.servers.request_timeout_seconds)",
                )

    def _account(self, server: ServerState[J]) -> None:
        """Add the time since the last call to the server's used and idle seconds."""
        now = time.monotonic()
        if server.failure is None and not self._is_lost(server):
            server.used_seconds += now - server.since
            server.idle_seconds += (now - server.since) * (not server.running)
        server.since = now

    def _spawn(self, coroutine: Any) -> asyncio.Task:
        """Start a task. Its error becomes the failure of the dispatcher."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task) -> None:
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
    """Yield completions as they finish, all sampled by policy `version`. Runs a dispatcher with
    only these requests in the background loop. Raises its error as soon as a request cannot be
    sampled; running requests are then cancelled, as they are when the iterator is closed."""
    results: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()

    def take(job: Job, completion: Completion, spans: tuple[Span, ...]) -> None:
        """Queues a completion. Raises SamplerError if another version sampled a token."""
        versions = sorted({span_version for span_version, _, _ in spans})
        if versions != [version]:
            raise SamplerError(
                f"completion {tuple(job.request.key)} was sampled by policy versions {versions} "
                f"where {version} was expected: something else updates the servers' weights"
            )
        results.put(completion)

    def give_up(job: Job, reason: str) -> None:
        raise SamplerError(f"request {tuple(job.request.key)} could not be sampled: {reason}")

    async def dispatch() -> None:
        """Runs in the background loop until cancelled; queues the error that ends it."""
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

    servers.refuse_all_lost()
    running = asyncio.run_coroutine_threadsafe(dispatch(), background_loop())
    try:
        for _ in requests:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        running.cancel()
