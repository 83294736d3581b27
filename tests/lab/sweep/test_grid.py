"""The cells of a sweep, and the sweeps that ship with the package."""

from pathlib import Path

import numpy as np
import pytest
from buffer_makers import make_rollout

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.lab.sweep.cells import expand
from grpo_replay.lab.sweep.sweep_file import (
    SweepFile,
    TuneSection,
    read_sweep_file,
)
from grpo_replay.lab.sweep.sweep_run import refuse_other_sweep, write_sweep
from grpo_replay.recipe import Recipe
from grpo_replay.replay.compose import draw_count
from grpo_replay.replay.replay_buffer import ReplayBuffer
from grpo_replay.shipped_recipes import shipped_sweeps

HERE = Path("sweep.yaml")


def sweep(**values) -> SweepFile:
    plain = {"name": "s", "recipe": "tiny", "arms": {"a": [], "b": ["replay.ratio=1"]}}
    return SweepFile(**{**plain, "seeds": [3, 4], **values})


def test_cells_lie_where_the_contract_says_and_arms_stay_level():
    tune = TuneSection(seeds=[1], grid={"optimizer.learning_rate": [1e-4, 2e-4]})
    cells = expand(sweep(tune=tune), HERE, Path("out"))
    assert [str(cell.folder) for cell in cells] == [
        "out/tune/a/learning_rate=0.0001/seed-1",
        "out/tune/a/learning_rate=0.0002/seed-1",
        "out/tune/b/learning_rate=0.0001/seed-1",
        "out/tune/b/learning_rate=0.0002/seed-1",
        "out/a/seed-3", "out/b/seed-3", "out/a/seed-4", "out/b/seed-4",
    ]  # fmt: skip
    assert [cell.awaits_tuning for cell in cells] == [False] * 4 + [True] * 4
    assert cells[3].all_overrides() == (
        "replay.ratio=1", "optimizer.learning_rate=0.0002", "run.seed=1",
    )  # fmt: skip
    chosen = cells[5].with_choice(["optimizer.learning_rate=0.0002"])
    recipe = chosen.resolved_recipe()
    found = (recipe.replay.ratio, recipe.optimizer.learning_rate, recipe.run.seed)
    assert found == (1.0, 2e-4, 3) and not chosen.awaits_tuning


@pytest.mark.parametrize("name", shipped_sweeps())
def test_a_shipped_sweep_loads_with_enough_seeds_for_an_interval(name):
    """Five or more; four where a run takes minutes on two cores."""
    path = shipped_sweeps()[name]
    file = read_sweep_file(path)
    cells = expand(file, path, Path("out"))
    takes_minutes = "smollm2" in name or name == "tiny-slow"
    assert file.name == name and len(file.seeds) >= (4 if takes_minutes else 5)
    # Comparison cells of a tuned arm have no values yet: they are the same as nothing else.
    assert len({cell.resolved_recipe().model_dump_json() for cell in cells}) == len(cells)
    text = path.read_text()
    assert f"grpo-replay sweep {name}" in text and "Hardware:" in text


def test_the_arms_of_paper_b_make_the_same_number_of_updates():
    path = shipped_sweeps()["paper-b"]
    updates = {}
    for cell in expand(read_sweep_file(path), path, Path("out")):
        recipe = cell.resolved_recipe()
        updates[cell.arm] = recipe.run.steps * recipe.batch.updates_per_step
        assert trained_rollouts(recipe) / recipe.batch.updates_per_step == 60
    least = min(updates.values())
    assert len(updates) == 8 and max(updates.values()) <= 1.05 * least


def trained_rollouts(recipe: Recipe) -> int:
    """The size of a step's batch once the buffer is full."""
    generated, replay = recipe.rollouts_per_step, recipe.replay
    if not recipe.replays:
        return generated
    buffer = ReplayBuffer(replay, recipe.sampling.group_size)
    buffer.insert([make_rollout(i) for i in range(replay.capacity_rollouts)], step=1)
    count = draw_count(replay, recipe.sampling.group_size, generated)
    return len(buffer.draw(count, 2, np.random.default_rng(0)).rollouts)


def test_a_folder_is_of_one_sweep(tmp_path):
    write_sweep(tmp_path, sweep(seeds=[1, 2]))
    more = sweep(arms={"a": [], "c": ["replay.ratio=2"]}, seeds=[3, 1, 2])
    refuse_other_sweep(tmp_path, more)
    write_sweep(tmp_path, more)
    assert read_sweep_file(tmp_path / "sweep.yaml") == more
    with pytest.raises(OutputDirectoryError, match="holds the sweep s: choose another"):
        refuse_other_sweep(tmp_path, more.model_copy(update={"name": "t"}))
