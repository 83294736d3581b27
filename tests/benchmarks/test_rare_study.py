"""The numbers of the study of rare successes, by hand, and its record against a real run."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import rare_study
from rare_numbers import (
    BENCHMARKS,
    BUDGET,
    OURS,
    Course,
    area,
    areas,
    at,
    at_equal_compute,
    best_without_buffer,
    compare,
    differences,
    estimate,
    finals,
    holm,
    letter_of,
    passes,
    replayed_minus_fresh,
    secondary,
)
from small_runs.trained import FinishedRun

from grpo_replay.lab.report.finished_run import read_finished_run
from grpo_replay.lab.sweep.sweep_file import find_sweep, read_sweep_file
from grpo_replay.recipe import load_recipe
from grpo_replay.shipped_recipes import shipped_recipes_folder
from grpo_replay.tiny.problems import train_problems
from grpo_replay.training import Observer
from grpo_replay.training.run import run_training


def rows(stage="compare", arm=OURS, rate="0.0002", seed=42, trained=(0, 100), correct=None, **more):
    """A run that generates `BUDGET` rollouts between its two evaluations."""
    correct = correct or {"rare": [[0, 0], [16, 32]], "hard": [[0], [8]]}
    return [
        {
            "stage": stage, "arm": arm, "rate": rate, "seed": str(seed), "step": str(160 * n),
            "generated": str(BUDGET * n), "trained": str(trained[n]), "trained_tokens": "0",
            "seconds": "0", "pass": "0", "solved": "0", "mixed": "0",
            "fresh_success": "0.25", "replay_success": "0.75",
            **{name: str(np.mean(correct[name][n]) / 32) for name in BENCHMARKS},
            **{f"{name}_correct": "".join(map(letter_of, correct[name][n])) for name in BENCHMARKS},
            **more,
        }
        for n in (1, 0)
    ]  # fmt: skip


def test_values_between_evaluations_lie_on_a_line_and_the_last_stays():
    axis, values = np.array([0.0, 100.0, 300.0]), np.array([[0.0, 1.0], [0.4, 1.0], [0.6, 0.0]])
    assert at(axis, values, 200).tolist() == pytest.approx([0.5, 0.5])
    assert at(axis, values, 50).tolist() == pytest.approx([0.2, 1.0])
    assert at(axis, values, 999).tolist() == pytest.approx([0.6, 0.0])


def test_an_area_ends_within_a_line_and_is_a_mean():
    """From 0 to 0.4 over 100, then to 0.5 over 100: (20 + 45) / 200."""
    axis, values = np.array([0.0, 100.0, 300.0]), np.array([0.0, 0.4, 0.6])
    assert float(area(axis, values, 200)) == pytest.approx(0.325)
    assert float(area(axis, values, 300)) == pytest.approx((20 + 100) / 300)


def test_the_rows_of_a_run_give_its_outcomes():
    run = Course.of(rows())
    assert [each.tolist() for each in finals(run)] == [[0.5, 1.0], [0.25]]
    assert [each.tolist() for each in areas(run)] == [[0.25, 0.5], [0.125]]
    assert [each.tolist() for each in passes(run)] == [[1.0, 1.0], [1.0]]
    assert run.mean_E.tolist() == [0.0, (0.75 + 0.25) / 2]
    assert replayed_minus_fresh(run)[0].tolist() == [0.5]


def test_equal_compute_is_that_of_the_cheaper_run():
    """At μ = 1 the baseline spends 1.5 budgets and the arm 2: three quarters of its way. Where
    generating costs a million, both get as far."""
    arm = Course.of(rows(trained=(0, BUDGET)))
    base = Course.of(rows(trained=(0, BUDGET // 2)))
    ahead = at_equal_compute([(arm, base)], 1)
    assert [each.tolist() for each in ahead] == [[[-0.125, -0.25]], [[-0.0625]]]
    close = at_equal_compute([(arm, base)], 1e6)
    assert np.allclose(np.concatenate([each.ravel() for each in close]), 0, atol=1e-5)


def test_holm_multiplies_by_those_that_are_not_smaller_and_never_falls():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.5]) == [1.0, 1.0]


def test_an_estimate_of_equal_values_has_no_width():
    found = estimate((np.full((4, 3), 0.25), np.full((4, 2), 0.75)), resamples=999)
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert found.p == pytest.approx(2 / 1000)
    assert (found.above, found.seeds) == (4, 4)


def test_an_estimate_draws_seeds_and_problems_as_a_slow_twin():
    rng = np.random.default_rng(3)
    values = (rng.normal(0.1, 1, (5, 6)) + rng.normal(0, 1, (5, 1)), rng.normal(0.1, 1, (5, 4)))
    found, slow = estimate(values, resamples=20_000), []
    for _ in range(20_000):
        seeds = rng.integers(5, size=5)
        parts = [each[np.ix_(seeds, rng.integers(each.shape[1], size=each.shape[1]))].mean()
                 for each in values]  # fmt: skip
        slow.append(np.mean(parts))
    assert found.mean == pytest.approx(np.mean([each.mean() for each in values]))
    assert (found.low, found.high) == pytest.approx(np.quantile(slow, [0.025, 0.975]), abs=0.03)
    assert found.p == pytest.approx(2 * min(np.mean(np.array(slow) <= 0), 0.5), abs=0.03)


def test_the_baseline_is_the_best_arm_without_a_buffer_at_its_rate():
    low, high = ({"rare": [[0, 0], [n, n]], "hard": [[0], [n]]} for n in (8, 24))
    runs = [
        Course.of(rows("tune", arm, rate, seed, correct=correct))
        for seed in (1, 2)
        for arm, rate, correct in (
            ("grpo", "0.0001", high), ("grpo", "0.0002", low), ("epochs-2", "0.0001", low),
            (OURS, "0.0001", {"rare": [[0, 0], [32, 32]], "hard": [[0], [32]]}),
        )
    ]  # fmt: skip
    assert best_without_buffer(runs) == "grpo"
    both = [Course.of(rows(arm=arm, seed=seed)) for arm in ("grpo", OURS) for seed in (42, 43, 44)]
    text = compare([*runs, *both])
    assert "`ours` minus `grpo`" in text and "+0.0 [+0.0, +0.0], 0/3" in text
    assert "| `grpo` | 0.0001 | 2 | 75.0 | 37.5 | chosen at the edge |" in text
    same = "+0.0 [+0.0, +0.0], 0/3"
    assert f"| `grpo` | 25.0 |  | {same} | 75.0 | 25.0 | 100 | 0 | 0 | 3 |" in text
    assert f"| `ours` | 25.0 | {same} |  | 75.0 | 25.0 | 100 | 0 | 0 | 3 |" in text
    assert len(secondary([(both[3], both[0])] * 3)) == 8


def test_a_difference_is_paired():
    one, other = Course.of(rows()), Course.of(rows(correct={"rare": [[0, 0], [0, 32]],
                                                            "hard": [[0], [0]]}))  # fmt: skip
    found = differences([(one, other), (other, one)], finals)
    assert [each.tolist() for each in found] == [[[0.5, 0], [-0.5, 0]], [[0.25], [-0.25]]]


PROBLEMS = shipped_recipes_folder() / "tiny-rare" / "train.jsonl"
ARMS = tuple(read_sweep_file(find_sweep("tiny-rare")).arms)
RATES = ("5e-05", "0.0001", "0.0002", "0.0004")
BEST = {"rare": [[0, 0], [32, 32]], "hard": [[0], [32]]}


def tuned(best, rates=RATES, arms=ARMS):
    """Records of all tuning runs, in which every arm prefers one rate."""
    return [
        row
        for arm in arms
        for seed in (1, 2, 3)
        for rate in rates
        for row in rows("tune", arm, rate, seed, correct=BEST if rate == best else None)
    ]


def test_a_run_is_missing_until_it_is_recorded_and_comparisons_until_all_is_tuned(tmp_path):
    file = tmp_path / "record.csv"
    every = rare_study.missing(tmp_path, file)
    assert len(every) == 120 and all("/tune/" in line for line in every)
    some = tuned("0.0002", arms=("grpo", "ours"))
    rare_study.write_record(some, file)
    left = rare_study.missing(tmp_path, file)
    assert len(left) == 96 and not any(f"{tmp_path}/tune/grpo/" in line for line in left)
    rare_study.write_record([*tuned("0.0002"), *rows("compare", "grpo", "0.0002", 42)], file)
    left = rare_study.missing(tmp_path, file)
    assert len(left) == 119 and all("optimizer.learning_rate=0.0002 " in line for line in left)
    assert not any(line.endswith(f"{tmp_path}/grpo/seed-42") for line in left)


@pytest.mark.parametrize(("best", "added"), [("0.0004", "0.0008"), ("5e-05", "2.5e-05")])
def test_an_edge_that_an_arm_prefers_is_widened_for_all_arms_first(tmp_path, best, added):
    file = tmp_path / "record.csv"
    rare_study.write_record(tuned(best), file)
    left = rare_study.missing(tmp_path, file)
    assert len(left) == 30 and all("/tune/" in line and f"={added} " in line for line in left)
    rare_study.write_record(tuned(best, rates=(*RATES, added)), file)
    left = rare_study.missing(tmp_path, file)
    assert len(left) == 120 and all(f"={best} " in line for line in left)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory, processes):
    """With easy problems among its own."""
    folder = tmp_path_factory.mktemp("rare")
    path, both = folder / "run", folder / "both.jsonl"
    others = [row for row in train_problems() if row["problem_id"] not in PROBLEMS.read_text()]
    easy = "".join(f"{json.dumps(row)}\n" for row in others[:680])
    both.write_text(PROBLEMS.read_text() + easy)
    words = (
        f"prompts.source={both}",
        *("run.steps=3", "replay.warmup_steps=1", "eval.every_steps=[2]"),
        *("eval.samples=4", "eval.max_problems=5"),
    )
    recipe = load_recipe("tiny-rare", words)
    run_training(recipe, path, False, Observer())
    return FinishedRun(path, recipe)


def test_a_record_counts_what_the_files_of_the_run_hold(small_run, tmp_path):
    found = rare_study.rows_of(read_finished_run(small_run.path), "compare", "ours")
    assert [row["step"] for row in found] == ["0", "2", "3"]
    ids = {json.loads(line)["problem_id"] for line in PROBLEMS.read_text().splitlines()}
    solved, kept, good, all_groups, without_signal = set(), 0, 0, 0, 0
    for step in (1, 2):
        for row in small_run.rollouts(step):
            solved |= {row["prompt_id"]} if row["reward"] == 1 else set()
            without_signal += row["reward"] == 1 and not row["kept"]
            kept += row["kept"]
            good += row["kept"] and row["reward"] == 1
            all_groups += 1
    after_two = found[1]
    assert without_signal > 0 and len(solved) > len(solved & ids) > 0
    assert float(after_two["solved"]) == pytest.approx(len(solved & ids) / 680, abs=1e-6)
    assert float(after_two["mixed"]) == pytest.approx(kept / all_groups, abs=1e-6)
    assert float(after_two["fresh_success"]) == pytest.approx(good / kept, abs=1e-6)
    draws = small_run.draws(2)
    advantages = [small_run.all_rollouts[draw["rollout_id"]]["advantage"] for draw in draws]
    assert len(draws) > 10
    drawn_good = np.mean([each > 0 for each in advantages])
    assert float(after_two["replay_success"]) == pytest.approx(drawn_good, abs=1e-6)
    assert int(after_two["trained"]) == kept + len(draws)
    samples = pq.read_table(small_run.path / "eval/step_000002.parquet").to_pylist()
    for name in BENCHMARKS:
        correct = [0] * 5
        for row in samples:
            if row["benchmark"] == name:
                correct[row["problem_index"]] += row["correct"]
        assert after_two[f"{name}_correct"] == "".join(map(str, correct))
    rare_study.write_record(found, tmp_path / "record.csv")
    assert rare_study.read_record(tmp_path / "record.csv") == found
    report = json.loads((small_run.path / "eval/step_000002.json").read_text())
    accuracy = report["benchmarks"]["rare"]["avg_at_k"]
    assert float(after_two["rare"]) == pytest.approx(accuracy, abs=1e-6)
