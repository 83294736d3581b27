"""`grpo-replay` through the real launcher, with a rank 1 that dawdles once and then hangs.

python hang_program.py ARGUMENTS      the command line `grpo-replay ARGUMENTS`
"""

import functools
import sys
import time

from grpo_replay.cli.app import main
from grpo_replay.distributed import launch
from grpo_replay.distributed.environment import rank_environment

SLOW_STEP, SLOW_SECONDS, HANG_STEP = 2, 4.5, 3  # a second report would come after 6 s


def rank_main() -> None:
    """The command line as a rank; rank 1 misbehaves in two micro-batches."""
    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine

    backward = DeepSpeedEngine._backward

    @functools.wraps(backward)
    def planted(engine, microbatch):
        place, _ = engine._comm.position.read()
        if place.part.startswith("update 1 of 2, micro-batch 2 of "):
            if place.step == SLOW_STEP:
                time.sleep(SLOW_SECONDS)
            if place.step == HANG_STEP:  # the other rank reduces its gradients alone
                engine._engine.backward = lambda *_, **__: None
        return backward(engine, microbatch)

    if rank_environment().rank == 1:
        DeepSpeedEngine._backward = planted
    main()


if __name__ == "__main__":
    launch.launch_ranks = functools.partial(launch.launch_ranks, entry="hang_program:rank_main")
    sys.argv[0] = "grpo-replay"
    main()
