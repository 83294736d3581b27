"""The real trainer as paper B runs it: zero-variance groups kept, the variants of its draw, the
horizon and the replay ratio of the recipe's header, and the baseline without a buffer."""

import re
from collections import Counter

import pytest
from small_runs.trained import FinishedRun, steps_of, train_small_run

from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import load_recipe, shipped_recipes_folder
from grpo_replay.replay.compose import relative_compute
from grpo_replay.training import Observer
from grpo_replay.training.run import run_training

QUICK = [
    "eval.benchmarks=[]", "tracking.report_to=[]", "reward.function=minerva", "reward.workers=1",
    "engine.device=cpu", "checkpoint.keep=100",
]  # fmt: skip


def train(folder, *overrides: str, steps: int) -> FinishedRun:
    recipe = load_recipe("fifo-tiny", [*QUICK, f"run.steps={steps}", *overrides])
    run_training(recipe, folder, False, Observer())
    return FinishedRun(folder, recipe)


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory, processes) -> FinishedRun:
    """The shipped recipe, 30 of its steps."""
    return train(tmp_path_factory.mktemp("fifo") / "run", "checkpoint.every_steps=5", steps=30)


@pytest.fixture
def update_sizes(monkeypatch) -> list[list[int]]:
    """The rollouts of every optimizer update, by id, as the engine gets them."""
    seen: list[list[int]] = []
    original = DeepSpeedEngine.update

    def update(engine, rows):
        seen.append([row.rollout_id for row in rows])
        return original(engine, rows)

    monkeypatch.setattr(DeepSpeedEngine, "update", update)
    return seen


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
    lives = [i for i, row in laboratory.all_rollouts.items() if 6 <= row["birth_step"] <= 24]
    mean = sum(uses[i] for i in lives) / len(lives)
    assert mean == pytest.approx(3.75, abs=0.5)  # 4.5 standard errors of a mean of Poisson(3.75)
    assert any(uses[i] == 0 for i in lives) and max(uses.values()) > 7


# --- zero-variance groups -------------------------------------------------------------------------


def test_zero_variance_groups_are_stored_and_drawn_with_advantage_zero(laboratory):
    run = laboratory
    level = {i: r for i, r in run.all_rollouts.items() if r["group_reward_std"] == 0}
    assert len(level) >= 32
    assert all(row["kept"] and row["advantage"] == 0 for row in level.values())
    assert all(row["behavior_logprobs"] is not None for row in level.values())
    drawn = [draw for draw in run.all_draws if draw["rollout_id"] in level]
    assert len(drawn) > 60 and all(draw["tokens"] > 0 for draw in drawn)
    for step in range(10, 31, 5):
        newest = sorted(i for i, row in run.all_rollouts.items() if row["birth_step"] <= step)[-84:]
        assert [r.rollout_id for r in run.snapshot(step).state["rollouts"]] == newest
    for step in steps_of(run):
        line = run.metrics[step - 1]
        groups = {row["group_id"] for row in run.rollouts(step) if row["rollout_id"] in level}
        assert line["frac_reward_zero_std"] == len(groups)  # one group a step
        assert line["fresh/rollouts"] == 16
        assert line["cost/trained_tokens"] == sum(draw["tokens"] for draw in run.draws(step))


def test_the_denominator_of_a_batch_counts_rollouts_of_advantage_zero(
    tmp_path, processes, monkeypatch
):
    rows_of: list[list] = []
    original = DeepSpeedEngine.update

    def update(engine, rows):
        rows_of.append(list(rows))
        return original(engine, rows)

    monkeypatch.setattr(DeepSpeedEngine, "update", update)
    train_small_run(
        tmp_path / "run", replay={"preset": "grpo", "drop_zero_variance": False}, run={"steps": 3}
    )
    level = 0
    for rows in rows_of:
        tokens = sum(len(row.completion_token_ids) for row in rows)
        assert [row.token_weight for row in rows] == pytest.approx([1 / tokens] * len(rows))
        level += sum(row.coefficient == 0 for row in rows)
    assert sum(map(len, rows_of)) == 3 * 24 and level > 0


def test_a_run_that_keeps_its_zero_variance_groups_passes_the_recomputation(laboratory):
    report = verify_run(laboratory.path)
    assert report.passed, [check for check in report.checks if not check.passed]


# --- variants of the draw -------------------------------------------------------------------------


@pytest.mark.slow
def test_unused_first_takes_what_was_never_drawn_before_anything_else(tmp_path, processes):
    run = train(
        tmp_path / "run", "replay.with_replacement=false", "replay.unused_first=true",
        "replay.ratio=1.5", "checkpoint.every_steps=10", steps=20,
    )  # fmt: skip
    used: set[int] = set()
    order: list[int] = []
    for step in steps_of(run):
        order += [row["rollout_id"] for row in run.rollouts(step)]
        drawn = [draw["rollout_id"] for draw in run.draws(step)]
        newest = order[-84:]
        never = [i for i in newest if i not in used]
        first = drawn[: len(never)]
        assert set(first) == set(never) and len(never) == 16  # 24 drawn: the 16 new ones, 8 others
        assert not set(drawn[len(never) :]) & set(never)
        for draw in run.draws(step):
            pool = len(never) if draw["rollout_id"] in first else len(newest) - len(never)
            assert draw["probability"] == pytest.approx(1 / pool, rel=1e-12)
        used |= set(drawn)
    assert used == set(order)  # every rollout was used
    report = verify_run(run.path)
    assert report.passed, [check for check in report.checks if not check.passed]


# --- no buffer ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_a_buffer_updates_are_as_large_and_each_rollout_is_used_once(
    tmp_path, processes, update_sizes
):
    header = (shipped_recipes_folder() / "fifo-tiny.yaml").read_text()
    arm = re.search(r"No buffer.*\n#\s+(.*)", header).group(1)
    overrides = arm.replace("--set ", "").split()
    assert "replay.preset=grpo" in overrides
    plain = train(tmp_path / "plain", *overrides, steps=3)
    without, update_sizes[:] = list(update_sizes), []
    replay = train(tmp_path / "replay", steps=12)
    with_buffer = update_sizes[len(update_sizes) - 8 :]  # once the buffer holds 60
    assert {len(ids) for ids in without} == {len(ids) for ids in with_buffer} == {60}
    assert len(without) == 3 * 4
    uses = Counter(i for ids in without for i in ids)
    assert set(uses) == set(plain.all_rollouts) and set(uses.values()) == {1}
    assert list((plain.path / "draws").glob("*.parquet")) == []
    # γ compares like with like: 1 without a buffer, (1 + μ/y)/(1 + μ) with one.
    assert [line["cost/gamma"] for line in plain.metrics] == pytest.approx([1.0] * 3)
    for line in replay.metrics[4:]:
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
