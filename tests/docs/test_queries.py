"""The queries of docs/buffer.md, run on a small run of the real trainer, say what its files say."""

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from grpo_replay.tiny.problems import train_problems

PAGE = Path(__file__).resolve().parents[2] / "docs" / "buffer.md"


@pytest.fixture
def session(one_update_run, tmp_path, monkeypatch) -> dict:
    """The variables of a session that ran every line of the page."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "ours").symlink_to(one_update_run.path)
    with (tmp_path / "problems.jsonl").open("w") as file:
        for problem in train_problems(one_update_run.recipe.run.seed):
            file.write(json.dumps(problem) + "\n")
    monkeypatch.chdir(tmp_path)
    variables: dict = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), variables)
    return variables


def test_the_lines_of_the_page_answer_what_they_say(session, one_update_run):
    rows, draws = one_update_run.all_rollouts, one_update_run.all_draws
    steps = len(one_update_run.metrics)
    assert set(session["wrong"].reward) == {-1.0} and len(session["wrong"]) > 5
    assert list(session["wrong"].completion_text) == [
        rows[each]["completion_text"] for each in session["wrong"].rollout_id
    ]
    stored = session["stored"]
    snapshot = one_update_run.path / "checkpoints/latest/buffer.parquet"
    assert set(stored.rollout_id[stored.stored]) == set(
        pq.read_table(snapshot)["rollout_id"].to_pylist()
    )
    assert len(stored) == len(rows)
    assert set(stored.age_steps + stored.birth_step) == {steps}
    drawn = Counter(row["rollout_id"] for row in draws)
    uses = dict(zip(session["uses"].rollout_id, session["uses"].times_drawn, strict=True))
    assert {each: count for each, count in uses.items() if count} == drawn
    assert len(uses) == sum(row["kept"] for row in rows.values())
    assert dict(zip(session["by_age"].age_steps, session["by_age"].uses, strict=True)) == Counter(
        row["age_steps"] for row in draws
    )
    prompts = Counter(rows[row["rollout_id"]]["prompt_id"] for row in draws)
    assert session["prompts"].uses.max() == max(prompts.values())
    joined = session["with_answer"]
    assert len(joined) == len(rows)
    assert all(joined.prompt == joined.problem + "=")
