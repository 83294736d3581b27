"""Damage of a checkpoint's files, and a broken Parquet file, are named by --verify."""

import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def swap(path: Path) -> None:
    """The same file of another step."""
    shutil.copy(str(path).replace("step_000012", "step_000009"), path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("checkpoints/step_000012/manifest.json", truncate),
        ("checkpoints/step_000012/state.json", swap),
        ("checkpoints/step_000012/buffer.parquet", flip),
        ("checkpoints/step_000012/model/model.safetensors", Path.unlink),
        ("rollouts/step_000003.parquet", truncate),
        ("draws/step_000011.parquet", Path.unlink),
    ],
)
def test_damage_is_named(name, damage, ours_run, tmp_path):
    run = shutil.copytree(ours_run.path, tmp_path / "run", symlinks=True)
    damage(run / name)
    words = ["inspect-buffer", str(run), "--verify"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 3 and "Traceback" not in result.output
    assert all(part in result.output for part in name.split("/"))
