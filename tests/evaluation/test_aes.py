"""AES: the papers' published numbers from their published inputs, and refusals."""

import json

import pytest
from commands import run_aes as run
from test_statistics import report

from grpo_replay.errors import EvaluationFileError, UsageError
from grpo_replay.evaluation.aes import accuracy_efficiency_score, score_reports

BASE = {"0.6B": (9.52, 2162), "1.7B": (13.53, 2007), "4B": (17.36, 2452)}
GRPO = {"0.6B": (11.20, 3890), "1.7B": (15.75, 2174), "4B": (26.71, 7576)}


@pytest.mark.parametrize(
    ("size", "recomputed", "printed"),
    [("0.6B", -0.270, -0.269), ("1.7B", 0.409, 0.409), ("4B", -0.474, -0.472)],
)
def test_aes_of_paper_a(size, recomputed, printed):
    """Printed from unrounded inputs; ours from the rounded ones of the same table."""
    score = accuracy_efficiency_score(*GRPO[size], *BASE[size])[2]
    assert round(score, 3) == recomputed
    assert score == pytest.approx(printed, abs=0.0025)


def test_aes_by_hand():
    # A fifth fewer tokens, a tenth more accuracy: 0.2 + 3·0.1. A tenth less: 0.2 - 5·0.1.
    assert accuracy_efficiency_score(55, 80, 50, 100) == pytest.approx((0.2, 0.1, 0.5))
    assert accuracy_efficiency_score(45, 80, 50, 100) == pytest.approx((0.2, -0.1, -0.3))
    assert accuracy_efficiency_score(45, 80, 50, 100, gain=1, loss=2)[2] == pytest.approx(0.0)
    assert accuracy_efficiency_score(50, 100, 50, 100) == (0, 0, 0)


def test_other_benchmarks_and_references_without_correct_answers_are_refused():
    with pytest.raises(EvaluationFileError, match="different benchmarks"):
        score_reports(("r", report({"x": [[1]]})), [("c", report({"y": [[1]]}))])
    with pytest.raises(UsageError, match="accuracy 0"):
        score_reports(("r", report({"x": [[0]]})), [("c", report({"x": [[1]]}))])


def test_the_command_prints_one_json_document(capsys):
    run("17.36,2452", [], ["GRPO=26.71,7576", "a=b=20,2000"], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["reference"] == {"name": "reference", "accuracy": 17.36, "tokens": 2452}
    assert document["constants"] == {"gain": 3, "loss": 5}
    first = document["candidates"][0]
    assert {"name", "accuracy", "tokens", "delta_length", "delta_accuracy", "aes"} <= first.keys()
    assert (first["name"], round(first["aes"], 3)) == ("GRPO", -0.474)


def test_the_command_reads_evaluation_files(capsys, tmp_path):
    for name, problems in (("r", [[1, 0]] * 4), ("c", [[1, 1]] * 4)):
        report({"x": problems}).write(tmp_path / f"{name}.json")
    run(str(tmp_path / "r.json"), [str(tmp_path / "c.json")], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["candidates"][0]["aes"] == pytest.approx(3)
    assert document["candidates"][0]["aes_interval"] == pytest.approx([3, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0,100", [], ["c=1,1"]), "accuracy 0"),
        (("50,100", ["x.json"], ["c=1,1"]), "either evaluation files, named without an option, or"),
        (("50,100", [], []), "either evaluation files, named without an option, or"),
        (("50", [], ["c=1,1"]), "expected ACC,TOKENS"),
        (("nan,100", [], ["c=1,1"]), "accuracy of 0 to 100"),
        (("50,-1", [], ["c=1,1"]), "and tokens"),
    ],
)
def test_the_command_refuses_invalid_arguments(arguments, message):
    with pytest.raises(UsageError, match=message):
        run(*arguments)
