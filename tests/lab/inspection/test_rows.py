"""Rollouts that a condition selects are listed and exported as the log has them."""

import json

import by_hand
import pyarrow.parquet as pq
import pytest
from commands import run_inspect as inspect_run

from grpo_replay.errors import UsageError
from grpo_replay.prompts.prompt_set import KnownProblems
from grpo_replay.storage.checkpoint import RunState


def listed(capsys) -> list[dict]:
    return json.loads(capsys.readouterr().out)["rollouts"]


def test_a_condition_selects_the_same_rollouts_as_python(runs, capsys):
    stored = {row["rollout_id"] for row in by_hand.stored_rows(runs["ours"], 24)}
    rows = by_hand.rows_of(runs["ours"] / "rollouts")
    expected = [
        row["rollout_id"] for row in rows if row["reward"] == 1 and row["rollout_id"] in stored
    ]
    inspect_run(str(runs["ours"]), where="reward = 1 and stored", limit=1000, as_json=True)
    assert [row["rollout_id"] for row in listed(capsys)] == expected != []
    with pytest.raises(UsageError, match="did you mean 'advantage'"):
        inspect_run(str(runs["ours"]), where="advntage > 1")


def test_an_export_has_every_column_of_the_selected_rollouts(runs, tmp_path):
    target = tmp_path / "some.parquet"
    inspect_run(str(runs["ours"]), where="kept", export=str(target))
    original = [row for row in by_hand.rows_of(runs["ours"] / "rollouts") if row["kept"]]
    exported = pq.read_table(target).to_pylist()
    assert [{name: row[name] for name in original[0]} for row in exported] == original


@pytest.mark.parametrize("recorded, answers", [("now", ["15"]), ("then", [None])])
def test_a_text_has_the_problem_of_its_step_or_none(runs, capsys, monkeypatch, recorded, answers):
    """The file of the prompts may have been edited since the step of the rollout."""
    first = by_hand.rows_of(runs["ours"] / "rollouts")[0]
    known = KnownProblems({first["prompt_id"]: ("[7+8]", "15")}, "now")
    monkeypatch.setattr("grpo_replay.prompts.prompt_set.read_problems", lambda *_: known)
    state = RunState(prompts={"1": recorded})
    monkeypatch.setattr("grpo_replay.cli.inspect_command.newest_state", lambda _: state)
    inspect_run(str(runs["ours"]), where="rollout_id = 0", text=True, as_json=True)
    assert [row["answer"] for row in listed(capsys)] == answers
