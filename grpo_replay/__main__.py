"""`python -m grpo_replay`, the form that torchrun and srun start."""

from grpo_replay.cli.app import main

if __name__ == "__main__":
    main()
