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


def check_training_room(recipe: Recipe, longest_prompt: int) -> None:
    """Raises RecipeError if the longest prompt, in tokens, and the longest completion of training
    are more than the sampler has room for."""
    _check_room(
        recipe,
        longest_prompt,
        recipe.sampling.max_completion_length,
        "sampling.max_completion_length, or prompts.max_prompt_length (longer prompts are left "
        "out)",
    )


def check_evaluation_room(recipe: Recipe, longest_prompt: int) -> None:
    """Raises RecipeError if the longest prompt of the benchmarks, in tokens, and the longest
    completion of an evaluation are more than the sampler has room for."""
    of_eval = recipe.eval.max_completion_length
    key = "eval" if of_eval is not None else "sampling"
    _check_room(
        recipe,
        longest_prompt,
        of_eval or recipe.sampling.max_completion_length,
        f"{key}.max_completion_length for the evaluation",
    )


def _check_room(recipe: Recipe, prompt: int, completion: int, remedy: str) -> None:
    room = model_length(recipe, recipe.model)
    if prompt + completion > room:
        raise RecipeError(
            f"a prompt of {prompt} tokens and a completion of up to {completion} are "
            f"{prompt + completion} tokens; {recipe.model.path} has room for {room} (its "
            f"positions, or sampling.vllm.max_model_len): lower {remedy}"
        )
