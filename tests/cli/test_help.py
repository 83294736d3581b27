"""`--help`, `--version` and completion import no heavy library, and a run no more than it needs."""

import os
import subprocess
import sys

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
