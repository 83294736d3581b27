"""docs/replay_in_one_file.py computes what the package computes.

Fast: its draws, evictions, losses, gradients, advantages and verdicts on the same inputs, its
presets, its table. Slow: whole runs of both side by side, and that it learns.
"""

import ast
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
from small_runs.trained import FinishedRun

from grpo_replay.engine.microbatches import plan_microbatches
from grpo_replay.engine.models import load_policy
from grpo_replay.engine.policy_module import PolicyModule
from grpo_replay.engine.shared_prompts import Layout
from grpo_replay.recipe import Recipe, ReplaySection, load_recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.advantages import group_advantages
from grpo_replay.replay.batch import token_weights, train_rows
from grpo_replay.replay.compose import buffer_step
from grpo_replay.replay.loss import token_loss
from grpo_replay.replay.priorities import EPSILON
from grpo_replay.rewards.math_verify import SymbolicGrader
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


# --- the file -------------------------------------------------------------------------------------


def test_it_is_short_and_takes_only_the_tiny_task_from_the_package():
    text = PATH.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 400
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    foreign = {name for name in modules if name.split(".")[0] not in sys.stdlib_module_names}
    assert foreign == {
        "numpy", "torch", "transformers", "grpo_replay.tiny", "grpo_replay.tiny.problems",
    }  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_the_settings_of_the_recipes(preset):
    recipe, settings = recipe_of(preset), one.PRESETS[preset]
    replay, loss, optimizer = recipe.replay, recipe.loss, recipe.optimizer
    uniform = replay.priority == "uniform"
    of_recipe = one.Settings(
        steps=recipe.run.steps,
        seed=recipe.run.seed,
        prompts_per_step=recipe.sampling.prompts_per_step,
        group_size=recipe.sampling.group_size,
        max_completion_tokens=recipe.sampling.max_completion_length,
        buffer_only=replay.composition == "buffer_only",
        ratio=replay.ratio,
        priority_exponent=0.0 if uniform else replay.priority_exponent,
        with_replacement=replay.with_replacement,
        drop_zero_variance=replay.drop_zero_variance,
        max_age_steps=replay.max_age_steps,
        warmup_steps=replay.warmup_steps,
        capacity=replay.capacity_rollouts,
        clip_low=loss.epsilon,
        clip_high=loss.epsilon_high,
        dual_clip=loss.dual_clip,
        updates_per_step=recipe.batch.updates_per_step,
        learning_rate=optimizer.learning_rate,
        weight_decay=optimizer.adamw.weight_decay,
    )
    assert settings == of_recipe
    assert uniform or replay.priority == "abs_advantage"
    assert (recipe.loss.kind, recipe.loss.aggregation, recipe.loss.beta) == (
        "clipped", "token_mean", 0.0,
    )  # fmt: skip
    assert (optimizer.adamw.betas, optimizer.adamw.eps) == ([0.9, 0.99], 1e-8)
    assert (optimizer.max_grad_norm, optimizer.schedule) == (1.0, "constant")
    assert EPSILON == recipe.advantage.epsilon == one.EPSILON
    assert recipe.advantage.std == "population"


@pytest.mark.slow
def test_the_program_prints_a_row_every_twenty_steps(monkeypatch, capsys):
    small = replace(one.PRESETS["ours"], steps=20, prompts_per_step=2, warmup_steps=4)
    monkeypatch.setitem(one.PRESETS, "ours", small)
    monkeypatch.setattr(one.Trainer, "accuracy", lambda self: 0.25)
    monkeypatch.setattr(sys, "argv", ["replay_in_one_file.py", "--seed", "3"])
    one.main()
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.split()[:1] == ["20"]]
    _, reward, fresh, drawn, age, *clipped = row.split()
    assert -1 <= float(reward) <= 1
    assert 0 < int(drawn) <= int(fresh) <= 16
    mean, largest = age.split("/")
    assert 1 <= float(mean) <= int(largest) <= 4
    assert len(clipped) == 5  # "0.0 % / 0.0 %"
    assert "held-out accuracy after training: 25.0 %" in lines


# --- advantages and verdicts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards_G",
    [
        *([1.0] * k + [-1.0] * (8 - k) for k in range(9)),
        [0.1 + 0.2, 0.3, 0.3],  # equal in float32
        [0.1, 0.7, 0.7, -2.5, 3.0],
        [1e-4, 2e-4],
    ],
)
def test_advantages_equal_the_packages(rewards_G):
    ours, theirs = one.group_advantages(rewards_G), group_advantages(rewards_G).advantages_G
    if theirs is None:
        assert ours is None
    else:
        np.testing.assert_allclose(ours, theirs, rtol=2e-7)
        assert ours.dtype == theirs.dtype


@pytest.fixture(scope="module")
def trainer():
    torch.set_num_threads(1)
    return one.Trainer(one.PRESETS["ours"])


def test_the_box_comparison_gives_math_verifys_verdicts(trainer):
    problems = trainer.problems[:400]
    rows, rewards = trainer.answer(problems, [(0, i) for i in range(len(problems))])
    grader, verdicts = SymbolicGrader(), []
    for row, problem in zip(rows, problems, strict=True):
        text = trainer.tokenizer.decode(row.completion, skip_special_tokens=True)
        verdicts.append(grader.grade(text, problem["answer"])[0] == "correct")
    assert [reward > 0 for reward in rewards] == verdicts
    assert 0.2 < np.mean(verdicts) < 0.6  # both kinds
    for text in (r"\boxed{12}\boxed{85}", r"\boxed{85", r"\boxed{085}", r"\boxed{-85}", "12,5"):
        for answer in ("85", "12"):
            correct = SymbolicGrader(boxed=True).grade(text, answer)[0] == "correct"
            assert (one.reward(text, answer) > 0) == correct, (text, answer)


