"""`train --smoke`: what it changes in a recipe, what it runs, and when it fails."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.cli.smoke import PROBLEMS, missing, smoke_settings
from grpo_replay.evaluation.benchmarks import find_benchmarks
from grpo_replay.recipe import load_recipe
from grpo_replay.shipped_recipes import shipped_recipes


def test_every_shipped_recipe_can_be_tried_in_three_steps():
    names = list(shipped_recipes())
    assert len(names) >= 10
    for name in names:
        recipe = load_recipe(name)
        tried = load_recipe(name, smoke_settings(recipe))
        assert (tried.run.steps, tried.checkpoint.every_steps) == (3, 2)
        assert tried.replay.warmup_steps <= 1
        benchmarks = len(find_benchmarks(tried.eval, tried.prompts))
        assert tried.eval.max_problems * tried.eval.samples * benchmarks <= PROBLEMS
        same = {"sampling", "model", "batch", "loss", "prompts", "reward"}
        assert tried.model_dump(include=same) == recipe.model_dump(include=same)


def answer(*words):
    result = CliRunner().invoke(app, ["train", *words])
    return result.exit_code, result.stderr


def test_a_run_of_three_steps_is_refused_with_the_command_that_tries_them():
    code, told = answer("tiny", "--set", "run.steps=3")
    assert code == 2 and "grpo-replay train RECIPE --smoke" in told


@pytest.mark.parametrize(
    "words, message",
    [
        (["tiny", "--dry-run"], "leave out --dry-run"),
        (["tiny", "--nodes", "2"], "leave out --nodes"),
        (["tiny", "--json"], "leave out --json"),
        (["--resume", "--output-dir", "x"], "leave out --resume"),
        ([], "--smoke needs a RECIPE"),
    ],
)
def test_what_does_not_go_with_it_is_refused(words, message):
    code, told = answer("--smoke", *words)
    assert code == 2 and message in told


@pytest.mark.slow
def test_code_that_a_run_refuses_is_refused_in_three_steps(tmp_path):
    (tmp_path / "own.py").write_text("def never(completion, answer, row):\n    return -1.0\n")
    (tmp_path / "r.yaml").write_text(
        (shipped_recipes()["tiny"]).read_text().replace("math_verify\n", "own.py:never\n", 1)
    )
    done = smoke(tmp_path, "r.yaml", "--no-code")
    assert done.returncode == 2 and "--no-code: recipe r.yaml brings code" in done.stderr
    assert done.stdout.startswith("failed: the run ended with exit code 2 after 0 of 3 steps: see")


def smoke(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "grpo_replay", "train", "--smoke", *words],
        cwd=folder, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip


@pytest.mark.slow
def test_a_recipe_that_works_says_so_in_one_line_and_leaves_nothing(tmp_path):
    # Even with fewer steps than warm-up, which a run refuses.
    done = smoke(tmp_path, "tiny", "--set", "run.steps=3")
    assert done.returncode == 0, done.stderr[-3000:]
    said = "worked: 3 steps, replay, 3 evaluations, checkpoint, resume, files read back in [0-9]+ s"
    assert re.fullmatch(f"{said}\n", done.stdout)
    assert not list(tmp_path.glob("grpo-replay-smoke-*"))


@pytest.mark.slow
def test_a_reward_that_is_always_the_same_fails_and_the_run_is_kept(tmp_path):
    (tmp_path / "never.py").write_text("def never(completion, answer, row):\n    return -1.0\n")
    done = smoke(tmp_path, "tiny", "--output-dir", "run", "--set", "reward.function=never.py:never")
    assert done.returncode == 3
    assert done.stdout.splitlines() == [
        f"failed: step {step} trained on nothing: in step {step}, 100 % of the groups were all "
        "wrong and 0 % all correct; see the samples above"
        for step in (1, 2, 3)
    ]
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_does_not_start_ends_with_its_own_code(tmp_path):
    done = smoke(tmp_path, "tiny", "--set", "prompts.source=absent.jsonl")
    assert done.returncode == 3 and "absent.jsonl" in done.stderr
    assert done.stdout == (
        "failed: the run ended with exit code 3 after 0 of 3 steps: see the message above\n"
    )


def line_of(step: int, fresh: int, replayed: int) -> str:
    groups = {"groups/all_wrong_fraction": 0.25, "groups/all_correct_fraction": 0.75}
    row = {"step": step, "fresh/rollouts": fresh, "replay/rollouts": replayed, **groups}
    return json.dumps(row) + "\n"


def test_what_a_run_did_not_do_is_said_with_the_reason(tmp_path, monkeypatch):
    def passed(_):
        return SimpleNamespace(passed=True)

    monkeypatch.setattr("grpo_replay.lab.verification.verify.verify_run", passed)
    (tmp_path / "metrics.jsonl").write_text(line_of(1, 4, 0) + line_of(2, 4, 0))
    (tmp_path / "eval").mkdir()
    for step in (0, 3):
        (tmp_path / f"eval/step_{step:06d}.json").write_text("{}")
    why = "in step 1, 25 % of the groups were all wrong and 75 % all correct; see the samples above"
    few = "2 of 3 steps are in metrics.jsonl"
    assert list(missing(tmp_path, load_recipe("tiny"))) == [
        f"step 2 replayed nothing: {why}", few, "step 2 was not evaluated",
    ]  # fmt: skip
    without = ["replay.preset=grpo", "eval.benchmarks=[]"]
    assert list(missing(tmp_path, load_recipe("tiny", without))) == [few]
