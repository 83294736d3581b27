"""Send weights to the servers over NCCL, with vLLM's own transfer engine.

Rank 0 of the trainer and every worker of every server form one NCCL group, in which rank 0
broadcasts the tensors. Needs CUDA on both sides and a direct network path between them.
"""

import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch

from grpo_replay.engine.weights import ExpectedWeights
from grpo_replay.errors import SamplerError, first_line
from grpo_replay.sampling.server.routes import CONTROL_SECONDS, Refused, Unreachable, VllmServer
from grpo_replay.sampling.vllm_process import stdout_to_stderr
from grpo_replay.sampling.vllm_requests import log_through_root

logger = logging.getLogger(__name__)

DEVICE = "cuda"
"""Device of the tensors that are broadcast."""


class NcclTransfer:
    """Implements `weight_transfer.Transfer`. The group is formed at the first version, and again
    after a server was dropped; the old group is freed first, on both sides."""

    def __init__(
        self, expected: ExpectedWeights, bucket_bytes: int, timeout_seconds: float
    ) -> None:
        self._expected = expected
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._client: _FanOutClient | None = None
        self._engine: Any = None
        self._source: Any = None
        self._failure: Exception | None = None  # of a server, while it received

    def stage(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        servers: Sequence[VllmServer],
    ) -> None:
        try:
            if self._client is None or self._client.urls != [server.url for server in servers]:
                self._form_group(servers)
            for server in servers:
                server.pause(self._timeout_seconds)
            self._source.tensors = named_tensors
            self._engine.send_weights()
        except (Refused, Unreachable, RuntimeError, ValueError, AssertionError) as error:
            # The servers may still wait inside a broadcast: the group cannot be used again, and
            # the servers cannot be asked to leave it.
            self._client = None
            self._abort()
            reason = first_line(self._failure or error)
            raise SamplerError(
                f"policy version {version} did not reach the vLLM servers over NCCL: {reason}; "
                "restart the servers and resume, or use sampling.servers.weight_transfer folder"
            ) from error

    def load_on(self, server: VllmServer) -> None:
        """A no-op: the broadcast has loaded the weights."""

    def discard(self) -> None:
        if self._source is not None:
            self._source.tensors = ()

    def close(self) -> None:
        self._leave_group(self._client)
        self._client = None

    def _leave_group(self, client: "_FanOutClient | None") -> None:
        """Free the communicators of the servers of `client`, and this side's."""
        if client is not None:
            try:
                client.leave_group()
            except (Refused, Unreachable) as error:
                logger.warning("a server keeps its NCCL communicator: %s", first_line(error))
        self._abort()

    def _give_up(self, failure: Exception) -> None:
        self._failure = failure
        self._abort()

    def _abort(self) -> None:
        """Free this side's communicator, which ends a broadcast that still waits."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _form_group(self, servers: Sequence[VllmServer]) -> None:
        log_through_root(os.environ)
        with stdout_to_stderr():  # NCCL prints as well
            self._form_group_of(servers)

    def _form_group_of(self, servers: Sequence[VllmServer]) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        client = _FanOutClient(servers, self._timeout_seconds, self._give_up)
        if self._client is not None:
            self._leave_group(client)  # the new client: a dropped server gets no request
        self._source = _streaming_source(self._expected)
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(
            NCCLTrainerInitInfo(
                master_address=master_address_for(
                    [local_address(server.url) for server in servers]
                ),
                master_port=_free_port(),
                world_size=1 + sum(client.world_sizes),
                packed_buffer_size_bytes=self._bucket_bytes,
                rank=0,
            ),
            client=client,
            source=self._source,
        )
        self._client = client


class _FanOutClient:
    """vLLM's VLLMWeightSyncClient for several servers: sends every call to all of them in parallel,
    and gives the workers of each server their own ranks in the group.

    `give_up` is called as soon as a server fails to receive: NCCL would wait for it forever.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        timeout_seconds: float,
        give_up: Callable[[Exception], None],
    ) -> None:
        self.urls = [server.url for server in servers]
        self._servers = servers
        self._timeout_seconds = timeout_seconds
        self._give_up = give_up
        self.world_sizes = [server.get("/get_world_size")["world_size"] for server in servers]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        offsets = rank_offsets(init_info["rank_offset"], self.world_sizes)
        bodies = [{"init_info": init_info | {"rank_offset": offset}} for offset in offsets]
        self._post("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", [None] * len(self._servers))

    def update_weights(self, update_info: Any) -> None:
        bodies = [{"update_info": update_info}] * len(self._servers)
        self._post("/update_weights", bodies, on_failure=self._give_up)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", [None] * len(self._servers))

    def leave_group(self) -> None:
        path, seconds = "/shutdown_weight_transfer_engine", CONTROL_SECONDS
        self._post(path, [None] * len(self._servers), timeout_seconds=seconds)

    def _post(
        self,
        path: str,
        bodies: Sequence[Any],
        on_failure: Callable[[Exception], None] = lambda _: None,
        timeout_seconds: float | None = None,
    ) -> None:
        def post(server: VllmServer, body: Any) -> None:
            try:
                server.post(path, body, timeout_seconds or self._timeout_seconds)
            except (Refused, Unreachable) as error:
                on_failure(error)
                raise

        with ThreadPoolExecutor(max_workers=len(self._servers)) as threads:
            list(threads.map(post, self._servers, bodies))


def rank_offsets(first: int, world_sizes: Sequence[int]) -> list[int]:
    """The first rank of each server's workers: (1, [2, 1, 4]) gives [1, 3, 4]."""
    return [first + sum(world_sizes[:index]) for index in range(len(world_sizes))]


def local_address(url: str) -> str:
    """The address of this machine from which `url` is reached. Sends nothing."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return probe.getsockname()[0]


def master_address_for(addresses: Sequence[str]) -> str:
    """The master address of the group, given this machine's address towards each server: one that
    all servers can reach. ["127.0.0.1", "10.0.0.7"] gives "10.0.0.7": a local server reaches both.
    """
    others = [each for each in addresses if not ipaddress.ip_address(each).is_loopback]
    return (others or list(addresses))[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _streaming_source(expected: ExpectedWeights) -> Any:
    """A vLLM WeightSource that streams the tensors of a version once, on the GPU, in the precision
    of the policy. The class is defined inside the function because vLLM is imported lazily."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class StreamingSource(WeightSource):
        tensors: Iterable[tuple[str, torch.Tensor]] = ()

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(n, expected.dtype, s) for n, s in expected.shapes.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.tensors:
                yield name, tensor.to(DEVICE, expected.dtype).contiguous()

    return StreamingSource()
