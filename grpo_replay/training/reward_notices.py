"""What a run checks about its reward functions before the first step, on rank 0."""

from grpo_replay.evaluation.evaluate import EvaluationPlan
from grpo_replay.evaluation.verifier_trial import try_verifier
from grpo_replay.prompts.prompt_set import PromptSet
from grpo_replay.recipe import BUILTIN_VERIFIERS, Recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.rewards.trial import CHECKED_ANSWERS, Sample, notices_of_workers, try_rewards


def reward_notices(
    recipe: Recipe, scorer: RewardScorer, prompts: PromptSet, evaluation: EvaluationPlan | None
) -> list[str]:
    """Notices about the reward functions, which are tried on a few problems.

    Raises RecipeError or DatasetError if no completion could earn a reward.
    """
    sample = Sample(prompts.sample(CHECKED_ANSWERS), len(prompts), "prompts.source")
    notices = notices_of_workers(recipe.reward.workers, recipe.engine.num_processes)
    notices += try_rewards(recipe.reward, scorer, sample)
    if evaluation is not None:
        notices += _evaluation_notices(recipe, evaluation)
    return notices


def _evaluation_notices(recipe: Recipe, evaluation: EvaluationPlan) -> list[str]:
    trained, verifier = recipe.reward.function, recipe.eval.reward
    if verifier not in BUILTIN_VERIFIERS:
        return try_verifier(recipe, evaluation)
    if trained in BUILTIN_VERIFIERS:
        return []
    return [
        f"evaluations are graded by {verifier} (eval.reward), not by the reward function "
        f"{trained}: set eval.reward to grade them alike"
    ]
