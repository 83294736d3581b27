"""One rank of the two-rank tests: samples its share and writes what it saw.

Usage: rank_program.py FOLDER OUTPUT TENSOR_PARALLEL_SIZE, under torchrun's variables.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_policy import Policy, changed, make_requests, named_tensors, tiny_recipe
from transformers import AutoModelForCausalLM

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import GrpoReplayError
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.vllm_local import VllmLocalSampler


def main(folder: Path, output: Path, tensor_parallel_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = Comm(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    recipe = tiny_recipe(folder, vllm={"tensor_parallel_size": tensor_parallel_size})
    sampler = VllmLocalSampler.open(SamplerOpening.from_recipe(recipe, str(folder), comm))
    policy = Policy(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

    # A tensor that is missing on one rank alone stops every rank.
    pairs = list(named_tensors(changed(policy, 21)))
    try:
        sampler.load_weights(pairs[1:] if comm.rank == 1 else pairs, 1)
        refusal = ""
    except GrpoReplayError as error:
        refusal = str(error)
    sampler.load_weights(pairs, 2)

    mine = make_requests()[comm.rank :: comm.world_size]
    rows = [
        [list(c.key), c.token_ids.tolist(), c.sampler_logprobs.tolist(), c.policy_version]
        for c in sampler.generate(mine)
    ]
    iterator = sampler.generate(make_requests()[comm.rank :: comm.world_size])
    next(iterator)
    iterator.close()
    sampler.close()
    del iterator, sampler
    gc.collect()
    comm.barrier()  # the trainer's process group outlives the sampler
    seen = {"rows": rows, "refusal": refusal}
    (output / f"rank{comm.rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()  # its threads may abort an interpreter that exits


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
