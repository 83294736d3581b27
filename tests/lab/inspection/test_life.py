"""The life of a rollout, compared with the rows of the files."""

import json
from collections import Counter

import by_hand
import pytest
from commands import run_inspect as run
from small_runs.synthetic import PRESETS, SyntheticRun, synthetic_recipe

from grpo_replay.lab.inspection.rebuild import replay_storage, survivors_for
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.inspection.views import read_life
from grpo_replay.replay import ReplayBuffer
from grpo_replay.storage.recipe_history import change_file, write_recipe


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
    assert life.fate == f"evicted at the end of step {birth + 5}, at age 5, by max_age_steps 5"
    assert fresh["tokens"] == len(life.rollout["completion_token_ids"])


def test_each_fate_is_described(runs):
    rows = by_hand.rows_of(runs["ours"] / "rollouts")
    source = open_source(runs["ours"])
    dropped = next(row["rollout_id"] for row in rows if not row["kept"])
    newest = next(row["rollout_id"] for row in reversed(rows) if row["kept"])
    assert "no learning signal" in read_life(source, dropped).fate
    assert read_life(source, dropped).uses == ()
    assert read_life(source, newest).fate == "still stored after step 24"
    assert "does not replay" in read_life(open_source(runs["grpo"]), _kept(runs["grpo"])).fate
    fifo = read_life(open_source(runs["fifo"]), _kept(runs["fifo"]))
    assert fifo.fate.endswith("by the capacity")


def _kept(run_dir) -> int:
    rows = by_hand.rows_of(run_dir / "rollouts")
    return next(row["rollout_id"] for row in rows if row["kept"])


def test_fifo_evictions_agree_with_the_snapshots(runs):
    stored = {row["rollout_id"] for row in by_hand.stored_rows(runs["fifo"], 12)}
    source = open_source(runs["fifo"])
    for rollout_id in sorted(stored)[::32]:
        fate = read_life(source, rollout_id).fate
        left = int(fate.split("step ")[1].split(",")[0]) if "evicted" in fate else 25
        assert left > 12


@pytest.mark.parametrize("preset", PRESETS)
def test_storage_rebuilt_from_the_log_has_the_logged_size(runs, preset):
    source = open_source(runs[preset])
    settings = source.recipe.replay
    steps, survivors = survivors_for(source, 1, settings)
    buffer = ReplayBuffer(settings, source.recipe.sampling.group_size)
    stored = [(step, len(buffer)) for step in replay_storage(buffer, survivors, steps)]
    logged = [(line["step"], line["buffer/rollouts"]) for line in source.metrics]
    assert stored == logged and len(stored) == 24


def test_a_snapshot_has_the_rollout_but_not_its_text(runs, tmp_path, capsys):
    copy = tmp_path / "buffer.parquet"
    copy.write_bytes((runs["ours"] / "checkpoints/step_000024/buffer.parquet").read_bytes())
    rollout_id = by_hand.stored_rows(runs["ours"], 24)[0]["rollout_id"]
    run(str(copy), show=rollout_id)
    text = capsys.readouterr().out
    assert str(rollout_id) in text and "not stored in a snapshot" in text


class Resumed(SyntheticRun):
    """Resumed after step 12 with another age limit."""

    def step(self, step):
        if step == 13:
            state = self.buffer.get_state()
            self.buffer.settings = self.recipe.replay.model_copy(update={"max_age_steps": 2})
            self.buffer.set_state(state)
        return super().step(step)


def test_each_step_has_the_settings_of_its_own_recipe(tmp_path):
    recipe = synthetic_recipe("ours")
    made = Resumed(tmp_path / "run", recipe).write(24)
    later = recipe.model_copy(update={"replay": made.buffer.settings})
    write_recipe(change_file(tmp_path / "run", 12), later)
    source = open_source(tmp_path / "run")
    rows = [row for row in by_hand.rows_of(tmp_path / "run" / "rollouts") if row["kept"]]
    newest = {row["birth_step"]: row["rollout_id"] for row in rows}
    for birth, evicted, limit in ((5, 10, 5), (9, 13, 2), (11, 13, 2), (15, 17, 2)):
        assert read_life(source, newest[birth]).fate == (
            f"evicted at the end of step {evicted}, at age {evicted - birth}, by max_age_steps "
            f"{limit}"
        )


def test_the_life_as_text_and_as_json(runs, capsys):
    run(str(runs["ours"]), show=300)
    assert "The answer is \\boxed{" in capsys.readouterr().out
    run(str(runs["ours"]), show=300, as_json=True)
    document = json.loads(capsys.readouterr().out)
    rows = by_hand.rows_of(runs["ours"] / "rollouts")
    group = [row["rollout_id"] for row in rows if row["group_id"] == rows[300]["group_id"]]
    assert [member["rollout_id"] for member in document["group"]] == group
    assert document["rollout"]["rollout_id"] == 300 and len(document["uses"]) == 1
