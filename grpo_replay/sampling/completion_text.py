"""The text of a completion as rewards and evaluations see it (`reward.special_tokens`)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_replay.recipe import Recipe


def decoded(tokenizer: Any, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
    """The text that the tokens stand for: a tokenizer may say that spaces before punctuation are to
    be removed (`clean_up_tokenization_spaces`), but the model wrote them."""
    return tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


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
        return decoded(self.tokenizer, shown, skip_special_tokens=not self.kept)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
