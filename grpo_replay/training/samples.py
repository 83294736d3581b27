"""A few completions of a step, for the terminal and the trackers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_replay.recipe import Recipe
from grpo_replay.types import Rollout


def samples_are_due(recipe: Recipe, step: int) -> bool:
    """Whether completions are shown after this step: the first, every n-th and the last."""
    settings = recipe.tracking
    due = step in (1, recipe.run.steps) or step % settings.samples_every_steps == 0
    return settings.samples > 0 and due


def sample_rows(rollouts: Sequence[Rollout], count: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Up to `count` rollouts, evenly spaced over the step, so that they are of different prompts
    where there are as many."""
    places = np.linspace(0, len(rollouts) - 1, min(count, len(rollouts))).round().astype(int)
    return [
        {
            "rollout_id": rollout.rollout_id,
            "prompt": tokenizer.decode(rollout.prompt_token_ids, skip_special_tokens=True),
            "completion": rollout.completion_text,
            "reward": rollout.reward,
            "verdict": rollout.verdict,
            "tokens": len(rollout.completion_token_ids),
        }
        for rollout in (rollouts[place] for place in places)
    ]
