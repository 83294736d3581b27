"""Output files: what may be replaced, checks before sampling, and printed tables."""

import errno
import json
import os
import signal
import threading
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from test_statistics import SETTINGS, report
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.cli.eval_command import run
from grpo_replay.cli.options import EvalOptions
from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import CheckpointError, OutputDirectoryError
from grpo_replay.evaluation import cache
from grpo_replay.evaluation.benchmarks import find_benchmarks, load_problems
from grpo_replay.evaluation.cache import GenerationWriter, read_generations, request_digest
from grpo_replay.evaluation.comparison import compare, differences
from grpo_replay.evaluation.evaluation_report import (
    EvaluationReport,
    read_report,
)
from grpo_replay.evaluation.evaluation_tables import comparison_table
from grpo_replay.evaluation.session import find_model, model_sha256, used_revision
from grpo_replay.recipe import EvalSection, load_recipe
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.terminal.console import print_table
from grpo_replay.training import Observer
from grpo_replay.training.rollout_source import Parts
from grpo_replay.training.run_evaluation import RunEvaluation
from grpo_replay.types import Completion, GenerationRequest, RequestKey

FAST = ("eval.max_problems=3", "eval.samples=1", "eval.greedy=false")


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
        OutputDirectoryError, match=r"mine\.parquet would be replaced, but it is not"
    ):
        run(tiny(tmp_path / "mine.json", benchmarks=[str(problems)]))
    assert problems.read_bytes() == before


@pytest.mark.slow
def test_the_files_of_an_earlier_evaluation_are_replaced(tmp_path, capsys):
    for seed in (1, 2):
        assert run(tiny(tmp_path / "e.json", f"eval.seed={seed}", benchmarks=["tiny_add"])) == 0
    assert read_report(tmp_path / "e.json").settings["benchmarks"]["tiny_add"]["seeds"] == [2]


def test_the_default_output_is_never_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(tiny(benchmarks=["tiny_add"])) == 0
    file = Path("evaluations/builtin-tiny.json")
    written = file.read_bytes()
    with pytest.raises(OutputDirectoryError, match=rf"{file} is there already: .* --output {file}"):
        run(tiny(benchmarks=["tiny_add"]))
    assert file.read_bytes() == written
    file.unlink()  # as after an interruption: the JSON is written last
    assert run(tiny(benchmarks=["tiny_add"])) == 0
    assert file.read_bytes() == written


def test_a_folder_has_no_revision(tmp_path):
    """The revision in the recipe belongs to the base model."""
    assert used_revision("abc", str(tmp_path)) is None
    assert used_revision("abc", "builtin:tiny") is None
    assert used_revision("abc", "me/tiny") == "abc"


@pytest.mark.parametrize("place", ["file/e.json", "e" * 260 + ".json", "f.json"])
def test_an_output_that_cannot_be_written_is_refused_before_sampling(tmp_path, monkeypatch, place):
    monkeypatch.setattr("grpo_replay.cli.eval_command.evaluate_model", not_sampled)
    (tmp_path / "file").write_text("")
    (tmp_path / "f.generations").write_text("")
    with pytest.raises(OutputDirectoryError, match="cannot be written"):
        run(tiny(tmp_path / place))


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
    named = pytest.raises(OutputDirectoryError, match=rf"{tmp_path} cannot be written \(No space")
    with named, GenerationWriter(tmp_path) as writer:
        writer.add(*generated(2))
    with pytest.raises(OutputDirectoryError, match=r"e\.json cannot be written \(No space left"):
        report({"x": [[1]]}).write(tmp_path / "e.json")
    monkeypatch.undo()
    first, second = (request_digest(generated(seed)[0]) for seed in (1, 2))
    assert list(read_generations(tmp_path, [first, second])) == [first]


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


def test_two_evaluations_may_share_a_generations_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FLUSH_ROWS", 2)
    seeds = [range(40 * writer, 40 * writer + 40) for writer in range(4)]
    failures = []

    def write(mine: range) -> None:
        try:
            with GenerationWriter(tmp_path) as writer:
                for seed in mine:
                    writer.add(*generated(seed))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(mine,)) for mine in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    everything = [request_digest(generated(seed)[0]) for seed in range(160)]
    assert read_generations(tmp_path, everything).keys() == set(everything)


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


