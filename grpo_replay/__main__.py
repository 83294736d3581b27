"""`python -m grpo_replay`, the form that torchrun and srun start."""

import sys

if not sys.flags.safe_path:
    # -m puts the working directory first, where a `secrets.py` stands for Python's own.
    sys.path.append(sys.path.pop(0))

from grpo_replay.cli.app import main

if __name__ == "__main__":
    main()
