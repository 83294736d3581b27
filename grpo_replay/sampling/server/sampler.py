"""The `vllm_server` sampler: vLLM servers over HTTP, given by URL or launched by the run.

Every rank spreads its own requests over all servers. Rank 0 launches and validates the servers and
drives weight updates. At every update the ranks agree on the servers in use.
"""

import asyncio
import logging
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from transformers import PretrainedConfig

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import run_collectively
from grpo_replay.engine.models import (
    load_config,
    load_policy,
)
from grpo_replay.engine.weights import (
    CheckedWeights,
    ExpectedWeights,
    expected_weights,
    named_weights,
    refuse_problems,
)
from grpo_replay.errors import RecipeError, SamplerError
from grpo_replay.recipe import ModelSection, ServersSection
from grpo_replay.sampling.sampler_protocol import SYNC_BUCKET_BYTES, SamplerOpening, WeightState
from grpo_replay.sampling.server.checks import check_server
from grpo_replay.sampling.server.dispatcher import (
    LONGEST_CHECK_SECONDS,
    Dispatcher,
    Job,
    PoolSettings,
    Servers,
)
from grpo_replay.sampling.server.routes import (
    CONTROL_SECONDS,
    Refused,
    Unreachable,
    VllmServer,
    background_loop,
    block_on,
)
from grpo_replay.sampling.server.server_process import (
    LaunchedServer,
    launch_servers,
    wait_until_healthy,
)
from grpo_replay.sampling.server.weight_nccl import NcclTransfer
from grpo_replay.sampling.server.weight_transfer import (
    FolderTransfer,
    Transfer,
    publish,
)
from grpo_replay.sampling.vllm_requests import check_request, engine_arguments
from grpo_replay.types import Completion, GenerationRequest, NamedTensors, Span

logger = logging.getLogger(__name__)


class ServerPool(Servers):
    """The servers in use. One that is lost stays lost."""

    def live(self) -> list[VllmServer]:
        return [server for server in self.servers if server.url not in self.lost]

    def lose(self, server: VllmServer, reason: str) -> None:
        """A no-op if it is lost already. Raises SamplerError if the recipe says to stop then, or if
        it was the last."""
        if server.url not in self.lost:
            self.lost[server.url] = reason
            super().lose(server, reason)

    def note_lost(self, server: VllmServer, reason: str) -> None:
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
        batch = _Batch(self, requests, policy_version)
        future = asyncio.run_coroutine_threadsafe(batch.run(stop_token_ids), background_loop())
        try:
            for _ in requests:
                yield batch.next_result()
        finally:
            future.cancel()


