"""The life of a rollout, compared with the rows of the files."""

import json
from collections import Counter

import by_hand
from commands import run_inspect as run

from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.inspection.views import read_life


def test_a_life_lists_every_use_and_the_eviction(runs):
    draws = by_hand.rows_of(runs["ours"] / "draws")
    rollout_id, count = Counter(row["rollout_id"] for row in draws).most_common(1)[0]
    assert count > 1
    mine = [row for row in draws if row["rollout_id"] == rollout_id]
    life = read_life(open_source(runs["ours"]), rollout_id)
    fresh, *drawn = life.uses
    for name in ("step", "age_steps", "probability", "approx_kl"):
        assert [use[name] for use in drawn] == [row[name] for row in mine]
    birth = life.rollout["birth_step"]
    assert (fresh["step"], fresh["age_steps"], fresh["probability"]) == (birth, 0, None)
    assert life.fate.startswith(f"evicted by max_age_steps 5 at the end of step {birth + 5}")
    assert fresh["tokens"] == len(life.rollout["completion_token_ids"])


def test_each_fate_is_described(runs):
    rows = by_hand.rows_of(runs["ours"] / "rollouts")
    source = open_source(runs["ours"])
    dropped = next(row["rollout_id"] for row in rows if not row["kept"])
    newest = next(row["rollout_id"] for row in reversed(rows) if row["kept"])
    assert "no signal" in read_life(source, dropped).fate
    assert read_life(source, dropped).uses == ()
    assert read_life(source, newest).fate == "still stored after step 24"
    assert "does not replay" in read_life(open_source(runs["grpo"]), _kept(runs["grpo"])).fate
    fifo = read_life(open_source(runs["fifo"]), _kept(runs["fifo"]))
    assert fifo.fate.endswith("by the capacity")


def _kept(run_dir) -> int:
    rows = by_hand.rows_of(run_dir / "rollouts")
    return next(row["rollout_id"] for row in rows if row["kept"])


def test_what_is_stored_agrees_with_the_snapshots(runs):
    stored = {row["rollout_id"] for row in by_hand.stored_rows(runs["fifo"], 12)}
    source = open_source(runs["fifo"], 12)
    for row in by_hand.rows_of(runs["fifo"] / "rollouts"):
        if row["birth_step"] <= 12 and row["kept"] and row["rollout_id"] % 16 == 0:
            fate = read_life(source, row["rollout_id"]).fate
            assert ("still stored" in fate) == (row["rollout_id"] in stored)


def test_the_life_as_text_and_as_json(runs, capsys):
    run(str(runs["ours"]), show=300)
    assert "The answer is \\boxed{" in capsys.readouterr().out
    run(str(runs["ours"]), show=300, as_json=True)
    document = json.loads(capsys.readouterr().out)
    rows = by_hand.rows_of(runs["ours"] / "rollouts")
    group = [row["rollout_id"] for row in rows if row["group_id"] == rows[300]["group_id"]]
    assert [member["rollout_id"] for member in document["group"]] == group
    assert document["rollout"]["rollout_id"] == 300 and len(document["uses"]) == 1
