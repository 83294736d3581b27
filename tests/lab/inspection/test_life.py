"""The life of a rollout, compared with the rows of the files."""

import json
from collections import Counter
from dataclasses import replace

import by_hand
import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import run_inspect as run
from small_runs.synthetic import PRESETS, SyntheticRun, synthetic_recipe

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.inspection.rebuild import replay_storage, survivors_for
from grpo_replay.lab.inspection.rollout_columns import NO_ROW, find_rows
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.inspection.views import print_life, read_life
from grpo_replay.replay import ReplayBuffer
from grpo_replay.storage.recipe_history import change_file, write_recipe
from grpo_replay.terminal.console import open_console


def test_a_life_lists_every_use_and_the_eviction(runs):
    draws = by_hand.rows_of(runs["ours"] / "draws")
    rollout_id, count = Counter(row["rollout_id"] for row in draws).most_common(1)[0]
    assert count > 1
    mine = [row for row in draws if row["rollout_id"] == rollout_id]
    life = read_life(open_source(runs["ours"]), rollout_id)
    assert [(use["step"], use["age_steps"]) for use in life.uses] == [
        (row["step"], row["age_steps"]) for row in mine
    ]
    assert [use["probability"] for use in life.uses] == [row["probability"] for row in mine]
    assert life.uses[0]["approx_kl"] == mine[0]["approx_kl"]
    birth = life.rollout["birth_step"]
    assert life.fate == f"evicted at the end of step {birth + 5}, at age 5, by max_age_steps 5"
    assert life.fresh_outcome["tokens"] == len(life.rollout["completion_token_ids"])


def test_a_life_says_how_often_a_rollout_was_drawn(runs, capsys):
    draws = by_hand.rows_of(runs["ours"] / "draws")
    life = read_life(open_source(runs["ours"]), draws[0]["rollout_id"])
    for count, said in ((0, "0 times"), (1, "once"), (2, "2 times")):
        print_life(replace(life, uses=life.uses[:1] * count), open_console(markup=True))
        assert f"life: drawn {said}\n" in capsys.readouterr().out


def test_a_life_lists_the_whole_group(runs):
    rows = by_hand.rows_of(runs["ours"] / "rollouts")
    life = read_life(open_source(runs["ours"]), 300)
    group = [row for row in rows if row["group_id"] == rows[300]["group_id"]]
    assert [member["rollout_id"] for member in life.group] == [row["rollout_id"] for row in group]
    assert [member["reward"] for member in life.group] == [row["reward"] for row in group]


def test_each_fate_is_described(runs):
    rows = by_hand.rows_of(runs["ours"] / "rollouts")
    source = open_source(runs["ours"])
    dropped = next(row["rollout_id"] for row in rows if not row["kept"])
    newest = next(row["rollout_id"] for row in reversed(rows) if row["kept"])
    assert "no learning signal" in read_life(source, dropped).fate
    assert read_life(source, dropped).fresh_outcome is None
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
    for rollout_id in sorted(stored)[::16]:
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


def test_only_steps_within_the_age_limit_are_read(runs):
    source = open_source(runs["ours"])  # rollouts are evicted after five steps
    steps, survivors = survivors_for(source, 20, source.recipe.replay)
    assert steps == [15, 16, 17, 18, 19, 20, 21, 22, 23, 24]
    assert survivors.kept.all() and survivors.birth_step.min() == 15
    fifo = open_source(runs["fifo"])
    assert survivors_for(fifo, 20, fifo.recipe.replay)[0] == list(range(1, 25))


def test_unknown_ids_have_no_row():
    ids = np.array([7, 3, 9])
    assert find_rows(ids, [9, 4, 7]).tolist() == [2, NO_ROW, 0]
    assert find_rows(ids[:0], [9, 4]).tolist() == [NO_ROW, NO_ROW]


def test_a_snapshot_has_the_rollout_but_not_its_text(runs, tmp_path, capsys):
    copy = tmp_path / "buffer.parquet"
    copy.write_bytes((runs["ours"] / "checkpoints/step_000024/buffer.parquet").read_bytes())
    rollout_id = by_hand.stored_rows(runs["ours"], 24)[0]["rollout_id"]
    run(str(copy), show=rollout_id)
    text = capsys.readouterr().out
    assert f"rollout {rollout_id}" in text and "not stored in a snapshot" in text


def test_a_snapshot_does_not_say_how_many_of_the_stored_ones_are_correct(runs, tmp_path, capsys):
    path = tmp_path / "buffer.parquet"
    table = pq.read_table(runs["ours"] / "checkpoints/step_000024/buffer.parquet")
    pq.write_table(table.slice(0, 1), path)
    run(str(path), show=table["rollout_id"][0].as_py())
    counted = f": {table['group_correct'][0]} correct, 1 of all are stored, reward mean"
    assert counted in capsys.readouterr().out


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
    text = capsys.readouterr().out
    assert "The answer is \\boxed{" in text
    assert "group 1003" in text and "life" in text
    run(str(runs["ours"]), show=300, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["rollout"]["rollout_id"] == 300 and document["uses"] == []


def test_a_completion_with_colons_is_shown_as_it_is(runs, capsys):
    life = read_life(open_source(runs["ours"]), 300)
    texts = {**life.rollout, "completion_text": "3:x:5 [b] :smile:"}
    print_life(
        replace(life, rollout=texts, prompt_text="a :fire: 4:o:2"), open_console(markup=True)
    )
    text = capsys.readouterr().out
    assert "3:x:5 [b] :smile:" in text and "a :fire: 4:o:2" in text


def test_an_unknown_id_raises_with_the_range_of_ids(runs):
    with pytest.raises(
        SnapshotError, match="no rollout 99999 up to step 24; ids run from 0 to 767"
    ):
        read_life(open_source(runs["ours"]), 99999)
