"""Checks behaviour log-probs against the weights of the checkpoints.

A checkpoint of step v holds the policy that sampled step v + 1. A sample of rows is recomputed by
plain forward passes. The caller gives the policies, so that nothing here loads torch.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from grpo_replay.lab.verification.run_files import RunFiles
from grpo_replay.lab.verification.verification_report import Check, Tally
from grpo_replay.storage.rollout_log import read_rollout_table, step_path

ROWS_PER_CHECKPOINT = 32
"""Rows recomputed for each checkpoint, spread evenly."""

_EXACT_NATS = 1e-3  # fp32 in another order
_COLUMNS = (
    *("rollout_id", "policy_version", "policy_version_end", "kept", "completion_mask"),
    *("prompt_token_ids", "completion_token_ids", "behavior_logprobs"),
)

Row = Mapping[str, Any]


class Policy(Protocol):
    def logprobs(
        self, prompt_token_ids: np.ndarray, completion_token_ids: np.ndarray, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs, entropies) of the completion's tokens, float64 [T]."""
        ...


def check_with_models(run: RunFiles, open_policy: Callable[[int], Policy]) -> Check:
    """The rows of the step after every checkpoint, and of the first. `open_policy(step)` is the
    policy after a step, 0 the one that the run began with."""
    tally = Tally("behaviour log-probs", "recomputed from the weights that sampled")
    for step in (0, *sorted(run.checkpoint_steps())):
        if step + 1 in run.rows_of_step:
            _check_step(run, step + 1, open_policy(step), tally)
    return tally.result()


def _check_step(run: RunFiles, step: int, policy: Policy, tally: Tally) -> None:
    recipe = run.recipe_at(step)
    exact = recipe.model.dtype == "float32" and recipe.loss.behavior_logprobs == "trainer"
    for row in _sampled_by(run, step):
        prompt, completion = (np.array(row[f"{n}_token_ids"]) for n in ("prompt", "completion"))
        logprobs, _ = policy.logprobs(prompt, completion, recipe.sampling.temperature)
        gaps = np.abs(logprobs - row["behavior_logprobs"])
        if row["completion_mask"] is not None:
            gaps = gaps[np.array(row["completion_mask"])]
        gap, limit = (gaps.max(), _EXACT_NATS) if exact else (gaps.mean(), recipe.logprob_gap_limit)
        tally.expect(
            bool(gap <= limit),
            f"step {step}, rollout {row['rollout_id']}: behaviour log-probs are {gap:.3g} nats "
            f"from those of the weights, at most {limit:g} are expected",
        )


def _sampled_by(run: RunFiles, step: int) -> list[Row]:
    """Kept rows of a step that the weights before it sampled alone: at most so many, spread."""
    table = read_rollout_table(step_path(run.folder / "rollouts", step), _COLUMNS)
    rows = [
        row
        for row in table.to_pylist()
        if row["policy_version"] == row["policy_version_end"] == step - 1
        if row["kept"] and row["completion_token_ids"]
    ]
    count = min(len(rows), ROWS_PER_CHECKPOINT)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, count).astype(int)]
