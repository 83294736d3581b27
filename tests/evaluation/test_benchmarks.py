"""Benchmarks: by name, by group, from a folder, from the user's file; and every bad input."""

import json

import datasets
import pytest
from stand_ins import SIZES, write_benchmarks

from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.evaluation.benchmarks import (
    BENCHMARKS,
    find_benchmarks,
    load_problems,
)
from grpo_replay.recipe import EvalSection, PromptsSection


def settings(*benchmarks: str, **others) -> EvalSection:
    return EvalSection(benchmarks=list(benchmarks), **others)


def names(*benchmarks: str) -> list[str]:
    return [each.name for each in find_benchmarks(settings(*benchmarks))]


def load(word: str, **others):
    fields = {key: others.pop(key) for key in [*others] if key.endswith("_field")}
    wanted = settings(word, **others)
    (benchmark,) = find_benchmarks(wanted, PromptsSection(**fields))
    return load_problems(benchmark, wanted)


def test_groups_expand_in_order_without_duplicates():
    assert names("paper") == ["math500", "aime25", "aime26", "hmmt_feb25", "hmmt_feb26"]
    assert names("paper_b") == ["math_pass1", "math_passk", "openr1_pass1", "openr1_passk"]
    assert len(names("tiny")) == 5
    assert names("tiny_long") == ["tiny_long_10", "tiny_long_14", "tiny_long_18"]
    assert names("aime25", "paper", "aime25")[0] == "aime25"
    assert len(names("aime25", "paper", "aime25")) == 5
    assert names() == []


def test_the_paper_group_has_the_benchmarks_of_paper_a():
    each = [(BENCHMARKS[n].source, BENCHMARKS[n].split, BENCHMARKS[n].samples) for n in SIZES]
    assert each == [
        ("HuggingFaceH4/MATH-500", "test", 8),
        ("MathArena/aime_2025", "train", 16),
        ("MathArena/aime_2026", "train", 16),
        ("MathArena/hmmt_feb_2025", "train", 16),
        ("MathArena/hmmt_feb_2026", "train", 16),
    ]


def test_a_folder_replaces_the_hub_and_whole_numbers_become_text(tmp_path):
    write_benchmarks(tmp_path)
    for name, size in SIZES.items():
        problems = load(name, data_folder=str(tmp_path))
        assert len(problems) == size
        assert all(isinstance(problem.answer, str) for problem in problems)
    (first, *_) = load("aime26", data_folder=str(tmp_path))
    assert (first.problem_id, first.problem, first.answer) == ("1", "What is $1 + 1$?", "2")
    (first, *_) = load("math500", data_folder=str(tmp_path))
    assert first.problem_id == "test/algebra/1.json"
    assert len(load("math500", data_folder=str(tmp_path), max_problems=7)) == 7


def test_a_file_without_the_columns_says_which_keys_name_them(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("task,result\n1+1,2\n")
    with pytest.raises(DatasetError, match=r"'problem'.*task, result.*prompts\.problem_field"):
        load(str(path))


def test_a_file_has_the_fields_and_the_separator_of_the_training_prompts(tmp_path):
    path = tmp_path / "test.csv"
    path.write_text("frage;l\u00f6sung\n1+1, or 2?;007\n")
    fields = {"problem_field": "frage", "answer_field": "l\u00f6sung"}
    prompts = PromptsSection(source="train.csv", dataset_options={"sep": ";"}, **fields)
    wanted = settings(str(path))
    (benchmark,) = find_benchmarks(wanted, prompts)
    (problem,) = load_problems(benchmark, wanted)
    assert problem.answer == "007"


def test_a_folder_with_several_splits_is_refused_because_it_would_read_the_training_one(tmp_path):
    saved = datasets.Dataset.from_list([{"problem": "1+1", "answer": "2"}])
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "both")
    with pytest.raises(DatasetError, match="has the splits train, test"):
        load(str(tmp_path / "both"))
    assert len(load(str(tmp_path / "both" / "test"))) == 1


def test_names_that_cannot_be_are_refused(tmp_path):
    for words, message in (
        ([str(tmp_path / "a" / "mine.jsonl"), str(tmp_path / "b" / "mine.jsonl")], "'mine'"),
        (["aime2025"], "did you mean 'aime25'"),
        (["./none"], "'./none'"),
    ):
        with pytest.raises(RecipeError, match=message):
            names(*words)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"mine\.jsonl' has no rows"),
        ([{"problem": "p", "answer": "1"}, {"answer": "1"}], r"mine\.jsonl:2: no field 'problem'"),
        ([{"problem": "p", "answer": None}], r"mine\.jsonl:1: field 'answer' found None"),
        ([{"problem": "p", "answer": True}], "found True"),
        ([{"problem": "p", "answer": " "}], "is empty"),
    ],
)
def test_errors_of_bad_rows_name_file_and_line(tmp_path, rows, message):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DatasetError, match=message):
        load(str(path))


def test_the_error_for_a_missing_file_says_what_to_download(tmp_path):
    with pytest.raises(DatasetError) as caught:
        load("hmmt_feb26", data_folder=str(tmp_path))
    message = str(caught.value)
    for part in ("hmmt_feb26.jsonl", "MathArena/hmmt_feb_2026", "eval.data_folder"):
        assert part in message
