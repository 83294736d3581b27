"""The longest sequence that a sampler of a recipe's model handles."""

from grpo_replay.engine.models import load_config
from grpo_replay.errors import RecipeError
from grpo_replay.recipe import ModelSection, Recipe


def model_length(recipe: Recipe, section: ModelSection) -> int:
    """Tokens of prompt plus completion that a sampler of the model `section` has room for.

    With vLLM this is `max_model_len` if set. Otherwise it is the longest sequence of the recipe,
    training and evaluation, but at most the number of positions of the model.
    Raises RecipeError if `max_model_len` exceeds the positions.
    """
    positions = getattr(load_config(section), "max_position_embeddings", None)
    wanted = None if recipe.sampling.backend == "hf" else recipe.sampling.vllm.max_model_len
    if wanted is None:
        return min(recipe.longest_sequence, positions or recipe.longest_sequence)
    if positions is not None and wanted > positions:
        raise RecipeError(
            f"sampling.vllm.max_model_len {wanted} exceeds the {positions} positions of "
            f"{section.path}: lower it, or leave it null to derive it"
        )
    return wanted
