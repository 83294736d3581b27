"""Decodes token ids with the tokenizer in a checkpoint of a run."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENIZER_FOLDERS = (
    "checkpoints/step_*/model",  # a run of this package
    "checkpoint-*",  # transformers' Trainer: TRL, ms-swift
    "global_step_*/actor/huggingface",  # verl
    "model",  # a checkpoint of this package
    ".",
)
"""Folders in which `tokenizer.json` is searched, below a run or checkpoint, or next to a
snapshot."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes with a tokenizer; without one, `reason` says why."""

    tokenizer: Any = None
    reason: str = ""

    def text(self, token_ids: Sequence[int]) -> str | None:
        """Returns the text of tokens, special ones included; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def pieces(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Decode tokens as inside a sequence; `�` for part of a character, {} without a tokenizer.

        A tokenizer drops the blank before a first token, so each token is decoded after itself.
        """
        if self.tokenizer is None:
            return {}
        tokens = sorted(set(token_ids))
        once = self.tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=False)
        twice = self.tokenizer.decode_batch([[token] * 2 for token in tokens], False)
        return {
            token: both.removeprefix(one) if both.startswith(one) else one
            for token, one, both in zip(tokens, once, twice, strict=True)
        }

    def special_ids(self) -> list[int]:
        """Returns the ids of special tokens, ascending."""
        if self.tokenizer is None:
            return []
        added = self.tokenizer.get_added_tokens_decoder()
        return sorted(id for id, token in added.items() if token.special)


def open_decoder(path: Path) -> Decoder:
    """Open the newest `tokenizer.json` of a run, of a checkpoint or next to a snapshot. Without
    one, the decoder has the reason instead."""
    folder = path if path.is_dir() else path.parent
    files = [f for pattern in TOKENIZER_FOLDERS for f in folder.glob(f"{pattern}/tokenizer.json")]
    if not files:
        searched = ", ".join(TOKENIZER_FOLDERS[:-1])
        return Decoder(reason=f"no tokenizer.json in {folder} or its {searched}")
    try:
        # Imported here: it is optional. It loads in milliseconds, unlike transformers.
        from tokenizers import Tokenizer
    except ImportError:
        return Decoder(reason="tokenizers is not installed: pip install tokenizers")
    return Decoder(Tokenizer.from_file(str(max(files, key=_age_key))))


def _age_key(file: Path) -> list[int]:
    """Returns the numbers in a path, which are largest for the newest checkpoint."""
    return [int(number) for number in re.findall(r"\d+", str(file))]
