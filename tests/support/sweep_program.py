"""`grpo-replay sweep ARGUMENTS` with a stand-in for the trainer, in a process of its own."""

from grpo_replay.cli.app import main
from grpo_replay.lab.sweep import cell_processes as processes

processes.ENTRY = "fake_trainer"
main()
