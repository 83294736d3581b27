"""The filter language: selected rows, errors and their positions."""

import io
import json

import by_hand
import pyarrow as pa
import pytest
from commands import run_inspect as inspect_run
from rich.console import Console

from grpo_replay.errors import DatasetError, UsageError
from grpo_replay.lab.inspection.rows import Filter, iter_rows, open_rows
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.inspection.views import LISTED, print_list
from grpo_replay.prompts.prompt_set import KnownProblems
from grpo_replay.storage.checkpoint import RunState


@pytest.fixture(scope="module")
def rows(runs):
    return open_rows(open_source(runs["ours"]))


@pytest.fixture(scope="module")
def plain(runs) -> list[dict]:
    """Every rollout as a dict, with the derived columns computed by hand."""
    draws = by_hand.rows_of(runs["ours"] / "draws")
    stored = {row["rollout_id"] for row in by_hand.stored_rows(runs["ours"], 24)}
    rows = by_hand.rows_of(runs["ours"] / "rollouts")
    for row in rows:
        steps = [draw["step"] for draw in draws if draw["rollout_id"] == row["rollout_id"]]
        row["age_steps"] = 24 - row["birth_step"]
        row["completion_tokens"] = len(row["completion_token_ids"])
        row["times_used"] = len(steps)
        row["last_used_step"] = max(steps, default=None)
        row["stored"] = row["rollout_id"] in stored
    return rows


def selected(rows, text: str) -> list[int]:
    chosen = Filter(text, rows.schema)
    tables = iter_rows(rows, ("rollout_id",), chosen)
    return [rollout_id for table in tables for rollout_id in table.column(0).to_pylist()]


CASES = {
    "reward = 1": lambda r: r["reward"] == 1,
    "reward == 1 and kept": lambda r: r["reward"] == 1 and r["kept"],
    "not kept": lambda r: not r["kept"],
    "advantage > 1": lambda r: r["advantage"] is not None and r["advantage"] > 1,
    "advantage >= -1.0 and advantage < 1e0": (
        lambda r: r["advantage"] is not None and -1.0 <= r["advantage"] < 1.0
    ),
    "advantage is null": lambda r: r["advantage"] is None,
    "advantage is not null and not reward = 1": (
        lambda r: r["advantage"] is not None and r["reward"] != 1
    ),
    "prompt_id in ('prompt-3', 'prompt-4')": lambda r: r["prompt_id"] in ("prompt-3", "prompt-4"),
    "prompt_id not in ('prompt-3')": lambda r: r["prompt_id"] != "prompt-3",
    "birth_step in (1, 2,3)": lambda r: r["birth_step"] in (1, 2, 3),
    "age_steps <= 5 or times_used > 1": lambda r: r["age_steps"] <= 5 or r["times_used"] > 1,
    "stored and completion_tokens >= 30": lambda r: r["stored"] and r["completion_tokens"] >= 30,
    "stored = false AND times_used != 0": lambda r: not r["stored"] and r["times_used"] != 0,
    "last_used_step > 20": lambda r: r["last_used_step"] is not None and r["last_used_step"] > 20,
    "last_used_step is null": lambda r: r["last_used_step"] is None,
    "completion_text like '%boxed{7}%'": lambda r: "boxed{7}" in r["completion_text"],
    "(reward = 1 or birth_step = 2) and (kept or birth_step <> 2)": (
        lambda r: (r["reward"] == 1 or r["birth_step"] == 2) and (r["kept"] or r["birth_step"] != 2)
    ),
    "reward = 1 or birth_step = 2 and not kept": (
        lambda r: r["reward"] == 1 or (r["birth_step"] == 2 and not r["kept"])
    ),
    "policy_version_end = policy_version": lambda r: True,
    "last_used_step - birth_step between 2 and 3": (
        lambda r: (
            r["last_used_step"] is not None and 2 <= r["last_used_step"] - r["birth_step"] <= 3
        )
    ),
    "reward > 1000": lambda r: False,
}


