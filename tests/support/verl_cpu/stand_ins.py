"""What stands in for hardware, process groups and the sampler. verl imports this module in each of
its processes: VERL_USE_EXTERNAL_MODULES=verl_cpu.stand_ins VERL_PLATFORM=cpu."""

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import verl.utils.distributed as distributed
import verl.utils.fsdp_utils as fsdp_utils
import verl.workers.rollout.base as rollout_base
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from verl_cpu.sampler import Sampler


def nothing(*_: Any, **__: Any) -> None:
    pass


def zero(*_: Any, **__: Any) -> int:
    return 0


TORCH_CPU = SimpleNamespace(  # torch.cpu, and what verl asks of torch.cuda besides
    **{name: nothing for name in (
        "synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "manual_seed",
        "manual_seed_all",
    )},
    **{name: zero for name in (
        "current_device", "memory_allocated", "memory_reserved", "max_memory_allocated",
        "max_memory_reserved",
    )},
    is_available=lambda: False,
    device_count=lambda: 1,
    get_device_name=lambda *_: "cpu",
    mem_get_info=lambda *_: (1, 1),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    Stream=torch.cpu.Stream,
    stream=torch.cpu.stream,
    current_stream=torch.cpu.current_stream,
)  # fmt: skip


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The methods that verl asks for of a platform."""

    device_name = vendor_name = "cpu"
    device_module = TORCH_CPU
    set_device = synchronize = manual_seed = manual_seed_all = nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:  # verl calls tensor.to(current_device())
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_id: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, _: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"  # numbers in Ray: ray.init(num_gpus=1)

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


# torch refuses "cpu:gloo,cpu:gloo", which verl makes of device and backend.
distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)


class Unpinned(fsdp_utils.CPUOffloadPolicy):
    """The reference model is offloaded; pinned memory needs a GPU."""

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(pin_memory=False)


fsdp_utils.CPUOffloadPolicy = Unpinned


def name_of(replica: int) -> str:
    """The name of a replica's sampler in Ray."""
    return f"sampler_cpu_{os.environ['VERL_CPU_RUN']}_{replica}"


class Replica(RolloutReplica):
    async def launch_servers(self) -> None:
        actor = ray.remote(num_cpus=0)(Sampler).options(
            name=name_of(self.replica_rank), max_concurrency=1000
        )
        self._server_handle = actor.remote(self.model_config.path, self.config.response_length)
        self.servers = [self._server_handle]
        self._server_address = name_of(self.replica_rank)
        await self._server_handle.ignore.remote()


class Adapter(BaseRollout):
    """In the process of the actor, or next to a sampler alone: gives the sampler its weights."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int | None = None
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        # Of tensor_model_parallel_size 1: every rank has a replica.
        self.replica = int(os.environ["RANK"]) if replica_rank is None else replica_rank

    async def resume(self, tags: Any) -> None:
        pass

    release = resume

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        if hasattr(weights, "__aiter__"):
            weights = [each async for each in weights]
        tensors = {name: each.detach().float().cpu().clone() for name, each in weights}
        await ray.get_actor(name_of(self.replica)).load.remote(tensors, global_steps)


@CheckpointEngineRegistry.register("file_cpu")
class FileEngine(CheckpointEngine):
    """In `separate_async`: the weights from the trainer to samplers of their own, by file."""

    init_process_group = finalize = nothing

    def __init__(self, bucket_size: int = 0, is_master: bool = False, folder: str = ".") -> None:
        self.is_master, self.folder = is_master, Path(folder)

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, *_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        tensors = {name: each.detach().cpu().clone() for name, each in weights}
        if self.is_master:
            whole = self.folder / f"weights_{global_steps}.pt"
            torch.save(tensors, whole.with_suffix(".part"))
            whole.with_suffix(".part").replace(whole)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Any]:
        whole = self.folder / f"weights_{global_steps}.pt"
        while not whole.exists():
            await asyncio.sleep(0.05)
        for each in torch.load(whole).items():
            yield each


RolloutReplicaRegistry.register("hf_cpu", lambda: Replica)
rollout_base._ROLLOUT_REGISTRY["hf_cpu", "async"] = "verl_cpu.stand_ins.Adapter"
