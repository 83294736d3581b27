"""Decodes completions into the text that rewards and evaluations see (`reward.special_tokens`)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_replay.recipe import Recipe


def decoded(tokenizer: Any, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
    """Decode tokens without removing spaces before punctuation, which the model wrote, whatever the
    tokenizer's `clean_up_tokenization_spaces` says."""
    return tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


@dataclass(frozen=True, slots=True)
class CompletionText:
    """Decodes completions without special tokens. If these are `kept`, only a last token that is
    one of `ends` is left out, so that a pattern may match the whole text."""

    tokenizer: Any
    kept: bool = False
    ends: Collection[int] = ()

    @classmethod
    def from_recipe(cls, recipe: Recipe, tokenizer: Any) -> "CompletionText":
        """Create the decoder for a recipe. `ends` are the model's own end tokens; those of
        `sampling.stop_tokens` stay in the text, because a reward may look for them."""
        if recipe.reward.special_tokens == "drop":
            return cls(tokenizer)
        from grpo_replay.engine.models import eos_token_ids

        return cls(tokenizer, True, eos_token_ids(recipe.model, tokenizer))

    def decode(self, token_ids: Sequence[int]) -> str:
        ended = len(token_ids) > 0 and token_ids[-1] in self.ends
        shown = token_ids[:-1] if ended else token_ids
        return decoded(self.tokenizer, shown, skip_special_tokens=not self.kept)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
