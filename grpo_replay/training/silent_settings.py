"""Notices about prompts and rewards that would hide something without a word."""

from collections.abc import Sequence
from typing import Any

from grpo_replay.engine.models import eos_token_ids
from grpo_replay.named_functions import source_text
from grpo_replay.recipe import BUILTIN_VERIFIERS, Recipe
from grpo_replay.recipe.open_lists import VERIFIERS


def notices_of_beginning(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """A notice if a prompt begins with no BOS, or with two, where the tokenizer begins every text
    with one."""
    bos, word = tokenizer.bos_token_id, tokenizer.bos_token
    count = sum(token == bos for token in ids[:2])
    if bos is None or count == 1 or tokenizer("a")["input_ids"][0] != bos:
        return []
    if count == 2:
        return [f"prompts begin with {word} twice, once by the tokenizer: leave it out of them"]
    return [
        f"prompts begin without {word}, which the tokenizer puts before any text, because the chat "
        "template leaves it out: if the model was trained with it, add {{ bos_token }} there"
    ]


def notices_of_tags(recipe: Recipe, tokenizer: Any) -> list[str]:
    """A notice if a reward function of the user, or the prompt beside one, names special tokens
    that completions are graded without."""
    functions = [each.function for each in recipe.reward.functions]
    functions += [recipe.eval.reward] if recipe.eval.benchmarks else []
    own = [each for each in dict.fromkeys(functions) if each not in BUILTIN_VERIFIERS]
    if not own or recipe.reward.special_tokens == "keep":
        return []
    prompts = recipe.prompts
    asked = prompts.user_template + (prompts.system_prompt or "") * prompts.in_chat
    source = "".join(source_text(VERIFIERS.place(each)) for each in own)
    usual = {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    usual.update(eos_token_ids(recipe.model, tokenizer))
    added = tokenizer.added_tokens_decoder.items()
    special = [token.content for number, token in added if token.special and number not in usual]
    tags = [each for each in special if each[0] == "<" and each[1] != "|"]
    hidden = [each for each in special if each in source or (each in tags and each in asked)]
    return [
        f"{', '.join(own)} may look for {', '.join(hidden)}, but rewards and evaluations see "
        "completions without what the tokenizer calls special: set reward.special_tokens keep"
    ] * bool(hidden)
