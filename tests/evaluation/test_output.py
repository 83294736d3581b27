"""Output files: what may be replaced, checks before sampling, and printed tables."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_statistics import report

from grpo_replay.cli.eval_command import run
from grpo_replay.cli.options import EvalOptions
from grpo_replay.errors import CheckpointError, EvaluationFileError, OutputDirectoryError
from grpo_replay.evaluation.cache import GenerationWriter, read_generations, request_digest
from grpo_replay.evaluation.evaluation_report import read_report, samples_path
from grpo_replay.evaluation.session import model_sha256
from grpo_replay.types import Completion, GenerationRequest, RequestKey

FAST = ("eval.max_problems=3", "eval.samples=1", "eval.greedy=false", "eval.reward=minerva")


def tiny(output: object = None, *overrides: str, **options) -> EvalOptions:
    where = None if output is None else str(output)
    return EvalOptions("builtin:tiny", output=where, overrides=(*FAST, *overrides), **options)


def not_sampled(*_: object, **__: object) -> None:
    raise AssertionError("it should have been refused before anything was loaded")


def test_the_users_own_files_are_never_replaced(tmp_path, monkeypatch):
    """mine.parquet has problems; `--output mine.json` would replace it."""
    monkeypatch.setattr("grpo_replay.cli.eval_command.evaluate_model", not_sampled)
    problems = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"problem": ["1+1"], "answer": ["2"]}), problems)
    before = problems.read_bytes()
    with pytest.raises(
        OutputDirectoryError,
        match=r"mine\.parquet would be replaced, but its report mine\.json is missing",
    ):
        run(tiny(tmp_path / "mine.json", benchmarks=[str(problems)]))
    assert problems.read_bytes() == before


def test_the_default_output_is_never_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(tiny(benchmarks=["tiny_add"])) == 0
    file = Path("evaluations/builtin-tiny.json")
    written = file.read_bytes()
    with pytest.raises(OutputDirectoryError, match=rf"{file} is there already"):
        run(tiny(benchmarks=["tiny_add"]))
    assert file.read_bytes() == written
    file.unlink()
    file.with_suffix(".parquet").unlink()
    assert run(tiny(benchmarks=["tiny_add"])) == 0
    assert file.read_bytes() == written


def test_an_output_that_cannot_be_written_is_refused_before_sampling(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_replay.cli.eval_command.evaluate_model", not_sampled)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputDirectoryError, match="cannot be written"):
        run(tiny(tmp_path / "file/e.json"))


def generated(seed: int) -> tuple[GenerationRequest, Completion]:
    key, tokens = RequestKey(0, 0, 0), np.array([1, 2], np.int32)
    completion = Completion(key, tokens, np.zeros(2, np.float32), "stop", 0, 0)
    return GenerationRequest(key, tokens, seed, 20, 1.0, 1.0), completion


def test_a_full_disk_is_reported_and_earlier_generations_survive(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with GenerationWriter(tmp_path) as writer:
        writer.add(*generated(1))
    monkeypatch.setattr(pq, "write_table", full)
    named = pytest.raises(OutputDirectoryError, match=rf"{tmp_path} cannot be written: No space")
    with named, GenerationWriter(tmp_path) as writer:
        writer.add(*generated(2))
    with pytest.raises(OutputDirectoryError, match=r"e\.json cannot be written: No space left"):
        report({"x": [[1]]}).write(tmp_path / "e.json")
    monkeypatch.undo()
    first, second = (request_digest(generated(seed)[0]) for seed in (1, 2))
    assert list(read_generations(tmp_path, [first, second])) == [first]


def test_what_was_generated_before_an_interruption_is_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt), GenerationWriter(tmp_path) as writer:
        writer.add(*generated(1))
        raise KeyboardInterrupt
    digest = request_digest(generated(1)[0])
    assert list(read_generations(tmp_path, [digest])) == [digest]


def test_sigterm_interrupts_an_evaluation_and_its_handler_is_restored(tmp_path, monkeypatch):
    """Schedulers send it; the completions so far must be kept, as after Ctrl-C."""
    before = signal.getsignal(signal.SIGTERM)

    def told_to_stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr("grpo_replay.cli.eval_command.evaluate_model", told_to_stop)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(tmp_path / "e.json"))
    assert signal.getsignal(signal.SIGTERM) is before


def test_revisions_of_a_hub_model_have_different_digests(tmp_path, monkeypatch):
    repository = tmp_path / "models--me--tiny"
    for revision, commit in (("main", "a" * 40), ("other", "b" * 40)):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"of": revision}))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    main, other = (model_sha256("me/tiny", {}, revision) for revision in (None, "other"))
    assert main == model_sha256("me/tiny", {}, "main") != other
    with pytest.raises(CheckpointError, match="at revision 'third' is not in the local cache"):
        model_sha256("me/tiny", {}, "third")


def test_an_evaluation_that_is_replaced_never_has_the_rows_of_another(tmp_path, monkeypatch):
    """Killed between the two files, it leaves the new rows alone."""

    def killed(*_):
        raise KeyboardInterrupt

    path = tmp_path / "e.json"
    report({"a": [[1]]}).write(path)
    monkeypatch.setattr("grpo_replay.evaluation.evaluation_report.write_text_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        report({"a": [[0]]}).write(path)
    assert not path.exists() and samples_path(path).exists()


@pytest.mark.parametrize(
    ("parents", "key", "value"),
    [(["benchmarks", "a"], "avg_at_k", "high"), (["mean"], "mean_tokens", None)],
)
def test_an_invalid_value_of_a_file_is_named(tmp_path, parents, key, value):
    path = tmp_path / "e.json"
    report({"a": [[1]]}).write(path)
    document = json.loads(path.read_text())
    node = document
    for parent in parents:
        node = node[parent]
    del node[key]
    if value is not None:
        node[key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(EvaluationFileError, match=f"(?s)e.json.*{key}"):
        read_report(path)
