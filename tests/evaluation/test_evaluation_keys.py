"""The plan of an evaluation, and the digests of completions, problems and model."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from threading import Barrier
from typing import Any, ClassVar

import numpy as np
import pytest
from commands import plan_of

from grpo_replay.cli.eval_command import print_report
from grpo_replay.distributed.comm import Comm
from grpo_replay.evaluation.benchmarks import try_verifier
from grpo_replay.evaluation.cache import request_digest
from grpo_replay.evaluation.evaluate import EvaluationPlan, Progress, evaluate
from grpo_replay.evaluation.evaluation_report import (
    SAME_SETTINGS,
    EvaluationReport,
    differing_settings,
    read_report,
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


class ThreadComm(Comm):
    """One of two ranks, each a thread of this process."""

    slots: ClassVar[list[Any]] = [None, None]
    both = Barrier(2, timeout=60)

    def all_gather(self, payload: Any) -> list[Any]:
        self.slots[self.rank] = payload
        self.both.wait()
        found = list(self.slots)
        self.both.wait()
        return found

    def broadcast(self, payload: bytes | None) -> bytes:
        return self.all_gather(payload)[0]

    def gather(self, payload: Any) -> list[Any] | None:
        everything = self.all_gather(payload)
        return everything if self.is_main else None


def plan(folder: Path, rows: Sequence[dict[str, str]] = ROWS, **settings: Any) -> EvaluationPlan:
    file = folder / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"benchmarks": [str(file)], "samples": 2}
    evaluation = RECIPE.eval.model_copy(update={**own, **settings})
    prompts = RECIPE.prompts.model_copy(update={"id_field": "name"})
    return plan_of(Bytes(), RECIPE.model_copy(update={"eval": evaluation, "prompts": prompts}))


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


def test_a_benchmark_with_its_own_temperature_keeps_its_samples(tmp_path):
    """Paper B's pass@k at T = 1, beside others that are evaluated at T = 0."""
    row = {"unique_id": "a", "problem": "1+1", "answer": "2"}
    (tmp_path / "math500.jsonl").write_text(json.dumps(row) + "\n")
    settings = {"samples": None, "greedy": False, "data_folder": str(tmp_path)}
    found = laws(plan(tmp_path, **settings, benchmarks=["math_passk"], temperature=0.0))
    assert found == [(False, sample, 1.0, 1.0, 20) for sample in range(16)]


def test_the_settings_of_a_report_equal_those_of_the_plan(tmp_path):
    law = {"temperature": 0.6, "top_p": 0.7, "max_completion_length": 33, "max_problems": 2}
    document = plan(tmp_path, **law, reward="minerva").document
    template = {"template": "plain", "system_prompt": None, "user_template": "{problem}="}
    absent = {"stop_tokens", "chat_template_kwargs", "correct_score"}  # the sampler's; unset here
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


HASHED = (
    *("config.json", "generation_config.json", "model.safetensors", "pytorch_model.bin"),
    *("model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "modeling_own.py"),
)


@pytest.mark.parametrize("name", HASHED)
def test_the_model_digest_covers_every_file_that_determines_a_completion(tmp_path, name):
    for each in HASHED:
        (tmp_path / each).write_text("as it was")
    file = tmp_path / name
    digests = [model_sha256(str(tmp_path), {})]
    for change in (lambda: file.write_text("new"), file.unlink):
        change()
        digests.append(model_sha256(str(tmp_path), {}))
    assert len(set(digests)) == 3


def test_the_model_digest_covers_file_names_and_no_unrelated_files(tmp_path):
    weights = tmp_path / "a.safetensors"
    weights.write_text("weights")
    before = model_sha256(str(tmp_path), {})
    for name in ("README.md", "eval.json", "eval.parquet"):  # such as an evaluation of it
        (tmp_path / name).write_text("about the model")
    assert model_sha256(str(tmp_path), {}) == before
    weights.rename(tmp_path / "b.safetensors")
    assert model_sha256(str(tmp_path), {}) != before


ONE_OF_TWO = """
def alone(completion, step):
    assert step is None
    return 1.0

def of_two(completions, answers):
    return [float(len(completions) == 2) for each in completions]
"""


def test_the_greedy_completion_is_in_no_group_of_sampled_ones(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(ONE_OF_TWO)
    reward = RECIPE.reward.alone(f"{file}:of_two").model_copy(update={"workers": 1})
    own = plan(tmp_path, reward=f"{file}:of_two", greedy=True)
    with RewardScorer.open(reward, as_verdicts=True) as scorer:
        report = evaluate(SaysTwo(), Bytes(), own, Comm(), scorer)
    assert report.accuracies()["mine"] == 1.0  # both samples of a problem, and nothing else
    assert report.greedy_accuracies()["mine"] == 0.0


def test_a_function_is_tried_as_evaluations_call_it(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(ONE_OF_TWO)
    assert try_verifier(RECIPE.reward, plan(tmp_path, reward=f"{file}:alone")) == []


def test_temperatures_are_those_that_were_sampled_at():
    def settings(shared, **own):
        described = {name: {"temperature": value} for name, value in own.items()}
        return {"temperature": shared, "benchmarks": {"plain": {}, **described}}

    own = settings(0.6, cold=0.1, hot=1.0)
    assert temperatures_used(own, ["cold", "hot", "plain"]) == [0.1, 0.6, 1.0]
    assert temperatures_used(own, ["cold", "hot"]) == [0.1, 1.0]
    other = settings(0.7, cold=0.1, hot=1.0)
    assert list(differing_settings(own, other, ["cold", "hot"])) == []
    assert list(differing_settings(own, other, ["plain"])) == [("temperature", 0.6, 0.7)]
    assert len(list(differing_settings(own, settings(0.6, cold=0.2, hot=1.0), ["cold"]))) == 1


@pytest.mark.slow
def test_two_ranks_report_their_totals_and_name_unparsable_answers(tmp_path, capsys):
    """Rank 0 takes problems p0 and p2, and what is remembered; rank 1 takes p1, whose reference
    answer cannot be parsed."""
    told: list[list[Progress]] = [[], []]

    def rank(number: int, ranks: int) -> EvaluationReport | None:
        with RewardScorer.open(RECIPE.reward.model_copy(update={"workers": 1})) as scorer:
            comm = ThreadComm(number, 2) if ranks == 2 else Comm()
            return evaluate(
                *(SaysTwo(), Bytes(), plans[ranks], comm, scorer),
                generations_folder=tmp_path / "generations",
                on_progress=told[number].append,
            )

    first = plan(tmp_path, samples=1, max_problems=1, greedy=False)
    plans = {1: first, 2: plan(tmp_path, samples=3, greedy=True)}
    rank(0, 1)
    assert (told[0][-1].total, told[0][-1].done) == (1, 1)
    with ThreadPoolExecutor(2) as threads:
        reports = list(threads.map(rank, (0, 1), (2, 2)))
    # Each problem has 3 samples and 1 greedy one; the first of p0 is remembered.
    assert [(each[-1].total, each[-1].done) for each in told] == [(1 + 3 + 4, 8), (4, 4)]
    assert reports[1] is None
    for results in (reports[0].sampled, reports[0].greedy):
        assert results.benchmarks["mine"].unparsable_answers == ("p1",)
        assert results.mean.avg_at_k == pytest.approx(1 / 3)
    reports[0].write(tmp_path / "e.json")
    assert read_report(tmp_path / "e.json").sampled == reports[0].sampled
    print_report(reports[0], tmp_path / "e.json", as_json=False)
    assert "mine: the reference answers of p1 cannot be parsed" in capsys.readouterr().out
