"""The `vllm_server` sampler: vLLM servers over HTTP, given by URL or launched by the run.

Every rank spreads its own requests over all servers. Rank 0 launches and validates the servers and
pushes new weights (`push.py`); at every update the ranks agree on the servers in use. Requests in
flight are frozen during an update and continue with the new weights (`pause` with mode keep). With
LoRA only adapters are pushed, named by their version, and a request in flight keeps the adapter
that it began with.
"""

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from grpo_replay.distributed.failures import run_collectively, run_on_main
from grpo_replay.engine.models import load_config
from grpo_replay.engine.weights import expected_adapters, expected_weights
from grpo_replay.sampling.sampler_protocol import SYNC_BUCKET_BYTES, SamplerOpening, WeightState
from grpo_replay.sampling.server.checks import check_server
from grpo_replay.sampling.server.dispatcher import Servers, sample
from grpo_replay.sampling.server.push import WeightPush
from grpo_replay.sampling.server.routes import Unreachable, VllmServer
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

ADAPTERS_KEPT = 16
"""Newest adapter versions kept on disk and in a server's memory in asynchronous runs: the one of
the oldest request in flight must be among them. Other runs keep two."""


class VllmServerSampler:
    """Implements `sampling.sampler_protocol.Sampler` over HTTP."""

    reads_files: ClassVar[bool] = True
    ranks_sample_together = False
    servers: Servers
    pusher: WeightPush

    def __init__(self, opening: SamplerOpening) -> None:
        """Use `open`. Reads configuration and expected weights; contacts no server."""
        self._opening, self._comm = opening, opening.comm
        self._config = load_config(opening.model)
        self._kept = ADAPTERS_KEPT if opening.pushed_while_sampling else 2
        self._arguments = engine_arguments(
            opening.sampling, opening.model, opening.longest, opening.on_gpu, self._kept
        )
        adapters = expected_adapters(opening.model)[0] if opening.with_adapters else None
        self._expected = adapters or expected_weights(opening.model)
        self._launched: Sequence[LaunchedServer] = ()
        self._files: FolderTransfer | None = None  # on rank 0
        self._weights = WeightState()
        self.stop_token_ids = tuple(opening.stop_token_ids)
        self.policy_version = 0

    @classmethod
    def open(cls, opening: SamplerOpening) -> "VllmServerSampler":
        """Open a sampler whose servers run, match the recipe and have the opening's weights. Of
        servers given by URL only one must be reachable; others may come later. Collective.

        Raises RecipeError for settings that contradict each other or the model, SamplerError for a
        server that cannot be launched or reached, or does not match the recipe.
        """
        sampler = cls(opening)
        try:
            run_collectively(opening.comm, sampler._open_resources)
            sampler._connect()
            run_on_main(opening.comm, sampler._check_servers)
            sampler.pusher = WeightPush(
                opening, sampler.servers, sampler._expected, sampler._files, sampler._check_server
            )
            sampler.pusher.push_first()
        except BaseException:
            sampler.close()
            raise
        return sampler

    @classmethod
    def check(
        cls, opening: SamplerOpening, ranks: int, ranks_here: int, elsewhere: bool = False
    ) -> None:
        """Raises the errors that `open` would raise: for servers given by URL all of them; for
        launched servers those about the machines of the `ranks`, and unless the run is `elsewhere`
        those about ports and GPUs beside `ranks_here` on this machine. Collective."""
        sampler, sampling = cls(opening), opening.sampling

        def check_machine() -> None:
            refuse_ranks_elsewhere(sampling.servers.launch, ranks_here, ranks)
            if not elsewhere:
                devices_of_servers(sampling, ranks_here, opening.on_gpu)

        if sampling.servers.launch:
            run_on_main(opening.comm, check_machine)
        else:
            sampler._connect()
            run_on_main(opening.comm, sampler._check_servers)

    def _open_resources(self) -> None:
        """Open the weight transfer and launch servers, on rank 0 and without waiting for them."""
        opening, settings = self._opening, self._opening.sampling.servers
        if not self._comm.is_main:
            return
        if opening.with_adapters:
            self._files = AdapterTransfer(settings.sync_folder, opening.model, self._kept)
        else:
            needed = self._expected.bytes_needed
            self._files = FolderTransfer(settings.sync_folder, needed, SYNC_BUCKET_BYTES)
        if settings.launch:
            self._launched = launch_servers(
                opening.sampling, self._arguments, opening.on_gpu, opening.log_folder
            )

    def _connect(self) -> None:
        """Create a client for every server, on every rank."""
        settings = self._opening.sampling.servers
        launched = {server.url: str(server.log) for server in self._launched}
        logs = self._comm.broadcast(launched or dict.fromkeys(settings.urls))
        run = self._comm.broadcast(secrets.token_hex(4))
        adapters = self._opening.with_adapters
        servers = [
            VllmServer(url, run, Path(log) if log else None, adapters) for url, log in logs.items()
        ]
        self.servers = Servers(servers, settings, self._comm.world_size)

    def _check_servers(self) -> None:
        """Wait for launched servers, and validate all servers. Called on rank 0 only."""
        if self._launched:
            wait_until_healthy(self._launched, self.servers.all)
        for server in self.servers.all:
            try:
                self._check_server(server)
            except Unreachable as error:
                self.servers.lose(server, str(error))
        self.servers.refuse_all_lost()

    def _check_server(self, server: VllmServer) -> None:
        check_server(server, self._config, self._arguments)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Yield completions as they finish, one for each request, all sampled by `policy_version`.

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

        A server that does not confirm the new version is lost; after the last one is lost, the next
        sampling raises ServersLost. If the tensors do not fit the model, raises SamplerError on
        that rank and PeerFailure on others, before any server gets them. Raises SamplerError if
        `version` does not increase.
        """
        self._weights.begin(version, self.policy_version)
        self.pusher.push(named_tensors, version)
        self._weights.complete()
        self.policy_version = version

    def sleep(self, keep_weights: bool = True) -> None:
        """Free nothing: the servers run on their own devices."""
        if not keep_weights:
            self._weights.discard()

    def close(self) -> None:
        """Stop launched servers and remove weight files. May be called twice."""
        if self._files is not None:
            self._files.close()
        for server in self._launched:
            server.stop()
