"""Two verifiers in one report: the evaluator on prepared completions."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import plan_of, run_comparison, run_regrading
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.cli.eval_command import run
from grpo_replay.cli.options import EvalOptions
from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.models import load_tokenizer
from grpo_replay.errors import EvaluationFileError, RecipeError, UsageError
from grpo_replay.evaluation.comparison import compare
from grpo_replay.evaluation.evaluate import add_gradings, evaluate
from grpo_replay.evaluation.evaluation_report import (
    HEADED_SETTINGS,
    SAMPLE_SCHEMA,
    read_report,
    samples_path,
)
from grpo_replay.evaluation.evaluation_tables import terminal_tables
from grpo_replay.recipe import load_recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.types import Completion

FAR = "We check the result once more. " * 17  # 527 characters
TEXTS = {  # of each problem with answer 5, two samples; then whether boxed and whole accept them
    "0": [("so \\boxed{5}", 1, 1), ("The answer is 5.", 0, 1)],
    "1": [("\\boxed{5} " + FAR, 0, 1), ("$x = 5$ and the", 0, 1)],
    "2": [("\\boxed{4}, or rather \\boxed{5}", 1, 0), ("no idea", 0, 0)],
}


class WrittenSampler:
    """Completes every request with its prepared text."""

    policy_version = 0

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids = (tokenizer.eos_token_id,)

    def generate(self, requests):
        for request in requests:
            index = str(request.key.prompt_index)
            text = TEXTS[index][request.key.completion_index % (1 << 30)][0]
            tokens = np.array(self._tokenizer.encode(text), dtype=np.int32)
            logprobs = np.zeros(len(tokens), np.float32)
            yield Completion(request.key, tokens, logprobs, "stop", 0, 0)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    problems = tmp_path_factory.mktemp("problems") / "five.jsonl"
    problems.write_text("".join(json.dumps({"problem": p, "answer": "5"}) + "\n" for p in TEXTS))
    words = ["model.tokenizer=builtin:bytes", f"eval.benchmarks=[{problems}]", "eval.samples=2"]
    return load_recipe("tiny", [*words])


@pytest.fixture(scope="module")
def evaluated(recipe):
    """The report under a verifier."""
    tokenizer = load_tokenizer(recipe.model)

    def by(verifier):
        settings = recipe.model_copy(
            update={"eval": recipe.eval.model_copy(update={"reward": verifier})}
        )
        reward = recipe.reward.model_copy(update={"function": verifier})
        with RewardScorer.open(reward) as scorer:
            plan = plan_of(tokenizer, settings)
            sampler = WrittenSampler(tokenizer)
            return evaluate(sampler, tokenizer, plan, Comm(), scorer, model={"name": "written"})

    return {verifier: by(verifier) for verifier in ("math_verify_boxed", "math_verify")}


@pytest.fixture(scope="module")
def both(recipe, evaluated):
    return add_gradings(evaluated["math_verify_boxed"], ["math_verify"], recipe.reward)


def test_both_gradings_and_their_disagreements_by_hand(both):
    other = both.other_gradings["math_verify"]
    assert both.sampled.benchmarks["five"].avg_at_k == pytest.approx(2 / 6)
    assert other.sampled.benchmarks["five"].avg_at_k == pytest.approx(4 / 6)
    assert both.sampled.benchmarks["five"].pass_at_k == pytest.approx(2 / 3)
    assert other.sampled.benchmarks["five"].pass_at_k == pytest.approx(2 / 3)
    assert (other.gained, other.lost) == ({"five": 3}, {"five": 1})
    assert other.versions["math-verify"] == "0.9.0"
    # Greedily, the first text of each problem:
    assert both.greedy_accuracies()["five"] == pytest.approx(2 / 3)
    assert other.greedy.benchmarks["five"].avg_at_k == pytest.approx(2 / 3)


def test_every_row_has_both_verdicts(both):
    rows = [row for row in both.samples.to_pylist() if not row["greedy"]]
    expected = [(bool(boxed), bool(whole)) for two in TEXTS.values() for _, boxed, whole in two]
    found = [(row["correct"], row["verdict_math_verify"] == "correct") for row in rows]
    assert found == expected
    assert [row["verdict"] == "correct" for row in rows] == [boxed for boxed, _ in expected]


def test_regrading_equals_an_evaluation_under_that_verifier(both, evaluated):
    view, direct = both.graded_by("math_verify"), evaluated["math_verify"]
    assert (view.sampled, view.greedy) == (direct.sampled, direct.greedy)
    assert view.settings == direct.settings and view.verifier == "math_verify"
    wanted = direct.samples.column_names
    assert view.samples.select(wanted).equals(direct.samples)
    assert both.graded_by("math_verify_boxed").sampled == both.sampled


def test_a_file_is_regraded_without_a_model_and_keeps_its_own_verdicts(both, evaluated, tmp_path):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    evaluated["math_verify_boxed"].write(before)
    kept = before.read_bytes(), samples_path(before).read_bytes()
    run_regrading(str(before), ["math_verify"], str(after))
    assert (before.read_bytes(), samples_path(before).read_bytes()) == kept
    found = read_report(after)
    assert found.other_gradings == both.other_gradings and found.sampled == both.sampled
    assert found.samples.equals(both.samples)
    run_regrading(str(after), ["minerva"], str(before))  # a third, beside the others
    run_regrading(str(after), ["minerva"])  # in its place
    assert before.read_bytes() == after.read_bytes()
    assert list(read_report(before).other_gradings) == ["math_verify", "minerva"]
    run_regrading(str(before), ["minerva"])  # again: replaced, not doubled
    columns = read_report(before).samples.column_names[len(SAMPLE_SCHEMA) :]
    assert columns == ["verdict_math_verify", "verdict_minerva"]


def test_both_gradings_are_shown(both, tmp_path, capsys):
    both.write(tmp_path / "e.json")
    run_regrading(str(tmp_path / "e.json"), ["minerva"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "math_verify (other) vs math_verify_boxed (own)" in lines
    assert "benchmark avg@k own other pass@k own other gained lost" in lines
    assert "five 33.3 66.7 66.7 66.7 3 1" in lines
    assert "minerva (other) vs math_verify_boxed (own)" in lines
    assert "mean 33.3 66.7 66.7 66.7 3 1" in lines


def test_comparisons_and_aes_can_use_either_grading(both, evaluated, tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("both.json", "whole.json", "boxed.json")]
    reports = [both, evaluated["math_verify"], evaluated["math_verify_boxed"]]
    for path, report in zip(paths, reports, strict=True):
        report.write(tmp_path / path)
    run_comparison(paths[0], paths[1], as_json=True, verifier="math_verify")
    mean = json.loads(capsys.readouterr().out)["mean"]
    assert (mean["accuracy_a"], mean["accuracy_b"]) == pytest.approx((4 / 6, 4 / 6))
    with pytest.raises(EvaluationFileError, match="has reward 'math_verify_boxed', but"):
        run_comparison(paths[0], paths[1])
    with pytest.raises(
        EvaluationFileError, match=r"boxed\.json is graded by math_verify_boxed, no"
    ):
        run_comparison(paths[0], paths[2], verifier="math_verify")
    aes = ["aes", "--reference", paths[0], paths[0], "--json"]
    for words, accuracy in (([], 100 * 2 / 6), (["--grade-with", "math_verify"], 100 * 4 / 6)):
        result = CliRunner().invoke(app, [*aes, *words])
        assert json.loads(result.stdout)["reference"]["accuracy"] == pytest.approx(accuracy)


def test_a_built_in_verdict_says_nothing_of_the_function_that_graded_too(recipe, evaluated):
    own = {"reward": "/a/own.py:score", "correct_score": 0.5, "reward_sha256": "1"}
    plain = evaluated["math_verify_boxed"]
    mine = replace(plain, settings={**plain.settings, **own})
    mine = add_gradings(mine, ["math_verify"], recipe.reward)
    compare("A", mine.graded_by("math_verify"), "B", evaluated["math_verify"])
    assert mine.graded_by("/a/own.py:score").settings["correct_score"] == 0.5


def test_functions_of_the_user_are_compared_by_their_source(evaluated):
    def graded(place, digest=None):
        plain = evaluated["math_verify"]
        own = {"reward": place} | ({"reward_sha256": digest} if digest else {})
        return replace(plain, settings={**plain.settings, **own})

    one = graded("/a/ok.py:score", "1")
    compare("A", one, "B", graded("/b/ok.py:score", "1"))
    for other in (graded("/a/ok.py:score", "2"), graded("/a/ok.py:other", "1")):
        with pytest.raises(EvaluationFileError, match="A has reward 'score of a file with SHA-256"):
            compare("A", one, "B", other)
    old = graded("/a/ok.py:score")  # of an earlier version
    compare("A", one, "B", old)
    with pytest.raises(EvaluationFileError, match=r"has reward '/a/ok\.py:score', but B '/b/"):
        compare("A", old, "B", graded("/b/ok.py:score", "1"))


@pytest.mark.parametrize("key", HEADED_SETTINGS)
def test_a_report_that_cannot_be_printed_is_not_regraded(evaluated, tmp_path, key):
    path = tmp_path / "e.json"
    evaluated["math_verify_boxed"].write(path)
    document = json.loads(path.read_text())
    del document["settings"][key]
    path.write_text(json.dumps(document))
    with pytest.raises(
        EvaluationFileError, match=rf"e\.json: damaged .*settings\.{key} is missing"
    ):
        run_regrading(str(path), ["minerva"])
    assert "other_gradings" in document and json.loads(path.read_text()) == document


@pytest.mark.slow
def test_grading_while_sampling_equals_regrading(tmp_path, capsys):
    settings = ("eval.max_problems=3", "eval.samples=2")
    options = {"benchmarks": ["tiny_add"], "overrides": settings}
    at_once, later = str(tmp_path / "at_once.json"), str(tmp_path / "later.json")
    run(EvalOptions("builtin:tiny", output=at_once, grade_with=["minerva"], **options))
    run(EvalOptions("builtin:tiny", output=later, **options))
    assert read_report(tmp_path / "later.json").other_gradings == {}
    result = CliRunner().invoke(app, ["eval", "--regrade", later, "--grade-with", "minerva"])
    assert result.exit_code == 0, result.output
    found, wanted = read_report(tmp_path / "later.json"), read_report(tmp_path / "at_once.json")
    assert found.other_gradings == wanted.other_gradings and list(wanted.other_gradings)
    assert found.samples.equals(wanted.samples)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--regrade", "e.json"], "needs --grade-with"),
        (["--regrade", "e.json", "--grade-with", "minerv"], "did you mean 'minerva'"),
        (["--regrade", "e.json", "--grade-with", "math_verify_boxed"], "it already grades"),
        (["--regrade", "e.json", "--grade-with", "minerva", "--k", "3"], "--k would have no"),
        (["--compare", "e.json", "e.json", "--regrade", "e.json"], "--regrade would have no"),
        (["--ckpt", "builtin:tiny", "--grade-with", "math_verify"], "name each verifier once"),
    ],
)
def test_options_without_effect_and_unknown_verifiers_are_refused(
    evaluated, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    evaluated["math_verify_boxed"].write(tmp_path / "e.json")
    result = CliRunner().invoke(app, ["eval", *words])
    error = str(result.exception) + result.output
    assert isinstance(result.exception, (UsageError, RecipeError, SystemExit))
    assert result.exit_code != 0 and message in " ".join(error.split())


def test_regrading_needs_the_per_sample_rows(evaluated, tmp_path):
    evaluated["math_verify_boxed"].write(tmp_path / "e.json")
    samples_path(tmp_path / "e.json").unlink()
    with pytest.raises(EvaluationFileError, match="per-sample file"):
        run_regrading(str(tmp_path / "e.json"), ["math_verify"])


def test_a_file_of_version_2_is_read_and_can_be_regraded(evaluated, tmp_path):
    path = tmp_path / "e.json"
    evaluated["math_verify_boxed"].write(path)
    document = json.loads(path.read_text())
    del document["other_gradings"]
    path.write_text(json.dumps(document | {"schema_version": 2}))
    assert read_report(path).other_gradings == {}
    run_regrading(str(path), ["minerva"])
    assert list(read_report(path).other_gradings) == ["minerva"]
    path.write_text(json.dumps(document | {"schema_version": 3}))  # which must have it
    with pytest.raises(EvaluationFileError, match=r"damaged.*'other_gradings'"):
        read_report(path)


def test_damage_to_another_grading_is_named(both, tmp_path):
    path = tmp_path / "e.json"
    both.write(path)
    document = json.loads(path.read_text())
    for change, message in (
        (lambda o: o["mean"].update(avg_at_k=0.9), "mean.avg_at_k 0.9 is not the mean"),
        (lambda o: o["gained"].update(five=-1), "five: .*found -1"),
        (lambda o: o.pop("lost"), "'lost'"),
    ):
        changed = json.loads(json.dumps(document))
        change(changed["other_gradings"]["math_verify"])
        path.write_text(json.dumps(changed))
        with pytest.raises(EvaluationFileError, match=rf"(?s)damaged.*{message}"):
            read_report(path)
    path.write_text(json.dumps(document))
    swapped = both.samples.drop_columns(["verdict_math_verify"])
    for rows, message in (
        (swapped, "no column 'verdict_math_verify'"),
        (swapped.append_column("verdict_math_verify", swapped["verdict"]), "avg_at_k is 0.66"),
        (swapped.append_column("remark", swapped["verdict"]), "its columns are"),
        (swapped.append_column("verdict_math_verify", pa.array([1] * 9)), "its columns are"),
    ):
        pq.write_table(rows, samples_path(path))
        with pytest.raises(EvaluationFileError, match=message):
            read_report(path)


def test_a_report_without_other_gradings_has_no_such_table(evaluated, tmp_path):
    titles = [str(table.title) for table in terminal_tables(evaluated["math_verify_boxed"])]
    assert "accuracy" in titles and not any("(other)" in title for title in titles)
    assert replace(evaluated["math_verify"]).to_json()["other_gradings"] == {}
