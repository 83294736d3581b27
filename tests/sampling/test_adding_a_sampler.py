"""A sampler is its class and its entry in the open list: every other file asks for its facts."""

import ast
from pathlib import Path

import pytest
import toy_sampler
from small_runs.trained import small_recipe, train_small_run
from toy_sampler import ToySampler

from grpo_replay.api import evaluate
from grpo_replay.cli.foreign_code import code_of
from grpo_replay.errors import RecipeError
from grpo_replay.evaluation.cache import sampler_facts
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.recipe.open_lists import SAMPLERS, SHIPPED_SAMPLERS, SamplerFacts
from grpo_replay.tiny import BASE_DIR

PACKAGE = Path(__file__).parents[2] / "grpo_replay"
FILE = f"{toy_sampler.__file__}:ToySampler"
LORA = {"model": {"lora": {"r": 4}}, "run": {"steps": 2}, "replay": {"preset": "grpo"}}


@pytest.fixture
def toy(monkeypatch):
    facts = SamplerFacts("toy_sampler:ToySampler", packages=("numpy", "pyarrow"))
    monkeypatch.setitem(SHIPPED_SAMPLERS, "toy", facts)
    monkeypatch.setitem(SAMPLERS._import_paths, "toy", facts.import_path)


@pytest.fixture(autouse=True)
def forgetful():
    ToySampler.checked_on.clear()
    ToySampler.got_adapters_alone.clear()


def test_an_entry_is_checked_trained_with_and_evaluated_by_its_facts(toy, tmp_path, processes):
    run = train_small_run(tmp_path / "run", **LORA, sampling={"backend": "toy"})
    assert ToySampler.checked_on == [1]
    assert [line["sampler/logprob_gap_max"] < 1e-4 for line in run.metrics] == [True, True]
    assert ToySampler.got_adapters_alone == [True, True]
    assert code_of(run.recipe) == []
    assert sampler_facts(run.recipe.sampling)["sampler_sha256"] is None
    words = ["sampling.backend=toy", "eval.max_problems=1", "eval.samples=1"]
    evaluate(BASE_DIR, tmp_path / "eval.json", "tiny", overrides=words)
    versions = read_report(tmp_path / "eval.json").versions
    assert {"numpy", "pyarrow"} <= versions.keys()


def test_the_same_class_named_by_its_file_is_code_of_the_user(tmp_path, processes):
    run = train_small_run(tmp_path / "run", **LORA, sampling={"backend": FILE})
    assert ToySampler.got_adapters_alone == [False, False]
    assert code_of(run.recipe) == [f"sampling.backend {FILE}"]
    assert sampler_facts(run.recipe.sampling)["sampler_sha256"] is not None


def test_an_entry_on_servers_may_sample_while_the_trainer_works(monkeypatch):
    for name, on_servers in (("here", False), ("there", True)):
        facts = SamplerFacts("toy_sampler:ToySampler", on_servers=on_servers)
        monkeypatch.setitem(SHIPPED_SAMPLERS, name, facts)
        monkeypatch.setitem(SAMPLERS._import_paths, name, facts.import_path)
    sections = {"run": {"mode": "async"}, "loss": {"behavior_logprobs": "sampler"}}
    servers = {"servers": {"launch": 2}}
    recipe = small_recipe(**sections, sampling={"backend": "there", **servers})
    assert recipe.sampling.servers_launched == 2
    with pytest.raises(RecipeError, match=r"sampling\.backend 'here': sampling goes on"):
        small_recipe(**sections, sampling={"backend": "here", **servers})


def test_no_file_but_the_open_list_decides_by_a_samplers_name():
    """`vllm` is also a module and a section of the recipe."""
    named, files = set(), sorted(PACKAGE.rglob("*.py"))
    for file in files:
        texts = (
            each.value
            for each in ast.walk(ast.parse(file.read_text()))
            if isinstance(each, ast.Constant)
        )
        if {"hf", "vllm_server"} & set(texts):
            named.add(str(file.relative_to(PACKAGE)))
    assert len(files) > 150
    assert named == {"recipe/open_lists.py", "recipe/input_sections.py"}  # the second: the default
