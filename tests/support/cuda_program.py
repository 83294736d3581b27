"""Ranks join on a machine that seems to have one GPU of 80 GiB and no CUDA toolkit.

Only torch is patched: torch.cuda answers as on such a machine, and gloo stands in for NCCL. Writes
{"timeout_seconds": …} of DeepSpeed's own group to stderr.
"""

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_properties = lambda device: SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30
)

init_process_group = dist.init_process_group


def with_gloo(backend: str, **options: object) -> None:
    assert backend == "nccl"
    init_process_group("gloo", **options)


dist.init_process_group = with_gloo


def join() -> None:
    from grpo_replay.engine.processes import initialize_processes
    from grpo_replay.recipe import resolve_recipe
    from grpo_replay.terminal.quiet import quiet_libraries

    with quiet_libraries():
        recipe = resolve_recipe([{"engine": {"device": "cuda", "timeout_seconds": 77}}])
        comm, device = initialize_processes(recipe)
        assert (comm.world_size, device) == (1, torch.device("cuda", 0))

        from deepspeed.accelerator import get_accelerator
        from deepspeed.utils import groups

        assert get_accelerator().device_name() == "cuda"
        options = groups._clone_world_group()._get_backend(torch.device("cpu")).options
    seen = {"timeout_seconds": options._timeout.total_seconds()}
    print(json.dumps(seen), file=sys.stderr)


if __name__ == "__main__":
    join()
