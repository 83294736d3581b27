"""Requests kept in flight on several servers: bounded, retried elsewhere, never lost silently.

A server is up while it answers and holds weights of this run. Waiting requests go to the server
that is up and has the fewest. One that fails a request, or generates nothing for too long, is down:
its requests are sent again, to another server if there is one. It is asked once a second for its
label, and is up again as soon as that is of this run. All of this runs in one event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from grpo_replay.errors import SamplerError
from grpo_replay.recipe import ServersSection
from grpo_replay.sampling.server.routes import (
    Choice,
    Refused,
    Unreachable,
    VllmServer,
    WeightSpan,
)
from grpo_replay.sampling.vllm_requests import build_completion
from grpo_replay.types import Completion, GenerationRequest, Span

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""Time between two looks at a server that is down."""
PROBE_TIMEOUT_SECONDS = 5.0

HEALTH_SECONDS = 60.0
"""Longest wait for the answer to the first look after a failure. A server that is gone refuses the
connection at once; one that is busy with hundreds of requests may answer late."""

CHECKS_PER_LIMIT = 4
"""How often a server's progress is checked within `request_timeout_seconds`, at least."""
LONGEST_CHECK_SECONDS = 5.0


class Interrupted(Exception):
    """The answer to a request is no completion of this run: the server aborted it, or held other
    weights. It is sent again."""


@dataclass(slots=True, eq=False)
class Job:
    """One request. `version` is that of the server when the request was sent."""

    request: GenerationRequest
    tries: int = 0
    failed_at: set[str] = field(default_factory=set)
    version: int | None = None


J = TypeVar("J", bound=Job)


@dataclass(slots=True, eq=False)
class ServerState(Generic[J]):
    """One server. `version` is the newest policy version that it confirmed; `lost` is true from
    the moment when it was found neither generating nor well until it is up again."""

    client: VllmServer
    down: str | None
    version: int | None
    lost: bool = False
    running: dict[asyncio.Task, J] = field(default_factory=dict)
    idle_seconds: float = 0.0
    used_seconds: float = 0.0
    since: float = field(default_factory=time.monotonic)

    def account(self) -> None:
        """Add the time since the last call to the times of use and idleness."""
        now = time.monotonic()
        if self.down is None:
            self.used_seconds += now - self.since
            self.idle_seconds += (now - self.since) * (not self.running)
        self.since = now