@pytest.mark.parametrize("text", CASES)
def test_a_filter_selects_the_same_rows_as_python(rows, plain, text):
    expected = [row["rollout_id"] for row in plain if CASES[text](row)]
    assert selected(rows, text) == expected
    if text not in ("reward > 1000", "policy_version_end = policy_version"):
        assert 0 < len(expected) < len(plain)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward = 0.1", [0.1]),
        ("reward in (0.1)", [0.1]),
        ("reward != 0.1", [0.0, 0.7, 1.0]),
        ("reward <= 0.1", [0.0, 0.1]),
        ("reward < 0.7", [0.0, 0.1]),
        ("reward >= 0.7", [0.7, 1.0]),
        ("reward > 0.1 and reward < 9000000000000000001", [0.7, 1.0]),
    ],
)
def test_a_reward_is_equal_to_the_number_that_it_was_stored_as(text, expected):
    rewards = pa.table({"reward": pa.array([0.0, 0.1, 0.7, 1.0], pa.float32())})
    found = rewards.filter(Filter(text, rewards.schema).mask(rewards))
    assert found["reward"].to_pylist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "text, message",
    [
        ("advntage > 1", "advntage (did you mean 'advantage'?); the columns are rollout_id,"),
        ("reward > 1 and nonsense = 2", "no such column: nonsense"),
        ("reward >", "syntax error"),
        ("reward = 1 reward = 2", "syntax error"),
        ("prompt_id = 'open", "unrecognized token"),
        ("reward = 1; drop table rows", "syntax error"),
        ("reward = 1) -- ", "syntax error"),
        ("completion_token_ids = 3", "no such column: completion_token_ids"),
        ("", "syntax error"),
        ("1", "one condition on the columns of a rollout"),
        ("reward = 1), (reward = 2", "one condition on the columns of a rollout"),
        ("count(reward) > 3", "one condition on the columns of a rollout"),
        ("rowid > 3", "one condition on the columns of a rollout"),
        ("prompt_id in (select prompt_id from rows)", "not authorized"),
        ("reward = 1) FROM rows UNION SELECT (1", "not authorized"),
        ("reward in (with recursive c as (select 1) select * from c)", "not authorized"),
        ("__import__('os').system('true') = 1", "syntax error"),
    ],
)
def test_what_is_no_condition_on_a_rollout_is_refused(rows, text, message):
    with pytest.raises(UsageError) as error:
        Filter(text, rows.schema)
    first, shown = str(error.value).split("\n", 1)
    assert message in first and shown.endswith(f"  {text}")


def test_a_filter_reaches_no_file(rows, tmp_path):
    for text in (f"writefile('{tmp_path}/x', reward)", f"load_extension('{tmp_path}/x', verdict)"):
        with pytest.raises(UsageError, match=r"no such function|not authorized"):
            list(iter_rows(rows, ("rollout_id",), Filter(text, rows.schema)))
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_can_be_filtered_by_its_own_columns(runs):
    rows = open_rows(open_source(runs["ours"] / "checkpoints" / "step_000024" / "buffer.parquet"))
    stored = by_hand.stored_rows(runs["ours"], 24)
    expected = [row["rollout_id"] for row in stored if row["priority"] > 1 and row["times_used"]]
    assert selected(rows, "priority > 1 and times_used > 0") == expected
    assert 0 < len(expected) < len(stored)
    with pytest.raises(UsageError, match="no such column: completion_text"):
        Filter("completion_text like '%x%'", rows.schema)


def test_a_list_has_as_many_rollouts_as_asked_for_and_their_texts(runs, plain, capsys):
    inspect_run(str(runs["ours"]), where="reward = 1", limit=3, text=True)
    shown = capsys.readouterr().out
    matching = [row for row in plain if row["reward"] == 1]
    for row in matching[:3]:
        assert f"{row['rollout_id']}  {row['completion_text']}" in shown
    assert f"{len(matching):,} rollouts match; the first 3 are shown" in shown
    inspect_run(str(runs["ours"]), where="reward = 1", limit=len(matching), as_json=True)
    assert len(json.loads(capsys.readouterr().out)["rollouts"]) == len(matching)


