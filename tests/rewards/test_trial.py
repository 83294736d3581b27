"""Reward functions and reference answers are tried before a run."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.recipe import RewardSection
from grpo_replay.rewards import trial
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.rewards.trial import Sample, try_rewards
from grpo_replay.types import Prompt

FILE = Path(__file__).parents[1] / "support" / "judge_rewards_file.py"


def problem(answer: str) -> Prompt:
    messages = [{"role": "user", "content": "1+1"}]
    return Prompt("p", "1+1=", np.array([1]), answer, {}, messages)


def tried(section: RewardSection, *answers: str) -> list[str]:
    problems = [problem(answer) for answer in answers]
    sample = Sample(problems, 1000, "prompts.source", lambda text: list(text.encode()))
    with RewardScorer.open(section.model_copy(update={"workers": 1})) as scorer:
        return try_rewards(section, scorer, sample)


def of_file(name: str, **settings) -> RewardSection:
    return RewardSection(function=f"{FILE}:{name}", workers=1, **settings)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", r"KeyError: 'no such field' \(.*judge_rewards_file\.py:15\)"),
        ("returns_nan", "returned nan, expected a finite"),
        ("returns_none", "returns_none returned None"),
        ("returns_text", "returned '1', expected a finite"),
        ("exits", r"SystemExit: it called sys.exit \(.*judge_rewards_file\.py:31\)"),
        ("other_names", r"other_names\(text.*is f\(completion, answer, row\).*unknown: 'text', 'g"),
        ("no_such_name", "has no attribute 'no_such_name'"),
    ],
)
def test_a_function_that_fails_on_every_row_is_refused_with_its_first_error(name, reason):
    with pytest.raises(RecipeError, match=reason):
        tried(of_file(name), "1", "2", "3", "4", "5")


def test_a_function_that_fails_on_some_rows_is_a_notice():
    section = RewardSection(function="judge_rewards:only_even", workers=1)
    (notice,) = tried(section, "2", "3", "4", "6", "9")
    assert "failed on 1 of the 4 rows" in notice and "ValueError: odd" in notice


def test_a_function_may_fail_on_every_row_if_the_recipe_says_so():
    (notice,) = tried(of_file("raises", max_failed_share=1.0), "1", "2")
    assert "failed on 2 of the 2 rows" in notice


def test_a_score_below_what_counts_as_correct_is_a_notice_with_the_value_to_set(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "def part(completion, answer):\n    return 0.777 if answer in completion else 0\n"
    )
    (notice,) = tried(RewardSection(function=f"{path}:part", workers=1), "1", "2")
    assert "own.py:part gives at most 0.777" in notice and "reward.correct is 1.0" in notice
    assert notice.endswith("set reward.correct 0.777")
    assert tried(RewardSection(function=f"{path}:part", workers=1, correct=0.777), "1", "2") == []


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("1.0 if answer in completion else -1.0", False),
        ("-1.0", True),  # a mistake, or another form of answer
        ("1.0", True),
        ("-1.0 if answer in completion else 1.0", True),
    ],
)
def test_a_function_that_does_not_tell_right_from_wrong_answers_is_a_notice(tmp_path, value, told):
    (tmp_path / "own.py").write_text(f"def f(completion, answer):\n    return {value}\n")
    notices = tried(RewardSection(function=f"{tmp_path}/own.py:f", workers=1), "1", "2", "3")
    assert [("own.py:f gives" in each, "another problem's" in each) for each in notices] == (
        [(True, True)] * told
    )


def test_answers_are_graded_against_themselves():
    readable = [str(number) for number in range(20)]
    assert tried(RewardSection(function="minerva"), *readable) == []
    long = "word " * 200  # longer than the 500 characters in which a box counts
    (notice,) = tried(RewardSection(function="minerva"), *readable, long, long)
    assert "minerva cannot read 2 of 22 reference answers checked, of 1000" in notice
    with pytest.raises(DatasetError, match=r"prompts\.source: minerva can read none of 2 .*answer"):
        tried(RewardSection(function="minerva"), long, long)


def test_beside_a_function_of_the_user_the_answers_are_still_checked(monkeypatch):
    section = RewardSection(function=["minerva", "judge_rewards:Count.calls"], workers=1)
    called, original = [], RewardScorer.results

    def counted(self):
        verdicts = original(self)
        called.append(len(verdicts))
        return verdicts

    monkeypatch.setattr(RewardScorer, "results", counted)
    (notice,) = tried(section, *map(str, range(30)), "word " * 200)
    assert "cannot read 1 of 31" in notice
    assert called == [trial.TRIED_ROWS, trial.TRIED_ROWS, 27], (
        "the user's function is called on few rows only"
    )


def test_a_file_may_import_its_neighbours_and_share_the_name_of_a_module(tmp_path):
    (tmp_path / "neighbour.py").write_text("SCORE = 0.5\n")
    (tmp_path / "json.py").write_text(
        "from neighbour import SCORE\n\ndef f(completion, answer, row):\n    return SCORE\n"
    )
    assert "json" in sys.modules
    section = RewardSection(
        function=[f"{tmp_path}/json.py:f", {"function": f"{tmp_path}/json.py:f", "name": "again"}],
        workers=1,
    )
    with RewardScorer.open(section) as scorer:
        (verdict,) = scorer.score([("a", "b", {})])
    assert (verdict.reward, verdict.scores) == (1.0, (0.5, 0.5))


def test_a_function_that_is_late_on_every_row_is_refused_with_its_limit(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("import time\n\ndef late(completion, answer):\n    time.sleep(30)\n")
    section = RewardSection(function=f"{path}:late", workers=1, time_limit_seconds=0.3)
    with pytest.raises(RecipeError, match=r"own\.py:late.*timeout.*time_limit_seconds 0\.3"):
        tried(section, "1", "2")


def test_a_function_is_tried_with_the_token_ids_of_its_completion(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "def ends(completion, completion_ids):\n"
        "    assert bytes(completion_ids).decode() == completion\n"
        "    return float(completion_ids[-1] == ord('.') and completion_ids[-3] == ord('2'))\n"
    )
    assert tried(RewardSection(function=f"{path}:ends", workers=1), "2", "2") == []


GOLDS = {
    r"\frac{1}{2}": r"\dfrac", "3,4": "a list in another order", "x=5": "the value of an equation",
    r"5\text{ cm}": "without a unit", "(1,2)": r"\left and \right", "2-3": "spaces",
}  # fmt: skip


def test_answers_are_graded_in_the_ways_in_which_they_may_be_written():
    golds = [*GOLDS, "7", "-8", "1,000", r"\text{Monday}", "x^{-1}"]
    assert tried(RewardSection(function="boxed"), *golds) == []
    (notice,) = tried(RewardSection(function="minerva"), *golds)
    assert notice.startswith(
        "3 of 11 reference answers checked, of 1000, may be graded wrongly: min"
    )
    assert r"(\dfrac: 1, a list in another order: 1, \left and \right: 1)" in notice
    assert notice.endswith(r"for example '\\dfrac{1}{2}' for '\\frac{1}{2}'")


@pytest.mark.parametrize("gold", GOLDS)
def test_each_way_changes_the_answers_that_it_is_for(gold):
    found = [way for way, pattern, _ in trial.REWRITES if re.search(pattern, gold)]
    assert GOLDS[gold] in found
