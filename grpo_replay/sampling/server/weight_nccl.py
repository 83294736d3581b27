"""Weights to servers over NCCL, by vLLM's own transfer engine.

Rank 0 of the trainer and every worker of every server form one NCCL group, in which rank 0
broadcasts the tensors. Needs CUDA on both sides and a direct network path between them.
"""

import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch

from grpo_replay.engine.weight_names import ExpectedWeights
from grpo_replay.errors import SamplerError
from grpo_replay.sampling.server.http_client import Refused, Unreachable
from grpo_replay.sampling.server.routes import VllmServer


class NcclTransfer:
    """Implements `weight_transfer.Transfer`. The group is formed at the first version, and again
    whenever a server has been dropped."""

    def __init__(
        self, expected: ExpectedWeights, bucket_bytes: int, timeout_seconds: float
    ) -> None:
        self._expected = expected
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._members: tuple[str, ...] = ()
        self._engine: Any = None
        self._source: Any = None

    def stage(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        servers: Sequence[VllmServer],
    ) -> None:
        try:
            if self._members != tuple(server.url for server in servers):
                self._form_group(servers)
            for server in servers:
                server.pause(self._timeout_seconds)
            self._source.tensors = named_tensors
            self._engine.send_weights()
        except (Refused, Unreachable, RuntimeError, ValueError) as error:
            # The other ends may still wait inside a broadcast: the group cannot be used again.
            raise SamplerError(
                f"policy version {version} did not reach the vLLM servers over NCCL: {error}; "
                "restart the servers and resume, or use sampling.servers.weight_transfer folder"
            ) from error

    def bring(self, server: VllmServer) -> None:
        """Nothing is left to do: the broadcast has loaded the weights."""

    def discard(self) -> None:
        if self._source is not None:
            self._source.tensors = ()

    def close(self) -> None:
        self._engine = None
        self._members = ()

    def _form_group(self, servers: Sequence[VllmServer]) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        client = _FanOutClient(servers, self._timeout_seconds)
        if self._members:
            client.leave_group()
        self._source = _streaming_source(self._expected)
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(
            NCCLTrainerInitInfo(
                master_address=local_address(servers[0].url),
                master_port=_free_port(),
                world_size=1 + sum(client.world_sizes),
                packed_buffer_size_bytes=self._bucket_bytes,
                rank=0,
            ),
            client=client,
            source=self._source,
        )
        self._members = tuple(server.url for server in servers)


class _FanOutClient:
    """vLLM's VLLMWeightSyncClient for several servers: every call goes to all of them at once, and
    each server's workers get ranks of their own in the group."""

    def __init__(self, servers: Sequence[VllmServer], timeout_seconds: float) -> None:
        self._servers = servers
        self._timeout_seconds = timeout_seconds
        self.world_sizes = [server.world_size() for server in servers]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        offsets = rank_offsets(init_info["rank_offset"], self.world_sizes)
        bodies = [{"init_info": init_info | {"rank_offset": offset}} for offset in offsets]
        self._post("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", [None] * len(self._servers))

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", [{"update_info": update_info}] * len(self._servers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", [None] * len(self._servers))

    def leave_group(self) -> None:
        self._post("/shutdown_weight_transfer_engine", [None] * len(self._servers))

    def _post(self, path: str, bodies: Sequence[Any]) -> None:
        def post(server: VllmServer, body: Any) -> None:
            try:
                server.http.post(path, body, self._timeout_seconds)
            finally:
                server.http.release()

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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _streaming_source(expected: ExpectedWeights) -> Any:
    """vLLM's WeightSource over tensors that come once per version, on the GPU and in the policy's
    precision. Its class is made here because vLLM is imported only where it is used."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class StreamingSource(WeightSource):
        tensors: Iterable[tuple[str, torch.Tensor]] = ()

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(n, expected.dtype, s) for n, s in expected.shapes.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.tensors:
                yield name, tensor.to("cuda", expected.dtype).contiguous()

    return StreamingSource()
