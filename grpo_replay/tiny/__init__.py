"""The tiny tasks of `grpo-replay train tiny` and `train tiny-long`: base models, tokenizers and
arithmetic problems (`tasks.py`). Imports nothing else of the package; torch and transformers only
in `make_base`, `makers` and `tokenizer`."""

from pathlib import Path

BASE_DIR: Path = Path(__file__).parent / "base"
"""The shipped base model of `train tiny`, a Hugging Face folder."""

LONG_BASE_DIR: Path = Path(__file__).parent / "long_base"
"""The shipped base model of `train tiny-long`."""
