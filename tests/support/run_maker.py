"""A run's directory made by the real stages (advantages, buffer, composition, logs), with coin
flips in place of a model."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from buffer_makers import make_group

from grpo_replay.buffer import ReplayBuffer
from grpo_replay.buffer.compose import compose_batch, insert_after_update, insert_before_draw
from grpo_replay.buffer.snapshot import write_snapshot
from grpo_replay.recipe import Recipe, recipe_to_yaml, resolve_recipe
from grpo_replay.storage.rollout_log import step_path, write_draws, write_rollouts
from grpo_replay.types import ComposedBatch, Rollout, RolloutOutcome

G = 4
PROMPTS = 6


def make_recipe(steps: int, **replay: object) -> Recipe:
    layer = {
        "sampling": {
            "prompts_per_step": PROMPTS,
            "group_size": G,
            "max_completion_length": 64,
        },
        "replay": {"warmup_steps": 3, "max_age_steps": 5, **replay},
        "run": {"steps": steps},
    }
    return resolve_recipe([layer])


def make_run(folder: Path, steps: int = 30, seed: int = 0, **replay: object) -> Recipe:
    """Write a whole run into `folder`; step 7 has no survivor, checkpoints every ten steps."""
    recipe = make_recipe(steps, **replay)
    for name in ("rollouts", "draws"):
        (folder / name).mkdir()
    (folder / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    rng, buffer = np.random.default_rng(seed), ReplayBuffer(recipe.replay, G)
    with open(folder / "metrics.jsonl", "w") as metrics:
        for step in range(1, steps + 1):
            line = _run_step(folder, recipe, buffer, step, rng)
            metrics.write(json.dumps(line) + "\n")
            if step % 10 == 0:
                checkpoint = folder / "checkpoints" / f"step_{step:06d}"
                checkpoint.mkdir(parents=True)
                write_snapshot(checkpoint / "buffer.parquet", buffer, step)
    return recipe


def _run_step(
    folder: Path, recipe: Recipe, buffer: ReplayBuffer, step: int, rng: np.random.Generator
) -> dict[str, object]:
    chance = 0.0 if step == 7 else 0.4
    generated: list[Rollout] = []
    for g in range(PROMPTS):
        rewards = np.where(rng.random(G) < chance, 1.0, -1.0)
        first, group = PROMPTS * G * step + G * g, PROMPTS * step + g
        drop = recipe.replay.drop_zero_variance
        generated += make_group(first, group, step, rewards.tolist(), drop)
    fresh = [rollout for rollout in generated if rollout.kept]
    buffer.evict(step)
    insert_before_draw(buffer, fresh, step)
    batch = compose_batch(buffer, fresh, step, len(generated), rng)
    insert_after_update(buffer, fresh, step, batch)
    outcomes = [_outcome(rollout) for rollout in batch.rollouts]
    at_birth = {
        rollout.rollout_id: outcome
        for rollout, age, outcome in zip(batch.rollouts, batch.ages_N, outcomes, strict=True)
        if age == 0
    }
    write_rollouts(step_path(folder / "rollouts", step), generated, at_birth)
    if recipe.replays:
        drawn = len(batch.draw.rollouts)
        path = step_path(folder / "draws", step)
        write_draws(path, step, batch.draw, outcomes[len(outcomes) - drawn :])
    return _metrics(step, buffer, fresh, batch)


def _metrics(
    step: int, buffer: ReplayBuffer, fresh: Sequence[Rollout], batch: ComposedBatch
) -> dict[str, object]:
    stats, ages = buffer.stats(step), batch.ages_N[batch.replayed_N]
    return {
        "step": step,
        "fresh/rollouts": len(fresh),
        "replay/rollouts": len(ages),
        "replay/age_mean": float(ages.mean()) if len(ages) else None,
        "replay/age_max": int(ages.max()) if len(ages) else None,
        "replay/ess": batch.draw.effective_sample_size if batch.draw.rollouts else None,
        "buffer/rollouts": stats.rollouts,
        "buffer/evicted": stats.evicted,
    }


def _outcome(rollout: Rollout) -> RolloutOutcome:
    return RolloutOutcome(len(rollout.completion_token_ids), 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5)