def test_texts_have_their_problem_and_answer(runs, plain, capsys, monkeypatch):
    row = next(row for row in plain if row["reward"] == 1)
    known = KnownProblems({row["prompt_id"]: ("[7+8]", "15")}, "now")
    monkeypatch.setattr("grpo_replay.prompts.prompt_set.read_problems", lambda *_: known)
    inspect_run(str(runs["ours"]), where="reward = 1", limit=1, text=True)
    shown = capsys.readouterr().out
    assert f"{row['rollout_id']}  [7+8]  answer 15\n{row['completion_text']}" in shown
    inspect_run(str(runs["ours"]), where="reward = 1", limit=1, text=True, as_json=True)
    first = json.loads(capsys.readouterr().out)["rollouts"][0]
    assert (first["problem"], first["answer"]) == ("[7+8]", "15")


@pytest.mark.parametrize(
    ("recorded", "shown", "notice"),
    [
        ({"1": "now"}, 2, ""),
        ({"1": "then"}, 0, "prompts.source has changed since the steps of 2 of 2 rollouts"),
        ({"1": "then", "2": "now"}, 1, "prompts.source has changed since the steps of 1 of 2"),
        ({}, 2, "no checkpoint records what it had then"),
    ],
)
def test_problems_are_those_of_the_step_of_a_rollout_or_none(
    runs, plain, capsys, monkeypatch, recorded, shown, notice
):
    """The file of the prompts was edited after step 1: an id is another problem now."""
    first, second = (next(row for row in plain if row["birth_step"] == step) for step in (1, 2))
    known = {row["prompt_id"]: ("[7+8]", "15") for row in (first, second)}
    monkeypatch.setattr(
        "grpo_replay.prompts.prompt_set.read_problems", lambda *_: KnownProblems(known, "now")
    )
    state = RunState(prompts=recorded)
    monkeypatch.setattr("grpo_replay.cli.inspect_command.newest_state", lambda _: state)
    chosen = f"rollout_id in ({first['rollout_id']}, {second['rollout_id']})"
    inspect_run(str(runs["ours"]), where=chosen, text=True, as_json=True)
    printed = capsys.readouterr()
    listed = json.loads(printed.out)["rollouts"]
    assert [row["answer"] for row in listed] == [None] * (2 - shown) + ["15"] * shown
    assert notice in printed.err and bool(notice) == bool(printed.err)


def test_texts_are_shown_where_the_problems_cannot_be_read(runs, plain, capsys, monkeypatch):
    def gone(*_):
        raise DatasetError("mine.jsonl does not exist")

    monkeypatch.setattr("grpo_replay.prompts.prompt_set.read_problems", gone)
    inspect_run(str(runs["ours"]), where="reward = 1", limit=1, text=True)
    printed = capsys.readouterr()
    assert "the problems are not shown: mine.jsonl does not exist" in printed.err
    assert next(row for row in plain if row["reward"] == 1)["completion_text"] in printed.out


def test_a_limit_without_a_filter_and_texts_of_a_snapshot_are_refused(runs):
    with pytest.raises(UsageError, match="--limit and --text choose what --where lists"):
        inspect_run(str(runs["ours"]), limit=3)
    snapshot = next(runs["ours"].glob("checkpoints/*/buffer.parquet"))
    with pytest.raises(UsageError, match="--text needs a run directory"):
        inspect_run(str(snapshot), where="reward = 1", text=True)


def test_what_a_completion_writes_to_the_terminal_is_text(capsys):
    row = {"rollout_id": 7, "completion_text": "[bold]x[/a] \x1b[31mred"}
    print_list([row], 1, Console(force_terminal=True, color_system=None, width=80))
    assert "7  [bold]x[/a] ␛[31mred" in capsys.readouterr().out


def test_the_list_fits_in_80_columns_and_cuts_off_no_value():
    values = (30_592, "tiny_pair:2*9-8*2", 1_234, 239, -1.0, -0.7746, 1_024, "incorrect", 0, False)
    console = Console(width=80, record=True, file=io.StringIO())
    print_list([dict(zip(LISTED, values, strict=True))], 1, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [line.split() for line in lines if "30592" in line]
    assert " ".join(row) == "30592 tiny_pai 1234 239 -1 -0.775 1024 incorrect 0 False"
