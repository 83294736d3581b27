"""A run that gets SIGKILL right after a step. Usage: killed_run.py FOLDER STEP SECTIONS_JSON"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from small_runs.trained import Listener, small_recipe

from grpo_replay.training.run import run_training

if __name__ == "__main__":
    torch.set_num_threads(1)
    recipe = small_recipe(**json.loads(sys.argv[3]))
    killer = Listener({int(sys.argv[2]): lambda: os.kill(os.getpid(), signal.SIGKILL)})
    run_training(recipe, Path(sys.argv[1]), False, killer)
