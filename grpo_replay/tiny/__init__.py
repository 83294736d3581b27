"""The tiny task of `grpo-replay train tiny`: base model, tokenizer and arithmetic problems. Imports
nothing else of the package; torch and transformers only in `make_base` and `tokenizer`."""

from pathlib import Path

BASE_DIR: Path = Path(__file__).parent / "base"
"""The shipped base model, a Hugging Face folder."""
