"""Docs that cannot rot: snippets run, links and names lead somewhere, references are generated."""

import ast
import asyncio
import importlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from grpo_replay.api import train
from grpo_replay.cli.app import app
from grpo_replay.cli.plan_command import MEASURED
from grpo_replay.errors import UsageError
from grpo_replay.recipe import Recipe, RewardSection, load_recipe
from grpo_replay.rewards.scorer import GradingRequest, RewardScorer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
                *DOCS.glob("*.md"), DOCS / "records" / "settings.md"])  # fmt: skip
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}


def program(name: str):
    """A program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def snippets(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[page], re.DOTALL)


# --- generated ------------------------------------------------------------------------------------


def test_the_generated_reference_is_current():
    made = program("make_reference").reference()
    assert TEXTS["recipe.md"] == made, "run python docs/make_reference.py"


def test_the_notebook_has_the_text_and_code_of_the_start_page():
    cells = json.loads((DOCS / "guide.ipynb").read_text(encoding="utf-8"))["cells"]
    made = program("make_reference").notebook_cells()
    assert [(cell["cell_type"], cell["source"]) for cell in cells] == made
    assert len(made) > 20


def test_every_metric_of_a_run_is_on_its_page(one_update_run):
    named = re.findall(r"`([a-z_]+(?:/[\w<>-]+)*)`", "".join(
        line.partition(": ")[0] for line in TEXTS["metrics.md"].splitlines() if line[:2] == "- "
    ))  # fmt: skip
    patterns = [re.sub(r"<\w+>", "[^/]+", name) for name in named]
    written = {name for line in one_update_run.metrics for name in line}
    unknown = [each for each in written if not any(re.fullmatch(p, each) for p in patterns)]
    assert unknown == [] and len(written) > 60


def test_pages_quote_the_measured_results():
    maker = program("make_results")
    for page in maker.PAGES:
        text = page.read_text()
        assert maker.with_results(text) == text, "run python docs/make_results.py"


def test_plan_says_where_replay_paid_in_our_runs():
    maker = program("make_results")
    said = " ".join(maker.pays_above().split())
    assert said == MEASURED
    assert f"Measured on our tasks: {said}" in " ".join(TEXTS["report.md"].split())
    level = maker.shown_level("tiny-long")
    assert f"| `ours` {maker.pays('tiny-long', 'ours', level)} on " in TEXTS["results.md"]


# --- links and names ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", TEXTS[page.name]):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_test_that_a_page_names_is_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", "".join(TEXTS.values())))
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, f"{path}::{name}"
    assert len(named) > 50


def is_recipe_key(name: str) -> bool:
    fields = Recipe.model_fields
    *sections, leaf = name.split(".")
    for section in sections:
        if section not in fields:
            return False
        fields = getattr(fields[section].annotation, "model_fields", {})
    return leaf in fields


def is_code(name: str) -> bool:
    """Whether `grpo_replay.<name>` is a module, or something in one."""
    found = importlib.import_module("grpo_replay")
    for part in name.split("."):
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except (AttributeError, ModuleNotFoundError):
                return False
        found = getattr(found, part)
    return True


def test_no_two_modules_have_the_same_name():
    modules = [path.stem for path in (ROOT / "grpo_replay").rglob("*.py")]
    names = [name for name in modules if name not in ("__init__", "__main__")]
    assert len(names) > 100 and sorted(set(names)) == sorted(names)


def test_every_function_and_key_that_the_equations_name_is_there():
    names = set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", TEXTS["algorithm.md"]))
    assert [each for each in names if not is_code(each) and not is_recipe_key(each)] == []
    assert len(names) > 40


def commands(page: str) -> list[list[str]]:
    """The words after `grpo-replay` of every command on the page, inline or in a block."""
    inline = re.findall(r"`grpo-replay ([^`\n]+)`", TEXTS[page])
    lines = re.findall(r"^ *grpo-replay (.+)$", TEXTS[page], re.MULTILINE)
    return [shlex.split(each.replace("$seed", "43")) for each in [*inline, *lines]]


def test_every_command_that_reproduces_the_papers_exists_and_its_recipe_loads():
    known = typer.main.get_command(app).commands
    for name, *words in commands("results.md"):
        options = {option for each in known[name].params for option in each.opts}
        assert {word for word in words if re.match(r"--[a-z]", word)} <= options, (name, words)
        if name == "train":
            pairs = itertools.pairwise(words)
            load_recipe(words[0], [after for word, after in pairs if word == "--set"])
    assert len(commands("results.md")) > 10


# --- snippets -------------------------------------------------------------------------------------


def lines_of(code: str, folder: Path) -> list[str]:
    """What a program prints; it prints nothing else."""
    (folder / "add.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "add.py"], cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr[-3000:]
    return done.stdout.splitlines()


def test_the_buffer_works_in_another_trainer_and_loads_no_torch(tmp_path):
    _, _, grading, library, handles, *_ = snippets("api.md")
    check = "\nimport sys\nprint(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    learnt = "[[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3]] 41"
    printed = lines_of("\n".join([library, handles, grading, check]), tmp_path)
    assert printed == [learnt, "[4, 5, 6, 7]", "correct 1.0", "unparsable", "incorrect", "[]"]
    assert len(library.splitlines()) <= 40


@pytest.mark.slow
def test_a_program_trains_evaluates_and_inspects_with_rows_and_a_function_of_its_own(tmp_path):
    recipes, own_task, *_ = snippets("api.md")
    trained, accuracy, _, arms = lines_of(recipes, tmp_path)
    assert trained.split()[0] == "6" and 0 <= float(accuracy) <= 1 and arms == "['ours']"
    assert lines_of(own_task, tmp_path) == ["4 4 True"]
    assert train(None, tmp_path / "runs" / "add", resume=True).step == 4


def test_several_ranks_need_the_command(tmp_path):
    with pytest.raises(UsageError, match="num_processes 2"):
        train(load_recipe("tiny", ["engine.num_processes=2"]), tmp_path / "run")


def test_the_first_tests_of_a_contributor_pass_as_printed(tmp_path, processes):
    (code,) = snippets("CONTRIBUTING.md")
    names: dict[str, object] = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    first, second = (names[name] for name in names if name.startswith("test_"))
    first()
    second(tmp_path)


REWARDS = {
    "my_rewards.py:score": [1.0, -1.0, 1.0],
    "verl_score.py:compute_score": [1.0, 0.0, 0.0],
    "trl_reward.py:ends_well": [0.0, 0.0, 1.0],
}
"""Rewards of "4", "5" and "so 4." (cut off) where the answer is 4."""


def test_every_reward_function_grades_as_the_page_says(tmp_path):
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXTS["rewards.md"], re.S):
        (tmp_path / name).write_text(code)
    for function, expected in REWARDS.items():
        section = RewardSection(function=f"{tmp_path}/{function}", workers=1)
        with RewardScorer.open(section) as scorer:
            for key, text in enumerate(("4", "5", "so 4.")):
                scorer.submit(key, GradingRequest(
                    text, "4", {}, truncated=key == 2, prompt="2+2=", step=1, group="1.0",
                    group_size=3,
                ))  # fmt: skip
            found = [verdict.reward for verdict in scorer.results().values()]
        assert found == expected, function


def test_the_judge_of_docs_reads_yes_no_and_neither(monkeypatch):
    judge = program("judge_reward")
    replies = {"4": "Yes.", "5": "<think>yes</think> No", "6": "hm"}

    async def ask(question: str) -> str:
        return replies[question.split("Solution to judge:\n")[1][0]]

    monkeypatch.setattr(judge, "ask", ask)
    problem = [{"role": "user", "content": "2+2"}]
    found = [asyncio.run(judge.judged(text, "4", problem, False)) for text in replies]
    assert found == [1.0, -1.0, None]


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_every_command_of_the_start_page_runs_and_the_model_learns(tmp_path):
    for name, content in re.findall(r"`([\w.-]+)`:\n\n```\w+\n(.*?)```", TEXTS["index.md"], re.S):
        (tmp_path / name).write_text(content, encoding="utf-8")
    programs, outputs = Path(sys.executable).parent, {}
    for command in "".join(snippets("index.md", "bash")).splitlines():
        if command.startswith("pip install"):
            continue
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=1500,
            env=os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        outputs[command] = done.stdout + done.stderr
    compared = next(text for command, text in outputs.items() if "base.json trained" in command)
    assert float(re.search(r"mean.*?\+(\d+\.\d)", compared, re.DOTALL)[1]) > 8, compared
