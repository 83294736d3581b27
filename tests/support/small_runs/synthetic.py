"""Run directories without a model: random groups through the real buffer, composer and writers.

Outcomes follow a law by age (clip fraction and log-ratio variance grow), so that what inspection
reports by age has a known shape.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grpo_replay.recipe import Recipe, recipe_to_yaml, resolve_recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.advantages import group_advantages
from grpo_replay.replay.compose import buffer_step
from grpo_replay.replay.snapshot import write_snapshot
from grpo_replay.storage.checkpoint import (
    RunState,
    begin_checkpoint,
    complete_checkpoint,
    temporary_folder,
)
from grpo_replay.storage.rollout_log import step_path, write_draws, write_rollouts
from grpo_replay.storage.starts import record_start
from grpo_replay.types import Rollout, RolloutOutcome

GROUP_SIZE = 4
PROMPTS = 30
PRESETS = ("ours", "uniform", "group_std", "fifo", "grpo")
VARIANCE_AT_AGE_ONE = 0.004
VARIANCE_EXPONENT = 1.5
_TOTALS = ("cost/generated_tokens", "cost/trained_tokens", "replay/rollouts")


def synthetic_recipe(preset: str, steps: int = 24, **replay) -> Recipe:
    """A recipe with small numbers: 8 prompts of 4, τ_max 5, warm-up 3."""
    section = {"preset": preset, "capacity_rollouts": 5000 if preset != "fifo" else 96}
    if preset not in ("fifo", "grpo"):
        section |= {"max_age_steps": 5, "warmup_steps": 3}
    if preset == "fifo":
        section |= {"ratio": 1.5}
    layer = {
        "name": f"synthetic-{preset}",
        "sampling": {"prompts_per_step": 8, "group_size": GROUP_SIZE},
        "replay": section | replay,
        "batch": {"updates_per_step": 1},
        "run": {"steps": steps},
    }
    return resolve_recipe([layer])


def variance_at(age: int) -> float:
    """The log-ratio variance that rollouts of an age are given, nats²; fresh ones have 0.001."""
    return 0.001 + VARIANCE_AT_AGE_ONE * age**VARIANCE_EXPONENT if age else 0.001


def outcome_of(rollout: Rollout, age: int, rng: np.random.Generator) -> RolloutOutcome:
    variance = variance_at(age)
    return RolloutOutcome(
        tokens=len(rollout.completion_token_ids),
        clip_fraction=float(min(1.0, 0.001 + 0.004 * age * rng.uniform(0.5, 1.5))),
        log_ratio_mean=0.0,
        log_ratio_var=variance,
        approx_kl=variance / 2,
        ratio_mean=1.0 + variance / 2,
        ratio_squared_mean=1.0 + 2 * variance,
        ratio_max=1.0 + 3 * variance**0.5,
        entropy=0.5,
    )


def clip_fraction(outcomes: Sequence[RolloutOutcome]) -> float | None:
    """The mean over tokens; None without any."""
    tokens = sum(outcome.tokens for outcome in outcomes)
    return sum(o.tokens * o.clip_fraction for o in outcomes) / tokens if tokens else None


class SyntheticRun:
    """Writes the steps of one run; `buffer` stays at hand for the tests. Rollouts are taken
    `steps_late` after their birth, as in an asynchronous run."""

    steps_late = 0

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        seed: int = 0,
        steps_without_survivors: Sequence[int] = (),
        steps_late: int = 0,
    ) -> None:
        self.folder = folder
        self.steps_late = steps_late
        self.recipe = recipe
        self.rng = np.random.default_rng(seed)
        self.buffer = ReplayBuffer(recipe.replay, recipe.sampling.group_size)
        self.steps_without_survivors = steps_without_survivors
        self.next_id = 0
        self.totals: Counter[str] = Counter()
        self.skill = self.rng.uniform(-1.5, 1.5, PROMPTS)
        for name in ("rollouts", "draws", "checkpoints"):
            (folder / name).mkdir(parents=True)
        (folder / "recipe.yaml").write_text(recipe_to_yaml(recipe))
        record_start(folder, recipe, 0)

    def write(self, steps: int, checkpoint_at: Sequence[int] = ()) -> "SyntheticRun":
        with (self.folder / "metrics.jsonl").open("w") as metrics:
            for step in range(1, steps + 1):
                line = self.step(step)
                metrics.write(json.dumps(line) + "\n")
                self.totals.update({name: line[name] for name in _TOTALS})
                if step in checkpoint_at:
                    self.checkpoint(step)
        return self

    def step(self, step: int) -> dict:
        generated = self.generate(step)
        fresh = [rollout for rollout in generated if rollout.kept]
        batch = buffer_step(self.buffer, fresh, step, len(generated), self.rng)
        outcomes = [
            outcome_of(rollout, int(age), self.rng)
            for rollout, age in zip(batch.rollouts, batch.ages, strict=True)
        ]
        drawn = len(batch.draw.rollouts)
        first_drawn = len(batch.rollouts) - drawn
        taken = {rollout.rollout_id for rollout in fresh}
        at_once = {
            rollout.rollout_id: outcome
            for rollout, outcome in zip(batch.rollouts, outcomes, strict=True)
            if rollout.rollout_id in taken
        }
        write_rollouts(step_path(self.folder / "rollouts", step), generated, at_once)
        write_draws(
            step_path(self.folder / "draws", step), step, batch.draw, outcomes[first_drawn:]
        )
        return self.metrics(step, generated, fresh, batch, outcomes)

    def metrics(self, step, generated, fresh, batch, outcomes) -> dict:
        sides = {True: [], False: []}
        for outcome, is_old in zip(outcomes, batch.replayed, strict=True):
            sides[bool(is_old)].append(outcome)
        replayed = sides[True]
        ages = batch.ages[batch.replayed]
        return {
            "step": step,
            "reward": float(np.mean([rollout.reward for rollout in generated])),
            "frac_reward_zero_std": float(np.mean([r.group_reward_std == 0 for r in generated])),
            "fresh/rollouts": len(fresh),
            "fresh/clip_fraction": clip_fraction(sides[False]),
            "replay/rollouts": len(replayed),
            "replay/ratio": len(replayed) / len(fresh) if fresh else None,
            "replay/clip_fraction": clip_fraction(replayed),
            "replay/age_mean": float(ages.mean()) if len(ages) else None,
            "replay/age_max": int(ages.max()) if len(ages) else None,
            "replay/ess": batch.draw.effective_sample_size if len(ages) else None,
            "buffer/rollouts": len(self.buffer),
            "buffer/evicted": self.buffer.stats(step).evicted,
            "cost/generated_tokens": sum(len(r.completion_token_ids) for r in generated),
            "cost/generated_rollouts": len(generated),
            "cost/trained_tokens": sum(len(r.completion_token_ids) for r in batch.rollouts),
            "cost/trained_rollouts": len(batch.rollouts),
            # 6 seconds to generate 1 rollout against 1.5 to train on one: μ = 4.
            "cost/generation_seconds": 6.0 * len(generated),
            "cost/training_seconds": 1.5 * len(batch.rollouts),
            "cost/mu": 4.0,
        }

    def generate(self, step: int) -> list[Rollout]:
        sampling = self.recipe.sampling
        rollouts: list[Rollout] = []
        prompts = self.rng.choice(PROMPTS, sampling.prompts_per_step, replace=False)
        for index, prompt in enumerate(prompts):
            chance = 1 / (1 + np.exp(-self.skill[prompt] - 0.05 * step))
            if step in self.steps_without_survivors:
                chance = 0.0
            correct_G = self.rng.random(sampling.group_size) < chance
            rollouts.extend(self.group(step, index, int(prompt), correct_G))
        return rollouts

    def group(self, step: int, index: int, prompt: int, correct_G: np.ndarray) -> list[Rollout]:
        rewards_G = np.where(correct_G, 1.0, -1.0)
        group = group_advantages(rewards_G)
        advantages_G = group.advantages_G
        if advantages_G is None and not self.recipe.replay.drop_zero_variance:
            advantages_G = np.zeros(len(correct_G), np.float32)
        kept = advantages_G is not None
        birth = max(1, step - self.steps_late)
        members = []
        for i, correct in enumerate(correct_G):
            tokens = int(self.rng.integers(3, 40))
            logprobs = self.rng.uniform(-2, 0, tokens).astype(np.float32)
            members.append(
                Rollout(
                    rollout_id=self.next_id,
                    group_id=step * 100 + index,
                    prompt_id=f"prompt-{prompt}",
                    completion_index=i,
                    birth_step=birth,
                    policy_version=birth - 1,
                    policy_version_end=birth - 1,
                    prompt_token_ids=np.arange(5, dtype=np.int32),
                    completion_token_ids=self.rng.integers(0, 30, tokens).astype(np.int32),
                    completion_text=f"The answer is \\boxed{{{prompt + (0 if correct else 1)}}}",
                    behavior_logprobs=logprobs if kept else None,
                    sampler_logprobs=logprobs.copy(),
                    reward=float(rewards_G[i]),
                    advantage=float(advantages_G[i]) if kept else None,
                    group_reward_mean=group.mean,
                    group_reward_std=group.std,
                    group_correct=int(correct_G.sum()),
                    finish_reason="length" if tokens == 39 else "stop",
                    verdict="correct" if correct else "incorrect",
                    kept=kept,
                )
            )
            self.next_id += 1
        return members

    def checkpoint(self, step: int) -> None:
        temporary = temporary_folder(self.folder / "checkpoints", step)
        begin_checkpoint(temporary)
        write_snapshot(temporary / "buffer.parquet", self.buffer, step)
        state = RunState(
            step=step,
            policy_version=step,
            next_rollout_id=self.next_id,
            next_group_id=step * 100 + self.recipe.sampling.prompts_per_step,
            generated_tokens=self.totals["cost/generated_tokens"],
            trained_tokens=self.totals["cost/trained_tokens"],
            replayed_rollouts=self.totals["replay/rollouts"],
        )
        complete_checkpoint(temporary, state, keep=100)


def write_synthetic_run(
    folder: Path,
    preset: str = "ours",
    steps: int = 24,
    seed: int = 0,
    steps_without_survivors: Sequence[int] = (),
    **replay,
) -> SyntheticRun:
    """A run of `steps` steps with checkpoints at the last step and at half of them."""
    recipe = synthetic_recipe(preset, max(steps, 5), **replay)
    run = SyntheticRun(folder, recipe, seed, steps_without_survivors)
    return run.write(steps, checkpoint_at=(steps // 2, steps))
