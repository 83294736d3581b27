"""docs/replay_in_one_file.py computes what the package computes.

What it trains on, stores and evicts on given rollouts, and its loss of given log-probs, are the
package's; and so are whole runs of both side by side, with its presets and the recipes.
"""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from buffer_makers import ids, make_rollout
from slow_tests import slow_except
from small_runs.trained import FinishedRun

from grpo_replay.engine.models import load_policy
from grpo_replay.recipe import Recipe, ReplaySection, load_recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.batch import token_weights
from grpo_replay.replay.compose import buffer_step
from grpo_replay.replay.loss import token_loss
from grpo_replay.training import Observer
from grpo_replay.training.run import run_training
from grpo_replay.types import Rollout, stream

PATH = Path(__file__).parents[2] / "docs" / "replay_in_one_file.py"
RECIPES = {
    "ours": ("tiny",),
    "grpo": ("tiny", ["replay.preset=grpo", "replay.ratio=0"]),
    "fifo": ("fifo-tiny",),
}
DRAW_STREAM = 1


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PATH.stem] = module  # where its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


one = _loaded()
PRESETS = list(RECIPES)


def recipe_of(preset: str, *overrides: str) -> Recipe:
    name, *own = RECIPES[preset]
    return load_recipe(name, [*(own[0] if own else []), *overrides])


