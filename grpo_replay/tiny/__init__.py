"""The tiny task of `grpo-replay train tiny`: base model, tokenizer and arithmetic problems. Imports
nothing of the package; torch only in `make_base`."""

from pathlib import Path

BASE_DIR: Path = Path(__file__).parent / "base"
"""The shipped base model, a Hugging Face folder."""
