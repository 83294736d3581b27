"""The real trainer as paper B runs it: zero-variance groups kept, the horizon and the replay ratio
of the recipe's header, and the baseline without a buffer."""

import re
from collections import Counter
from typing import NamedTuple

import pytest
from small_runs.trained import FinishedRun, spied_updates, steps_of, train_small_run

from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import load_recipe, shipped_recipes_folder
from grpo_replay.replay.batch import TrainRow
from grpo_replay.replay.compose import relative_compute
from grpo_replay.training import Observer
from grpo_replay.training.run import run_training

QUICK = [
    "eval.benchmarks=[]", "tracking.report_to=[]", "reward.function=minerva", "reward.workers=1",
    "engine.device=cpu", "checkpoint.keep=100",
]  # fmt: skip


STEPS = 20


def train(folder, *overrides: str, steps: int) -> FinishedRun:
    recipe = load_recipe("fifo-tiny", [*QUICK, f"run.steps={steps}", *overrides])
    run_training(recipe, folder, False, Observer())
    return FinishedRun(folder, recipe)


class Laboratory(NamedTuple):
    run: FinishedRun
    updates: list[list[TrainRow]]
    """The rows of every optimizer update, as the engine gets them."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory, processes) -> Laboratory:
    """The shipped recipe, 20 of its steps."""
    folder = tmp_path_factory.mktemp("fifo") / "run"
    with spied_updates() as updates:
        return Laboratory(train(folder, "checkpoint.every_steps=5", steps=STEPS), updates)


@pytest.fixture(scope="module")
def laboratory(lab) -> FinishedRun:
    return lab.run


# --- the numbers of the header --------------------------------------------------------------------


def test_horizon_ratio_and_ages_of_a_run_are_those_of_the_recipe_s_header(laboratory):
    header = (shipped_recipes_folder() / "fifo-tiny.yaml").read_text()
    x, y = map(float, re.search(r"x = N/R = ([\d.]+) steps, y = B/R = ([\d.]+)", header).groups())
    oldest, mean_age = re.search(r"0 to (\d+), mean (\d+\.\d+)", header).groups()
    run = laboratory
    full = [line for line in run.metrics if line["step"] > 5]
    generated = len(run.rollouts(1))
    assert {line["buffer/rollouts"] / generated for line in full} == {x}
    assert {line["cost/trained_rollouts"] / generated for line in run.metrics} == {y}
    draws = [draw for draw in run.all_draws if draw["step"] > 5]
    ages = Counter(draw["age_steps"] for draw in draws)
    assert set(ages) == set(range(int(oldest) + 1))
    # Uniform over the newest 84 of 16 a step: ages 0 to 4 are 16/84 each, age 5 the last 4/84.
    expected = {age: len(draws) * (16 if age < 5 else 4) / 84 for age in ages}
    chi_square = sum((ages[age] - n) ** 2 / n for age, n in expected.items())
    assert chi_square < 30.9  # 5 degrees of freedom: a right run fails once in 100,000
    assert sum(age * n for age, n in expected.items()) / len(draws) == pytest.approx(
        float(mean_age), abs=0.005
    )


def test_a_rollout_is_used_as_often_over_its_life_as_the_ratio_says(laboratory):
    uses = Counter(draw["rollout_id"] for draw in laboratory.all_draws)
    # Born when the buffer was full and evicted before the end.
    lives = [i for i, row in laboratory.all_rollouts.items() if 6 <= row["birth_step"] <= 14]
    mean = sum(uses[i] for i in lives) / len(lives)
    assert mean == pytest.approx(3.75, abs=0.7)  # 4.3 standard errors of a mean of Poisson(3.75)
    assert min(uses[i] for i in lives) <= 1 and max(uses.values()) > 7


# --- zero-variance groups -------------------------------------------------------------------------


def test_zero_variance_groups_are_stored_and_drawn_with_advantage_zero(laboratory):
    run = laboratory
    level = {i: r for i, r in run.all_rollouts.items() if r["group_reward_std"] == 0}
    assert len(level) >= 32
    assert all(row["kept"] and row["advantage"] == 0 for row in level.values())
    assert all(row["behavior_logprobs"] is not None for row in level.values())
    drawn = [draw for draw in run.all_draws if draw["rollout_id"] in level]
    assert len(drawn) > 60 and all(draw["tokens"] > 0 for draw in drawn)
    for step in range(10, STEPS + 1, 5):
        newest = sorted(i for i, row in run.all_rollouts.items() if row["birth_step"] <= step)[-84:]
        assert [r.rollout_id for r in run.snapshot(step).rollouts] == newest
    for step in steps_of(run):
        line = run.metrics[step - 1]
        groups = {row["group_id"] for row in run.rollouts(step) if row["rollout_id"] in level}
        assert line["frac_reward_zero_std"] == len(groups)  # one group a step
        assert line["fresh/rollouts"] == 16
        assert line["cost/trained_tokens"] == sum(draw["tokens"] for draw in run.draws(step))


def test_the_denominator_of_a_batch_counts_rollouts_of_advantage_zero(lab):
    level = 0
    for rows in lab.updates:
        tokens = sum(len(row.completion_token_ids) for row in rows)
        assert [row.token_weight for row in rows] == pytest.approx([1 / tokens] * len(rows))
        level += sum(row.coefficient == 0 for row in rows)
    assert sum(map(len, lab.updates)) == STEPS * 60 and level > 60


def test_a_run_that_keeps_its_zero_variance_groups_passes_the_recomputation(laboratory):
    report = verify_run(laboratory.path)
    assert report.passed, [check for check in report.checks if not check.passed]


# --- no buffer ------------------------------------------------------------------------------------


def test_without_a_buffer_updates_are_as_large_and_each_rollout_is_used_once(lab, tmp_path):
    header = (shipped_recipes_folder() / "fifo-tiny.yaml").read_text()
    arm = re.search(r"No buffer.*\n#\s+(.*)", header).group(1)
    machines = "replay.machines={workers: 5, trainers: 3, mu: 5.28}"  # a recipe's, left by the arm
    overrides = [*arm.replace("--set ", "").split(), machines]
    assert "replay.preset=grpo" in overrides
    with spied_updates() as updates:
        plain = train(tmp_path / "plain", *overrides, steps=2)
    sizes = {len(rows) for rows in updates}
    assert sizes == {len(rows) for rows in lab.updates} == {60} and len(updates) == 2 * 4
    uses = Counter(row.rollout_id for rows in updates for row in rows)
    assert set(uses) == set(plain.all_rollouts) and set(uses.values()) == {1}
    assert list((plain.path / "draws").glob("*.parquet")) == []
    # γ compares like with like: 1 without a buffer, (1 + μ/y)/(1 + μ) with one.
    assert [line["cost/gamma"] for line in plain.metrics] == pytest.approx([1.0] * 2)
    for line in lab.run.metrics[4:]:
        mu = line["cost/mu"]
        assert line["cost/gamma"] == pytest.approx(relative_compute(3.75, mu))
        assert line["cost/gamma"] < 1


# --- an architecture with an untied head ----------------------------------------------------------


def test_a_small_qwen2_with_an_untied_head_trains_and_reaches_its_sampler(tmp_path, processes):
    """The shipped Qwen2.5 configuration with small numbers: its head and its attention biases are
    tensors of their own, and a push that missed one would show as a gap."""
    run = train_small_run(
        tmp_path / "run",
        model={
            "path": "builtin:qwen2.5-7b", "tokenizer": "builtin:tiny",
            "random_init": {
                "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_window_layers": 2,
            },
        },
        replay={"preset": "fifo", "capacity_rollouts": 48, "ratio": 1.0},
        reward={"function": "core_rewards:graded"},
        optimizer={"learning_rate": 1e-2},
        run={"steps": 4},
    )  # fmt: skip
    weights = run.weights()
    assert not weights["lm_head.weight"].equal(weights["model.embed_tokens.weight"])
    assert weights["model.layers.1.self_attn.q_proj.bias"].abs().max() > 0  # it began at 0
    assert all(line["sampler/logprob_gap_max"] < 1e-3 for line in run.metrics)
    assert run.metrics[-1]["replay/ratio_max"] > 1.01  # the policy moved
