"""The `vllm_server` sampler: vLLM servers over HTTP, given by URL or launched by the run.

Every rank spreads its own requests over all servers. Rank 0 launches and validates the servers and
drives weight updates. At every update the ranks agree on the servers in use.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import run_collectively
from grpo_replay.engine.models import (
    load_config,
    load_policy,
    load_tokenizer,
    section_at,
)
from grpo_replay.engine.stop_tokens import find_stop_tokens
from grpo_replay.engine.weight_names import (
    CheckedWeights,
    ExpectedWeights,
    expected_weights,
    named_weights,
    refuse_problems,
)
from grpo_replay.errors import RecipeError
from grpo_replay.recipe import ModelSection, Recipe
from grpo_replay.sampling.contract import WeightState
from grpo_replay.sampling.server.checks import ServerRequirements, check_server
from grpo_replay.sampling.server.http_client import Refused, Unreachable, block_on
from grpo_replay.sampling.server.request_pool import PoolSettings, ServerPool
from grpo_replay.sampling.server.routes import CONTROL_SECONDS, VllmServer
from grpo_replay.sampling.server.server_process import (
    LaunchedServer,
    launch_servers,
    wait_until_healthy,
)
from grpo_replay.sampling.server.weight_files import SyncFolder
from grpo_replay.sampling.server.weight_nccl import NcclTransfer
from grpo_replay.sampling.server.weight_transfer import (
    FolderTransfer,
    KeptFolderTransfer,
    Transfer,
    publish,
)
from grpo_replay.sampling.vllm_requests import check_request
from grpo_replay.sampling.vllm_settings import engine_arguments
from grpo_replay.types import Completion, GenerationRequest, NamedTensors

logger = logging.getLogger(__name__)


class VllmServerSampler:
    """Implements `sampling.sampler_protocol.Sampler` over HTTP."""

    def __init__(
        self,
        required: ServerRequirements,
        stop_token_ids: Sequence[int],
        expected: ExpectedWeights,
        comm: Comm,
    ) -> None:
        self._required = required
        self.stop_token_ids = tuple(stop_token_ids)
        self._expected = expected
        self._comm = comm
        self._launched: Sequence[LaunchedServer] = ()
        self._transfer: Transfer | None = None
        self._pool: ServerPool
        self._weights = WeightState()
        self.policy_version = 0

    @classmethod
    def open(
        cls, recipe: Recipe, model_path: str, comm: Comm, log_folder: Path | None = None
    ) -> "VllmServerSampler":
        """A sampler whose servers are up, match the recipe and hold the weights in `model_path`.
        Collective. Launched servers write their logs to `log_folder`.

        Raises RecipeError for settings that contradict each other or the model, SamplerError for a
        server that cannot be launched or reached, or does not match the recipe.
        """
        settings = recipe.sampling.servers
        section = section_at(recipe.model, model_path)
        on_gpu = recipe.engine.device != "cpu" and torch.cuda.is_available()
        arguments = engine_arguments(recipe, section, on_gpu)
        expected = expected_weights(section)
        stop_token_ids = find_stop_tokens(recipe, section, load_tokenizer(section))
        required = ServerRequirements.of(load_config(section), arguments, settings.weight_transfer)
        sampler = cls(required, stop_token_ids, expected, comm)
        try:
            run_collectively(
                comm, lambda: sampler._open_resources(recipe, arguments, on_gpu, log_folder)
            )
            sampler._connect(recipe)
            run_collectively(comm, lambda: sampler._check_servers(recipe))
            sampler._push_initial_weights(section, recipe.run.seed)
        except BaseException:
            sampler.close()
            raise
        return sampler

    def _open_resources(
        self,
        recipe: Recipe,
        arguments: Mapping[str, Any],
        on_gpu: bool,
        log_folder: Path | None,
    ) -> None:
        """On rank 0 only: open the weight transfer and launch servers, without waiting for them."""
        if not self._comm.is_main:
            return
        self._transfer = _transfer(recipe, self._expected)
        if recipe.sampling.servers.launch:
            self._launched = launch_servers(recipe, arguments, on_gpu, log_folder)

    def _connect(self, recipe: Recipe) -> None:
        """Create a client for every server, on every rank."""
        own = {each.url: str(each.log) for each in self._launched}
        logs = self._comm.broadcast_json(own or dict.fromkeys(_distinct_urls(recipe)))
        run = self._comm.broadcast_json(secrets.token_hex(4))
        servers = [VllmServer(url, run, Path(log) if log else None) for url, log in logs.items()]
        self._pool = ServerPool(servers, _pool_settings(recipe, self._comm.world_size))

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

    def _check_servers(self, recipe: Recipe) -> None:
        if not self._comm.is_main:
            return
        servers = self._pool.servers
        if self._launched:
            wait_until_healthy(
                self._launched,
                [partial(_is_healthy, server) for server in servers],
                recipe.sampling.servers.start_timeout_seconds,
            )
        for server in servers:
            check_server(server, self._required)

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
            check_request(request, self._required.max_model_len, self._required.vocabulary)
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
        self.policy_version = self._weights.complete()

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


def _distinct_urls(recipe: Recipe) -> list[str]:
    plain = [url.rstrip("/") for url in recipe.sampling.servers.urls]
    for url in plain:
        if plain.count(url) > 1:
            raise RecipeError(f"sampling.servers.urls names {url} more than once")
    return plain


def _pool_settings(recipe: Recipe, world_size: int) -> PoolSettings:
    settings = recipe.sampling.servers
    return PoolSettings(
        in_flight_per_server=max(settings.max_in_flight // world_size, 1),
        request_timeout_seconds=settings.request_timeout_seconds,
        max_retries=settings.max_retries,
        drop_lost=settings.on_failure == "drop",
    )


def _transfer(recipe: Recipe, expected: ExpectedWeights) -> Transfer:
    settings = recipe.sampling.servers
    bucket_bytes = recipe.sampling.sync_bucket_mib * 2**20
    if settings.weight_transfer == "nccl":
        return NcclTransfer(expected, bucket_bytes, settings.request_timeout_seconds)
    folder = SyncFolder(settings.sync_folder, expected.bytes_needed)
    kind = KeptFolderTransfer if recipe.run.mode == "async" else FolderTransfer
    return kind(folder, bucket_bytes, settings.request_timeout_seconds)
