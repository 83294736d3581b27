"""A priority, an advantage estimator, a loss, a sampler and a verifier of the user, each one file
outside the package and one line of recipe, in one run with every tool. The examples are those of
docs/api.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_runs.trained import FinishedRun, train_small_run
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.errors import RecipeError
from grpo_replay.recipe import resolve_recipe
from grpo_replay.recipe.open_lists import ADVANTAGES, LOSSES, PRIORITIES

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
PRIORITY, ESTIMATOR, LOSS, SAMPLER, VERIFIER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[
    5:10
]
STEPS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("own")
    (folder / "short.py").write_text(PRIORITY)
    (folder / "ranks.py").write_text(ESTIMATOR)
    (folder / "plain_loss.py").write_text(LOSS)
    (folder / "only_the_end.py").write_text(SAMPLER)
    (folder / "ends_in_answer.py").write_text(VERIFIER)
    return train_small_run(
        folder / "run",
        replay={
            "priority": f"{folder}/short.py:short", "priority_exponent": 2.0, "warmup_steps": 2,
            "max_age_steps": 5,
        },
        advantage={"estimator": f"{folder}/ranks.py:ranks"},
        loss={"kind": f"{folder}/plain_loss.py:plain"},
        sampling={"backend": f"{folder}/only_the_end.py:OnlyTheEndTrains"},
        reward={"function": f"{folder}/ends_in_answer.py:ends_in_answer"},
        optimizer={"learning_rate": 2e-4},
        run={"steps": STEPS, "seed": 5},
        checkpoint={"every_steps": 4},
    )  # fmt: skip


def inspect(run: FinishedRun, *words: str) -> dict:
    result = CliRunner().invoke(app, ["inspect-buffer", str(run.path), *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.slow
def test_a_run_is_made_of_the_functions_of_the_user(run):
    for step in range(3, STEPS + 1):  # P is p² over the sum of all candidates, p = 1/length + ε
        stored = {
            row["rollout_id"]: (1 / len(row["completion_token_ids"]) + 1e-6) ** 2
            for birth in range(max(step - 5, 1), step)
            for row in run.survivors(birth)
        }
        assert run.draws(step)
        for row in run.draws(step):
            expected = stored[row["rollout_id"]] / sum(stored.values())
            assert row["probability"] == pytest.approx(expected, rel=1e-9)
    # The loss has no clip.
    assert {line["fresh/clip_fraction"] for line in run.metrics} == {0.0}
    assert max(line["fresh/ratio_max"] for line in run.metrics) > 1.28
    for row in run.rollouts(1):  # of every completion the last four tokens train
        tokens = len(row["completion_token_ids"])
        assert row["completion_mask"] == [index >= tokens - 4 for index in range(tokens)]
        assert row["verdict"] == "scored" and row["reward"] in (1.0, -1.0)
    for row in run.survivors(2):  # each correct one has the share of incorrect others
        correct = row["group_correct"]
        expected = (4 - correct) / 3 if row["reward"] > 0 else -correct / 3
        assert row["advantage"] == np.float32(expected)


@pytest.mark.slow
def test_the_tools_read_such_a_run_and_verify_finds_other_functions(run):
    assert inspect(run, "--verify")["passed"] is True
    document = inspect(run, "--what-if", "priority=uniform")
    logged, same, other = (document[name]["ess_mean"] for name in ("logged", "same", "changed"))
    assert same == pytest.approx(logged, rel=1e-6)
    assert other > 1.05 * logged
    stored = run.snapshot(STEPS)
    lengths = [len(rollout.completion_token_ids) for rollout in stored.rollouts]
    np.testing.assert_array_equal(stored.state["priority"], 1 / np.array(lengths) + 1e-6)
    recipe = run.path / "recipe.yaml"
    other = re.sub(r"priority: .*short", "priority: abs_advantage", recipe.read_text())
    recipe.write_text(re.sub(r"estimator: .*ranks", "estimator: group_relative", other))
    result = CliRunner().invoke(app, ["inspect-buffer", str(run.path), "--verify", "--json"])
    checks = json.loads(result.stdout)["checks"]
    failed = {each["name"] for each in checks if not each["passed"]}
    assert {"probabilities", "advantages"} <= failed


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
    with pytest.raises(RecipeError, match=rf"{section}\.{key}.*'shortest'"):
        resolve_recipe([{section: {key: "shortest"}}])


@pytest.mark.parametrize(
    ("open_list", "parameters"),
    [(PRIORITIES, "columns, x"), (ADVANTAGES, "rewards"), (LOSSES, "logprobs, old, a, settings")],
)
def test_a_function_of_other_parameters_is_refused_before_a_run(tmp_path, open_list, parameters):
    (tmp_path / "mine.py").write_text(f"def mine({parameters}): ...\nmine.columns = ('reward',)")
    with pytest.raises(RecipeError, match=rf"{open_list.key} .*it is called as mine\("):
        open_list.load(f"{tmp_path}/mine.py:mine")


def test_a_missing_file_is_refused_and_no_folder_is_left(tmp_path):
    words = ["train", "tiny", "--output-dir", str(tmp_path / "run")]
    for change in ("replay.priority=nowhere.py:short", "reward.function=minerva"):
        words += ["--set", change]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "replay.priority" in done.stderr and "nowhere.py" in done.stderr
    assert not (tmp_path / "run").exists()


TOY = "def toy(logprobs, behavior_logprobs, coefficients, settings, lengths):\n"
TOY += "    return coefficients + logprobs - logprobs.detach()\n"
ENTRY = '"toy": LossFacts("grpo_replay.replay.toy:toy", sums_rollouts=True, baseline_shift=0.5),'


@pytest.mark.slow
def test_a_loss_that_ships_is_a_file_and_one_line_of_the_open_list(tmp_path):
    root = Path(__file__).parents[2]
    for folder in ("grpo_replay", "recipes"):
        shutil.copytree(root / folder, tmp_path / folder)
    (tmp_path / "grpo_replay/replay/toy.py").write_text(TOY)
    entries = tmp_path / "grpo_replay/recipe/open_lists.py"
    first = "SHIPPED_LOSSES = {\n"
    entries.write_text(entries.read_text().replace(first, f"{first}    {ENTRY}\n"))
    words = [sys.executable, "-m", "grpo_replay", "train", "tiny", "--output-dir", "run"]
    for change in (
        "loss.kind=toy", "replay.preset=grpo", "run.steps=1", "batch.updates_per_step=1",
        "eval.benchmarks=[]",
    ):  # fmt: skip
        words += ["--set", change]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    rows = pq.read_table(tmp_path / "run/rollouts/step_000001.parquet").to_pylist()
    kept = [row for row in rows if row["kept"]]
    sums = [  # a loss of r - (V + 0.5) for each token, summed over the rollout
        len(row["completion_token_ids"]) * (row["reward"] - row["group_reward_mean"] - 0.5)
        for row in kept
    ]
    assert line["loss"] == pytest.approx(sum(sums) / len(kept), rel=1e-5)
