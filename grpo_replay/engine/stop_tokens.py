"""The tokens that end a completion: the recipe's, or all that the model's files name."""

from transformers import PreTrainedTokenizerBase

from grpo_replay.engine.models import eos_token_ids
from grpo_replay.errors import RecipeError, did_you_mean
from grpo_replay.recipe import ModelSection, Recipe


def find_stop_tokens(
    recipe: Recipe, section: ModelSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """The ids of `sampling.stop_tokens`, ascending. If that is null, `eos_token_ids` of `section`,
    the model that is sampled. The same in training and evaluation, for every sampler.

    Raises RecipeError for a text that is not one token of the tokenizer.
    """
    wanted = recipe.sampling.stop_tokens
    if wanted is None:
        return eos_token_ids(section, tokenizer)
    vocabulary = tokenizer.get_vocab()
    for token in wanted:
        if token not in vocabulary:
            usual = tokenizer.convert_ids_to_tokens(list(eos_token_ids(section, tokenizer)))
            raise RecipeError(
                f"sampling.stop_tokens: {token!r} is not a token of the tokenizer"
                f"{did_you_mean(token, tokenizer.get_added_vocab())}; name whole tokens by their "
                f"text (null would be {', '.join(usual)})"
            )
    return tuple(sorted({vocabulary[token] for token in wanted}))
