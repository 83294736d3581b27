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

import grpo_replay
from grpo_replay import __version__
from grpo_replay.cli.app import app
from grpo_replay.shipped_recipes import shipped_recipes

HEAVY = ("torch", "transformers", "deepspeed", "vllm", "datasets", "pyarrow", "pydantic", "numpy")


def _imported_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["sweep", "-h"], ["--version"]])
def test_help_imports_no_heavy_library(words):
    code = f"from grpo_replay.cli.app import app\ntry: app({words})\nexcept SystemExit: pass"
    imported = _imported_by(code)
    assert "typer" in imported
    converts_values = {"pydantic"} if words == ["--version"] else set()  # Typer, with pydantic
    assert not imported & set(HEAVY) - converts_values


STAND_IN_RUN = """
import sys, types
def run_training(recipe, path, resume, observer, scorer):
    scorer.wait_ready()
    print("torch" in sys.modules, scorer.score([("42", "42", None)])[0].status)
    raise SystemExit
sys.modules["grpo_replay.training.run"] = types.SimpleNamespace(run_training=run_training)
from grpo_replay.cli.app import app
app(["train", "tiny", "--set", "reward.function=minerva", "--output-dir", sys.argv[1]])
"""


def test_a_run_starts_its_verifiers_before_it_loads_torch(tmp_path):
    """So that they load at the same time."""
    words = [sys.executable, "-c", STAND_IN_RUN, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "unparsable"], done.stderr


ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(grpo_replay.__file__).parent
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


@pytest.mark.slow
def test_a_synchronous_run_loads_no_clients_of_servers_nor_tensorboard():
    imported = _imported_by("import grpo_replay.training.run")
    assert "transformers" in imported
    assert not imported & {"aiohttp", "zmq", "msgspec", "tensorboard", "matplotlib", "datasets"}


COUNTED_RUN = """
import atexit, sys
def show():
    own = {name: m.__file__ for name, m in sys.modules.items() if name.startswith("grpo_replay")}
    print("files:", *sorted(set(filter(None, own.values()))), file=sys.stderr)
atexit.register(show)
from grpo_replay.cli.app import main
main()
"""


@pytest.mark.slow
def test_a_whole_run_of_train_tiny_executes_at_most_90_files_of_the_package(tmp_path):
    """With the evaluation before and after, a checkpoint, and the tables at the end."""
    changes = {"run.steps": 2, "replay.warmup_steps": 1, "eval.samples": 1}
    words = ["train", "tiny", "--output-dir", str(tmp_path / "run")]
    words += [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-c", COUNTED_RUN, *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("files: "))
    files = [Path(word).relative_to(PACKAGE) for word in line.split()[1:]]
    assert {Path("training/trainer.py"), Path("evaluation/evaluate.py")} < set(files)
    assert "staleness, steps" in done.stdout
    assert len(files) <= 90, "\n".join(map(str, files))


def test_the_light_modules_do_not_import_torch():
    light = ("recipe", "types", "replay.advantages", "replay", "replay.snapshot", "replay.compose",
             "replay.batch", "storage.rollout_log", "prompts.prompt_set", "rewards.scorer",
             "evaluation.aes", "lab.planning.theory", "training.metrics", "training.weight_sync",
             "storage.checkpoint", "storage.run_directory", "distributed.comm",
             "sampling.sampler_protocol")  # fmt: skip
    imported = _imported_by("\n".join(f"import grpo_replay.{name}" for name in light))
    assert "grpo_replay.lab.planning.theory" in imported
    assert not imported & {"torch", "transformers", "deepspeed", "vllm"}


def test_every_command_has_help():
    commands = ["train", "eval", "inspect-buffer", "aes", "plan", "sweep", "report"]
    for command in commands:
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0
        assert ("--json" in result.output) == (command != "sweep")


def test_the_version_is_printed():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"grpo-replay {__version__}\n")


def test_the_help_of_train_lists_every_shipped_recipe():
    text = CliRunner().invoke(app, ["train", "--help"]).output
    assert len(shipped_recipes()) >= 8
    for name in shipped_recipes():
        assert name in text


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


@pytest.mark.parametrize("command", [["train"], ["plan"], ["eval", "--recipe"]])
def test_the_shell_completes_shipped_recipes(command):
    assert completed(*command, "qwen3-") == ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"]


@pytest.mark.slow
def test_a_notebook_with_a_backend_of_its_own_gets_its_figure(runs, tmp_path):
    words = [sys.executable, "-m", "grpo_replay", "inspect-buffer", str(runs["ours"]), "--plot"]
    words.append(str(tmp_path / "p.svg"))
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "p.svg").stat().st_size > 1000
