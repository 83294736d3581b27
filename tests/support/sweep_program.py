"""`grpo-replay sweep ARGUMENTS` with a stand-in for the trainer, in a process of its own."""

from grpo_replay.cli import main
from grpo_replay.experiments import local

local.ENTRY = "fake_trainer"
main()
