"""`python -m grpo_replay`, the form that torchrun and srun start."""

from grpo_replay.cli import main
from grpo_replay.rank_failures import exit_rank

if __name__ == "__main__":
    code: object = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    exit_rank(code if isinstance(code, int) else int(code is not None))
