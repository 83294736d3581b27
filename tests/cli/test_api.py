"""The Python API: recipes, rows and functions as Python values, and what it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from judge_rewards import half_for_hint, no_sum
from judge_rewards_file import shortness
from small_runs.experiments import write_run

import grpo_replay
from grpo_replay import api
from grpo_replay.errors import DatasetError, RecipeError, UsageError
from grpo_replay.prompts.prompt_set import read_source
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.run_directory import RunDirectory


@pytest.fixture
def started(monkeypatch) -> list[SimpleNamespace]:
    """What runs were started with; nothing is trained."""
    runs: list[SimpleNamespace] = []

    def run_training(recipe, path, resume, observer):
        runs.append(SimpleNamespace(recipe=recipe, path=path, resume=resume, observer=observer))
        return runs[-1]

    monkeypatch.setattr("grpo_replay.training.run.run_training", run_training)
    return runs


def test_the_package_has_the_functions_and_loads_them_when_they_are_used():
    code = (
        "import sys, grpo_replay\n"
        "assert 'grpo_replay.api' not in sys.modules\n"
        "print(grpo_replay.train.__module__, sorted({'torch', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["grpo_replay.api", "[]"]
    assert {name for name in api.__all__} <= set(grpo_replay.__all__)
    assert all(getattr(grpo_replay, name) is getattr(api, name) for name in api.__all__)


def test_a_recipe_is_a_name_or_an_object_and_overrides_are_words_or_a_mapping():
    own = load_recipe("tiny", ["run.seed=7"])
    assert api.load_recipe("tiny", ["run.steps=30"]).run.steps == 30
    found = api.load_recipe(own, {"run.steps": 30})
    assert (found.run.steps, found.run.seed) == (30, 7)


def test_paths_and_numpy_scalars_are_overrides_and_other_objects_are_refused():
    changes = {
        "model.path": Path("/a/model"), "run.steps": np.int64(30), "replay.ratio": np.float32(0.5),
        "reward.mask_truncated": np.bool_(True), "eval.benchmarks": [np.str_("tiny_add")],
        "name": "no", "prompts.system_prompt": "a = b # c", "replay.max_age_steps": None,
    }  # fmt: skip
    found = api.load_recipe("tiny", changes)
    assert (found.model.path, found.run.steps, found.replay.ratio) == ("/a/model", 30, 0.5)
    assert found.reward.mask_truncated is True and found.eval.benchmarks == ["tiny_add"]
    assert (found.name, found.replay.max_age_steps) == ("no", None)
    assert found.prompts.system_prompt == "a = b # c"
    with pytest.raises(UsageError, match=r"override run\.steps: .* is a set"):
        api.load_recipe("tiny", {"run.steps": {30}})
    with pytest.raises(RecipeError, match=r"replay\.rato"):
        api.load_recipe("tiny", {"replay.rato": 1})


def test_what_is_no_recipe_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="namespace"):
        api.train(SimpleNamespace(engine=1), tmp_path / "run")
    with pytest.raises(UsageError, match="resume=True"):
        api.train(None, tmp_path / "run")


def test_rows_become_a_file_beside_the_run_and_a_callback_hears_steps(started, tmp_path):
    id_field = "key"
    rows = ({"problem": f"{n}+1", "answer": str(n + 1), id_field: f"é{n}"} for n in range(3))
    heard = []
    api.train("tiny", tmp_path / "a" / "run", prompts=rows, on_step=heard.append)
    started[0].observer.on_step({"step": 1})
    assert heard == [{"step": 1}]
    prompts = started[0].recipe.prompts
    assert prompts.source == str(tmp_path / "a" / "run.prompts.jsonl")
    assert prompts.id_field is None
    api.train("tiny", tmp_path / "b", prompts=[{"problem": "1+1", "answer": np.int64(2)}])
    assert json.loads((tmp_path / "b.prompts.jsonl").read_text())["answer"] == 2
    api.train("tiny", tmp_path / "c", prompts=[{"problem": "\ud83d", "answer": "1"}])
    with pytest.raises(DatasetError, match=r"c.prompts.jsonl:1: field 'problem' has half"):
        read_source(started[-1].recipe.prompts)
    text = (tmp_path / "a" / "run.prompts.jsonl").read_text()
    assert [json.loads(line)[id_field] for line in text.splitlines()] == ["é0", "é1", "é2"]


def test_a_class_of_a_dataset_is_written_by_its_name(started, tmp_path):
    import datasets

    features = {
        "problem": datasets.Value("string"),
        "answer": datasets.ClassLabel(names=["A", "B"]),
    }
    rows = [{"problem": "x", "answer": 1}]
    given = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    api.train("tiny", tmp_path / "a", prompts=given)
    written = json.loads((tmp_path / "a.prompts.jsonl").read_text())
    assert written == {"problem": "x", "answer": "B"}


def test_a_function_is_named_by_its_file(started, tmp_path):
    for reward in (half_for_hint, shortness, "minerva"):
        api.train("tiny", tmp_path / "run", reward=reward)
    named = [run.recipe.reward.function for run in started]
    assert re.fullmatch(r"/.*/judge_rewards\.py:half_for_hint", named[0])
    assert re.fullmatch(r"/.*/judge_rewards_file\.py:shortness", named[1])
    assert named[2] == "minerva"


def test_a_function_that_no_other_process_can_import_is_refused(started, tmp_path, monkeypatch):
    def closure(completion, answer, row):
        return 1.0

    unguarded = SimpleNamespace(__module__="__main__", __qualname__="f")
    script = tmp_path / "script.py"
    script.write_text("train()\n")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    for reward in (closure, lambda completion, answer, row: 1.0, unguarded):
        with pytest.raises(UsageError, match=r'reward="file\.py:function"'):
            api.train("tiny", tmp_path / "run", reward=reward)
    script.write_text('if __name__ == "__main__":\n    train()\n')
    api.train("tiny", tmp_path / "run", reward=unguarded)
    assert started[0].recipe.reward.function == f"{script}:f"


def test_a_resume_goes_on_with_the_runs_own_recipe(started, tmp_path):
    """With another it is refused, as the command does; with the same one it need not be left out,
    nor need the rows that were given at its start."""
    rows = [{"problem": "1+1", "answer": "2", "problem_id": "a"}]
    changes = {"optimizer.learning_rate": 1e-5}
    run = RunDirectory(tmp_path / "run")
    api.train("tiny", run.path, prompts=rows, overrides=changes)
    run.create(started[0].recipe)
    run.metrics_path.write_text("")
    run.unlock()
    for recipe in (None, "tiny", load_recipe("tiny")):
        api.train(recipe, run.path, resume=True, overrides=changes)
        assert started[-1].recipe == started[0].recipe
    with pytest.raises(UsageError, match=r"optimizer.learning_rate is 1e-05 in the run, 7e-05 in"):
        api.train("tiny", run.path, resume=True)
    api.train(None, run.path, resume=True, overrides={"run.steps": 999})
    assert (started[-1].recipe.run.steps, started[-1].recipe.optimizer.learning_rate) == (999, 1e-5)


def test_an_evaluation_and_the_views_of_a_run_print_nothing(tmp_path, runs, capfd):
    quick = ["eval.samples=1", "eval.max_problems=3", "eval.greedy=false", "reward.workers=1"]
    recipe = load_recipe("tiny", quick)
    found = api.evaluate("builtin:tiny", tmp_path / "e.json", recipe, ["tiny_add"], reward=no_sum)
    assert found.verifier.endswith("judge_rewards.py:no_sum") and found.accuracies()["mean"] == 0
    assert api.inspect(runs["ours"]).occupancy.stored_rollouts > 0
    ended = write_run(tmp_path / "ended", [], seed=0, gain=0.2)
    assert [arm["name"] for arm in api.report(ended)["arms"]] == ["grpo"]
    assert capfd.readouterr() == ("", "")