def twin(rollout: Rollout) -> Any:
    """The same rollout in the one file's form."""
    assert rollout.behavior_logprobs is not None and rollout.advantage is not None
    tokens = one.Tokens(rollout.prompt_token_ids.tolist(), rollout.completion_token_ids.tolist())
    behavior_T = torch.from_numpy(rollout.behavior_logprobs.copy())
    return one.Rollout(
        rollout.rollout_id, rollout.birth_step, tokens, behavior_T, rollout.advantage
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_sizes_and_limits_of_the_recipes(preset):
    """What short runs do not show; the rest of a preset is compared by whole runs below."""
    recipe, settings = recipe_of(preset), one.PRESETS[preset]
    run, sampling, replay = recipe.run, recipe.sampling, recipe.replay
    assert (settings.steps, settings.seed) == (run.steps, run.seed)
    assert settings.prompts_per_step == sampling.prompts_per_step
    assert settings.group_size == sampling.group_size
    assert (settings.max_age_steps, settings.warmup_steps, settings.capacity) == (
        replay.max_age_steps, replay.warmup_steps, replay.capacity_rollouts,
    )  # fmt: skip


class ScriptedTrainer(one.Trainer):  # type: ignore[misc, name-defined]
    """Its loop, with given rollouts and without a model."""

    def __init__(self, settings: Any) -> None:
        self.settings, self.buffer = settings, one.ReplayBuffer(settings)
        self.script: dict[int, list[Rollout]] = {}
        self.trained: list[int] = []

    def generate(self, step: int) -> tuple[list[Any], list[float]]:
        return list(map(twin, self.script[step])), [1.0]

    def update(self, fresh: list[Any], report: Any) -> None:
        self.trained = ids([*fresh, *report.drawn])


STORIES = {
    "ours": dict(max_age_steps=3, warmup_steps=5, ratio=0.5),
    "capacity": dict(max_age_steps=4, warmup_steps=0, capacity=20),
    "one_step": dict(max_age_steps=1, warmup_steps=1),
    "grpo": dict(ratio=0.0),
    "fifo": dict(buffer_only=True, with_replacement=True, priority_exponent=0.0, capacity=50,
                 max_age_steps=None, warmup_steps=0, ratio=1.3),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_every_step_trains_on_and_stores_what_the_packages_does(story):
    settings = replace(one.Settings(), prompts_per_step=4, group_size=4, **STORIES[story])
    section = ReplaySection(
        composition="buffer_only" if settings.buffer_only else "fresh_anchored",
        ratio=settings.ratio,
        priority_exponent=settings.priority_exponent,
        max_age_steps=settings.max_age_steps,
        warmup_steps=settings.warmup_steps,
        capacity_rollouts=settings.capacity,
        with_replacement=settings.with_replacement,
    )
    ours, theirs = ScriptedTrainer(settings), ReplayBuffer(section, group_size=4)
    rng = np.random.default_rng(1)
    drew = evicted = 0
    for step in range(1, 41):
        survivors = int(rng.choice([0, 4, 8, 16]))
        if step > 1 and story == "fifo":
            survivors = max(survivors, 4)
        advantages = rng.choice([-1.7, -0.6, 0.6, 1.7], survivors).astype(np.float32)
        fresh = [
            make_rollout(100 * step + i, birth_step=step, advantage=float(a))
            for i, a in enumerate(advantages)
        ]
        generator = stream(settings.seed, step, DRAW_STREAM)
        batch = buffer_step(theirs, fresh, step, 16, generator)
        ours.script[step] = fresh
        before = len(ours.buffer.rollouts)
        report = ours.train_step(step)
        evicted += before + survivors - len(ours.buffer.rollouts)
        assert ours.trained == ids(batch.rollouts)
        assert ids(report.drawn) == ids(batch.draw.rollouts)
        drew += len(report.drawn)
        if section.replays:  # without replay the package stores nothing
            assert ids(ours.buffer.rollouts) == theirs.column("rollout_id").tolist()
    assert evicted > 100
    assert drew > 100 or story == "grpo"


# --- loss and gradient ----------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["ours", "fifo"])
def test_the_loss_of_given_log_probs_equals_the_packages(preset):
    rng, tokens = np.random.default_rng(4), 4000
    behavior = torch.from_numpy(rng.normal(-1, 0.5, tokens))
    log_ratios = rng.choice([0.02, 0.3, 3.0, 30.0], tokens) * rng.normal(size=tokens)
    advantages = torch.from_numpy(rng.choice([-2.0, -0.5, 0.0, 0.5, 2.0], tokens))
    settings = recipe_of(preset).loss
    found = []
    for in_package in (False, True):
        logprobs = (behavior + torch.from_numpy(log_ratios)).requires_grad_()
        if in_package:
            result = token_loss(logprobs, behavior, torch.zeros(tokens), advantages, settings)
            weight = float(token_weights(np.array([tokens]), settings, 20)[0])
            loss, clipped = (result.losses_C * weight).sum(), result.clipped_C
        else:
            loss, clipped = one.policy_loss(logprobs, behavior, advantages, one.PRESETS[preset])
        loss.backward()
        found.append((loss.item(), clipped, logprobs.grad))
    (ours, clipped, gradient), (theirs, their_clipped, their_gradient) = found
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert torch.equal(clipped, their_clipped)
    assert 0.2 < clipped.double().mean() < 0.8
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-12, atol=0)


# --- whole runs -----------------------------------------------------------------------------------

SMALL = [
    "run.steps=6", "sampling.prompts_per_step=4", "sampling.group_size=8", "eval.benchmarks=[]",
    "checkpoint.every_steps=6", "reward.workers=1",
]  # fmt: skip
SHORT_LIFE = ["replay.max_age_steps=2", "replay.warmup_steps=2"]


@pytest.mark.parametrize("preset", slow_except(["ours"], PRESETS))
def test_a_run_samples_draws_and_learns_what_the_packages_does(preset, tmp_path, processes):
    life = SHORT_LIFE if preset == "ours" else []
    recipe = recipe_of(preset, *SMALL, *life)
    run_training(recipe, tmp_path / "run", False, Observer())
    theirs = FinishedRun(tmp_path / "run", recipe)
    changes = dict(max_age_steps=2, warmup_steps=2) if life else {}
    settings = replace(one.PRESETS[preset], prompts_per_step=4, group_size=8, **changes)
    ours = one.Trainer(settings)
    for step in range(1, 7):
        report = ours.train_step(step)
        rollouts, survivors = theirs.rollouts(step), theirs.survivors(step)
        assert report.rewards_N == [row["reward"] for row in rollouts]
        assert ids(report.fresh) == [row["rollout_id"] for row in survivors]
        assert ids(report.drawn) == [row["rollout_id"] for row in theirs.draws(step)]
        for fresh, row in zip(report.fresh, survivors, strict=True):
            assert fresh.tokens.prompt == row["prompt_token_ids"]
            assert fresh.tokens.completion == row["completion_token_ids"]
            assert fresh.advantage == row["advantage"]
            behavior_T = fresh.behavior_logprobs.numpy()
            np.testing.assert_allclose(behavior_T, row["behavior_logprobs"], atol=1e-4)
        loss = theirs.metrics[step - 1]["loss"]
        if report.losses:
            assert np.mean(report.losses) == pytest.approx(loss, abs=1e-5)
        else:
            assert loss is None and not report.fresh
    assert sum(len(theirs.draws(step)) for step in range(1, 7)) > 30 or preset == "grpo"
    base, learned = load_policy(recipe.model, 0).state_dict(), theirs.weights()
    moved = sum((learned[name] - base[name]).square().sum() for name in learned)
    own = ours.model.state_dict()
    apart = sum((own[name] - learned[name]).square().sum() for name in learned)
    assert apart < 1e-4 * moved