# --- draws and evictions --------------------------------------------------------------------------

DRAW_SETTINGS = {
    "by_advantage": dict(priority_exponent=0.5),
    "steeply": dict(priority_exponent=2.0),
    "uniform": dict(priority_exponent=0.0),
    "with_replacement": dict(priority_exponent=0.5, with_replacement=True),
    "fifo": dict(priority_exponent=0.0, with_replacement=True),
}


@pytest.mark.parametrize("kind", DRAW_SETTINGS)
@pytest.mark.parametrize("stored", [0, 1, 7, 300])
def test_the_same_buffer_and_generator_give_the_same_draws(kind, stored):
    changes = DRAW_SETTINGS[kind]
    rng = np.random.default_rng(stored)
    advantages = rng.normal(size=stored).astype(np.float32).round(1)  # with ties and zeros
    rollouts = [make_rollout(i, advantage=float(a)) for i, a in enumerate(advantages)]
    theirs = ReplayBuffer(ReplaySection(**changes), group_size=8)
    theirs.insert(rollouts, 1)
    ours = one.ReplayBuffer(replace(one.PRESETS["ours"], **changes), list(map(twin, rollouts)))
    generators = np.random.default_rng(9), np.random.default_rng(9)
    for count in (0, 1, 5, 80, 400):
        drawn = ids(theirs.draw(count, 2, generators[0]).rollouts)
        assert ids(ours.draw(count, generators[1])) == drawn
        assert len(drawn) == (count if kind in ("with_replacement", "fifo") and stored
                              else min(count, stored))  # fmt: skip
        if stored:
            assert generators[0].bit_generator.state == generators[1].bit_generator.state


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


def test_the_gradient_of_a_mini_batch_equals_the_packages_in_several_micro_batches(trainer):
    """Completions of different lengths: a mean of means would differ."""
    rows, _ = trainer.answer(trainer.problems[:24], [(1, i) for i in range(24)])
    rng, recipe = np.random.default_rng(2), recipe_of("ours")
    rollouts = []
    for i, row in enumerate(rows):
        tokens = row.completion[: 1 + i % len(row.completion)]
        behavior = torch.from_numpy(rng.normal(-0.5, 0.3, len(tokens)).astype(np.float32))
        kept = replace(
            make_rollout(i, advantage=float(np.float32(rng.normal()))),
            prompt_token_ids=np.array(row.prompt, np.int32),
            completion_token_ids=np.array(tokens, np.int32),
            behavior_logprobs=behavior.numpy(),
        )
        rollouts.append(kept)
    loss, _ = one.batch_loss(trainer.model, list(map(twin, rollouts)), one.PRESETS["ours"])
    trainer.model.zero_grad()
    loss.backward()
    module = PolicyModule(load_policy(recipe.model, 0), 1.0, 64)
    (microbatches,) = plan_microbatches(train_rows(rollouts, None, recipe.loss, 20), Layout(100), 1)
    assert len(microbatches) >= 4
    their_loss = 0.0
    for each in microbatches:
        inputs = map(torch.from_numpy, (each.input_ids_SL, each.positions_C, each.target_ids_C))
        logprobs, _ = module(*inputs)
        behavior = torch.from_numpy(each.behavior_logprobs_C)
        weights = torch.from_numpy(each.token_weights_R)[each.row_of_C]
        coefficients = torch.from_numpy(each.coefficients_R)[each.row_of_C]
        result = token_loss(logprobs, behavior, behavior, coefficients, recipe.loss)
        part = (result.losses_C * weights).sum()
        part.backward()
        their_loss += part.item()
    assert loss.item() == pytest.approx(their_loss, abs=1e-6)
    ours = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    theirs = torch.cat([p.grad.flatten() for p in module.model.parameters()])
    assert torch.linalg.vector_norm(ours - theirs) < 1e-5 * torch.linalg.vector_norm(theirs)


# --- whole runs -----------------------------------------------------------------------------------

QUICK = ("run.steps=7", "eval.benchmarks=[]", "checkpoint.every_steps=7", "reward.workers=1")
SHORT_LIFE = ("replay.max_age_steps=2", "replay.warmup_steps=2")


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_samples_draws_and_learns_what_the_packages_does(preset, tmp_path):
    torch.set_num_threads(1)
    life = SHORT_LIFE if preset == "ours" else ()
    recipe = recipe_of(preset, *QUICK, *life)
    run_training(recipe, tmp_path / "run", False, Observer())
    theirs = FinishedRun(tmp_path / "run", recipe)
    settings = one.PRESETS[preset]
    if life:
        settings = replace(settings, max_age_steps=2, warmup_steps=2)
    ours = one.Trainer(settings)
    for step in range(1, 8):
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
        assert np.mean(report.losses) == pytest.approx(theirs.metrics[step - 1]["loss"], abs=1e-5)
    assert sum(len(theirs.draws(step)) for step in range(1, 8)) > 300 or preset == "grpo"
    base, learned = load_policy(recipe.model, 0).state_dict(), theirs.weights()
    moved = sum((learned[name] - base[name]).square().sum() for name in learned)
    own = ours.model.state_dict()
    apart = sum((own[name] - learned[name]).square().sum() for name in learned)
    assert apart < 1e-4 * moved


@pytest.mark.slow
def test_it_learns():
    torch.set_num_threads(1)
    trainer = one.Trainer(one.PRESETS["ours"])
    before = trainer.accuracy(samples=1)
    for step in range(1, 31):
        trainer.train_step(step)
    assert trainer.accuracy(samples=1) > before + 0.03
