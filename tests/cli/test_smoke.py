"""`train --smoke`: what it changes in a recipe, what it runs, and when it fails."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from grpo_replay.cli import smoke as smoke_module
from grpo_replay.cli.app import app
from grpo_replay.cli.smoke import PROBLEMS, _Wanted, smoke_settings, with_cause
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
    done, found = smoke(tmp_path, "r.yaml", "--no-code")
    assert done.returncode == 2 and "--no-code: recipe r.yaml brings code" in done.stderr
    assert found["start"] == "failed"


def smoke(folder, *words):
    """The exit code, and what it prints of every stage."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_replay", "train", "--smoke", *words],
        cwd=folder, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip
    cells = [line.split() for line in done.stdout.splitlines()]
    found = {}
    for line in cells:
        if line[-2:] == ["not", "reached"]:
            found[" ".join(line[:-2])] = "not reached"
        for state in {"ok", "failed", "skipped"} & set(line[:5]):
            found[" ".join(line[: line.index(state)])] = state
    return done, found


STAGES = ("start", "evaluation", "step 1, warm-up", "step 2, replay", "checkpoint", "resume",
          "step 3, resumed", "files")  # fmt: skip


@pytest.mark.slow
def test_a_recipe_that_works_passes_every_stage_and_leaves_nothing(tmp_path):
    # Even with fewer steps than warm-up, which a run refuses.
    done, found = smoke(tmp_path, "tiny", "--set", "run.steps=3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert found == dict.fromkeys(STAGES, "ok")
    assert not list(tmp_path.glob("grpo-replay-smoke-*"))


@pytest.mark.slow
def test_a_reward_that_is_always_the_same_fails_and_the_run_is_kept(tmp_path):
    (tmp_path / "never.py").write_text("def never(completion, answer, row):\n    return -1.0\n")
    done, found = smoke(
        tmp_path, "tiny", "--output-dir", "run", "--set", "reward.function=never.py:never"
    )
    assert done.returncode == 3
    failed = {stage for stage, state in found.items() if state == "failed"}
    assert failed == {"step 1, warm-up", "step 2, replay", "step 3, resumed"}
    assert "100 % of" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_does_not_start_ends_with_its_own_code(tmp_path):
    done, found = smoke(tmp_path, "tiny", "--set", "prompts.source=absent.jsonl")
    assert done.returncode == 3
    assert found["start"] == "failed" and "absent.jsonl" in done.stderr
    assert set(found.values()) == {"failed", "not reached"} and "files" not in found


TIMED = {("evaluation", 0): 0.1, ("evaluation", 2): 0.1, ("checkpoint", 2): 0.2}


def line_of(step: int) -> dict:
    spent = {f"cost/{each}_seconds": 0.1 for each in ("generation", "reward", "training")}
    return {"step": step, "fresh/rollouts": 4, "replay/rollouts": 4, "step_time": 1.0, **spent}


OK, FAILED, NOT_REACHED = "ok", "failed", "not reached"


@pytest.mark.parametrize(
    ("done", "timed", "processes", "states"),
    [
        ((), {}, 1, [FAILED, *[NOT_REACHED] * 6]),
        # in step 1, which wrote nothing; the evaluation before it worked
        ((), {("evaluation", 0): 0.1}, 1, [OK, OK, FAILED, *[NOT_REACHED] * 4]),
        ((1, 2), {("evaluation", 0): 0.1}, 1, [OK, FAILED, OK, OK, FAILED, *[NOT_REACHED] * 2]),
        ((1, 2), TIMED, 2, [OK, OK, OK, OK, OK, FAILED, NOT_REACHED]),
    ],
)
def test_the_cause_belongs_to_the_first_stage_that_failed(
    tmp_path, monkeypatch, done, timed, processes, states
):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line_of(s)) + "\n" for s in done))
    monkeypatch.setattr(smoke_module, "_timed", lambda _: timed)
    found = smoke_module._stages(_Wanted((0, 2, 3), True), tmp_path, [5.0] * processes)
    stages = with_cause(list(found))
    assert [(stage.name, stage.state) for stage in stages] == list(
        zip(STAGES[:7], states, strict=True)
    )
    first = next(stage for stage in stages if stage.state == FAILED)
    assert first.missing and not any(each.missing for each in stages if each.state == OK)


def test_what_the_recipe_does_not_ask_for_is_skipped(tmp_path):
    stages = list(smoke_module._stages(_Wanted((), True), tmp_path, [5.0]))
    assert [stage.state for stage in stages[:3]] == ["failed", "skipped", "not reached"]
