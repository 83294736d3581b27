"""The collector: samples groups continuously, grades them, and delivers them to rank 0.

It starts groups as long as servers have capacity and rank 0 gives credit, in the order of the
prompts (first the outstanding ones of an earlier attempt). It delivers a group when all its
completions are graded, and then forgets it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from grpo_replay.collection.messages import (
    LOGPROBS,
    TOKEN_IDS,
    Cancel,
    CollectorSettings,
    Command,
    Credit,
    Delivery,
    Drop,
    Group,
    Hello,
    PromptPosition,
    Report,
    Row,
    Stop,
    Version,
    pack,
)
from grpo_replay.prompts.prompt_set import PromptSet
from grpo_replay.replay.rollouts import group_requests
from grpo_replay.rewards.scorer import GradingRequest, RewardScorer
from grpo_replay.sampling.server.dispatcher import Dispatcher, Job, Servers
from grpo_replay.sampling.server.routes import VllmServer, close_kept_connections
from grpo_replay.types import Completion, Prompt, Span, Verdict


@dataclass(slots=True, eq=False, kw_only=True)
class Member(Job):
    """One completion of a group."""

    group: "OpenGroup"
    index: int
    completion: Completion | None = None
    spans: tuple[Span, ...] = ()
    text: str = ""
    verdict: Verdict | None = None


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group with members that are not graded yet."""

    position: PromptPosition
    prompt: Prompt
    members: list[Member] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        return all(member.completion for member in self.members)

    @property
    def is_graded(self) -> bool:
        return all(member.verdict for member in self.members)

    @property
    def grading(self) -> int:
        """Number of members that have finished and have no verdict yet."""
        return sum(m.completion is not None and m.verdict is None for m in self.members)

    def finished(self) -> tuple[int, int]:
        """Returns numbers of rollouts and tokens of the members that have finished."""
        lengths = [len(m.completion.token_ids) for m in self.members if m.completion]
        return len(lengths), sum(lengths)

    def oldest_version(self) -> int | None:
        """Returns the oldest policy version known to have sampled for the group."""
        versions = [m.spans[0][0] if m.spans else m.version for m in self.members]
        return min((version for version in versions if version is not None), default=None)

    def drop(self, reason: Any) -> Drop:
        return Drop(*self.position, reason, *self.finished())

    def complete(self) -> Group:
        """Returns the message to rank 0 for a group whose members are all graded."""
        return Group(
            epoch=self.position[0],
            prompt_index=self.position[1],
            prompt_id=self.prompt.prompt_id,
            prompt_token_ids=pack(self.prompt.token_ids, TOKEN_IDS),
            rows=tuple(_row(member) for member in self.members),
        )


def _row(member: Member) -> Row:
    """Packs a graded completion for the message of its group; the reward is rounded to float32."""
    completion, verdict = member.completion, member.verdict
    assert completion is not None and verdict is not None, "the group is not graded"
    return Row(
        token_ids=pack(completion.token_ids, TOKEN_IDS),
        logprobs=pack(completion.sampler_logprobs, LOGPROBS),
        spans=member.spans,
        text=member.text,
        reward=None if verdict.reward is None else float(np.float32(verdict.reward)),
        verdict=verdict.status,
        scores=verdict.scores,
        finish_reason=completion.finish_reason,
    )


logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
GRADE_POLL_SECONDS = 0.01


