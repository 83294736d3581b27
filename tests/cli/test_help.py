"""`--help`, `--version` and completion import no heavy library, and a run no more than it needs."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from small_runs.experiments import write_run
from typer.testing import CliRunner

from grpo_replay import __version__
from grpo_replay.cli.app import app
from grpo_replay.shipped_recipes import shipped_recipes

HEAVY = ("torch", "transformers", "deepspeed", "vllm", "datasets", "pyarrow", "pydantic", "numpy")


def _imported_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_no_heavy_library():
    words = ["train", "--help"]
    code = f"from grpo_replay.cli.app import app\ntry: app({words})\nexcept SystemExit: pass"
    imported = _imported_by(code)
    assert "typer" in imported and not imported & set(HEAVY)


ROOT = Path(__file__).resolve().parents[2]

READING = runpy.run_path(str(ROOT / ".ci/check_base.py"))["READING"]

WITHOUT = """
import sys, json
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
from grpo_replay.cli.app import main
for line in json.loads(sys.argv[2]):
    sys.argv = ["grpo-replay", *line.split()]
    try: main()
    except SystemExit as end: print(f"exit {end.code}: {line}", file=sys.stderr)
"""


@pytest.mark.slow
def test_commands_that_only_read_need_none_of_the_packages_for_training(runs, tmp_path):
    """As `.ci/check_base.py` shows in an environment that has only the base."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra, base = (
        {Requirement(line).name.replace("-", "_") for line in lines}
        for lines in (project["optional-dependencies"]["train"], project["dependencies"])
    )
    missing = {{"pyzmq": "zmq"}.get(name, name) for name in extra - base}
    assert {"torch", "psutil", "zmq"} < missing
    read = shutil.copytree(runs["ours"], tmp_path / "read")
    ended = write_run(tmp_path / "ended", [], seed=0, gain=0.2)
    lines = [line.format(run=ended if line.startswith("report") else read) for line in READING]
    words = [sys.executable, "-c", WITHOUT, json.dumps(sorted(missing)), json.dumps(lines)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.count("exit 0: ") == len(READING) > 8, done.stderr


def test_the_light_modules_do_not_import_torch():
    light = ("recipe", "types", "replay.advantages", "replay", "replay.snapshot", "replay.compose",
             "replay.batch", "storage.rollout_log", "prompts.prompt_set", "rewards.scorer",
             "evaluation.aes", "lab.planning.theory", "training.metrics", "training.weight_sync",
             "storage.checkpoint", "storage.run_directory", "distributed.comm",
             "sampling.sampler_protocol")  # fmt: skip
    imported = _imported_by("\n".join(f"import grpo_replay.{name}" for name in light))
    assert "grpo_replay.lab.planning.theory" in imported
    assert not imported & {"torch", "transformers", "deepspeed", "vllm"}


def completed(*words: str) -> list[str]:
    """What bash is offered for the last word."""
    variables = {
        "_GRPO_REPLAY_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["grpo-replay", *words]),
        "COMP_CWORD": str(len(words)),
    }
    code = "from grpo_replay.cli.app import app; app(prog_name='grpo-replay')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables
    )
    return done.stdout.split()


def test_the_shell_completes_shipped_recipes():
    offered = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"]
    assert completed("eval", "--recipe", "qwen3-") == offered


def test_every_command_has_help_and_that_of_train_lists_every_shipped_recipe():
    for command in ("train", "eval", "inspect-buffer", "aes", "plan", "sweep", "report"):
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0
        if command == "train":
            assert all(name in result.output for name in shipped_recipes())
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"grpo-replay {__version__}\n")
