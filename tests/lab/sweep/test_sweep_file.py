"""SWEEP.yaml is read whole and checked before anything is started."""

import pytest

from grpo_replay.errors import RecipeError, SweepFileError
from grpo_replay.lab.sweep.grid import choose_arms, expand
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


def read(tmp_path, text):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return expand(read_sweep_file(path), path, tmp_path / "out")


@pytest.mark.parametrize("name", ["two", "'1e3'"])
def test_a_good_sweep_is_read_and_survives_a_round_trip(tmp_path, name):
    (comparison,) = read(tmp_path, GOOD.replace("name: two", f"name: {name}"))
    assert list(comparison.file.arms) == ["grpo", "ours"]
    copy = tmp_path / "copy.yaml"
    copy.write_text(sweep_to_yaml(comparison.file))
    assert read_sweep_file(copy) == comparison.file


BAD = {
    "an arm named twice": (
        ("  ours: [replay.preset=ours]", "  grpo: [replay.preset=ours]"),
        "sweep.yaml:7: not valid YAML: 'grpo' is written twice, first in line 6",
    ),
    "arms that differ in case": (
        ("  ours:", "  GRPO:"),
        "differ only in case: grpo is there twice",
    ),
    "a key that a recipe lacks": (
        ("replay.preset=ours", "replay.presett=ours"),
        "arm ours: .*unknown key 'replay.presett' .did you mean 'preset'",
    ),
    "a value that contradicts": (("run.steps=30", "run.steps=10"), "warmup_steps 20 is not less"),
    "a value of the wrong type": (("run.steps=30", "run.steps=many"), "run.steps: .* 'many'"),
    "an override without value": (("run.steps=30", "run.steps"), "expected key=value"),
    "a key overridden twice": (
        ("[run.steps=30]", "[run.steps=30, run.steps=40]"),
        "set: run.steps is there twice",
    ),
    "a seed among the overrides": (("run.steps=30", "run.seed=3"), "listed in seeds"),
    "an arm called tune": (("  ours:", "  tune:"), "cannot be called 'tune'"),
    "an arm called log": (("  ours:", "  log:"), "cannot be called 'log'"),
    "an arm with a path": (("  ours:", "  ../ours:"), "'../ours' is to name a folder: use"),
    "a name with a path": (("name: two", "name: a/b"), "name: 'a/b' is to name a folder"),
    "a doubled seed": (("seeds: [3, 4]", "seeds: [3, 3]"), "seeds: 3 is there twice"),
    "a negative seed": (("seeds: [3, 4]", "seeds: [3, -4]"), "greater than or equal to 0"),
    "a seed that is text": (("seeds: [3, 4]", "seeds: ['3']"), "valid integer"),
    "no seeds": (("seeds: [3, 4]", "seeds: []"), "seeds: is empty"),
    "a doubled tuning seed": (("seeds: [1, 2]", "seeds: [1, 1]"), "tune.seeds: 1 is there twice"),
    "a seed in both stages": (("seeds: [3, 4]", "seeds: [2, 4]"), "tune.seeds and seeds share 2"),
    "an empty grid": (("{optimizer.learning_rate: [5.0e-5, 1.0e-4]}", "{}"), "tune.grid: is empty"),
    "a grid without values": (("[5.0e-5, 1.0e-4]", "[]"), "learning_rate: is empty"),
    "a value twice in the grid": (
        ("[5.0e-5, 1.0e-4]", "[1.0e-4, 1.0e-4]"),
        "learning_rate: 0.0001 is there twice",
    ),
    "a tuned key that an arm sets": (
        ("replay.preset=ours", "optimizer.learning_rate=1e-3"),
        "ours sets optimizer.learning_rate, which tune.grid chooses",
    ),
    "a tuned key that no recipe has": (("optimizer.learning_rate", "optimizer.rate"), "unknown k"),
    "another metric": (
        ("  grid:", "  metric: final.gsm8k\n  grid:"),
        "tune.metric: Input should be 'final.mean', found 'final.gsm8k'",
    ),
    "tuning without evaluation": (("run.steps=30", "'eval.benchmarks=[]'"), "evaluates nothing"),
    "a value that cannot be a folder": (
        ("optimizer.learning_rate: [5.0e-5, 1.0e-4]", "model.path: [a/b]"),
        "cannot name a folder",
    ),
    "no arms": (
        ("  grpo: [replay.preset=grpo]\n  ours: [replay.preset=ours]", "  {}"),
        "arms: is empty",
    ),
    "an arm that the grid makes too": (
        (
            "  ours: [replay.preset=ours]",
            "  ours: []\n  'ours,group_size=4': [sampling.group_size=4]\n"
            "grid: {sampling.group_size: [4, 8]}",
        ),
        "arms: ours,group_size=4 is there twice with what grid makes",
    ),
    "an unknown key": (("name: two", "name: two\nseed: 3"), "unknown key 'seed' .did you mean"),
    "an unknown recipe": (("recipe: tiny", "recipe: tinny"), "no recipe 'tinny'.*did you mean"),
    "a recipe twice": (("recipe: tiny", "recipe: [tiny, tiny]"), "recipe: tiny is there twice"),
    "a newer format": (("name: two", "name: two\nformat: 2"), "format: Input should be 1, found 2"),
    "no mapping": ((GOOD, "- a"), "a sweep is a mapping"),
    "no YAML": (("seeds: [3, 4]", "seeds: [3, 4"), "sweep.yaml:1[0-9]: "),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_bad_sweeps_are_refused_with_their_place(tmp_path, change, message):
    assert change[0] in GOOD
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        read(tmp_path, GOOD.replace(*change))


def test_an_unknown_sweep_is_refused_with_the_shipped_names(tmp_path):
    with pytest.raises(RecipeError, match=r"'tiny-mian'.*did you mean 'tiny-main'.*paper-a, "):
        find_sweep("tiny-mian")
    with pytest.raises(SweepFileError, match=r"--only uors: no such arm .did you mean 'ours'"):
        choose_arms(read(tmp_path, GOOD), "uors")


def test_a_recipe_file_is_found_beside_the_sweep(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("run: {steps: 40}\nreplay: {preset: grpo}\n")
    text = GOOD.replace("recipe: tiny", "recipe: mine.yaml").replace("set: [run.steps=30]", "")
    text = text[: text.index("tune:")] + "seeds: [3]\n"
    monkeypatch.chdir("/")
    (comparison,) = read(tmp_path, text)
    cell = comparison.arms[0].comparison[0]
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
