"""A verifier of the user is tried on a few problems before anything is sampled."""

from grpo_replay.evaluation.sampling_plan import EvaluationPlan
from grpo_replay.recipe import BUILTIN_VERIFIERS, Recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.rewards.trial import TRIED_ROWS, Sample, try_rewards


def try_verifier(recipe: Recipe, plan: EvaluationPlan) -> list[str]:
    """Notices about `eval.reward`; nothing for a built-in verifier, of which a report names the
    answers that it cannot read. Raises RecipeError if the function fails on every problem."""
    verifier = recipe.eval.reward
    if verifier in BUILTIN_VERIFIERS:
        return []
    problems = {each.problem.problem_id: each.problem for each in plan.samples}
    sample = Sample(list(problems.values())[:TRIED_ROWS], len(problems), "eval.benchmarks")
    section = recipe.reward.alone(verifier).model_copy(update={"workers": 1})
    with RewardScorer.open(section, as_verdicts=True) as scorer:
        return try_rewards(section, scorer, sample)
