"""What a library does not take of its settings is refused before a model is loaded: by a run at its
start, and by the dry run with the same words."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import RecipeError
from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training.opening import RunOpener

REFUSED = {
    "optimizer.adamw.nonsense=1": "optimizer.adamw: .*unexpected keyword argument 'nonsense'",
    "engine.zero.nonsense=3": "engine.zero: nonsense: Extra inputs are not permitted",
    "model.lora={r: 4, nonsense: 1}": "model.lora: .*unexpected keyword argument 'nonsense'",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(RunOpener, "_try_rewards", lambda _: None)


def start(recipe: Recipe, folder: Path) -> None:
    with ExitStack() as stack:
        device = SimpleNamespace(type="cpu")
        RunOpener(recipe, Comm(), device, RunDirectory(folder), stack).open()


@pytest.mark.parametrize("override", REFUSED)
def test_what_a_library_refuses_stops_the_start_and_is_a_problem_of_the_dry_run(override, tmp_path):
    recipe = load_recipe("tiny", [override])
    folder = tmp_path / "run"
    with pytest.raises(RecipeError, match=REFUSED[override]) as refused:
        start(recipe, folder)
    assert not folder.exists(), "nothing was created"
    found = dry_run(recipe)
    assert found["problems"] == [str(refused.value)] and found["exit_code"] == 2


def test_what_a_library_takes_of_its_own_settings_fits():
    taken = ["optimizer.adamw.maximize=false", "model.lora={r: 4, use_rslora: true}"]
    assert dry_run(load_recipe("tiny", taken))["problems"] == []
