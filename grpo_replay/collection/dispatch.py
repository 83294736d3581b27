"""Requests kept in flight on several servers, some of which may be away.

A server is `up` while it answers and holds weights of this run. One that fails a request, generates
nothing for too long or could not be updated is down; it is asked once a second for its label, and
is up again as soon as that is of this run. Its requests are sent again, to another server if there
is one. A server whose version is too old for the next step gets no requests until it is updated:
its rollouts would be dropped as stale. All of this runs in one event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_replay.collection.messages import Span
from grpo_replay.collection.open_groups import Member, OpenGroup
from grpo_replay.errors import SamplerError
from grpo_replay.recipe import ServersSection
from grpo_replay.sampling.server.http_client import Refused, Unreachable
from grpo_replay.sampling.server.request_pool import CHECKS_PER_LIMIT
from grpo_replay.sampling.server.routes import VllmServer
from grpo_replay.sampling.server.stalls import ServerProgress
from grpo_replay.sampling.vllm_requests import Spans, build_completion
from grpo_replay.types import Completion

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""Time between two looks at a server that is down."""
PROBE_TIMEOUT_SECONDS = 5.0


class Interrupted(Exception):
    """The answer to a request is no completion of this run: the server aborted it, or held other
    weights. It is sent again."""


@dataclass(slots=True, eq=False)
class ServerState:
    """One server. `version` is the newest policy version that it confirmed."""

    client: VllmServer
    down: str | None = "not asked yet"
    version: int | None = None
    running: dict[asyncio.Task, Member] = field(default_factory=dict)
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


