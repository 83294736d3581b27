"""Requests spread over several servers: bounded in flight, retried elsewhere, never lost silently.

Waiting requests are dealt to the servers in turns, as far as those have room, so that every server
begins with its share. A server gets another request for each one it answers, so a faster server
serves more of them. All of this runs as tasks of the background loop of `http_client`.
"""

import asyncio
import logging
import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from grpo_replay.errors import SamplerError
from grpo_replay.sampling.server.http_client import Refused, Unreachable, background_loop
from grpo_replay.sampling.server.routes import VllmServer
from grpo_replay.sampling.server.stalls import HEALTH_SECONDS, ServerProgress
from grpo_replay.types import Completion, GenerationRequest

logger = logging.getLogger(__name__)

CHECKS_PER_LIMIT = 4
"""How often a server's progress is checked within `request_timeout_seconds`, at least."""

LONGEST_CHECK_SECONDS = 5.0
"""Longest time between two checks: after it a server that came back gets requests."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    in_flight_per_server: int
    request_timeout_seconds: float
    """Longest time in which a server with requests outstanding generates nothing."""
    max_retries: int
    drop_lost: bool
    """Go on with the other servers when one is lost; otherwise stop."""


@dataclass(slots=True)
class _Job:
    request: GenerationRequest
    tries: int = 0
    failed_at: set[str] = field(default_factory=set)


class ServerPool:
    """The servers in use. `lost` maps the URL of one that is no longer used to the reason."""

    def __init__(self, servers: Sequence[VllmServer], settings: PoolSettings) -> None:
        self.servers = list(servers)
        self.settings = settings
        self.lost: dict[str, str] = {}

    def live(self) -> list[VllmServer]:
        return [server for server in self.servers if server.url not in self.lost]

    def lose(self, server: VllmServer, reason: str) -> None:
        """Stop using a server; a no-op if it is lost already. Raises SamplerError if the recipe
        says to stop then, or if it was the last."""
        if server.url in self.lost:
            return
        if server.log is not None:
            reason = f"{reason}; its log is {server.log}"
        self.lost[server.url] = reason
        if not self.settings.drop_lost:
            raise SamplerError(
                f"the vLLM server {server.url} is lost: {reason}. The run stops because "
                "sampling.servers.on_failure is stop; resume it when the server is back, or set "
                "on_failure to drop"
            )
        left = len(self.live())
        if left == 0:
            raise SamplerError(f"the last vLLM server, {server.url}, is lost: {reason}")
        logger.warning("the vLLM server %s is lost (%s); %d left", server.url, reason, left)

    def run(
        self,
        requests: Sequence[GenerationRequest],
        stop_token_ids: Sequence[int],
        policy_version: int,
    ) -> Iterator[Completion]:
        """Completions as they finish, all sampled by `policy_version`. Raises SamplerError as soon
        as one cannot be had; requests still running are then cancelled, as they are when the
        iterator is closed."""
        work = _Work(self, requests, stop_token_ids, policy_version)
        future = asyncio.run_coroutine_threadsafe(work.run(), background_loop())
        try:
            for _ in requests:
                yield work.next_result()
        finally:
            future.cancel()


class _Work:
    """One call of `ServerPool.run`: its waiting and running requests, and its results.

    The methods run in the background loop, except `next_result`.
    """

    def __init__(
        self,
        pool: ServerPool,
        requests: Sequence[GenerationRequest],
        stop_token_ids: Sequence[int],
        policy_version: int,
    ) -> None:
        self._pool = pool
        self._stop_token_ids = stop_token_ids
        self._policy_version = policy_version
        self._waiting = deque(_Job(request) for request in requests)
        self._unfinished = len(requests)
        self._running: dict[str, dict[asyncio.Task, _Job]] = {s.url: {} for s in pool.servers}
        self._health_locks = {server.url: asyncio.Lock() for server in pool.servers}
        self._all_finished = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._results: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()

    def next_result(self) -> Completion:
        """The next completion, waited for in the caller's thread. Raises the error of the run."""
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result

    async def run(self) -> None:
        """Put all completions, or those before the first error and then it, into the results."""
        try:
            async with self._tasks:
                servers = self._pool.servers
                watchers = [self._tasks.create_task(self._watch(server)) for server in servers]
                self._dispatch()
                await self._all_finished.wait()
                for watcher in watchers:
                    watcher.cancel()
        except ExceptionGroup as errors:
            self._results.put(errors.exceptions[0])

    def _dispatch(self) -> None:
        """Start waiting requests on the servers that have room, in turns."""
        started = True
        while started:
            started = False
            for server in self._pool.live():
                running = self._running[server.url]
                if len(running) >= self._pool.settings.in_flight_per_server:
                    continue
                if job := self._next_job(server):
                    running[self._tasks.create_task(self._sample(job, server))] = job
                    started = True

    def _next_job(self, server: VllmServer) -> _Job | None:
        """The next waiting request that has not failed at this server, or that failed at all."""
        live = {each.url for each in self._pool.live()}
        for index, job in enumerate(self._waiting):
            if server.url not in job.failed_at or live <= job.failed_at:
                del self._waiting[index]
                return job
        return None

    async def _sample(self, job: _Job, server: VllmServer) -> None:
        """One try of one request. The request waits again afterwards if the try failed."""
        try:
            completion = await server.complete(job.request, self._stop_token_ids)
        except (Refused, Unreachable) as error:
            await self._handle_failure(job, server, error)
        except (KeyError, IndexError, TypeError) as error:
            raise SamplerError(
                f"{server.url} answers, but not like vLLM 0.32: {error!r}"
            ) from error
        else:
            self._check_version(completion, server)
            self._results.put(completion)
            self._unfinished -= 1
        task = asyncio.current_task()
        assert task is not None
        self._running[server.url].pop(task, None)
        self._dispatch()
        if self._unfinished == 0:
            self._all_finished.set()

    def _check_version(self, completion: Completion, server: VllmServer) -> None:
        sampled_by = {completion.policy_version, completion.policy_version_end}
        if sampled_by != {self._policy_version}:
            raise SamplerError(
                f"completion {tuple(completion.key)} from {server.url} was sampled by policy "
                f"versions {sorted(sampled_by)} where {self._policy_version} was asked for: "
                "something else updates that server's weights"
            )

    async def _handle_failure(
        self, job: _Job, server: VllmServer, error: Refused | Unreachable
    ) -> None:
        """Let the request wait for another try, and lose the server if it is not well. Raises
        SamplerError if the run cannot go on."""
        key, max_retries = tuple(job.request.key), self._pool.settings.max_retries
        if isinstance(error, Refused) and 400 <= error.status < 500:
            raise SamplerError(f"{server.url} refused request {key}: {error}") from error
        async with self._health_locks[
            server.url
        ]:  # the first failure asks, the others see the outcome
            if server.url not in self._pool.lost and (
                reason := await self._diagnose(server, error)
            ):
                self._lose(server, reason)
        job.tries += 1
        job.failed_at.add(server.url)
        if job.tries > max_retries:
            raise SamplerError(
                f"request {key} failed {job.tries} times (sampling.servers.max_retries "
                f"{max_retries}), last at {server.url}: {error}"
            ) from error
        self._waiting.appendleft(job)

    async def _diagnose(self, server: VllmServer, error: Refused | Unreachable) -> str | None:
        """Why a server that failed a request can no longer be used; None if it is well."""
        try:
            await server.check_health(HEALTH_SECONDS)
            label = await server.weight_label(HEALTH_SECONDS)
        except (Refused, Unreachable) as still:
            return f"{error}; then {still}"
        except (KeyError, TypeError) as other:
            return f"{error}; then it answered, but not like vLLM 0.32: {other!r}"
        if label != server.label(self._policy_version):
            return f"{error}; then it was back with weights {label!r}: it was restarted"
        return None

    async def _watch(self, server: VllmServer) -> None:
        """Lose the server if it generates nothing for too long, and use it again if it comes back.
        Raises SamplerError if for so long no server can be used."""
        limit = self._pool.settings.request_timeout_seconds
        running = self._running[server.url]
        progress = ServerProgress(server, limit)
        alone = time.monotonic()
        while True:
            await asyncio.sleep(min(limit / CHECKS_PER_LIMIT, LONGEST_CHECK_SECONDS))
            if self._pool.live():
                alone = time.monotonic()
            elif time.monotonic() - alone > limit:
                raise SamplerError(f"no vLLM server came back for {limit:g} s: {self._pool.lost}")
            if server.url in self._pool.lost:
                progress = ServerProgress(server, limit)
                continue
            self._dispatch()
            if await progress.stalled_seconds(len(running)) > limit and running:
                self._lose(
                    server,
                    f"it generated no token for {limit:g} s with {len(running)} requests "
                    "outstanding (sampling.servers.request_timeout_seconds)",
                )

    def _lose(self, server: VllmServer, reason: str) -> None:
        """Stop using a server, and give the requests that wait for it to others. Raises
        SamplerError if the run cannot go on."""
        self._pool.lose(server, reason)
        running = self._running[server.url]
        for task in running.keys() - {asyncio.current_task()}:
            task.cancel()
            self._waiting.appendleft(running.pop(task))
        self._dispatch()
