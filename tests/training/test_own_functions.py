"""A priority, an advantage estimator and a loss of the user, each one file outside the package and
one line of recipe, work with every tool. The examples are those of docs/extend.md."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_runs.trained import FinishedRun, interrupted, same_files, same_weights, train_small_run
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.errors import RecipeError
from grpo_replay.recipe import resolve_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
PRIORITY, ESTIMATOR, LOSS, SAMPLER, VERIFIER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[
    :5
]
STEPS = 8


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "short.py").write_text(PRIORITY)
    (folder / "ranks.py").write_text(ESTIMATOR)
    (folder / "plain_loss.py").write_text(LOSS)
    (folder / "only_the_end.py").write_text(SAMPLER)
    (folder / "ends_in_answer.py").write_text(VERIFIER)
    return {
        "replay": {
            "priority": f"{folder}/short.py:short", "priority_exponent": 2.0, "warmup_steps": 2,
            "max_age_steps": 5,
        },
        "advantage": {"estimator": f"{folder}/ranks.py:ranks"},
        "loss": {"kind": f"{folder}/plain_loss.py:plain"},
        "sampling": {"backend": f"{folder}/only_the_end.py:OnlyTheEndTrains"},
        "reward": {"function": f"{folder}/ends_in_answer.py:ends_in_answer"},
        "optimizer": {"learning_rate": 2e-4},
        "run": {"steps": STEPS, "seed": 5},
        "checkpoint": {"every_steps": 4},
    }  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param("", marks=pytest.mark.slow)])
def run(sections, tmp_path_factory) -> FinishedRun:
    return train_small_run(tmp_path_factory.mktemp("runs") / "own", **sections)


def inspect(run: FinishedRun, *words: str) -> dict:
    result = CliRunner().invoke(app, ["inspect-buffer", str(run.path), *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_draws_follow_the_priority(run):
    """P of each draw is p² over the sum of all candidates, with p = 1/length + ε."""
    for step in range(3, STEPS + 1):
        stored = {
            row["rollout_id"]: (1 / len(row["completion_token_ids"]) + 1e-6) ** 2
            for birth in range(max(step - 5, 1), step)
            for row in run.survivors(birth)
        }
        draws = run.draws(step)
        assert draws
        for row in draws:
            expected = stored[row["rollout_id"]] / sum(stored.values())
            assert row["probability"] == pytest.approx(expected, rel=1e-9)


def test_the_loss_trains_without_a_clip(run):
    assert {line["fresh/clip_fraction"] for line in run.metrics} == {0.0}
    assert max(line["fresh/ratio_max"] for line in run.metrics) > 1.28


def test_the_sampler_and_the_verifier_are_the_users(run):
    """Of every completion the last four tokens train, as the sampler says."""
    for row in run.rollouts(1):
        tokens = len(row["completion_token_ids"])
        assert row["completion_mask"] == [index >= tokens - 4 for index in range(tokens)]
        assert row["verdict"] == "scored" and row["reward"] in (1.0, -1.0)
    assert any(len(row["completion_token_ids"]) > 4 for row in run.rollouts(1))


def test_every_example_is_short():
    assert all(len(each.splitlines()) <= 30 for each in (PRIORITY, LOSS, SAMPLER, VERIFIER))


def test_advantages_are_those_of_the_estimator(run):
    """With two rewards, `ranks` gives each correct one the share of incorrect others, and so on."""
    for row in run.survivors(2):
        correct = row["group_correct"]
        expected = (4 - correct) / 3 if row["reward"] > 0 else -correct / 3
        assert row["advantage"] == np.float32(expected)


def test_verify_accepts_the_run_and_finds_another_priority(run, tmp_path, sections):
    report = inspect(run, "--verify")
    assert report["passed"] is True
    recipe = run.path / "recipe.yaml"
    text = recipe.read_text()
    try:
        other = re.sub(r"priority: .*short", "priority: abs_advantage", text)
        recipe.write_text(re.sub(r"estimator: .*ranks", "estimator: group_relative", other))
        result = CliRunner().invoke(app, ["inspect-buffer", str(run.path), "--verify", "--json"])
        failed = [
            each["name"] for each in json.loads(result.stdout)["checks"] if not each["passed"]
        ]
        assert {"probabilities", "advantages"} <= set(failed)
    finally:
        recipe.write_text(text)


def test_what_if_simulates_the_priority(run):
    """With its own settings the simulation draws as the run did; uniform draws otherwise."""
    document = inspect(run, "--what-if", "priority=uniform")
    logged, same, other = (document[name]["ess_mean"] for name in ("logged", "same", "changed"))
    assert same == pytest.approx(logged, rel=1e-6)
    assert other > 1.05 * logged


def test_inspection_shows_the_priorities(run):
    stored = run.snapshot(STEPS).state
    lengths = [len(rollout.completion_token_ids) for rollout in stored["rollouts"]]
    np.testing.assert_array_equal(stored["priority"], 1 / np.array(lengths) + 1e-6)
    rows = [row for birth in range(STEPS - 5, STEPS) for row in run.survivors(birth)]
    mean = np.mean([1 / len(row["completion_token_ids"]) for row in rows]) + 1e-6
    rebuilt = inspect(run, "--step", str(STEPS - 1))  # no checkpoint: rebuilt from the log
    assert rebuilt["priority"]["mean"] == pytest.approx(mean)


def test_a_run_that_was_killed_and_resumed_is_the_run(run, sections, tmp_path):
    interrupted(tmp_path / "killed", 6, **sections)
    resumed = train_small_run(tmp_path / "killed", resume=True, **sections)
    assert same_weights(run.weights(), resumed.weights())
    assert same_files(run.path, resumed.path, "draws") == STEPS


@pytest.mark.parametrize(
    "section, key",
    [
        ("replay", "priority"),
        ("advantage", "estimator"),
        ("loss", "kind"),
        ("sampling", "backend"),
        ("reward", "function"),
        ("eval", "reward"),
    ],
)
def test_an_unknown_name_is_refused(section, key):
    with pytest.raises(RecipeError, match=rf"{section}.{key}.*'shortest' is not known"):
        resolve_recipe([{section: {key: "shortest"}}])


def test_a_missing_file_is_refused_before_anything_is_loaded(tmp_path):
    command = [
        *(sys.executable, "-m", "grpo_replay", "train", "tiny", "--output-dir", tmp_path / "run"),
        *("--set", "replay.priority=nowhere.py:short"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "replay.priority" in done.stderr and "no file" in done.stderr
    assert "nowhere.py" in done.stderr and "loading" not in done.stderr
    assert not (tmp_path / "run").exists()
