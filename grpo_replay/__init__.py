"""GRPO post-training with rollout replay. `grpo_replay.api` has the functions."""

__version__ = "0.1.0"
