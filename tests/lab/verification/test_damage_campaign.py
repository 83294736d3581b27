"""A campaign: every kind of file of a run, damaged in every way, is named by --verify."""

import json
import os
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_runs.fixtures import made_once
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.storage.checkpoint import file_facts

KINDS = {
    "recipe": "recipe.yaml",
    "metrics": "metrics.jsonl",
    "rollouts": "rollouts/step_000003.parquet",
    "draws": "draws/step_000004.parquet",
    "base evaluation": "eval/step_000000.json",
    "rows of an evaluation": "eval/step_000004.parquet",
    "summary": "summary.json",
    "list of files": "files.json",
    "manifest": "checkpoints/step_000002/manifest.json",
    "newest manifest": "checkpoints/step_000004/manifest.json",
    "state": "checkpoints/step_000004/state.json",
    "buffer": "checkpoints/step_000004/buffer.parquet",
    "weights": "checkpoints/step_000004/model/model.safetensors",
    "older weights": "checkpoints/step_000002/model/model.safetensors",
    "optimizer": "checkpoints/step_000004/engine/state",
    "engine layout": "checkpoints/step_000004/engine/layout.json",
    "model configuration": "checkpoints/step_000004/model/config.json",
    "tokenizer": "checkpoints/step_000004/model/tokenizer.json",
    "model card": "checkpoints/step_000004/model/README.md",
    "latest": "checkpoints/latest",
}
QUICK = ("metrics", "rollouts", "rows of an evaluation", "state", "weights", "optimizer", "latest")
NAMED_ONLY = {("list of files", "delete")}
"""A run of an earlier version has no such list: what was not checked is said instead."""


@pytest.fixture(scope="module")
def whole(shared_folder, processes) -> Path:
    """A small run with everything that a synchronous run writes."""
    from small_runs.trained import train_small_run

    path = shared_folder / "damage_campaign"
    sections = {
        "run": {"steps": 4},
        "checkpoint": {"every_steps": 2},
        "eval": {"benchmarks": ["tiny_add"], "samples": 1, "max_problems": 4},
    }
    made_once(path, lambda: train_small_run(path, **sections))
    return path


def place(run: Path, kind: str) -> Path:
    path = run / KINDS[kind]
    return next(path.iterdir()) if path.is_dir() and not path.is_symlink() else path


def flip(path: Path, at: float) -> None:
    if path.is_symlink():
        return repoint(path, "step_000009")
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    if path.is_symlink():
        return repoint(path, "step_0000")
    os.truncate(path, path.stat().st_size // 2)


def delete(path: Path) -> None:
    path.unlink()


def repoint(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def swap(path: Path) -> None:
    """Another file of the same kind, where there is one; else that of another run."""
    if path.is_symlink():
        return repoint(path, "step_000002")
    for step in (0, 2, 4):
        other = Path(re.sub(r"step_\d{6}", f"step_{step:06d}", str(path)))
        if other.exists() and other.read_bytes() != path.read_bytes():
            return path.write_bytes(other.read_bytes())
    path.write_bytes(b"{}" if path.suffix == ".json" else b"name: another\n")


def change_type(path: Path) -> None:
    """Text for the first number of a JSON object; another type for a first column; else a list."""
    if path.is_symlink():
        target = path.resolve()
        path.unlink()
        shutil.copytree(target.with_name("step_000002"), path)
    elif path.suffix == ".parquet":
        table = pq.read_table(path)
        column = pa.array([str(value) for value in table[0].to_pylist()])
        if table.schema.field(0).type == pa.string():
            column = pa.array(range(len(table)))
        pq.write_table(table.set_column(0, table.column_names[0], column), path)
    elif path.suffix in (".json", ".jsonl"):
        text = path.read_text()
        changed = re.sub(r": \d+", ': "x"', text, count=1)
        path.write_text(changed if changed != text else "[]")
    else:
        path.write_bytes(b"[1, 2]\n")


def forge(path: Path) -> None:
    """Flip a byte, and bring manifest.json in line with it."""
    if path.is_symlink():
        return repoint(path, "../checkpoints/step_000002")
    if path.name == "manifest.json":
        listed = json.loads(path.read_text())["files"]
        listed.pop("model/model.safetensors")
        return path.write_text(json.dumps({"files": listed}))
    flip(path, 0.5)
    for folder in path.parents:
        if (folder / "manifest.json").exists():
            names = list(json.loads((folder / "manifest.json").read_text())["files"])
            facts = file_facts(folder, names)
            return (folder / "manifest.json").write_text(json.dumps({"files": facts}, indent=2))


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"flip at {at}": (lambda path, at=at: flip(path, at)) for at in (0.1, 0.5, 0.9)},
    "truncate": truncate,
    "delete": delete,
    "swap": swap,
    "type change": change_type,
    "forged manifest": forge,
}


def verify(run: Path):
    return CliRunner().invoke(app, ["inspect-buffer", str(run), "--verify"])


def campaign(whole: Path, folder: Path, cases: list[tuple[str, str]]) -> int:
    """Verify one damage after the other; returns how many there were."""
    run, unreported, done = folder / "run", [], 0
    for kind, name in cases:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run, symlinks=True)
        DAMAGES[name](place(run, kind))
        result = verify(run)
        traceback = result.exception is not None and not isinstance(result.exception, SystemExit)
        said = (kind, name) in NAMED_ONLY and "there is no files.json" in result.output
        if traceback or (result.exit_code == 0 and not said):
            unreported.append((kind, name, result.exit_code, repr(result.exception)))
        done += 1
    assert unreported == []
    return done


CASES = list(product(KINDS, DAMAGES))


def test_a_whole_run_is_verified_and_says_what_it_did_not_read(whole):
    done = verify(whole)
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert "4 steps match the algorithm of the recipe" in words
    assert "not read: .lock, environment.json, log" in words
    assert "not recomputed: whether the weights are those that the run trained" in words


def test_every_file_of_a_run_is_of_a_kind_of_the_campaign_or_named_as_unread(whole):
    done = CliRunner().invoke(app, ["inspect-buffer", str(whole), "--verify", "--json"])
    document = json.loads(done.stdout)
    assert document["passed"]
    compared = {check["name"]: check["checked"] for check in document["checks"]}
    listed = json.loads((whole / "files.json").read_text())["files"]
    assert compared["written files"] == 1 + len(listed) == 1 + 1 + 4 + 4 + 4 + 2 + 2
    assert compared["checkpoints"] > 30 and compared["evaluations"] > 8
    assert compared["summary"] == 11


def test_damage_of_each_sort_is_named(whole, tmp_path):
    """Every damage, and the kinds that matter most, in turn."""
    cases = [pair for i, pair in enumerate(product(QUICK, DAMAGES)) if i % 3 == 0]
    assert {name for _, name in cases} == set(DAMAGES)
    assert campaign(whole, tmp_path, cases) == 19


@pytest.mark.slow
def test_every_damage_to_every_kind_of_file_is_named(whole, tmp_path):
    assert campaign(whole, tmp_path, CASES) == len(KINDS) * len(DAMAGES) == 160