class _Batch:
    """One call of `ServerPool.run`. The methods run in the background loop, except `next_result`,
    which waits in the caller's thread."""

    def __init__(
        self, pool: ServerPool, requests: Sequence[GenerationRequest], policy_version: int
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._policy_version = policy_version
        self._unfinished = len(requests)
        self._finished = asyncio.Event()
        self._last: Completion | None = None  # kept until every server that failed was looked at
        self._results: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()

    def next_result(self) -> Completion:
        """The next completion. Raises the error of the run."""
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result

    async def run(self, stop_token_ids: Sequence[int]) -> None:
        """Put all completions, or those before the first error and then it, into the results."""
        dispatcher: Dispatcher[Job] = Dispatcher(
            self._pool, stop_token_ids, tuple, self._take, self._give_up, self._policy_version
        )
        dispatcher.waiting.extend(map(Job, self._requests))
        dispatcher.failure.add_done_callback(lambda _: self._finished.set())
        try:
            dispatcher.fill()
            await self._wait()
            if dispatcher.failure.done():
                dispatcher.failure.result()
            await dispatcher.settle()
            if self._last is not None:
                self._results.put(self._last)
        except Exception as error:
            self._results.put(error)
        finally:
            await dispatcher.close()

    async def _wait(self) -> None:
        """Until the batch is finished or has failed. Raises SamplerError if for too long no server
        can be used."""
        limit, alone = self._pool.settings.request_timeout_seconds, time.monotonic()
        while not self._finished.is_set():
            try:
                async with asyncio.timeout(min(limit, LONGEST_CHECK_SECONDS)):
                    await self._finished.wait()
            except TimeoutError:
                if self._pool.live():
                    alone = time.monotonic()
                elif time.monotonic() - alone > limit:
                    lost = self._pool.lost
                    raise SamplerError(
                        f"no vLLM server came back for {limit:g} s: {lost}"
                    ) from None

    def _take(self, job: Job, completion: Completion, spans: tuple[Span, ...]) -> None:
        sampled_by = {version for version, _, _ in spans}
        if sampled_by != {self._policy_version}:
            raise SamplerError(
                f"completion {tuple(job.request.key)} was sampled by policy versions "
                f"{sorted(sampled_by)} where {self._policy_version} was asked for: something else "
                "updates the servers' weights"
            )
        self._unfinished -= 1
        if self._unfinished:
            self._results.put(completion)
        else:
            self._last = completion
            self._finished.set()

    def _give_up(self, job: Job, reason: str) -> None:
        raise SamplerError(f"request {tuple(job.request.key)} cannot be had: {reason}")


class VllmServerSampler:
    """Implements `sampling.sampler_protocol.Sampler` over HTTP."""

    reads_files: ClassVar[bool] = True
    ranks_sample_together = False
    pushed_while_sampling: ClassVar[bool] = False
    pool_class: ClassVar[type[ServerPool]] = ServerPool

    def __init__(
        self,
        config: PretrainedConfig,
        arguments: Mapping[str, Any],
        stop_token_ids: Sequence[int],
        expected: ExpectedWeights,
        comm: Comm,
    ) -> None:
        self._config, self._arguments = config, arguments
        self.stop_token_ids = tuple(stop_token_ids)
        self._expected = expected
        self._comm = comm
        self._launched: Sequence[LaunchedServer] = ()
        self._transfer: Transfer | None = None
        self._pool: ServerPool
        self._weights = WeightState()
        self.policy_version = 0

    @classmethod
    def open(cls, opening: SamplerOpening) -> "VllmServerSampler":
        """A sampler whose servers are up, match the recipe and hold the opening's weights.
        Collective.

        Raises RecipeError for settings that contradict each other or the model, SamplerError for a
        server that cannot be launched or reached, or does not match the recipe.
        """
        if opening.pushed_while_sampling and cls is VllmServerSampler:
            from grpo_replay.sampling.server.rolling import RollingServerSampler

            return RollingServerSampler.open(opening)
        section, comm = opening.model, opening.comm
        arguments = engine_arguments(opening.sampling, section, opening.longest, opening.on_gpu)
        expected = expected_weights(section)
        sampler = cls(load_config(section), arguments, opening.stop_token_ids, expected, comm)
        try:
            run_collectively(comm, lambda: sampler._open_resources(opening))
            sampler._connect(opening.sampling.servers)
            run_collectively(comm, lambda: sampler._check_servers(opening.sampling.servers))
            sampler._push_initial_weights(section, opening.seed)
        except BaseException:
            sampler.close()
            raise
        return sampler

    def _open_resources(self, opening: SamplerOpening) -> None:
        """On rank 0 only: open the weight transfer and launch servers, without waiting for them."""
        if not self._comm.is_main:
            return
        self._transfer = _transfer(opening, self._expected)
        if opening.sampling.servers.launch:
            self._launched = launch_servers(
                opening.sampling, self._arguments, opening.on_gpu, opening.log_folder
            )

    def _connect(self, settings: ServersSection) -> None:
        """Create a client for every server, on every rank."""
        own = {each.url: str(each.log) for each in self._launched}
        logs = self._comm.broadcast_json(own or dict.fromkeys(_distinct_urls(settings)))
        run = self._comm.broadcast_json(secrets.token_hex(4))
        servers = [VllmServer(url, run, Path(log) if log else None) for url, log in logs.items()]
        pool = PoolSettings.of(settings, self._config.vocab_size, self._comm.world_size)
        self._pool = self.pool_class(servers, pool)

    def _push_initial_weights(self, section: ModelSection, seed: int) -> None:
        """Push version 0 to servers given by URL, whatever weights they hold. Launched servers have
        read it from the model's files."""
        if self._comm.broadcast_json(bool(self._launched)):
            self._publish(lambda server: None, 0)
            return
        weights = None
        if self._comm.is_main:
            plain = section.model_copy(update={"attn_implementation": "eager"})
            weights = named_weights(load_policy(plain, seed))
        self._update(weights, 0)

    def _check_servers(self, settings: ServersSection) -> None:
        if not self._comm.is_main:
            return
        servers = self._pool.servers
        if self._launched:
            wait_until_healthy(
                self._launched,
                [partial(_is_healthy, server) for server in servers],
                settings.request_timeout_seconds,
            )
        for server in servers:
            self._check_server(server)

    def _check_server(self, server: VllmServer) -> None:
        nccl = isinstance(self._transfer, NcclTransfer)
        check_server(server, self._config, self._arguments, nccl, self.pushed_while_sampling)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Completions as they finish, exactly one for each request, all sampled by
        `policy_version`.

        A failed request is retried, on another server if there is one. Raises RecipeError for a
        request longer than the servers' longest sequence; SamplerError for an invalid one, for a
        log-prob that is not finite, when retries or servers run out, when a server is lost and
        `on_failure` is stop, after `close`, or if a weight update was left incomplete.
        """
        self._weights.refuse_incomplete()
        for request in requests:
            check_request(request, self._arguments["max_model_len"], self._config.vocab_size)
        return self._pool.run(requests, self.stop_token_ids, self.policy_version)

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace all weights on all servers. Collective.

        A server that does not confirm the new version is lost: the run then stops or goes on
        without it, according to `on_failure`. If the tensors do not fit the model, raises
        SamplerError on the rank concerned and PeerFailure on the others, before any server has
        them. Raises SamplerError if `version` does not increase.
        """
        self._weights.begin(version, self.policy_version)
        for lost in self._comm.all_gather_json(self._pool.lost):
            self._lose_all(lost)
        self._update(named_tensors, version)
        self._weights.complete()
        self.policy_version = version

    def _update(self, named_tensors: NamedTensors | None, version: int) -> None:
        """Stage on rank 0, validate on every rank that has tensors, then publish."""
        checked = None if named_tensors is None else CheckedWeights(named_tensors, self._expected)

        def stage() -> None:
            if checked is None:
                return
            try:
                if self._transfer is not None:
                    self._transfer.stage(iter(checked), version, self._pool.live())
            finally:
                checked.drain()
            refuse_problems(checked.problems, version)

        try:
            run_collectively(self._comm, stage)
            self._publish(self._transfer.load_on if self._transfer else None, version)
        finally:
            if self._transfer is not None:
                self._transfer.discard()

    def _publish(self, load_on: Callable[[VllmServer], None] | None, version: int) -> None:
        """Publish on rank 0, which has `load_on`; every rank learns which servers failed."""
        failures: dict[str, str] = {}
        if self._comm.is_main and load_on is not None:
            timeout = self._pool.settings.request_timeout_seconds
            failures = publish(self._pool.live(), load_on, version, timeout)
        self._lose_all(self._comm.broadcast_json(failures))

    def _lose_all(self, reasons: dict[str, str]) -> None:
        for server in self._pool.servers:
            if server.url in reasons:
                self._pool.lose(server, reasons[server.url])

    def sleep(self, keep_weights: bool = True) -> None:
        """Frees nothing: the servers run on their own devices."""
        if not keep_weights:
            self._weights.discard()

    def close(self) -> None:
        """Stop launched servers and remove weight files. May be called twice."""
        self._weights.close()
        if self._transfer is not None:
            self._transfer.close()
        for server in self._launched:
            server.stop()


def _is_healthy(server: VllmServer) -> bool:
    try:
        block_on(server.check_health(CONTROL_SECONDS))
    except (Refused, Unreachable):
        return False
    return True


def _distinct_urls(settings: ServersSection) -> list[str]:
    plain = [url.rstrip("/") for url in settings.urls]
    for url in plain:
        if plain.count(url) > 1:
            raise RecipeError(f"sampling.servers.urls names {url} more than once")
    return plain


def _transfer(opening: SamplerOpening, expected: ExpectedWeights) -> Transfer:
    settings = opening.sampling.servers
    limits = SYNC_BUCKET_BYTES, settings.request_timeout_seconds
    if settings.weight_transfer == "nccl":
        return NcclTransfer(expected, *limits)
    needed, keeps = expected.bytes_needed, opening.pushed_while_sampling
    return FolderTransfer(settings.sync_folder, needed, *limits, keeps=keeps)
