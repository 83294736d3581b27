"""docs/guide.md, followed literally: its files are written, its commands run, in order."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_replay.recipe import load_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
FILES = {
    name: content
    for name, content in re.findall(r"`([\w.-]+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL)
}
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if not line.startswith("pip install")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("guide")
    for name, content in FILES.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    programs = Path(sys.executable).parent
    return subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, timeout=1500,
        env=os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip


def test_the_guide_has_its_files_and_commands():
    assert set(FILES) == {"make_problems.py", "reward.py", "my-task.yaml", "gsm8k.yaml"}
    assert len(COMMANDS) >= 12


def test_every_cell_of_the_notebook_has_run_and_has_its_outputs():
    """`docs/make_reference.py` drops the outputs of a cell whose code changes."""
    notebook = (Path(__file__).parents[2] / "docs" / "guide.ipynb").read_text(encoding="utf-8")
    cells = [each for each in json.loads(notebook)["cells"] if each["cell_type"] == "code"]
    assert [each["execution_count"] for each in cells] == list(range(1, len(cells) + 1))
    silent = [each["source"] for each in cells if not each["outputs"]]
    assert silent == ["!python make_problems.py"]
    outputs = [output for each in cells for output in each["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert "/tmp/" not in notebook


@pytest.mark.parametrize("name", ["my-task.yaml", "gsm8k.yaml"])
def test_its_recipes_are_valid(folder, name):
    recipe = load_recipe(str(folder / name), [])
    assert recipe.replays and recipe.eval.benchmarks


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_every_command_runs_and_the_model_learns(folder):
    outputs = {}
    for command in COMMANDS:
        done = run(command, folder)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        outputs[command] = done.stdout + done.stderr
    compared = next(text for command, text in outputs.items() if "base.json trained" in command)
    gain = float(re.search(r"mean.*?\+(\d+\.\d)", compared, re.DOTALL)[1])
    assert gain > 8, compared
    verified = next(text for command, text in outputs.items() if "--verify" in command)
    assert "80 steps match" in verified
    assert (folder / "buffer.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_plan_of_the_real_task_is_made_without_its_weights(folder):
    (folder / "gsm8k-test.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n')
    done = run("grpo-replay train gsm8k.yaml --dry-run --gpu-memory-gib 80 --json", folder)
    assert done.returncode == 0, done.stderr[-3000:]