class Collector:
    """A collector, created in its event loop. `handle` executes rank 0's commands; `run` returns
    after Stop. `send` must not block."""

    def __init__(
        self,
        settings: CollectorSettings,
        prompts: PromptSet,
        decode: Callable[[Sequence[int]], str],
        scorer: RewardScorer,
        send: Callable[[Delivery], None],
    ) -> None:
        """Connects to the servers; sampling starts once rank 0 has sent Hello and Credit."""
        self._recipe, self._prompts = settings.recipe, prompts
        self._decode, self._scorer, self._send = decode, scorer, send
        adapters = settings.recipe.pushes_adapters
        clients = [VllmServer(u, settings.run, with_adapters=adapters) for u in settings.urls]
        self._dispatcher: Dispatcher[Member] = Dispatcher(
            Servers(clients, settings.recipe.sampling.servers),
            settings.stop_token_ids,
            self._admit,
            self._on_sampled,
            self._on_lost,
        )
        self._outstanding: deque[PromptPosition] = deque()  # sampled before those of the cursor
        self._cursor = 0
        self._open: dict[PromptPosition, OpenGroup] = {}
        self._credit = Credit(0)
        self._started = 0
        self._generated_rollouts = self._generated_tokens = 0
        self._stopped = asyncio.Event()

    async def run(self, *others: Coroutine[Any, Any, object]) -> None:
        """Work until Stop, or until one of the `others` ends, which run concurrently. Raises the
        error of a request, a verifier, a server or one of the others."""
        loops = (self._stopped.wait(), self._send_reports(), self._take_verdicts())
        tasks = [asyncio.ensure_future(loop) for loop in (*loops, *others)]
        ends: list[asyncio.Future[Any]] = [*tasks, self._dispatcher.failure]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._dispatcher.close()
            await close_kept_connections()

    def handle(self, command: Command) -> None:
        """Execute one command of rank 0 in the event loop; all but Stop may allow new requests, so
        the dispatcher is filled afterwards."""
        if isinstance(command, Hello):
            self._outstanding, self._cursor = deque(command.outstanding), command.cursor
        elif isinstance(command, Credit):
            self._credit = command
        elif isinstance(command, Cancel):
            self._cancel_older_than(command.older_than)
        elif isinstance(command, Stop):
            self._stopped.set()
            return
        elif isinstance(command, Version):
            self._dispatcher.set_version(command.url, command.version)
        self._dispatcher.fill()

    def _admit(self) -> Sequence[Member]:
        """Starts the next group and returns its members, one request each; empty if the credit is
        used up. Called by the dispatcher when a server has capacity."""
        running = len(self._open) if self._credit.finished_only else 0
        counted = self._started - running
        if counted >= self._credit.groups:
            return ()
        self._started += 1
        position, prompt = self._next_prompt()
        group = OpenGroup(position, prompt)
        epoch, prompt_index = position
        sampling, seed = self._recipe.sampling, self._recipe.run.seed
        requests = group_requests({prompt_index: prompt}, epoch, sampling, seed)
        group.members = [
            Member(request, group=group, index=index) for index, request in enumerate(requests)
        ]
        self._open[position] = group
        return group.members

    def _next_prompt(self) -> tuple[PromptPosition, Prompt]:
        """Takes the next outstanding prompt of an earlier collector, else the one at the cursor."""
        epoch_length = len(self._prompts)
        if self._outstanding:
            epoch, index = self._outstanding.popleft()
        else:
            epoch, index = divmod(self._cursor, epoch_length)
            self._cursor += 1
        return (epoch, index), self._prompts.take(epoch * epoch_length + index, 1)[0]

    def _on_sampled(self, member: Member, completion: Completion, spans: tuple[Span, ...]) -> None:
        """Called by the dispatcher for a finished completion: submits it to the scorer. The step of
        the grading request is the one after the policy version of its first token."""
        token_ids = completion.token_ids.tolist()
        text = self._decode(token_ids)
        member.completion, member.spans, member.text = completion, spans, text
        self._generated_rollouts += 1
        self._generated_tokens += len(completion.token_ids)
        request = GradingRequest.for_prompt(
            member.group.prompt, text, token_ids, step=spans[0][0] + 1,
            truncated=completion.finish_reason == "length",
            group=_group_name(member.group.position), group_size=len(member.group.members),
        )  # fmt: skip
        self._scorer.submit((member.group.position, member.index), request)

    def _on_lost(self, member: Member, reason: str) -> None:
        group = member.group
        logger.warning("group %s is lost: completion %d: %s", group.position, member.index, reason)
        self._give_up(group, "lost")

    def _cancel_older_than(self, version: int) -> None:
        self._dispatcher.oldest_usable = version
        for group in list(self._open.values()):
            oldest = group.oldest_version()
            if oldest is not None and oldest < version and not group.is_sampled:
                self._give_up(group, "cancelled")

    def _give_up(self, group: OpenGroup, reason: str) -> None:
        """Stop working on a group, and tell rank 0 how much of it was generated."""
        del self._open[group.position]
        self._dispatcher.withdraw(group.members)
        self._scorer.put_incomplete(_group_name(group.position))
        self._deliver(group.drop(reason))

    async def _take_verdicts(self) -> None:
        """Polls the scorer forever, and delivers every group whose members are all graded."""
        while True:
            await asyncio.sleep(GRADE_POLL_SECONDS)
            for key, verdict in self._scorer.take_graded().items():
                position, index = cast(tuple[PromptPosition, int], key)
                group = self._open.get(position)
                if group is None:
                    continue  # cancelled or lost meanwhile
                group.members[index].verdict = verdict
                if group.is_graded:
                    del self._open[position]
                    self._deliver(group.complete())

    def _deliver(self, body: Group | Drop) -> None:
        self._send(Delivery(body, self.report()))

    async def _send_reports(self) -> None:
        while True:
            self._send(Delivery(None, self.report()))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def report(self) -> Report:
        """Returns the present counts. Held are finished completions of groups not delivered yet."""
        servers = self._dispatcher.servers.values()
        idle, used = self._dispatcher.server_seconds()
        finished = [group.finished() for group in self._open.values()]
        return Report(
            generated_rollouts=self._generated_rollouts,
            generated_tokens=self._generated_tokens,
            held_rollouts=sum(rollouts for rollouts, _ in finished),
            held_tokens=sum(tokens for _, tokens in finished),
            started_groups=self._started,
            running=sum(len(server.running) for server in servers),
            grading=sum(group.grading for group in self._open.values()),
            idle_seconds=idle,
            server_seconds=used,
            sent=time.monotonic(),
            first_error=self._scorer.first_error,
        )


def _group_name(position: PromptPosition) -> str:
    """Returns the group's name for reward functions."""
    return f"{position[0]}.{position[1]}"
