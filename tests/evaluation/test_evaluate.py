"""The evaluator on the tiny model: correct, resumable, and the same on one and two ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow.compute as pc
import pytest
from evaluate_program import evaluate_tiny, recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.models import load_tokenizer
from grpo_replay.errors import DatasetError, EvaluationFileError, RecipeError
from grpo_replay.evaluation.benchmarks import plan_evaluation
from grpo_replay.evaluation.evaluate import evaluate
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.evaluation.evaluation_tables import heading
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.tiny import BASE_DIR
from grpo_replay.types import RequestKey, completion_seed

PROGRAM = Path(__file__).parents[1] / "support" / "evaluate_program.py"
SAMPLES = 5 * 12 * (4 + 1)  # benchmarks · problems · (sampled + greedy)


def start(output: Path, rank: int = 0, ranks: int = 1, folder: object = "none"):
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(output), str(rank), str(ranks), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process) -> int:
    """The number of completions the process sampled."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    return int(out.split()[-1])


def files(output: Path) -> tuple[bytes, bytes]:
    return output.read_bytes(), output.with_suffix(".parquet").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "eval.json"
    assert evaluate_tiny(output, rank=0, ranks=1, generations=None) == SAMPLES
    return output


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(recipe().model)


def plan(tokenizer, **settings):
    own = recipe().eval.model_copy(update=settings)
    return plan_evaluation(tokenizer, recipe().model_copy(update={"eval": own}))


