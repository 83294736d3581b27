"""The examples of docs/api.md run, and print what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_replay.api import train
from grpo_replay.errors import UsageError
from grpo_replay.recipe import load_recipe
from grpo_replay.replay.group import rollouts_of_group

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
COMMANDS, OWN_TASK, LIBRARY, HANDLES = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL
)


def lines_of(code: str, folder: Path) -> list[str]:
    (folder / "add.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "add.py"], cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""  # nothing is printed but what the program prints
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_recipe_is_trained_evaluated_and_inspected_without_printing(tmp_path):
    trained, accuracy, stored, arms = lines_of(COMMANDS, tmp_path)
    steps, replayed = map(int, trained.split())
    assert steps == 6 and replayed > 0
    assert 0 <= float(accuracy) <= 1
    assert int(stored.partition(" ")[0]) > 0
    assert arms == "['api']"


@pytest.mark.slow
def test_rows_a_function_and_a_callback_of_the_program_are_used_and_stored(tmp_path):
    assert lines_of(OWN_TASK, tmp_path) == ["4 4 True"]
    recipe = load_recipe(str(tmp_path / "runs" / "add" / "recipe.yaml"))
    assert recipe.reward.function == f"{tmp_path}/add.py:brief"
    assert recipe.prompts.source == f"{tmp_path}/runs/add.prompts.jsonl"
    assert train(None, tmp_path / "runs" / "add", resume=True).step == 4


def test_the_buffer_works_in_another_trainer_and_loads_no_torch(tmp_path):
    check = "\nimport sys\nprint(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    counts, loaded = lines_of(LIBRARY + check, tmp_path)
    assert counts == "20 4 6"  # five groups of four, the oldest four steps old
    assert loaded == "[]"


def test_a_trainer_that_keeps_its_tensors_hears_what_left(tmp_path):
    (kept,) = lines_of(HANDLES, tmp_path)
    assert kept == "[4, 5, 6, 7]"  # 2 and 3 left in step 2; 4 and 5 left in step 3, not yet told


def group(**changes):
    given = {
        "first_rollout_id": 7, "group_id": 3, "prompt_id": "p", "step": 2,
        "prompt_token_ids": [1], "completion_token_ids": [[4], [5, 6]],
        "behavior_logprobs": [[-1.0], [-2.0, -3.0]], "rewards": [1.0, -1.0],
    }  # fmt: skip
    return rollouts_of_group(**given | changes)


def test_a_group_has_its_advantages_and_consecutive_ids():
    one, other = group()
    assert (one.rollout_id, other.rollout_id, one.group_correct) == (7, 8, 1)
    assert (one.advantage, other.advantage) == pytest.approx((1, -1), abs=2e-6)
    assert other.behavior_logprobs.tolist() == [-2.0, -3.0]
    assert other.completion_token_ids.dtype == np.int32
    assert group(rewards=[1.0, 1.0]) == []


def test_a_reward_that_is_none_leaves_its_completion_out():
    """Of right, missing, wrong and right, k is 2 of 3: |A| = √(1/2) and √2."""
    tokens, logprobs = [[4], [5], [6], [7]], [[-1.0]] * 4
    three = group(
        completion_token_ids=tokens, behavior_logprobs=logprobs, rewards=[1.0, None, -1.0, 1.0]
    )
    assert [(r.rollout_id, r.completion_index) for r in three] == [(7, 0), (9, 2), (10, 3)]
    assert [r.advantage for r in three] == pytest.approx([0.5**0.5, -(2**0.5), 0.5**0.5], abs=1e-5)
    assert {r.group_correct for r in three} == {2}
    assert group(rewards=[1.0, None]) == []


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rewards": [1.0]}, "2 completions, 2 arrays of log-probs, 1 rewards"),
        ({"behavior_logprobs": [[-1.0], [-2.0]]}, "completion 1 has 2 tokens and 1 log-probs"),
        ({"completion_token_ids": [[], [5, 6]], "behavior_logprobs": [[], [-2.0, -3.0]]},
         "completion 0 has 0 tokens"),
    ],
)  # fmt: skip
def test_a_group_whose_arrays_do_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        group(**changes)


def test_several_ranks_need_the_command(tmp_path):
    with pytest.raises(UsageError, match=r"num_processes 2: train\(\) is one process"):
        train(load_recipe("tiny", ["engine.num_processes=2"]), tmp_path / "run")
