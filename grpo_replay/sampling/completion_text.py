"""The text of a completion as rewards and evaluations see it (`reward.special_tokens`)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_replay.recipe import Recipe


@dataclass(frozen=True, slots=True)
class CompletionText:
    """Decodes completions: without special tokens, or if these are `kept` with all but one of
    `ends` as the last token, so that a pattern may match the whole text."""

    tokenizer: Any
    kept: bool = False
    ends: Collection[int] = ()

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: Any) -> "CompletionText":
        """As the recipe says. The end tokens are the model's own, not those that
        `sampling.stop_tokens` chooses: a reward may look for these."""
        if recipe.reward.special_tokens == "drop":
            return cls(tokenizer)
        from grpo_replay.engine.models import eos_token_ids

        return cls(tokenizer, True, eos_token_ids(recipe.model, tokenizer))

    def decode(self, token_ids: Sequence[int]) -> str:
        ended = len(token_ids) > 0 and token_ids[-1] in self.ends
        shown = token_ids[:-1] if ended else token_ids
        return self.tokenizer.decode(shown, skip_special_tokens=not self.kept)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
