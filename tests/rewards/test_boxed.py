"""The `boxed` verifier against a table that was graded by hand, twice."""

import csv
import time
from pathlib import Path

import pytest

from grpo_replay.rewards.answer_text import last_boxes
from grpo_replay.rewards.boxed import BoxedGrader

TABLE = Path(__file__).with_name("boxed_pairs.tsv")
WRONG = {
    # (answer, reference): what the verifier says. docs/rewards.md lists these.
    ("x=1, y=2", "(1,2)"): "incorrect",
    ("3", "3:1"): "correct",
    (r"\boxed{\begin{array}{c}5\end{array}}", "5"): "incorrect",
    ("12 sq cm", r"12 \text{ cm}^2"): "incorrect",
    (r"40^\circ", r"40^\circ \text{F}"): "incorrect",
}


def test_the_verdicts_of_the_table_are_right_but_for_those_that_are_known():
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    grader, wrong = BoxedGrader(), {}
    for row in rows:
        answer, gold = row["answer"], row["gold"]
        whole = row["kind"] == "several boxes"
        found, _ = grader.grade(answer if whole else f"So it is $\\boxed{{{answer}}}$.", gold)
        if found != row["verdict"]:
            wrong[answer, gold] = found
    assert wrong == WRONG
    assert len(rows) > 250 and len({row["kind"] for row in rows}) > 25
    assert {row["verdict"] for row in rows} == {"correct", "incorrect", "unparsable"}


@pytest.mark.parametrize(
    ("completion", "boxes"),
    [
        (r"\boxed{1}, then \boxed{2}", ["2"]),
        (r"$\boxed{1}$ and $\boxed{2}$", ["2", "1,2"]),
        (r"\boxed{2} \boxed{ } \boxed{$ $}", ["2"]),
        (r"\boxed{\frac{1}{\boxed{2}}}", [r"\frac{1}{\boxed{2}}"]),
        (r"\boxed{\{1}. \fbox {\}}", [r"\}"]),
        (r"\boxed 5. \boxed{6", ["5"]),
        ("} } { \\boxed{7}", ["7"]),
        ("no box", []),
        ("\\boxed{" * 20_000, []),
        ("\\boxed{" * 5_000 + "1" + "}" * 5_000, ["\\boxed{" * 4_999 + "1" + "}" * 4_999]),
    ],
)
def test_the_last_complete_box_that_is_not_empty_is_found(completion, boxes):
    assert last_boxes(completion) == boxes


def test_a_box_may_stand_anywhere_in_the_completion():
    assert BoxedGrader().grade(r"\boxed{5} " + "We check it again. " * 200, "5") == (
        "correct",
        True,
    )


@pytest.mark.parametrize(
    "answer",
    [
        r"\frac{1}{0}",
        r"0.\overline{" + "9" * 5_000 + "}",
        "(" * 3_000,
        "\x00\ud800",
        "1e999999999",
        "{",
    ],
)
def test_what_cannot_be_read_is_incorrect(answer):
    assert BoxedGrader().grade(f"\\boxed{{{answer}}} \\boxed{{{answer}}}"[:9_000], "5")[0] in (
        "incorrect", "unparsable",
    )  # fmt: skip


def test_a_comparison_without_end_is_a_timeout(monkeypatch):
    monkeypatch.setattr("grpo_replay.rewards.boxed.LIMIT_SECONDS", 1)
    monkeypatch.setattr("grpo_replay.rewards.math_verify.STARVED_SECONDS", 0)
    monkeypatch.setattr("grpo_replay.rewards.boxed.same", lambda *_: time.sleep(60))
    assert BoxedGrader().grade(r"\boxed{5}", "6") == ("timeout", True)
