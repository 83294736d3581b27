"""The `vllm_server` sampler: vLLM servers over HTTP, given by URL or launched by the run.

Every rank spreads its own requests over all servers. Rank 0 launches and validates the servers and
brings them new weights; at every update the ranks agree on the servers in use, and those that were
lost and answer again are taken back. Requests in flight are frozen during an update and go on with
the new weights (`pause` with mode keep). Of LoRA they get the adapter, under a name of its own for
every version, and a request in flight keeps that which it began with.
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, ClassVar

import torch

from grpo_replay.distributed.failures import run_collectively, run_on_main
from grpo_replay.engine.models import load_config, load_policy
from grpo_replay.engine.weights import (
    CheckedWeights,
    expected_adapters,
    expected_weights,
    named_weights,
    refuse_problems,
)
from grpo_replay.errors import SamplerError
from grpo_replay.sampling.sampler_protocol import SYNC_BUCKET_BYTES, SamplerOpening, WeightState
from grpo_replay.sampling.server.checks import check_server
from grpo_replay.sampling.server.dispatcher import Servers, sample
from grpo_replay.sampling.server.push import load_weights, switch_server
from grpo_replay.sampling.server.routes import Refused, Unreachable, VllmServer, block_on
from grpo_replay.sampling.server.server_process import (
    LaunchedServer,
    devices_of_servers,
    launch_servers,
    refuse_ranks_elsewhere,
    wait_until_healthy,
)
from grpo_replay.sampling.vllm_requests import check_request, engine_arguments
from grpo_replay.sampling.weight_files import AdapterTransfer, FolderTransfer
from grpo_replay.types import Completion, GenerationRequest, NamedTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ADAPTERS_KEPT = 16
"""Newest versions of the adapter that stay on disk in asynchronous runs, and in a server's memory:
that of the oldest request in flight must be among them. In others one that ends may be there."""

RETURN_SECONDS = 2.0
"""Longest wait, before an update, for the answer of a server that was lost."""


class VllmServerSampler:
    """Implements `sampling.sampler_protocol.Sampler` over HTTP.

    In asynchronous runs the servers are updated one after the other, so that the others go on
    sampling; `on_switch(url, version)` is called after each, with None if it did not confirm the
    version, and `paused_seconds` sums the time that servers were paused for weights.
    """

    reads_files: ClassVar[bool] = True
    ranks_sample_together = False
    servers: Servers

    def __init__(self, opening: SamplerOpening) -> None:
        """Use `open`."""
        self._opening, self._comm = opening, opening.comm
        self._config = load_config(opening.model)
        self._kept = ADAPTERS_KEPT if opening.pushed_while_sampling else 2
        self._arguments = engine_arguments(
            opening.sampling, opening.model, opening.longest, opening.on_gpu, self._kept
        )
        of_push = expected_adapters(opening.model)[0] if opening.with_adapters else None
        self._expected = of_push or expected_weights(opening.model)
        self._launched: Sequence[LaunchedServer] = ()
        self._transfer: FolderTransfer | None = None  # on rank 0
        self._base: FolderTransfer | None = None  # on rank 0, during an update
        self._staging_base = Lock()
        self._weights = WeightState()
        self.stop_token_ids = tuple(opening.stop_token_ids)
        self.policy_version = 0
        self.on_switch: Callable[[str, int | None], None] = lambda url, version: None
        self.paused_seconds = 0.0

    @classmethod
    def open(cls, opening: SamplerOpening) -> "VllmServerSampler":
        """A sampler whose servers are up, match the recipe and hold the opening's weights. Of
        those given by URL one must be there, the others may come later. Collective.

        Raises RecipeError for settings that contradict each other or the model, SamplerError for a
        server that cannot be launched or reached, or does not match the recipe.
        """
        sampler = cls(opening)
        try:
            run_collectively(opening.comm, sampler._open_resources)
            sampler._connect()
            run_on_main(opening.comm, sampler._check_servers)
            sampler._push_initial_weights()
        except BaseException:
            sampler.close()
            raise
        return sampler

    @classmethod
    def check(
        cls, opening: SamplerOpening, ranks: int, ranks_here: int, elsewhere: bool = False
    ) -> None:
        """Raises what `open` would raise of servers given by URL; of those that it launches, what
        it would raise of the machines of the `ranks`, and of ports and GPUs beside `ranks_here` on
        this machine, unless that is `elsewhere`. Collective."""
        sampler, sampling = cls(opening), opening.sampling

        def look() -> None:
            refuse_ranks_elsewhere(sampling.servers.launch, ranks_here, ranks)
            if not elsewhere:
                devices_of_servers(sampling, ranks_here, opening.on_gpu)

        if sampling.servers.launch:
            run_on_main(opening.comm, look)
        else:
            sampler._connect()
            run_on_main(opening.comm, sampler._check_servers)

    def _open_resources(self) -> None:
        """On rank 0 only: open the weight transfer and launch servers, without waiting for them."""
        opening, settings = self._opening, self._opening.sampling.servers
        if not self._comm.is_main:
            return
        if opening.with_adapters:
            self._transfer = AdapterTransfer(settings.sync_folder, opening.model, self._kept)
        else:
            needed = self._expected.bytes_needed
            self._transfer = FolderTransfer(settings.sync_folder, needed, SYNC_BUCKET_BYTES)
        if settings.launch:
            self._launched = launch_servers(
                opening.sampling, self._arguments, opening.on_gpu, opening.log_folder
            )

    def _connect(self) -> None:
        """Create a client for every server, on every rank."""
        settings = self._opening.sampling.servers
        own = {each.url: str(each.log) for each in self._launched}
        logs = self._comm.broadcast_json(own or dict.fromkeys(settings.urls))
        run = self._comm.broadcast_json(secrets.token_hex(4))
        adapters = self._opening.with_adapters
        servers = [
            VllmServer(url, run, Path(log) if log else None, adapters) for url, log in logs.items()
        ]
        self.servers = Servers(servers, settings, self._comm.world_size)

    def _check_servers(self) -> None:
        """Wait for launched servers, and validate all of them; on rank 0 only."""
        if self._launched:
            wait_until_healthy(self._launched, self.servers.all)
        for server in self.servers.all:
            try:
                check_server(server, self._config, self._arguments)
            except Unreachable as error:
                self.servers.lose(server, str(error))
        self.servers.refuse_none()

    def _push_initial_weights(self) -> None:
        """Push version 0 to servers given by URL, whatever weights they hold. Launched servers have
        read it from the model's files. Adapters begin at zero."""
        if self._opening.with_adapters:
            shapes = self._expected.shapes.items()
            zeros = ((name, torch.zeros(shape)) for name, shape in shapes)
            self._update(zeros if self._comm.is_main else None, 0)
        elif self._comm.broadcast_json(bool(self._launched)):
            self._publish(None, 0)
        else:
            weights = named_weights(self._first_policy()) if self._comm.is_main else None
            self._update(weights, 0)
        self.servers.refuse_none()

    def _first_policy(self) -> "PreTrainedModel":
        plain = self._opening.model.model_copy(update={"attn_implementation": "eager"})
        return load_policy(plain, self._opening.seed)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Completions as they finish, exactly one for each request, all sampled by
        `policy_version`.

        A failed request is retried, on another server if there is one. Raises RecipeError for a
        request longer than the servers' longest sequence; ServersLost if no server is left;
        SamplerError for an invalid request, for a log-prob that is not finite, when retries run
        out, or if a weight update was left incomplete.
        """
        self._weights.refuse_incomplete()
        for request in requests:
            check_request(request, self._arguments["max_model_len"], self._config.vocab_size)
        return sample(self.servers, requests, self.stop_token_ids, self.policy_version)

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace all weights, or the adapter, on all servers. Collective.

        A server that does not confirm the new version is lost; if it was the last one, what is
        sampled next raises ServersLost. If the tensors do not fit the model, raises SamplerError on
        the rank concerned and PeerFailure on the others, before any server has them. Raises
        SamplerError if `version` does not increase.
        """
        self._weights.begin(version, self.policy_version)
        for lost in self._comm.all_gather_json(self.servers.lost):
            self.servers.lost |= lost
        self._update(named_tensors, version)
        self._weights.complete()
        self.policy_version = version

    def _update(self, named_tensors: NamedTensors | None, version: int) -> None:
        """Stage on rank 0, validate on every rank that has tensors, then publish. Everything is
        gathered before anything is sent."""
        checked = None if named_tensors is None else CheckedWeights(named_tensors, self._expected)

        def stage() -> None:
            if checked is None:
                return
            try:
                if self._transfer is not None:
                    self._take_back(version)
                    self._transfer.stage(iter(checked), version)
            finally:
                checked.drain()
            refuse_problems(checked.problems, version)

        try:
            run_collectively(self._comm, stage)
            self._publish(self._transfer, version)
        finally:
            if self._transfer is not None:
                self._transfer.discard()

    def _take_back(self, version: int) -> None:
        """Give servers that were lost the version too, if they answer again."""
        for server in self.servers.all:
            if server.url in self.servers.lost:
                with contextlib.suppress(Refused, Unreachable):
                    block_on(server.check_health(RETURN_SECONDS))
                    del self.servers.lost[server.url]
                    logger.warning("%s is back, and gets version %d", server.url, version)

    def _publish(self, staged: FolderTransfer | None, version: int) -> None:
        """Switch the servers on rank 0, to what is staged if they do not have it. Every rank learns
        which are lost."""
        if self._comm.is_main:
            live = self.servers.live()
            at_once = 1 if self._opening.pushed_while_sampling else len(live)
            with ThreadPoolExecutor(max_workers=max(at_once, 1)) as threads:
                list(threads.map(lambda server: self._switch(server, staged, version), live))
            if self._base is not None:
                self._base.close()
                self._base = None
        self.servers.lost = self._comm.broadcast_json(self.servers.lost)

    def _give_base(self, server: VllmServer) -> None:
        """Bring a server the weights that adapters belong to. They are staged once an update."""
        with self._staging_base:
            if self._base is None:
                parent = self._opening.sampling.servers.sync_folder
                needed = expected_weights(self._opening.model).bytes_needed
                base = FolderTransfer(parent, needed, SYNC_BUCKET_BYTES)
                try:
                    base.stage(named_weights(self._first_policy()), 0)
                except BaseException:
                    base.close()
                    raise
                self._base = base
        load_weights(server, str(self._base.path), self.servers.timeout_seconds)
        server.resume()

    def _switch(self, server: VllmServer, staged: FolderTransfer | None, version: int) -> None:
        """Bring one server the version, or lose it. One without a version is validated first."""
        started = time.monotonic()
        try:
            label = block_on(server.weight_label())
            is_new = server.version_of(label) is None  # restarted, or a load of weights failed
            if is_new and version > 0:
                check_server(server, self._config, self._arguments)
            if is_new and server.with_adapters and not self._launched:
                self._give_base(server)
            timeout = self.servers.timeout_seconds
            folder = str(staged.path) if staged else None
            reason = switch_server(server, folder, version, timeout)
        except (Refused, Unreachable, SamplerError) as error:
            reason = str(error)
        if not server.with_adapters:
            self.paused_seconds += time.monotonic() - started
        if reason is not None:
            self.servers.lose(server, reason)
        self.on_switch(server.url, None if reason else version)

    def sleep(self, keep_weights: bool = True) -> None:
        """Frees nothing: the servers run on their own devices."""
        if not keep_weights:
            self._weights.discard()

    def close(self) -> None:
        """Stop launched servers and remove weight files. May be called twice."""
        if self._transfer is not None:
            self._transfer.close()
        for server in self._launched:
            server.stop()
