"""files.json: what a run has written, with digests, cut back where a resume goes back."""

import json
import tracemalloc
from pathlib import Path

import pytest

from grpo_replay.errors import SnapshotError
from grpo_replay.storage.sealed_files import (
    SEAL,
    changed_files,
    cut_back_seal,
    read_seal,
    reseal,
    seal_files,
    sealed_problem,
)

FILES = (
    *("recipe.yaml", "recipes/step_000002.yaml", "rollouts/step_000001.parquet"),
    *("rollouts/step_000003.parquet", "draws/step_000003.parquet", "eval/step_000000.json"),
    *("eval/step_000002.json", "eval/step_000002.parquet", "metrics.jsonl"),
    *("journal/segment_000001.journal", "summary.json", "checkpoints/step_000002/manifest.json"),
)
# A resume that is refused has already written environment.json again.
NOT_LISTED = (
    "environment.json",
    "log/attempt_001.log",
    "eval/notes.txt",
    "checkpoints/step_000002/state.json",
)


@pytest.fixture
def run(tmp_path) -> Path:
    for name in (*FILES, *NOT_LISTED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"what is in {name}")
    seal_files(tmp_path)
    return tmp_path


def problems(run: Path) -> dict[str, str]:
    listed = read_seal(run)
    found = {name: sealed_problem(run / name, facts) for name, facts in listed.items()}
    return {name: problem for name, problem in found.items() if problem}


def test_what_a_run_writes_is_listed(run):
    assert set(read_seal(run)) == set(FILES)
    assert problems(run) == {}


@pytest.mark.parametrize("name", FILES)
def test_a_changed_a_cut_and_a_missing_file_are_found(run, name):
    data = (run / name).read_bytes()
    (run / name).write_bytes(data[:3] + b"X" + data[4:])
    assert problems(run) == {
        name: f"is not what the run wrote: its SHA-256 differs from that in {SEAL}"
    }
    (run / name).write_bytes(data[:-1])
    assert list(problems(run)) == [name]
    (run / name).unlink()
    assert problems(run) == {name: "is missing"}


def test_what_a_resume_would_list_anew_is_compared_first(run):
    assert changed_files(run) == []
    for name in FILES:
        (run / name).write_text(f"What is in {name}")  # of the same size
    digests = {line.partition(" ")[0] for line in changed_files(run)}
    assert digests == {
        *("recipe.yaml", "recipes/step_000002.yaml", "metrics.jsonl", "eval/step_000000.json"),
        *("eval/step_000002.json", "checkpoints/step_000002/manifest.json"),
    }
    assert {line.partition(" ")[0] for line in changed_files(run, step=1)} == {
        "recipe.yaml", "metrics.jsonl", "eval/step_000000.json"
    }  # fmt: skip
    for name in FILES:
        (run / name).unlink()
    (run / "checkpoints/step_000002/state.json").unlink()
    (run / "checkpoints/step_000002").rmdir()  # kept no longer
    missing = {line.partition(" is missing")[0] for line in changed_files(run)}
    assert missing == (digests | {"eval/step_000002.parquet"}) - {
        "checkpoints/step_000002/manifest.json"
    }
    at_resume = {line.partition(" is missing")[0] for line in changed_files(run, step=3)}
    of_steps = {"rollouts/step_000001.parquet", "rollouts/step_000003.parquet"}
    assert at_resume == missing | of_steps | {"draws/step_000003.parquet"}
    (run / SEAL).write_text('{"files": {')
    (damaged,) = changed_files(run)
    assert damaged.startswith(f"{SEAL}: damaged")


def test_only_what_grows_may_be_longer(run):
    for name in FILES:
        with (run / name).open("a") as file:
            file.write("more")
    assert set(FILES) - set(problems(run)) == {"metrics.jsonl", "journal/segment_000001.journal"}


def test_a_segment_of_the_journal_is_read_again_only_if_it_has_grown(run):
    segment = run / "journal/segment_000001.journal"
    data = segment.read_bytes()
    segment.write_bytes(data[:3] + b"X" + data[4:])
    seal_files(run)
    assert list(problems(run)) == ["journal/segment_000001.journal"]
    segment.write_bytes(data + b"more")
    seal_files(run)
    assert problems(run) == {}


def test_a_file_that_is_written_once_keeps_its_digest_and_one_that_changes_does_not(run):
    for name in ("rollouts/step_000001.parquet", "metrics.jsonl"):
        (run / name).write_text("other")
    (run / "draws/step_000003.parquet").unlink()
    seal_files(run)
    assert set(problems(run)) == {"rollouts/step_000001.parquet", "draws/step_000003.parquet"}


def test_a_resume_leaves_out_what_it_removes_or_may_write_again(run):
    cut_back_seal(run, 2)
    assert set(read_seal(run)) == {
        "recipe.yaml", "rollouts/step_000001.parquet",
        "eval/step_000002.json", "eval/step_000002.parquet",
    }  # fmt: skip


def test_a_regraded_evaluation_is_listed_again_and_a_report_elsewhere_is_not(run):
    paths = [run / "eval/step_000002.json", run / "eval/step_000002.parquet"]
    for path in paths:
        path.write_text("regraded")
    reseal(*paths)
    assert problems(run) == {}
    before = (run / SEAL).read_text()
    (run / "eval/mine.json").write_text("mine")
    reseal(run / "eval/mine.json")
    assert (run / SEAL).read_text() == before
    reseal(run / "eval/deeper/mine.json")  # no run there
    assert not (run / "eval" / SEAL).exists()


def test_a_list_of_an_earlier_version_is_said_and_replaced(run):
    (run / SEAL).write_text(json.dumps({"files": read_seal(run)}, indent=2) + "\n")
    with pytest.raises(SnapshotError, match=r"written by an earlier version .* or remove it"):
        read_seal(run)
    seal_files(run)
    assert set(read_seal(run)) == set(FILES)


def test_a_list_that_was_cut_is_replaced_by_the_run(run):
    before = (run / SEAL).read_text()
    (run / SEAL).write_text(before[: len(before) // 2])
    seal_files(run)
    assert (run / SEAL).read_text() == before


def test_a_list_of_many_files_takes_no_memory_for_their_facts(run):
    """The whole list at once took 1,500 bytes for each file."""
    for step in range(4, 2004):
        (run / f"draws/step_{step:06d}.parquet").write_text("draws")
    seal_files(run)
    tracemalloc.start()
    try:
        seal_files(run)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(read_seal(run)) == len(FILES) + 2000
    assert most < 2000 * 300


@pytest.mark.parametrize("text", ["", "[]", '{"files": []}', '{"files": {"a": {"bytes": "1"}}}'])
def test_a_damaged_list_is_named_by_a_reader_and_replaced_by_the_run(run, text):
    (run / SEAL).write_text(text)
    with pytest.raises(SnapshotError, match=r"files\.json: damaged"):
        read_seal(run)
    seal_files(run)
    assert set(json.loads((run / SEAL).read_text())["files"]) == set(FILES)
