"""A trainer that launches a server and then waits to be killed.

Usage: server_run_program.py FOLDER PORT LOGS; prints the guard's process id once it has sampled.
"""

import sys
import time
from pathlib import Path

from tiny_policy import make_requests, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.server.sampler import VllmServerSampler

folder, port, logs = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
servers = {"launch": 1, "address": f"127.0.0.1:{port}"}
recipe = tiny_recipe(folder, backend="vllm_server", servers=servers)
sampler = VllmServerSampler.open(SamplerOpening.from_recipe(recipe, str(folder), Comm(), logs))
assert len(list(sampler.generate(make_requests(count=4)))) == 4
print(sampler._launched[0].guard.pid, flush=True)
time.sleep(600)
