"""A campaign: damage of a checkpoint's files, or a broken Parquet file, is named by --verify, ends
no resume in a traceback, and costs no file."""

import os
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from click.testing import Result
from small_runs.fixtures import made_once
from small_runs.trained import files_of
from typer.testing import CliRunner

from grpo_replay.cli.app import app

CHECKPOINT = {
    "manifest": "checkpoints/step_000004/manifest.json",
    "state": "checkpoints/step_000004/state.json",
    "buffer": "checkpoints/step_000004/buffer.parquet",
    "weights": "checkpoints/step_000004/model/model.safetensors",
    "optimizer": "checkpoints/step_000004/engine/state",
    "engine layout": "checkpoints/step_000004/engine/layout.json",
    "model configuration": "checkpoints/step_000004/model/config.json",
    "tokenizer": "checkpoints/step_000004/model/tokenizer.json",
}
KINDS = {
    **CHECKPOINT,
    "rollouts": "rollouts/step_000003.parquet",
    "draws": "draws/step_000004.parquet",
}


@pytest.fixture(scope="module")
def whole(shared_folder, processes) -> Path:
    """A small run with two checkpoints."""
    from small_runs.trained import train_small_run

    path = shared_folder / "damage_campaign"
    sections = {
        "run": {"steps": 4},
        "checkpoint": {"every_steps": 2},
    }
    made_once(path, lambda: train_small_run(path, **sections))
    return path


def place(run: Path, kind: str) -> Path:
    path = run / KINDS[kind]
    return next(path.iterdir()) if path.is_dir() else path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def delete(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    """The same file of another step."""
    shutil.copy(re.sub(r"step_\d{6}", "step_000002", str(path)), path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flip": flip, "truncate": truncate, "delete": delete, "swap": swap,
}  # fmt: skip
SAME_BYTES = [("tokenizer", "swap"), ("model configuration", "swap"), ("engine layout", "swap")]
"""A file that is alike in every checkpoint."""


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "300"})


def verify(run: Path) -> Result:
    return call("inspect-buffer", run, "--verify")


def resume(run: Path) -> Result:
    return call("train", "--resume", "--output-dir", run)


def campaign(
    command: Callable[[Path], Result], whole: Path, folder: Path, cases: list[tuple[str, str]]
) -> list[tuple[str, str, str]]:
    """What went wrong when the command met one damage after the other."""
    run, problems = folder / "run", []
    for kind, name in cases:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run, symlinks=True)
        DAMAGES[name](place(run, kind))
        before = files_of(run)
        result = command(run)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            problems.append((kind, name, repr(result.exception)))
        elif result.exit_code == 0 and KINDS[kind] not in result.output:
            problems.append((kind, name, "no word"))
        elif result.exit_code != 0 and files_of(run) != before:
            problems.append((kind, name, "refused, and changed files"))
    return problems


def test_a_whole_run_is_verified_in_full(whole):
    done = verify(whole)
    assert done.exit_code == 0, done.output
    assert "4 steps match the algorithm of the recipe" in " ".join(done.output.split())


def test_damage_of_each_sort_is_named(whole, tmp_path):
    def verified(run: Path) -> Result:
        result = verify(run)
        assert result.exit_code != 0
        return result

    cases = [case for case in product(KINDS, DAMAGES) if case not in SAME_BYTES]
    assert campaign(verified, whole, tmp_path, cases[::5]) == []


@pytest.mark.slow
def test_every_damage_of_a_checkpoint_is_named_by_a_resume_and_costs_no_file(whole, tmp_path):
    cases = [case for case in product(CHECKPOINT, DAMAGES) if case not in SAME_BYTES]
    assert campaign(resume, whole, tmp_path, cases) == []
