"""The embedded laboratory: what `grpo-replay train tiny` trains, and on which problems."""

from pathlib import Path

BASE_DIR: Path = Path(__file__).parent / "base"
"""The shipped base model, a Hugging Face folder."""
