"""Functions of the user are recognised by the names of their parameters."""

import asyncio
import os
import subprocess
import sys

import pytest

from grpo_replay.recipe import RewardSection
from grpo_replay.rewards.scorer import GradingRequest, RewardScorer
from grpo_replay.rewards.verifier_worker import Caller

TASK = {
    "text": "so \\boxed{4}",
    "answer": "4",
    "row": {
        "data_source": "gsm8k",
        "extra_info": {"index": 7},
        "solution": "four",
        "prompt": "2+2",
    },
    "truncated": True,
    "completion_ids": [52],
    "prompt": "2+2=",
    "messages": [{"role": "user", "content": "2+2="}],
    "step": 12,
    "group": "12.3",
}
MESSAGES = {**TASK, "row": {"prompt": [{"role": "user", "content": "2+2"}], "solution": "four"}}


def call(score, task=TASK):
    (found,) = Caller(score, "score")([task])
    if isinstance(found, Exception):
        raise found
    return found


def test_ours_gets_what_it_names_in_any_order():
    assert call(lambda row, completion, answer: (completion, answer, row["solution"])) == (
        "so \\boxed{4}", "4", "four",
    )  # fmt: skip
    assert call(lambda completion: completion) == "so \\boxed{4}"
    assert call(lambda completion, *, step, truncated, prompt: (step, truncated, prompt)) == (
        12, True, "2+2=",
    )  # fmt: skip
    assert call(lambda completion, messages, group: (messages, group)) == (TASK["messages"], "12.3")
    assert call(lambda completion, answer, row, tolerance=0.5, **_: (tolerance, _)) == (0.5, {})


def test_verls_arguments_are_not_shifted():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, solution_str, ground_truth) == ("gsm8k", "so \\boxed{4}", "4")
        return {"score": 0.5, "index": extra_info["index"]}

    assert call(compute_score) == 0.5
    assert call(lambda solution_str, ground_truth, step: step + 0.5) == 12.5
    without = {**TASK, "row": {}}
    assert call(lambda data_source, solution_str, ground_truth: data_source, without) is None


def test_trls_lists_have_one_completion_and_its_columns():
    def reward(prompts, completions, solution, **columns):
        assert (prompts, completions, solution) == (["2+2="], ["so \\boxed{4}"], ["four"])
        assert columns == {"data_source": ["gsm8k"], "extra_info": [{"index": 7}]}
        return [0.25]

    assert call(reward) == 0.25
    assert call(lambda completions, **_: [None]) is None


def test_trls_prompts_and_completions_are_messages_if_the_rows_prompt_is():
    def reward(prompts, completions, solution):
        assert prompts == [[{"role": "user", "content": "2+2"}]]
        assert completions == [[{"role": "assistant", "content": "so \\boxed{4}"}]]
        return [1.0]

    assert call(reward, MESSAGES) == 1.0


def many(score, count=3):
    tasks = [{**TASK, "text": str(i), "step": i} for i in range(count)]
    return Caller(score, "score")(tasks)


def test_a_batch_gets_the_completions_of_a_prompt_as_lists():
    def ours(completions, answers, rows, truncated, messages, step, group):
        assert (answers, truncated, group) == (["4"] * 3, [True] * 3, ["12.3"] * 3)
        assert messages == [TASK["messages"]] * 3 and rows[2] is TASK["row"]
        return [float(text) + number for text, number in zip(completions, step, strict=True)]

    assert many(ours) == [0.0, 2.0, 4.0]
    assert many(lambda prompts, completions, solution: completions) == ["0", "1", "2"]
    for error in many(lambda completions, answers: [1.0]):
        with pytest.raises(TypeError, match="for 3 completions, expected as many numbers"):
            raise error


def test_async_functions_are_awaited_together_and_fail_alone():
    under_way = []

    async def judged(completion, group):
        under_way.append(completion)
        while len(under_way) < 3:
            await asyncio.sleep(0)
        if completion == "1":
            raise OSError("no judge")
        return None if completion == "2" else 0.5

    first, second, third = many(judged)
    assert (first, third) == (0.5, None) and isinstance(second, OSError)

    async def batch(completions, rows):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    assert many(batch) == [1.0] * 3


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (lambda text, gold, meta: 1.0, "unknown: 'text', 'gold', 'meta'"),
        (lambda completion, answer, row, weight: 1.0, "unknown: 'weight'"),
        (lambda solution_str, ground_truth, tokenizer: 1.0, "unknown: 'tokenizer'"),
        (lambda *args: 1.0, "unknown: all"),
        (3, "3 is not a callable object"),
    ],
)
def test_other_parameters_are_refused_by_name(score, reason):
    with pytest.raises(TypeError, match=reason):
        Caller(score, "score")


def test_async_functions_are_awaited_on_one_loop_and_extras_reach_the_worker():
    section = RewardSection(function="judge_rewards:awaited", workers=1)
    with RewardScorer.open(section) as opened:
        for key, (truncated, step) in enumerate([(False, 3), (True, 4), (False, None)]):
            request = GradingRequest("c", "a", {}, truncated=truncated, prompt="p=", step=step)
            opened.submit(key, request)
        verdicts = list(opened.results().values())
        assert [verdict.reward for verdict in verdicts] == [3.0, -4.0, None]
        assert "takes no evaluation" in opened.first_error


def test_a_file_is_compiled_as_it_is_on_disk_even_with_its_old_size_and_time(tmp_path):
    """Python's own cache of compiled files knows them by both."""
    file = tmp_path / "own.py"
    program = "from grpo_replay.named_functions import load_function as load; import sys"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    given = []
    for number in (11, 99):
        file.write_text(f"def score():\n    return {number}\n")
        os.utime(file, (1_700_000_000, 1_700_000_000))
        command = [sys.executable, "-c", f"{program}; print(load(sys.argv[1])())", f"{file}:score"]
        given.append(subprocess.check_output(command, text=True, env=env))
    assert given == ["11\n", "99\n"]