@pytest.mark.slow
def test_an_evaluation_killed_midway_and_resumed_or_on_two_ranks_gives_the_same_files(
    tmp_path, uninterrupted
):
    output, generations = tmp_path / "eval.json", tmp_path / "generations"
    process = start(output, folder=generations)
    deadline = time.monotonic() + 120
    while len(list(generations.glob("*.parquet"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not output.exists()
    resumed = finish(start(output, folder=generations))
    assert 0 < resumed <= SAMPLES - 3 * 16
    assert files(output) == files(uninterrupted)
    output = tmp_path / "two.json"
    ranks = [start(output, rank, 2) for rank in range(2)]
    assert [finish(process) for process in ranks] == [SAMPLES // 2, SAMPLES // 2]
    assert files(output) == files(uninterrupted)


def test_the_report_agrees_with_its_rows(uninterrupted):
    report = read_report(uninterrupted)
    rows = report.samples.to_pylist()
    assert len(rows) == SAMPLES
    assert list(report.sampled.benchmarks) == [
        *("tiny_add", "tiny_sub", "tiny_mul", "tiny_order", "tiny_pair")
    ]
    means = []
    for name, result in report.sampled.benchmarks.items():
        mine = [row for row in rows if row["benchmark"] == name and not row["greedy"]]
        assert (result.n, result.k, len(mine)) == (12, 4, 48)
        assert result.avg_at_k == pytest.approx(np.mean([row["correct"] for row in mine]))
        right = {row["problem_id"] for row in mine if row["correct"]}
        assert result.pass_at_k == pytest.approx(len(right) / 12)
        assert result.pass_at_j["1"] == pytest.approx(result.avg_at_k)
        assert result.mean_tokens == pytest.approx(np.mean([row["tokens"] for row in mine]))
        assert sum(result.verdicts.values()) == 48
        means.append(result.avg_at_k)
    assert report.accuracies()["mean"] == pytest.approx(np.mean(means))
    assert report.accuracies()["mean"] > 0.1
    greedy = [row["correct"] for row in rows if row["greedy"]]
    assert report.greedy_accuracies()["mean"] == pytest.approx(np.mean(greedy))
    truncated = [row for row in rows if row["finish_reason"] == "length"]
    assert all(row["tokens"] == 20 for row in truncated)


def test_accuracy_agrees_with_independent_grading_of_the_arithmetic(uninterrupted):
    """The benchmark is arithmetic, so Python can check every completion."""
    rows = read_report(uninterrupted).samples.to_pylist()
    for row in rows:
        problem = row["problem_id"].split(":")[1]
        expected = row["completion_text"].rstrip().endswith(f"\\boxed{{{eval(problem)}}}")
        assert row["correct"] == expected, row


def test_each_wave_of_eight_has_its_own_seed(tokenizer):
    requests = [
        each
        for each in plan(tokenizer, samples=17, greedy=False).samples
        if each.benchmark == "tiny_sub" and each.problem_index == 3
    ]
    seeds = [each.request.seed for each in requests]
    own = crc32(b"tiny_sub")
    expected = [
        completion_seed(42 + sample // 8, RequestKey(own, 3, sample)) for sample in range(17)
    ]
    assert seeds == expected and len(set(seeds)) == 17
    # None is shared across benchmarks: errors would be correlated, the error of the mean too small.
    everywhere = [each.request.seed for each in plan(tokenizer, greedy=False).samples]
    assert len(set(everywhere)) == len(everywhere) == 5 * 12 * 4


def test_more_samples_reuse_the_existing_ones(tmp_path, tokenizer):
    sampler = HfSampler.open(SamplerOpening.from_recipe(recipe(), str(BASE_DIR), Comm()))
    settings = {"benchmarks": ["tiny_add"], "greedy": False}
    with RewardScorer.open(recipe().reward) as scorer:
        four, six = (
            evaluate(
                sampler,
                tokenizer,
                plan(tokenizer, **settings, samples=k),
                Comm(),
                scorer,
                generations_folder=tmp_path,
            )
            for k in (4, 6)
        )
    first = six.samples.filter(pc.field("sample") < 4)
    assert first.equals(four.samples)
    assert six.sampled.benchmarks["tiny_add"].k == 6


def test_invalid_plans_are_refused(tokenizer):
    with pytest.raises(RecipeError, match="greedily twice"):
        plan(tokenizer, temperature=0.0)
    with pytest.raises(RecipeError, match="did you mean 'tiny_add'"):
        plan(tokenizer, benchmarks=["tiny_ad"])
    prompts = recipe().prompts.model_copy(update={"max_prompt_length": 3})
    with pytest.raises(DatasetError, match="max_prompt_length 3"):
        plan_evaluation(tokenizer, recipe().model_copy(update={"prompts": prompts}))


def test_a_report_round_trips_and_a_broken_one_is_named(tmp_path, uninterrupted):
    report = read_report(uninterrupted)
    report.write(tmp_path / "copy.json")
    assert files(tmp_path / "copy.json") == files(uninterrupted)
    bad = tmp_path / "bad.json"
    for text, message in (
        ('{"accuracy": 3}', "not an evaluation file"),
        ('{"schema_version": 3}', "schema_version is 3, not 4"),
    ):
        bad.write_text(text)
        with pytest.raises(EvaluationFileError, match=message):
            read_report(bad)
    with pytest.raises(EvaluationFileError, match=r"which writes NAME\.json") as caught:
        read_report(uninterrupted.with_suffix(".parquet"))
    assert len(str(caught.value)) < 400  # no bytes of the file


# --- paper B's two settings in one evaluation -----------------------------------------------------


def test_paper_b_has_pass_at_1_at_temperature_0_1_and_pass_at_k_at_1(tokenizer, tmp_path):
    """The real evaluator on the tiny model: `paper_b` reads each set once and samples it twice."""
    from grpo_replay.tiny.problems import benchmark_problems

    for stem, name, field in (("math500", "tiny_add", "unique_id"), ("openr1", "tiny_mul", "uuid")):
        rows = [{**row, field: row["problem_id"]} for row in benchmark_problems(name)[:5]]
        (tmp_path / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    planned = plan(
        tokenizer, benchmarks=["paper_b"], data_folder=str(tmp_path), samples=None,
        temperature=0.1, top_p=0.95, greedy=False,
    )  # fmt: skip
    sampler = HfSampler.open(SamplerOpening.from_recipe(recipe(), str(BASE_DIR), Comm()))
    with RewardScorer.open(recipe().reward.model_copy(update={"function": "minerva"})) as scorer:
        report = evaluate(sampler, tokenizer, planned, Comm(), scorer)
    laws = {}
    for each in planned.samples:
        law = (each.request.temperature, each.request.top_p)
        laws.setdefault(each.benchmark, Counter())[law] += 1
    assert laws == {
        "math_pass1": {(0.1, 0.95): 5}, "math_passk": {(1.0, 0.95): 80},
        "openr1_pass1": {(0.1, 0.95): 5}, "openr1_passk": {(1.0, 0.95): 80},
    }  # fmt: skip
    rows = report.samples.to_pylist()
    assert Counter(row["benchmark"] for row in rows) == {
        k: sum(v.values()) for k, v in laws.items()
    }
    assert set(report.accuracies()) == {*laws, "mean"}
    described = report.settings["benchmarks"]
    assert {name: described[name]["temperature"] for name in described} == {
        "math_pass1": 0.1, "math_passk": 1.0, "openr1_pass1": 0.1, "openr1_passk": 1.0,
    }  # fmt: skip
    assert " T 0.1 and 1, " in heading(report)
    digests = {name: each["problems_sha256"] for name, each in described.items()}
    assert digests["math_pass1"] == digests["math_passk"] != digests["openr1_pass1"]
    texts = {
        temperature: len({row["completion_text"] for row in rows if row["benchmark"] == name})
        for name, temperature in (("math_pass1", 0.1), ("math_passk", 1.0))
    }
    assert texts[1.0] > texts[0.1]
