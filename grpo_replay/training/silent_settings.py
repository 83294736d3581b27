"""Notices about settings of prompts and rewards that have silent effects."""

from collections.abc import Sequence
from typing import Any

from grpo_replay.engine.models import eos_token_ids
from grpo_replay.named_functions import source_text
from grpo_replay.recipe import BUILTIN_VERIFIERS, Recipe
from grpo_replay.recipe.open_lists import VERIFIERS


def notices_of_beginning(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Returns a notice if a prompt (token `ids`) begins with no BOS token, or with two, though the
    tokenizer adds one to every text; none for a tokenizer that does not."""
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
    """Returns a notice if the source of the user's reward functions, or the prompt template, names
    special tokens (say <think>) that are removed before grading, unless the recipe keeps them."""
    functions = [weighted.function for weighted in recipe.reward.functions]
    functions += [recipe.eval.reward] if recipe.eval.benchmarks else []
    user_functions = [name for name in dict.fromkeys(functions) if name not in BUILTIN_VERIFIERS]
    if not user_functions or recipe.reward.special_tokens == "keep":
        return []
    prompts = recipe.prompts
    template = prompts.user_template + (prompts.system_prompt or "") * prompts.in_chat
    source = "".join(source_text(VERIFIERS.import_path(name)) for name in user_functions)
    control_ids = {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    control_ids.update(eos_token_ids(recipe.model, tokenizer))
    added = tokenizer.added_tokens_decoder.items()
    special = [token.content for i, token in added if token.special and i not in control_ids]
    tags = {text for text in special if text[0] == "<" and text[1] != "|"}
    removed = [text for text in special if text in source or (text in tags and text in template)]
    if not removed:
        return []
    names = ", ".join(user_functions)
    return [
        f"{names} may look for {', '.join(removed)}, but rewards and evaluations see completions "
        "without what the tokenizer calls special: set reward.special_tokens keep"
    ]