class Dispatcher:
    """Sends members to servers. `admit()` gives the next group to start, or None; `on_sampled` and
    `on_lost` are called with members that finished or failed for good."""

    def __init__(
        self,
        clients: Iterable[VllmServer],
        settings: ServersSection,
        stop_token_ids: Sequence[int],
        admit: Callable[[], OpenGroup | None],
        on_sampled: Callable[[Member, Completion, tuple[Span, ...]], None],
        on_lost: Callable[[Member, str], None],
    ) -> None:
        self.servers = {client.url: ServerState(client) for client in clients}
        self.waiting: deque[Member] = deque()
        self.oldest_usable = 0  # policy version
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settings = settings
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
        """Send waiting members, and those of new groups, to the servers that have room."""
        room = self._with_room()
        while room:
            server = min(room, key=lambda each: len(each.running))
            member = self._next_member(server)
            if member is None:
                room.remove(server)
                continue
            self._send(member, server)
            room = self._with_room() if len(room) > 1 else [s for s in room if self._has_room(s)]

    def withdraw(self, group: OpenGroup) -> None:
        """Cancel what runs and waits for a group."""
        self.waiting = deque(member for member in self.waiting if member.group is not group)
        for server in self.servers.values():
            for task, member in list(server.running.items()):
                if member.group is group:
                    self._cancel(server, task)

    def set_version(self, url: str, version: int | None) -> None:
        """A server confirmed a version, or (None) must not be used until its label is right."""
        server = self.servers[url]
        if version is None:
            self.take_down(server, "its weights could not be updated")
        else:
            server.version = version
            self._put_up(server)

    def take_down(self, server: ServerState, reason: str) -> None:
        """Stop using a server, and send its requests elsewhere or again."""
        if server.down is None:
            logger.warning("%s is down: %s", server.client.url, reason)
        server.account()
        server.down = reason
        for task, member in list(server.running.items()):
            self._cancel(server, task)
            member.failed_at.add(server.client.url)  # others first
            self.waiting.appendleft(member)
        self.fill()

    def unused(self) -> dict[str, str]:
        """The reason for each server that gets no requests, by URL."""
        reasons = {url: self._reason_not_to_use(server) for url, server in self.servers.items()}
        return {url: reason for url, reason in reasons.items() if reason is not None}

    async def close(self) -> None:
        """Cancel everything."""
        tasks = [*self._watchers, *(task for s in self.servers.values() for task in s.running)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _with_room(self) -> list[ServerState]:
        return [server for server in self.servers.values() if self._has_room(server)]

    def _has_room(self, server: ServerState) -> bool:
        is_used = self._reason_not_to_use(server) is None
        return is_used and len(server.running) < self._settings.max_in_flight

    def _reason_not_to_use(self, server: ServerState) -> str | None:
        version, oldest = server.version, self.oldest_usable
        if server.down is None and version is not None and version < oldest:
            return f"it holds version {version}; the next step takes version {oldest} or newer"
        return server.down

    def _next_member(self, server: ServerState) -> Member | None:
        """The next waiting member that has not failed at this server, or failed at all that are up;
        else one of a new group."""
        up = self.servers.keys() - self.unused().keys()
        for index, member in enumerate(self.waiting):
            if server.client.url not in member.failed_at or up <= member.failed_at:
                del self.waiting[index]
                return member
        if self.waiting or (group := self._admit()) is None:
            return None
        self.waiting.extend(group.members)
        return self.waiting.popleft()

    def _send(self, member: Member, server: ServerState) -> None:
        server.account()
        member.version = server.version
        task = self._spawn(self._sample(member, server))
        server.running[task] = member

    def _cancel(self, server: ServerState, task: asyncio.Task) -> None:
        server.account()
        server.running.pop(task, None)
        task.cancel()

    async def _sample(self, member: Member, server: ServerState) -> None:
        task = asyncio.current_task()
        assert task is not None
        failure: Exception | None = None
        try:
            answer = await server.client.generate(member.request, self._stop_token_ids)
            completion, spans = self._read(answer, member, server)
        except (Refused, Unreachable, Interrupted) as error:
            failure = error
        except (KeyError, IndexError, TypeError) as error:
            raise SamplerError(
                f"{server.client.url} answers, but not like vLLM 0.32: {error!r}"
            ) from error
        if task not in server.running:
            return  # it was withdrawn while the answer was read
        server.account()
        del server.running[task]
        if failure is None:
            self._on_sampled(member, completion, spans)
        else:
            self._retry(member, server, failure)
        self.fill()

    def _read(
        self, answer: dict[str, Any], member: Member, server: ServerState
    ) -> tuple[Completion, tuple[Span, ...]]:
        """The validated completion and its spans. Raises Interrupted, or SamplerError as
        `build_completion` does."""
        if answer["finish_reason"] == "abort":
            raise Interrupted("the server aborted the request")
        labelled = answer["weight_versions"] or []
        versions = [server.client.version_of(span["version"]) for span in labelled]
        spans = tuple(
            (version, span["start"], span["end"])
            for version, span in zip(versions, labelled, strict=True)
            if version is not None
        )
        if not spans or len(spans) < len(labelled):
            labels = [span["version"] for span in labelled]
            raise Interrupted(f"sampled by weights labelled {labels}, not of this run")
        completion = build_completion(
            member.request,
            answer["token_ids"],
            [entry["logprob"] for entry in answer["logprobs"]["content"]],
            answer["finish_reason"],
            Spans(spans[0][0], spans[-1][0]),
            self._stop_token_ids,
        )
        return completion, spans

    def _retry(self, member: Member, server: ServerState, error: Exception) -> None:
        """Let the member wait for another try, or give its group up."""
        url, limit = server.client.url, self._settings.max_retries
        if isinstance(error, Refused) and 400 <= error.status < 500:
            raise SamplerError(f"{url} refused request {tuple(member.request.key)}: {error}")
        server.account()
        server.down = f"a request failed: {error}"  # until it answers a probe
        member.tries += 1
        member.failed_at.add(url)
        if member.tries > limit:
            self._on_lost(
                member,
                f"it failed {member.tries} times (sampling.servers.max_retries {limit}), "
                f"last at {url}: {error}",
            )
        else:
            self.waiting.appendleft(member)

    async def _probe_while_unused(self, server: ServerState) -> None:
        """Put a server up whenever its label is of this run, and learn when one that is too old has
        newer weights."""
        while True:
            if self._reason_not_to_use(server) is not None:
                reason = await self._reason_to_stay_down(server)
                is_lost = server.down is not None and server.version is not None
                if reason is None:
                    self._put_up(server)
                elif self._settings.on_failure == "stop" and is_lost:
                    raise SamplerError(
                        f"the vLLM server {server.client.url} is lost ({server.down}; then "
                        f"{reason}). The run stops because sampling.servers.on_failure is stop; "
                        "resume it when the server is back, or set on_failure to drop"
                    )
            is_used = self._reason_not_to_use(server) is None
            await asyncio.sleep(PROBE_SECONDS / 4 if is_used else PROBE_SECONDS)

    async def _reason_to_stay_down(self, server: ServerState) -> str | None:
        try:
            await server.client.check_health(PROBE_TIMEOUT_SECONDS)
            label = await server.client.weight_label(PROBE_TIMEOUT_SECONDS)
        except (Refused, Unreachable) as error:
            return str(error)
        except (KeyError, TypeError) as error:
            return f"it answers, but not like vLLM 0.32: {error!r}"
        version = server.client.version_of(label)
        if version is None:
            return f"its weights are labelled {label!r}, not of this run"
        server.version = version
        return None

    def _put_up(self, server: ServerState) -> None:
        if server.down is not None:
            logger.info("%s is up with version %s", server.client.url, server.version)
        server.account()
        server.down = None
        self.fill()

    async def _watch_progress(self, server: ServerState) -> None:
        """Take a server down that generates nothing for too long, though /health may answer."""
        limit = self._settings.request_timeout_seconds
        progress = ServerProgress(server.client, limit)
        while True:
            await asyncio.sleep(limit / CHECKS_PER_LIMIT)
            stalled = await progress.stalled_seconds(len(server.running))
            if stalled > limit and server.running:
                self.take_down(
                    server,
                    f"it generated no token for {limit:g} s with {len(server.running)} requests "
                    "outstanding (sampling.servers.request_timeout_seconds)",
                )

    def _spawn(self, coroutine: Any) -> asyncio.Task:
        """A task whose error ends the collector."""
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._note_failure)
        return task

    def _note_failure(self, task: asyncio.Task) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)
