"""Decodes token ids with the tokenizer that lies with a checkpoint of a run."""

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
"""Where `tokenizer.json` is looked for, below a run or checkpoint, or beside a snapshot."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes with a tokenizer, or says in `reason` why there is none."""

    tokenizer: Any = None
    reason: str = ""

    def text(self, token_ids: Sequence[int]) -> str | None:
        """The text of tokens, special ones included; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def pieces(self, token_ids: Iterable[int]) -> dict[int, str]:
        """The text that each token adds behind another; `�` for a part of a character.

        A tokenizer drops the blank before a first token, so each is decoded behind itself.
        """
        if self.tokenizer is None:
            return {}
        wanted = sorted(set(token_ids))
        once = self.tokenizer.decode_batch([[each] for each in wanted], skip_special_tokens=False)
        twice = self.tokenizer.decode_batch([[each] * 2 for each in wanted], False)
        return {
            each: both.removeprefix(one) if both.startswith(one) else one
            for each, one, both in zip(wanted, once, twice, strict=True)
        }

    def special_ids(self) -> list[int]:
        """The ids of special tokens, ascending."""
        if self.tokenizer is None:
            return []
        added = self.tokenizer.get_added_tokens_decoder()
        return sorted(each for each, token in added.items() if token.special)


def open_decoder(path: Path) -> Decoder:
    """The decoder of a run, a checkpoint or a snapshot: of the newest checkpoint with a
    `tokenizer.json`."""
    folder = path if path.is_dir() else path.parent
    found = [file for each in TOKENIZER_FOLDERS for file in folder.glob(f"{each}/tokenizer.json")]
    if not found:
        where = ", ".join(TOKENIZER_FOLDERS[:-1])
        return Decoder(reason=f"no tokenizer.json in {folder} or its {where}")
    try:
        # Imported here: it is optional. It loads in milliseconds, unlike transformers.
        from tokenizers import Tokenizer
    except ImportError:
        return Decoder(reason="tokenizers is not installed: pip install tokenizers")
    return Decoder(Tokenizer.from_file(str(max(found, key=_age_key))))


def _age_key(file: Path) -> list[int]:
    """The numbers in a path: the newest of several checkpoints has the largest."""
    return [int(number) for number in re.findall(r"\d+", str(file))]
