"""`--help` imports no heavy library."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "deepspeed", "vllm", "datasets", "pyarrow", "pydantic", "numpy")


def _imported_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_no_heavy_library():
    code = "from grpo_replay.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass"
    imported = _imported_by(code)
    assert "typer" in imported
    assert not imported & set(HEAVY)


def test_the_light_modules_do_not_import_torch():
    light = ("recipe", "types", "grpo.advantages", "buffer", "buffer.snapshot", "buffer.compose",
             "grpo.batch", "storage.rollout_log", "prompts.prompt_set", "rewards.scorer",
             "evaluation.aes", "planning.theory", "training.metrics", "training.weight_sync",
             "storage.checkpoint", "storage.run_directory", "grpo.seeding", "distributed.comm",
             "sampling.protocol")  # fmt: skip
    imported = _imported_by("\n".join(f"import grpo_replay.{name}" for name in light))
    assert "grpo_replay.planning.theory" in imported
    assert not imported & {"torch", "transformers", "deepspeed", "vllm"}


def test_every_command_has_help():
    from typer.testing import CliRunner

    from grpo_replay.cli import app

    commands = ["train", "eval", "inspect-buffer", "aes", "plan"]
    for command in commands:
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0
        assert "--json" in result.output