def test_a_mistyped_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match="runs/tpyo: no such folder in runs/"):
        find_model("runs/tpyo")


def test_options_without_effect_on_a_comparison_are_refused(tmp_path):
    report({"x": [[1]]}).write(tmp_path / "e.json")
    words = ["eval", "--compare", *[str(tmp_path / "e.json")] * 2]
    assert CliRunner().invoke(app, words).exit_code == 0
    refused = CliRunner().invoke(app, [*words, "--k", "3", "--output", "x.json"])
    assert refused.exit_code == 2
    assert "--k, --output would have no effect" in " ".join(refused.output.split())


def test_a_comparison_notes_another_backend_or_precision():
    def made(backend: str, dtype: str, sha256: str, **model) -> EvaluationReport:
        plain = report({"x": [[1]]}, {**SETTINGS, "backend": backend})
        facts = {"dtype": dtype, "sha256": sha256, **model}
        return EvaluationReport(facts, plain.settings, {}, plain.sampled)

    one = made("hf", "float32", "s")
    assert differences(one, made("hf", "float32", "t")) == []
    assert differences(one, made("vllm", "bfloat16", "s")) == [
        "A and B are the same model, by its SHA-256",
        "sampled on hf in A, vllm in B",
        "sampled in float32 in A, bfloat16 in B",
    ]
    plain = made("hf", "float32", "s", sampler_options={}, sampler_sha256="1")
    other = made("hf", "float32", "t", sampler_options={"quantization": "fp8"}, sampler_sha256="2")
    assert differences(plain, other) == [
        "sampled with engine options none in A, {'quantization': 'fp8'} in B",
        "sampled by a class whose file has SHA-256 1 in A, 2 in B",
    ]
    assert differences(one, replace(other, model={**other.model, "sampler_sha256": None})) == []


def test_a_benchmark_of_another_size_than_published_is_warned_about(tmp_path, caplog):
    rows = [{"problem_idx": i, "problem": "1+1", "answer": 2} for i in range(29)]
    (tmp_path / "aime25.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = EvalSection(benchmarks=["aime25"], data_folder=str(tmp_path))
    load_problems(*find_benchmarks(settings), settings)
    assert "'aime25' has 29 problems here, but the published one has 30" in caplog.text
    caplog.clear()
    fewer = settings.model_copy(update={"max_problems": 5})
    load_problems(*find_benchmarks(fewer), fewer)
    assert caplog.text == ""


@pytest.mark.parametrize("width", [20, 50, 80, 200])
def test_no_number_is_truncated_on_a_narrow_terminal(width):
    a = report({"a_benchmark_with_a_very_long_name": [[1, 0]] * 30 + [[0, 0]] * 90})
    b = report({"a_benchmark_with_a_very_long_name": [[1, 1]] * 110 + [[0, 0]] * 10})
    results = compare("a", a, "b", b)
    stream = StringIO()
    print_table(Console(file=stream, width=width), comparison_table(results))
    for number in ("+79.2", "12.5", "91.7", "<.001", "110", "190"):
        assert f" {number} " in stream.getvalue(), number


def test_evaluations_during_training_name_how_they_were_sampled():
    recipe = load_recipe("tiny", ["model.dtype=bfloat16"])
    parts = SimpleNamespace(recipe=recipe, comm=None, run_dir=SimpleNamespace(path=Path("runs/a")))
    described = RunEvaluation(parts, RunState(), None, Observer())._described(3)
    assert described == {
        **{"run": "a", "step": 3, "dtype": "bfloat16"},
        **{"sampler_options": {}, "sampler_sha256": None},
    }


def test_evaluations_during_training_use_the_recipe_s_verifier_limits():
    recipe = load_recipe("tiny", ["reward.function=minerva", "reward.workers=3",
                                  "reward.time_limit_seconds=7"])  # fmt: skip
    parts = Parts(recipe, Comm(), *[None] * 7)
    with RunEvaluation(parts, RunState(), None, Observer())._scorer() as scorer:
        found = scorer._section
    assert (found.function, found.workers, found.time_limit_seconds) == ("math_verify", 3, 7)
