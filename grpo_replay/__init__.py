"""GRPO post-training with rollout replay."""

__version__ = "0.1.0"
