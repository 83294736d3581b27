"""A campaign: every kind of file of a run, damaged in every way, is named by --verify; no damage
ends a resume, an evaluation or a report in a traceback, changes their result without a word, or
costs a file."""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from small_runs.fixtures import made_once
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.evaluation import evaluation_report
from grpo_replay.evaluation.evaluation_report import read_samples
from grpo_replay.lab.verification.file_checks import FileChecks
from grpo_replay.lab.verification.run_files import read_run_files
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


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "300"})


def verify(run: Path) -> Result:
    return call("inspect-buffer", run, "--verify")


def resume(run: Path) -> Result:
    return call("train", "--resume", "--output-dir", run)


def evaluate(run: Path) -> Result:
    few = ("--set", "eval.max_problems=4", "--set", "eval.samples=1", "--set", "eval.greedy=false")
    return call("eval", "--ckpt", run, "--benchmark", "tiny_add", *few, "--output", evaluated(run))


def evaluated(run: Path) -> Path:
    return run.with_name("evaluated.json")


def report(run: Path) -> Result:
    return call("report", run, "--json")


def files_of(run: Path) -> dict[str, bytes]:
    """Every file but the log and what names this attempt."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.parent.name != "log"
        and path.name not in (".lock", "environment.json")
    }  # fmt: skip


@dataclass
class Case:
    """A damaged run, and the same command on the whole run."""

    run: Path
    kind: str
    damage: str
    result: Result
    before: dict[str, bytes]
    whole: Result
    whole_accuracies: Any

    @property
    def named(self) -> bool:
        """The file is; or its checkpoint's manifest, where that was changed with it."""
        path = KINDS[self.kind]
        manifest = re.sub(r"(checkpoints/step_\d{6}/).*", r"\1manifest.json", path)
        forged = self.damage == "forged manifest"
        return path in self.result.output or (forged and manifest in self.result.output)

    def problem_of_verify(self) -> bool:
        said = (self.kind, self.damage) in NAMED_ONLY
        return not (said and "there is no files.json" in self.result.output)

    def problem_of_resume(self) -> bool:
        """A resume of a whole run makes summary.json, files.json and `latest` anew; what it does
        not read is told by --verify, before as after."""
        there = {name for name in self.before if not name.startswith("checkpoints/latest/")}
        if not there <= files_of(self.run).keys():
            return True
        intact = verify(self.run).exit_code == 0
        return intact and not self.named and self.kind not in MADE_ANEW

    def problem_of_evaluate(self) -> bool:
        """A manifest that was changed with its files is told by --verify alone."""
        same = accuracies(self.run) == self.whole_accuracies
        return not same and not self.named and self.damage != "forged manifest"

    def problem_of_report(self) -> bool:
        return self.result.stdout != self.whole.stdout and not self.named


def accuracies(run: Path) -> Any:
    path = evaluated(run)
    return json.loads(path.read_text())["benchmarks"] if path.exists() else None


COMMANDS = {
    verify: Case.problem_of_verify, resume: Case.problem_of_resume,
    evaluate: Case.problem_of_evaluate, report: Case.problem_of_report,
}  # fmt: skip
MADE_ANEW = ("summary", "list of files", "latest")
READ_BY_EVAL = (
    *("recipe", "newest manifest", "state", "weights", "optimizer", "engine layout"),
    *("model configuration", "tokenizer", "latest"),
)


def campaign(
    command: Callable[[Path], Result], whole: Path, folder: Path, cases: list[tuple[str, str]]
) -> int:
    """Run a command on one damage after the other; returns how many there were."""
    run, problems = folder / "run", []
    shutil.copytree(whole, run, symlinks=True)
    unharmed = command(run)
    assert unharmed.exit_code == 0, unharmed.output
    expected = accuracies(run)
    for kind, name in cases:
        shutil.rmtree(run)
        evaluated(run).unlink(missing_ok=True)
        shutil.copytree(whole, run, symlinks=True)
        DAMAGES[name](place(run, kind))
        before = files_of(run)
        result = command(run)
        case = Case(run, kind, name, result, before, unharmed, expected)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            problems.append((kind, name, repr(result.exception)))
        elif result.exit_code == 0 and COMMANDS[command](case):
            problems.append((kind, name, "no word"))
        elif result.exit_code != 0 and files_of(run) != before:
            problems.append((kind, name, "refused, and changed files"))
    assert problems == []
    return len(cases)


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
    assert compared["written files"] == 2 + len(listed) == 2 + 1 + 4 + 4 + 4 + 2 + 2
    assert compared["checkpoints"] > 30 and compared["evaluations"] > 8
    assert compared["summary"] == 11


def test_the_texts_of_evaluations_are_not_read_and_no_rows_are_kept(whole, monkeypatch):
    def without_texts(path, with_texts=True):
        assert not with_texts
        return read_samples(path, with_texts)

    monkeypatch.setattr(evaluation_report, "read_samples", without_texts)
    checks = FileChecks(read_run_files(whole))
    checks.check()
    assert checks.evaluations.failed == 0 < len(checks.reports)
    assert all(report.samples is None for report in checks.reports.values())


def some(kinds: Sequence[str], every: int) -> list[tuple[str, str]]:
    """Every damage, and these kinds, in turn."""
    cases = [pair for i, pair in enumerate(product(kinds, DAMAGES)) if i % every == 0]
    assert {name for _, name in cases} == set(DAMAGES)
    return cases


def test_damage_of_each_sort_is_named(whole, tmp_path):
    assert campaign(verify, whole, tmp_path, some(QUICK, 3)) == 19


@pytest.mark.slow
def test_damage_of_each_sort_costs_no_resume_and_no_report_a_file(whole, tmp_path, processes):
    (tmp_path / "report").mkdir()
    listed_anew = [("metrics", "flip at 0.5"), ("weights", "forged manifest")]
    assert campaign(resume, whole, tmp_path, some(QUICK, 5) + listed_anew) == 14
    assert campaign(report, whole, tmp_path / "report", some(READ_BY_REPORT, 1)) == 40


READ_BY_REPORT = ("recipe", "metrics", "base evaluation", "rows of an evaluation", "summary")


@pytest.mark.slow
@pytest.mark.parametrize("command", [verify, resume, report])
def test_every_damage_to_every_kind_of_file_is_named(whole, tmp_path, processes, command):
    assert campaign(command, whole, tmp_path, CASES) == len(KINDS) * len(DAMAGES) == 152


@pytest.mark.slow
def test_no_damage_changes_an_evaluation_without_a_word(whole, tmp_path, processes):
    cases = list(product(READ_BY_EVAL, DAMAGES))
    assert campaign(evaluate, whole, tmp_path, cases) == 72
