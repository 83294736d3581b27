"""`python -m grpo_replay.lab.sweep.cell_entry PARENT_PID ARGUMENTS`: what a sweep starts as a cell.

It is `grpo-replay ARGUMENTS`, told to stop after its step if the sweep dies, also by SIGKILL.
"""

import runpy
import sys

from grpo_replay.distributed.environment import stop_with_parent


def main() -> None:
    stop_with_parent(int(sys.argv[1]))
    sys.argv = ["grpo-replay", *sys.argv[2:]]
    runpy.run_module("grpo_replay", run_name="__main__")


if __name__ == "__main__":
    main()
