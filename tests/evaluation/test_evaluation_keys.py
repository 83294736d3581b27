"""The plan of an evaluation, and the digests of completions, problems and model."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_replay.distributed.comm import Comm
from grpo_replay.evaluation.benchmarks import plan_evaluation, try_verifier
from grpo_replay.evaluation.cache import request_digest
from grpo_replay.evaluation.evaluate import EvaluationPlan, evaluate
from grpo_replay.evaluation.evaluation_report import (
    SAME_SETTINGS,
    differing_settings,
    temperatures_used,
)
from grpo_replay.evaluation.session import model_sha256
from grpo_replay.recipe import load_recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.types import Completion, GenerationRequest, RequestKey

RECIPE = load_recipe("tiny", [])
ANSWERS = {"p0": "2", "p1": "$", "p2": "6"}  # math-verify cannot parse "$"
ROWS = [{"name": name, "problem": f"{name}?", "answer": ANSWERS[name]} for name in ANSWERS]


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_token, eos_token_id = "<eos>", 256

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return bytes(token_ids).decode()

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [repr(bytes([each])) for each in token_ids]


class SaysTwo:
    """A sampler that returns the same completion for every request."""

    stop_token_ids = (0,)

    def generate(self, requests: Sequence[GenerationRequest]):
        for request in requests:
            tokens = np.array(list(b"\\boxed{2}"), dtype=np.int32)
            yield Completion(request.key, tokens, np.zeros(len(tokens)), "stop", 0, 0)


def plan(folder: Path, rows: Sequence[dict[str, str]] = ROWS, **settings: Any) -> EvaluationPlan:
    file = folder / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"benchmarks": [str(file)], "samples": 2}
    evaluation = RECIPE.eval.model_copy(update={**own, **settings})
    prompts = RECIPE.prompts.model_copy(update={"id_field": "name"})
    return plan_evaluation(
        Bytes(), RECIPE.model_copy(update={"eval": evaluation, "prompts": prompts})
    )


def laws(planned: EvaluationPlan) -> list[tuple[bool, int, float, float, int]]:
    """Of the first problem of each benchmark."""
    return [
        (each.greedy, each.sample, r.temperature, r.top_p, r.max_tokens)
        for each in planned.samples
        if each.problem_index == 0 and (r := each.request)
    ]


def test_sampled_and_greedy_completions_have_their_own_settings(tmp_path):
    law = {"temperature": 0.6, "top_p": 0.7, "max_completion_length": 33}
    assert laws(plan(tmp_path, **law, greedy=True)) == [
        (False, 0, 0.6, 0.7, 33),
        (False, 1, 0.6, 0.7, 33),
        (True, 0, 0.0, 1.0, 33),
    ]


def test_at_temperature_zero_one_sample_is_enough(tmp_path):
    settings = {"samples": None, "greedy": False, "benchmarks": ["tiny_add", "tiny_sub"]}
    first = [(False, sample, 1.0, 1.0, 20) for sample in range(4)]
    assert laws(plan(tmp_path, **settings)) == [*first, *first]
    only = (False, 0, 0.0, 1.0, 20)
    assert laws(plan(tmp_path, **settings, temperature=0.0)) == [only, only]


def test_the_settings_of_a_report_equal_those_of_the_plan(tmp_path):
    law = {"temperature": 0.6, "top_p": 0.7, "max_completion_length": 33, "max_problems": 2}
    document = plan(tmp_path, **law, reward="minerva").document
    template = {"template": "plain", "system_prompt": None, "user_template": "{problem}="}
    # the sampler's, or unset here
    absent = {"stop_tokens", "chat_template_kwargs", "correct_score", "special_tokens"}
    found = {key: document[key] for key in SAME_SETTINGS if key not in absent}
    assert found == {**law, **template, "reward": "minerva"}


@pytest.mark.parametrize(("field", "value"), [("name", "q"), ("problem", "1*1"), ("answer", "3")])
def test_the_problems_digest_covers_every_field(tmp_path, field, value):
    first, *others = ROWS
    digests = {
        plan(tmp_path, rows).document["benchmarks"]["mine"]["problems_sha256"]
        for rows in (ROWS, [{**first, field: value}, *others], [*others, first])
    }
    assert len(digests) == 3


REQUEST = GenerationRequest(RequestKey(0, 1, 2), np.array([5, 6], dtype=np.int32), 7, 20, 0.6, 0.8)
OTHER = {
    "prompt_token_ids": np.array([5, 7], dtype=np.int32),
    **{"seed": 8, "max_tokens": 21, "temperature": 0.7, "top_p": 0.9},
}


@pytest.mark.parametrize("field", [field.name for field in fields(GenerationRequest)])
def test_the_request_digest_covers_everything_that_determines_a_completion(field):
    if field == "key":
        moved = replace(REQUEST, key=RequestKey(3, 4, 5))
        assert request_digest(moved) == request_digest(REQUEST)
    else:
        changed = replace(REQUEST, **{field: OTHER[field]})
        assert request_digest(changed) != request_digest(REQUEST)


def test_the_model_digest_covers_what_determines_a_completion_and_no_unrelated_files(tmp_path):
    names = ("config.json", "a.safetensors", "tokenizer.json", "chat_template.jinja", "own.py")
    for each in names:
        (tmp_path / each).write_text("as it was")
    digests = [model_sha256(str(tmp_path), {})]
    for name in names:
        (tmp_path / name).write_text("new")
        digests.append(model_sha256(str(tmp_path), {}))
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    digests.append(model_sha256(str(tmp_path), {}))
    assert len(set(digests)) == len(names) + 2
    for name in ("README.md", "eval.json", "eval.parquet"):  # such as an evaluation of it
        (tmp_path / name).write_text("about the model")
    assert model_sha256(str(tmp_path), {}) == digests[-1]


ONE_OF_TWO = """
def of_two(completions, answers):
    return [float(len(completions) == 2) for each in completions]
