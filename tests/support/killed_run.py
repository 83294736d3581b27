"""A run that gets SIGKILL right after a step. Usage: killed_run.py FOLDER STEP SECTIONS_JSON"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from small_runs.trained import small_recipe

from grpo_replay.training import Observer
from grpo_replay.training.run import run_training


class Killer(Observer):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, metrics) -> None:
        if metrics["step"] == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_training(
        small_recipe(**json.loads(sys.argv[3])), Path(sys.argv[1]), False, Killer(int(sys.argv[2]))
    )
