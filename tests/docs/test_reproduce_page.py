"""docs/reproduce.md: every command in it is one, and its computed numbers are ours."""

import itertools
import re
import shlex
import sys
from pathlib import Path

import typer
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.lab.inspection.rows import Filter
from grpo_replay.recipe import Machines, load_recipe
from grpo_replay.replay.compose import relative_compute
from grpo_replay.storage.rollout_log import ROLLOUT_SCHEMA

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reproduce.md").read_text()


def commands() -> list[list[str]]:
    """The words after `grpo-replay` of every command on the page, inline or in a block."""
    inline = re.findall(r"`grpo-replay ([^`]+)`", PAGE)
    lines = re.findall(r"^ *grpo-replay (.+)$", PAGE, re.MULTILINE)
    return [shlex.split(each.replace("$seed", "43")) for each in [*inline, *lines]]


def test_every_command_and_option_exists():
    known = typer.main.get_command(app).commands
    for name, *words in commands():
        options = {option for each in known[name].params for option in each.opts}
        assert {word for word in words if re.match(r"--[a-z]", word)} <= options, (name, words)
    assert len(commands()) > 30


def test_every_recipe_loads_with_its_overrides():
    seen = set()
    for name, *words in commands():
        if name == "train":
            overrides = [after for word, after in itertools.pairwise(words) if word == "--set"]
            load_recipe(words[0], overrides)
            seen.add(words[0])
        if "--recipe" in words:
            load_recipe(words[words.index("--recipe") + 1])
    assert seen == {"qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "fifo-qwen3-0.6b", "fifo-qwen2.5-7b"}


def test_every_plan_command_succeeds():
    plans = [words for words in commands() if words[0] == "plan"]
    for words in plans:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output)
    assert len(plans) == 3


def test_every_condition_parses():
    conditions = [w[w.index("--where") + 1] for w in commands() if "--where" in w]
    conditions += re.findall(r'`--where "([^"]+)"`', PAGE)
    assert len(conditions) == 2
    for condition in conditions:
        Filter(condition, ROLLOUT_SCHEMA)


def test_the_cost_table_agrees_with_the_formula():
    rows = re.findall(r"^\| \((\d), (\d)\) \|(.*)\|$", PAGE, re.MULTILINE)
    for workers, trainers, cells in rows:
        w, t = int(workers), int(trainers)
        expected = [w / t]
        for mu in (6.84, 5.28):
            y = Machines(workers=w, trainers=t, mu=mu).ratio
            expected += [y, relative_compute(y, mu)]
        assert [f"{value:.3f}" for value in expected] == [c.strip() for c in cells.split("|")]
    assert [int(w) for w, _, _ in rows] == [7, 6, 5, 4, 3, 2, 1]


def test_the_untying_program_writes_a_model_that_loads_untied(tmp_path, monkeypatch):
    from grpo_replay.engine.models import load_policy, load_tokenizer
    from grpo_replay.recipe import ModelSection
    from grpo_replay.tiny import BASE_DIR

    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    monkeypatch.setattr(sys, "argv", ["untie", str(BASE_DIR), str(tmp_path / "untied")])
    exec(program, {})
    section = ModelSection(path=str(tmp_path / "untied"))
    policy, base = load_policy(section, 0), load_policy(ModelSection(), 0)
    assert policy.lm_head.weight is not policy.model.embed_tokens.weight
    assert policy.lm_head.weight.equal(base.lm_head.weight)
    assert len(load_tokenizer(section)) == len(load_tokenizer(ModelSection()))