MAX_RETRIES = 2
"""How often a failed request is sent again, to another server if there is one."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    in_flight_per_server: int
    request_timeout_seconds: float
    """Longest time in which a server with requests outstanding generates nothing."""
    drop_lost: bool
    """Go on with the other servers when one is lost; otherwise stop."""
    vocabulary: int
    """Token ids of the policy."""

    @classmethod
    def of(cls, section: ServersSection, vocabulary: int, ranks: int = 1) -> "PoolSettings":
        """Those of each of the `ranks` that share the servers."""
        return cls(
            in_flight_per_server=max(section.max_in_flight // ranks, 1),
            request_timeout_seconds=section.request_timeout_seconds,
            drop_lost=section.on_failure == "drop",
            vocabulary=vocabulary,
        )


class Servers:
    """The servers of a run. `lost` maps the URL of one that is not to be asked any more to the
    reason. A lost server of this class may come back at any time."""

    def __init__(self, servers: Iterable[VllmServer], settings: PoolSettings) -> None:
        self.servers = list(servers)
        self.settings = settings
        self.lost: dict[str, str] = {}

    def lose(self, server: VllmServer, reason: str) -> None:
        """Note that a server is lost. Raises SamplerError if the recipe says to stop then."""
        remedy = "resume it when the server is back"
        if server.log is not None:  # the run started it
            reason, remedy = f"{reason}; its log is {server.log}", "a resume starts it again"
        if not self.settings.drop_lost:
            raise SamplerError(
                f"the vLLM server {server.url} is lost: {reason}. The run stops because "
                f"sampling.servers.on_failure is stop; {remedy}, or set on_failure to drop"
            )
        self.note_lost(server, reason)

    def note_lost(self, server: VllmServer, reason: str) -> None:
        """What losing a server means when the run goes on."""
        logger.warning("the vLLM server %s is down: %s", server.url, reason)


class Dispatcher(Generic[J]):
    """Sends jobs to servers. `admit()` gives further jobs, or none; `on_sampled` and `on_lost` are
    called with jobs that finished, or failed for good. The servers hold `version`; if it is None,
    they are asked before they are used. `failure` has the first error."""

    def __init__(
        self,
        servers: Servers,
        stop_token_ids: Sequence[int],
        admit: Callable[[], Iterable[J]],
        on_sampled: Callable[[J, Completion, tuple[Span, ...]], None],
        on_lost: Callable[[J, str], None],
        version: int | None = None,
    ) -> None:
        self._pool, self._settings = servers, servers.settings
        unknown = "not asked yet" if version is None else None
        self.servers: dict[str, ServerState[J]] = {
            each.url: ServerState(
                each, servers.lost.get(each.url, unknown), version, each.url in servers.lost
            )
            for each in servers.servers
        }
        self.waiting: deque[J] = deque()
        self.oldest_usable = 0  # policy version
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop_token_ids = stop_token_ids
        self._admit = admit
        self._on_sampled = on_sampled
        self._on_lost = on_lost
        self._watchers = [
            self._spawn(watch(server))
            for server in self.servers.values()
            for watch in (self._probe_while_unused, self._watch_progress)
        ]

    def fill(self) -> None:
        """Send waiting jobs, and further ones, to the servers that have room."""
        room = [server for server in self.servers.values() if self._has_room(server)]
        while room:
            server = min(room, key=lambda each: len(each.running))
            job = self._next_job(server)
            if job is None:
                room.remove(server)
                continue
            self._send(job, server)
            # `admit` may have changed which servers are used.
            room = [each for each in room if self._has_room(each)]

    def withdraw(self, jobs: Iterable[J]) -> None:
        """Cancel these, whether they run or wait."""
        gone = {id(job) for job in jobs}
        self.waiting = deque(job for job in self.waiting if id(job) not in gone)
        for server in self.servers.values():
            for task, job in list(server.running.items()):
                if id(job) in gone:
                    self._cancel(server, task)

    def set_version(self, url: str, version: int | None) -> None:
        """A server confirmed a version, or (None) must not be used until its label is right."""
        server = self.servers[url]
        if version is None:
            logger.warning("the weights of %s could not be updated", url)
            self._take_down(server, "its weights could not be updated")
        else:
            server.version = version
            self._put_up(server)

    def unused(self) -> dict[str, str]:
        """The reason for each server that gets no requests, by URL."""
        reasons = {url: self._reason_not_to_use(server) for url, server in self.servers.items()}
        return {url: reason for url, reason in reasons.items() if reason is not None}

    async def settle(self) -> None:
        """Look at the servers that failed a request and were not looked at since. Raises
        SamplerError if the run stops for one, also if a watcher has just found that out."""
        for server in self.servers.values():
            if server.down is not None and not server.lost:
                await self._look_at(server)
        for watcher in self._watchers:
            if watcher.done():
                watcher.result()

    async def close(self) -> None:
        """Cancel everything."""
        tasks = [*self._watchers, *(task for s in self.servers.values() for task in s.running)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _has_room(self, server: ServerState[J]) -> bool:
        is_used = self._reason_not_to_use(server) is None
        return is_used and len(server.running) < self._settings.in_flight_per_server

    def _reason_not_to_use(self, server: ServerState[J]) -> str | None:
        version, oldest = server.version, self.oldest_usable
        if server.down is None and version is not None and version < oldest:
            return f"it holds version {version}; the next step takes version {oldest} or newer"
        return server.down

    def _next_job(self, server: ServerState[J]) -> J | None:
        """The next waiting job that has not failed at this server, or failed at all that are up;
        else a further one."""
        up = self.servers.keys() - self.unused().keys()
        for index, job in enumerate(self.waiting):
            if server.client.url not in job.failed_at or up <= job.failed_at:
                del self.waiting[index]
                return job
        if not self.waiting:
            self.waiting.extend(self._admit())
            return self.waiting.popleft() if self.waiting else None
        return None

    def _send(self, job: J, server: ServerState[J]) -> None:
        server.account()
        job.version = server.version
        task = self._spawn(self._sample(job, server))
        server.running[task] = job

    def _cancel(self, server: ServerState[J], task: asyncio.Task) -> None:
        server.account()
        server.running.pop(task, None)
        task.cancel()

    async def _sample(self, job: J, server: ServerState[J]) -> None:
        """One try of one job."""
        task = asyncio.current_task()
        assert task is not None
        failure: Exception | None = None
        try:
            answer = await server.client.generate(job.request, self._stop_token_ids)
            answer = await self._labelled(answer, job, server.client)
            completion, spans = self._read(answer, job, server.client)
        except (Refused, Unreachable, Interrupted) as error:
            failure = error
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise SamplerError(
                f"{server.client.url} answers, but not like vLLM 0.32: {error!r}"
            ) from error
        if task not in server.running:
            return  # it was withdrawn while the answer was read
        server.account()
        del server.running[task]
        if failure is None:
            self._on_sampled(job, completion, spans)
        else:
            self._retry(job, server, failure)
        self.fill()

    async def _labelled(self, answer: Choice, job: J, client: VllmServer) -> Choice:
        """Before 0.32 vLLM does not say which weights sampled a token. All tokens are of those that
        the server had when it was asked, if it has them still. Raises Interrupted otherwise."""
        if answer.weight_versions is not msgspec.UNSET:
            return answer
        label = await client.weight_label()
        if client.version_of(label) != job.version:
            raise Interrupted(f"its weights are now labelled {label!r}, not {job.version}")
        answer.weight_versions = [WeightSpan(label, 0, len(answer.token_ids))]
        return answer

    def _read(
        self, answer: Choice, job: J, client: VllmServer
    ) -> tuple[Completion, tuple[Span, ...]]:
        """The validated completion and its spans. Raises Interrupted, or SamplerError as
        `build_completion` does."""
        if answer.finish_reason == "abort":
            raise Interrupted("the server aborted the request")
        labelled = answer.weight_versions if isinstance(answer.weight_versions, list) else []
        versions = [client.version_of(span.version) for span in labelled]
        spans = tuple(
            (version, span.start, span.end)
            for version, span in zip(versions, labelled, strict=True)
            if version is not None
        )
        if not spans or len(spans) < len(labelled):
            labels = [span.version for span in labelled]
            raise Interrupted(f"sampled by weights labelled {labels}, not of this run")
        completion = build_completion(
            job.request,
            answer.token_ids,
            [each.logprob for each in answer.logprobs.content],
            answer.finish_reason,
            (spans[0][0], spans[-1][0]),
            self._stop_token_ids,
            self._settings.vocabulary,
        )
        return completion, spans

    def _retry(self, job: J, server: ServerState[J], error: Exception) -> None:
        """Let the job wait for another try, or give it up. The server is down until it has
        answered a probe."""
        url = server.client.url
        if isinstance(error, Refused) and 400 <= error.status < 500:
            raise SamplerError(f"{url} refused request {tuple(job.request.key)}: {error}")
        server.account()
        server.down = server.down or f"a request failed: {error}"
        job.tries += 1
        job.failed_at.add(url)
        if job.tries > MAX_RETRIES:
            self._on_lost(job, f"it failed {job.tries} times, last at {url}: {error}")
        else:
            self.waiting.appendleft(job)

    def _lose(self, server: ServerState[J], reason: str) -> None:
        """The server neither generates nor is well. Raises SamplerError if the run stops then."""
        server.lost = True
        self._pool.lose(server.client, reason)
        self._take_down(server, reason)

    def _take_down(self, server: ServerState[J], reason: str) -> None:
        """Stop using a server, and send its requests elsewhere or again."""
        server.account()
        server.down = reason
        for task, job in list(server.running.items()):
            self._cancel(server, task)
            job.failed_at.add(server.client.url)  # others first
            self.waiting.appendleft(job)
        self.fill()

    def _put_up(self, server: ServerState[J]) -> None:
        if server.lost:
            logger.warning("%s is up with version %s", server.client.url, server.version)
        server.account()
        server.down, server.lost = None, False
        self.fill()

    async def _probe_while_unused(self, server: ServerState[J]) -> None:
        """Put a server up whenever its label is of this run, and learn when one that is too old has
        newer weights."""
        while True:
            if self._reason_not_to_use(server) is not None:
                await self._look_at(server)
            is_used = self._reason_not_to_use(server) is None
            await asyncio.sleep(PROBE_SECONDS / 4 if is_used else PROBE_SECONDS)

    async def _look_at(self, server: ServerState[J]) -> None:
        """Put it up if it is well, and lose it if it is not although it was."""
        reason = await self._reason_to_stay_down(server)
        was_well = server.down is not None and server.version is not None
        if reason is None:
            self._put_up(server)
        elif was_well and not server.lost:
            self._lose(server, f"{server.down}; then {reason}")

    async def _reason_to_stay_down(self, server: ServerState[J]) -> str | None:
        if server.client.url in self._pool.lost:
            return self._pool.lost[server.client.url]
        was_well = server.version is not None and not server.lost
        timeout = HEALTH_SECONDS if was_well else PROBE_TIMEOUT_SECONDS
        try:
            await server.client.check_health(timeout)
            label = await server.client.weight_label(timeout)
        except (Refused, Unreachable) as error:
            return str(error)
        except (KeyError, TypeError) as error:
            return f"it answers, but not like vLLM 0.32: {error!r}"
        version = server.client.version_of(label)
        if version is None:
            fresh = label in ("default", "")
            why = "it was restarted" if fresh else "another run updates it; each needs its own"
            return f"its weights are labelled {label!r}, not of this run: {why}"
        server.version = version
        return None

    async def _watch_progress(self, server: ServerState[J]) -> None:
        """Lose a server that generates nothing for too long with requests outstanding, though
        /health may answer. Only a lack of progress counts: a completion may take as long as it
        needs."""
        limit = self._settings.request_timeout_seconds
        tokens: float | None = None
        since = time.monotonic()  # when it was last idle, or had another count of tokens
        while True:
            await asyncio.sleep(min(limit / CHECKS_PER_LIMIT, LONGEST_CHECK_SECONDS))
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

    def _spawn(self, coroutine: Any) -> asyncio.Task:
        """A task whose error is the dispatcher's failure."""
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._note_failure)
        return task

    def _note_failure(self, task: asyncio.Task) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)
