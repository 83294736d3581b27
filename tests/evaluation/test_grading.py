"""An evaluation under two verifiers: the evaluator on prepared completions."""

import json
from dataclasses import replace

import numpy as np
import pytest

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.models import load_tokenizer
from grpo_replay.errors import EvaluationFileError
from grpo_replay.evaluation import evaluate as evaluate_module
from grpo_replay.evaluation.benchmarks import plan_evaluation
from grpo_replay.evaluation.comparison import compare
from grpo_replay.evaluation.evaluate import evaluate
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
    return load_recipe("tiny", [*words, "reward.workers=1"])


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
            plan = plan_evaluation(tokenizer, settings)
            sampler = WrittenSampler(tokenizer)
            return evaluate(sampler, tokenizer, plan, Comm(), scorer, model={"name": "written"})

    return {verifier: by(verifier) for verifier in ("math_verify_boxed", "math_verify")}


def test_both_gradings_by_hand(evaluated):
    boxed, whole = evaluated["math_verify_boxed"], evaluated["math_verify"]
    assert boxed.sampled.benchmarks["five"].avg_at_k == pytest.approx(2 / 6)
    assert whole.sampled.benchmarks["five"].avg_at_k == pytest.approx(4 / 6)
    assert boxed.sampled.benchmarks["five"].pass_at_k == pytest.approx(2 / 3)
    assert whole.sampled.benchmarks["five"].pass_at_k == pytest.approx(2 / 3)
    # Greedily, the first text of each problem:
    assert boxed.greedy_accuracies()["five"] == pytest.approx(2 / 3)
    assert whole.greedy_accuracies()["five"] == pytest.approx(2 / 3)
    for report, column in ((boxed, 1), (whole, 2)):
        rows = [row["correct"] for row in report.samples.to_pylist() if not row["greedy"]]
        assert rows == [bool(text[column]) for two in TEXTS.values() for text in two]


def test_progress_is_told_at_every_completion_if_time_has_passed(recipe, monkeypatch):
    monkeypatch.setattr(evaluate_module, "PROGRESS_SECONDS", -1.0)
    tokenizer, told = load_tokenizer(recipe.model), []
    reward = recipe.reward.model_copy(update={"function": recipe.eval.reward})
    with RewardScorer.open(reward) as scorer:
        scorer.wait = lambda seconds: True
        plan, sampler = plan_evaluation(tokenizer, recipe), WrittenSampler(tokenizer)
        evaluate(
            sampler, tokenizer, plan, Comm(), scorer, on_progress=lambda *now: told.append(now)
        )
    assert len(told) == len(plan.samples) + 1


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