"""


def test_the_greedy_completion_is_in_no_group_of_sampled_ones(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(ONE_OF_TWO)
    reward = RECIPE.reward.with_single_function(f"{file}:of_two").model_copy(update={"workers": 1})
    own = plan(tmp_path, reward=f"{file}:of_two", greedy=True)
    with RewardScorer.open(reward, as_verdicts=True) as scorer:
        report = evaluate(SaysTwo(), Bytes(), own, Comm(), scorer)
    assert report.accuracies()["mine"] == 1.0  # both samples of a problem, and nothing else
    assert report.greedy_accuracies()["mine"] == 0.0


def test_a_verifier_is_tried_on_problems_of_every_benchmark_though_their_ids_coincide(tmp_path):
    (tmp_path / "own.py").write_text("def own(completion, answer):\n    return 1 / int(answer)\n")
    row = {"name": "0", "problem": "?"}
    for name, answer in (("a", "0"), ("b", "1")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**row, "answer": answer}) + "\n")
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    own = plan(tmp_path, benchmarks=files, reward=f"{tmp_path}/own.py:own")
    (notice,) = try_verifier(RECIPE.reward, own)
    assert "failed on 1 of the 2 rows" in notice


def test_temperatures_are_those_that_were_sampled_at():
    def settings(shared, **own):
        described = {name: {"temperature": value} for name, value in own.items()}
        return {"temperature": shared, "benchmarks": {"plain": {}, **described}}

    own = settings(0.6, cold=0.1, hot=1.0)
    assert temperatures_used(own, ["cold", "hot", "plain"]) == [0.1, 0.6, 1.0]
    assert temperatures_used(own, ["cold", "hot"]) == [0.1, 1.0]
    other = settings(0.7, cold=0.1, hot=1.0)
    assert list(differing_settings(own, other, ["cold", "hot"])) == []
    assert list(differing_settings(own, other, ["plain"])) == [
        ("temperature", {"plain": 0.6}, {"plain": 0.7})
    ]
    assert len(list(differing_settings(own, settings(0.6, cold=0.2, hot=1.0), ["cold"]))) == 1
