"""Requests spread over several servers: bounded in flight, retried elsewhere, never lost silently.

Every server has as many threads as it may have requests outstanding. Each begins with a request of
its own, dealt in turns, so that every server has its share however the threads are scheduled; then
they take requests from one queue, so a faster server serves more of them.
"""

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from grpo_replay.errors import GrpoReplayError, SamplerError
from grpo_replay.sampling.server.http_client import Refused, Unreachable
from grpo_replay.sampling.server.progress import HEALTH_SECONDS, ServerProgress
from grpo_replay.sampling.server.routes import VllmServer
from grpo_replay.types import Completion, GenerationRequest

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0
"""Longest wait for a thread whose connection was cut."""
LOOKS_PER_LIMIT = 4
"""How often a server is looked at within `request_timeout_seconds`."""


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
        self._lock = threading.Lock()

    def live(self) -> list[VllmServer]:
        return [server for server in self.servers if server.url not in self.lost]

    def lose(self, server: VllmServer, reason: str) -> None:
        """Stop using a server. Raises SamplerError if the recipe says to stop then, or if it was
        the last. Noting a server that is lost already changes nothing."""
        with self._lock:
            if server.url in self.lost:
                return
            if server.log is not None:
                reason = f"{reason}; its log is {server.log}"
            self.lost[server.url] = reason
            left = len(self.servers) - len(self.lost)
        if not self.settings.drop_lost:
            raise SamplerError(
                f"the vLLM server {server.url} is lost: {reason}. The run stops because "
                "sampling.servers.on_failure is stop; resume it when the server is back, or set "
                "on_failure to drop"
            )
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
        try:
            for _ in requests:
                yield work.next_result()
        finally:
            work.cancel()


class _Work:
    """One call of `run`: its queue, its threads, its results."""

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
        self._pending = deque(_Job(request) for request in requests)
        self._unfinished = len(requests)
        self._changed = threading.Condition()
        self._cancelled = False
        self._results: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()
        self._probing = {server.url: threading.Lock() for server in pool.servers}
        seats = pool.live() * pool.settings.in_flight_per_server
        dealt = [(server, self._pending.popleft()) for server in seats[: len(requests)]]
        self._outstanding = Counter(server.url for server, _ in dealt)
        self._threads = [
            threading.Thread(target=self._serve, args=each, daemon=True) for each in dealt
        ]
        self._threads += [
            threading.Thread(target=self._watch, args=(server,), daemon=True)
            for server in pool.live()
        ]
        for thread in self._threads:
            thread.start()

    def next_result(self) -> Completion:
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result

    def cancel(self) -> None:
        """Stop all threads, cutting connections on which one still waits."""
        with self._changed:
            self._cancelled = True
            waiting = self._unfinished > 0
            self._changed.notify_all()
        if waiting:
            for server in self._pool.servers:
                server.http.cut()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def _serve(self, server: VllmServer, first: _Job) -> None:
        job: _Job | None = first
        try:
            while job is not None:
                self._work_on(job, server)
                self._count(server, -1)
                job = self._take(server)
        except Exception as error:  # would end this thread alone, and leave the caller waiting
            self._finish(error)
        finally:
            server.http.release()

    def _count(self, server: VllmServer, change: int) -> None:
        with self._changed:
            self._outstanding[server.url] += change

    def _take(self, server: VllmServer) -> _Job | None:
        """The next request for this server; None when there is nothing left for it to do."""
        with self._changed:
            while not self._cancelled and self._unfinished > 0:
                if server.url in self._pool.lost:
                    return None
                live = {each.url for each in self._pool.live()}
                for index, job in enumerate(self._pending):
                    if server.url not in job.failed_at or live <= job.failed_at:
                        del self._pending[index]
                        self._outstanding[server.url] += 1
                        return job
                self._changed.wait()
        return None

    def _work_on(self, job: _Job, server: VllmServer) -> None:
        try:
            completion = server.complete(job.request, self._stop_token_ids)
            self._check_version(completion, server)
        except (Refused, Unreachable) as error:
            self._failed(job, server, error)
        except GrpoReplayError as error:
            self._finish(error)
        except (KeyError, IndexError, TypeError) as error:
            self._finish(SamplerError(f"{server.url} answers, but not like vLLM 0.32: {error!r}"))
        else:
            self._finish(completion)

    def _check_version(self, completion: Completion, server: VllmServer) -> None:
        sampled_by = {completion.policy_version, completion.policy_version_end}
        if sampled_by != {self._policy_version}:
            raise SamplerError(
                f"completion {tuple(completion.key)} from {server.url} was sampled by policy "
                f"versions {sorted(sampled_by)} where {self._policy_version} was asked for: "
                "something else updates that server's weights"
            )

    def _finish(self, result: Completion | Exception) -> None:
        with self._changed:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._changed.notify_all()
        self._results.put(result)

    def _failed(self, job: _Job, server: VllmServer, error: Refused | Unreachable) -> None:
        """Put the request back for another try, or give up; note the server as lost if it is."""
        if self._cancelled:
            return
        key, settings = tuple(job.request.key), self._pool.settings
        if isinstance(error, Refused) and 400 <= error.status < 500:
            self._finish(SamplerError(f"{server.url} refused request {key}: {error}"))
            return
        try:
            self._note_state(server, error)
        except SamplerError as lost:
            self._finish(lost)
            return
        job.tries += 1
        job.failed_at.add(server.url)
        if job.tries > settings.max_retries:
            self._finish(
                SamplerError(
                    f"request {key} failed {job.tries} times (sampling.servers.max_retries "
                    f"{settings.max_retries}), last at {server.url}: {error}"
                )
            )
            return
        with self._changed:
            self._pending.appendleft(job)
            self._changed.notify_all()

    def _note_state(self, server: VllmServer, error: Refused | Unreachable) -> None:
        """Ask a server that failed a request how it is; one thread asks, the others learn it."""
        with self._probing[server.url]:
            if server.url in self._pool.lost:
                return
            if reason := self._illness(server, error):
                self._pool.lose(server, reason)

    def _watch(self, server: VllmServer) -> None:
        """Lose a server that generates nothing for too long, and cut what waits for it."""
        limit = self._pool.settings.request_timeout_seconds
        progress = ServerProgress(server, limit)
        try:
            while self._goes_on(server, limit / LOOKS_PER_LIMIT):
                if progress.stalled_seconds(self._outstanding[server.url]) <= limit:
                    continue
                if self._goes_on(server, 0.0):
                    self._pool.lose(
                        server,
                        f"it generated no token for {limit:g} s with "
                        f"{self._outstanding[server.url]} requests outstanding "
                        "(sampling.servers.request_timeout_seconds)",
                    )
        except Exception as error:
            self._results.put(error)
        finally:
            server.http.release()
        if server.url in self._pool.lost:
            server.http.cut()

    def _goes_on(self, server: VllmServer, seconds: float) -> bool:
        """Wait, and say whether the server is still waited for then."""

        def over() -> bool:
            return self._cancelled or self._unfinished <= 0 or server.url in self._pool.lost

        with self._changed:
            return not self._changed.wait_for(over, seconds)

    def _illness(self, server: VllmServer, error: Refused | Unreachable) -> str | None:
        try:
            server.check_health(HEALTH_SECONDS)
            label = server.weight_label(HEALTH_SECONDS)
        except (Refused, Unreachable) as still:
            return f"{error}; then {still}"
        except (KeyError, TypeError) as other:
            return f"{error}; then it answered, but not like vLLM 0.32: {other!r}"
        if label != server.label(self._policy_version):
            return f"{error}; then it was back with weights {label!r}: it was restarted"
        return None
