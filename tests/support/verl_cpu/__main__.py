"""python -m verl_cpu OUTPUT_DIR [hydra words]: the tiny task, with or without words of replay."""

import os
import sys
from pathlib import Path

from verl_cpu.command import command, environment

folder = Path(sys.argv[1]).absolute()
words = command(folder, *sys.argv[2:])
os.execve(words[0], words, environment(folder))
