"""SWEEP.yaml is read whole and checked before anything is started."""

import pytest

from grpo_replay.errors import RecipeError, SweepFileError
from grpo_replay.lab.sweep.cells import expand
from grpo_replay.lab.sweep.sweep_file import find_sweep, read_sweep_file, sweep_to_yaml

GOOD = """
name: two
recipe: tiny
set: [run.steps=30]
arms:
  grpo: [replay.preset=grpo]
  ours: [replay.preset=ours]
tune:
  seeds: [1, 2]
  grid: {optimizer.learning_rate: [5.0e-5, 1.0e-4]}
seeds: [3, 4]
"""


def read(tmp_path, text, only=None):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return expand(read_sweep_file(path), path, tmp_path / "out", only)


def test_a_good_sweep_is_read_and_survives_a_round_trip(tmp_path):
    path, copy = tmp_path / "sweep.yaml", tmp_path / "copy.yaml"
    path.write_text(GOOD.replace("name: two", "name: '1e3'"))
    sweep = read_sweep_file(path)
    assert sweep.name == "1e3" and list(sweep.arms) == ["grpo", "ours"]
    copy.write_text(sweep_to_yaml(sweep))
    assert read_sweep_file(copy) == sweep


BAD = {
    "an arm named twice": (
        ("  ours: [replay.preset=ours]", "  grpo: [replay.preset=ours]"), "sweep.yaml:7: .*'grpo'",
    ),
    "a key that a recipe lacks": (
        ("replay.preset=ours", "replay.presett=ours"), "arm ours: .*'replay.presett'",
    ),
    "a value that contradicts": (("run.steps=30", "run.steps=10"), "warmup_steps 20"),
    "a seed set by an arm": (("replay.preset=ours", "run.seed=3"), "ours sets run.seed"),
    "an arm called tune": (("  ours:", "  tune:"), "'tune'"),
    "an arm with a path": (("  ours:", "  ../ours:"), "'../ours'"),
    "no seeds": (("seeds: [3, 4]", "seeds: []"), "seeds: List should have"),
    "a seed twice": (("seeds: [3, 4]", "seeds: [3, 3]"), "seeds: .*3, 3. is named more than once"),
    "a seed in both stages": (("seeds: [3, 4]", "seeds: [2, 4]"), "tune.seeds and seeds share 2"),
    "a grid without values": (("[5.0e-5, 1.0e-4]", "[]"), "learning_rate: List should have"),
    "a tuned key that an arm sets": (
        ("replay.preset=ours", "optimizer.learning_rate=1e-3"),
        "ours sets optimizer.learning_rate",
    ),
    "a tuned key that no recipe has": (("optimizer.learning_rate", "optimizer.rate"), "unknown k"),
    "tuning without evaluation": (("run.steps=30", "'eval.benchmarks=[]'"), "evaluates nothing"),
    "a value that cannot be a folder": (
        ("optimizer.learning_rate: [5.0e-5, 1.0e-4]", "model.path: [a/b]"), "names a folder",
    ),
    "an unknown key": (("name: two", "name: two\nseed: 3"), "seed: Extra.*keys .* seeds"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_bad_sweeps_are_refused_with_their_place(tmp_path, change, message):
    assert change[0] in GOOD
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        read(tmp_path, GOOD.replace(*change))


def test_an_unknown_sweep_is_refused_with_the_shipped_names(tmp_path):
    with pytest.raises(RecipeError, match=r"'tiny-mian'.*did you mean 'tiny-main'"):
        find_sweep("tiny-mian")
    with pytest.raises(SweepFileError, match=r"--only uors: .*did you mean 'ours'"):
        read(tmp_path, GOOD, "uors")


def test_a_recipe_file_is_found_beside_the_sweep(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("run: {steps: 40}\nreplay: {preset: grpo}\n")
    text = GOOD.replace("recipe: tiny", "recipe: mine.yaml").replace("set: [run.steps=30]", "")
    text = text[: text.index("tune:")] + "seeds: [3]\n"
    monkeypatch.chdir("/")
    cell = read(tmp_path, text)[0]
    assert cell.recipe == str(tmp_path / "mine.yaml")
    assert cell.resolved_recipe().run.steps == 40


def test_a_grid_makes_an_arm_of_every_combination_that_an_arm_leaves_open(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text(
        "name: grid\nrecipe: tiny\nseeds: [1]\n"
        "arms:\n  plain: [replay.preset=grpo, replay.ratio=1]\n  ours: []\n"
        "grid:\n  replay.ratio: [0.5, 1]\n  optimizer.learning_rate: [1.0e-4]\n"
    )
    sweep = read_sweep_file(path)
    assert sweep.arms == {
        "plain,learning_rate=0.0001": [
            "replay.preset=grpo", "replay.ratio=1", "optimizer.learning_rate=0.0001",
        ],
        "ours,ratio=0.5,learning_rate=0.0001": [
            "replay.ratio=0.5", "optimizer.learning_rate=0.0001",
        ],
        "ours,ratio=1,learning_rate=0.0001": ["replay.ratio=1", "optimizer.learning_rate=0.0001"],
    }  # fmt: skip
    (tmp_path / "again.yaml").write_text(sweep_to_yaml(sweep))
    assert read_sweep_file(tmp_path / "again.yaml") == sweep
