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
    local_file,
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


def test_a_users_file_may_have_other_field_names(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"q": "1+1", "a": 2, "k": "x"}\n\n{"q": "2+2", "a": "4", "k": "y"}\n')
    fields = {"problem_field": "q", "answer_field": "a"}
    problems = load(str(path), **fields)
    assert [p.problem_id for p in problems] == ["0", "1"]
    assert [p.answer for p in problems] == ["2", "4"]
    assert [p.problem_id for p in load(str(path), **fields, id_field="k")] == ["x", "y"]
    assert names(str(path)) == ["mine"]


def test_a_file_without_the_columns_says_which_keys_name_them(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("task,result\n1+1,2\n")
    with pytest.raises(
        DatasetError,
        match=r"no column 'problem'; there are.* task, result: set prompts.problem_field and "
        r"prompts.answer_field to the column with it$",
    ):
        load(str(path))
    (tmp_path / "aime26.jsonl").write_text('{"task": "1+1", "id": 1}\n')
    with pytest.raises(DatasetError) as caught:  # its columns are those that were published
        load("aime26", data_folder=str(tmp_path))
    assert "no field 'problem'" in str(caught.value) and "prompts." not in str(caught.value)


def test_a_folder_is_read_as_one_of_prompts(tmp_path, monkeypatch):
    folder = tmp_path / "held.out"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text(f'{{"question": "{name}", "answer": "1 #### 2"}}\n')
    monkeypatch.chdir(tmp_path)
    for word in (str(folder), "./held.out", "../" + tmp_path.name + "/held.out"):
        assert names(word) == ["held.out"]
        problems = load(word)
        assert [(p.problem_id, p.text, p.answer) for p in problems] == [
            ("0", "a", "2"), ("1", "b", "2"),
        ]  # fmt: skip
    wanted = settings(str(folder))
    (benchmark,) = find_benchmarks(wanted)
    assert local_file(benchmark, wanted) == folder
    (tmp_path / "math500").mkdir()
    assert find_benchmarks(settings("math500"))[0].source == "HuggingFaceH4/MATH-500"
    with pytest.raises(RecipeError, match=r"no benchmark './none'.*, or a file .*, or a folder"):
        names("./none")
    with pytest.raises(RecipeError, match="'mean' in the report"):
        (tmp_path / "mean").mkdir()
        names("./mean")


def test_a_folder_with_several_splits_is_refused_because_it_would_read_the_training_one(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    with pytest.raises(DatasetError, match=r"'mine': .* has the splits train, test: name the file"):
        load(str(folder))
    saved = datasets.Dataset.from_list([{"problem": "1+1", "answer": "2"}])
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "both")
    with pytest.raises(DatasetError, match="has the splits train, test"):
        load(str(tmp_path / "both"))
    assert len(load(str(tmp_path / "both" / "test"))) == 1


def test_a_folder_without_data_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="empty: cannot be read: EmptyDatasetError"):
        load(str(tmp_path / "empty"))


def test_a_file_is_read_as_the_training_file_of_its_kind(tmp_path):
    path = tmp_path / "test.csv"
    path.write_bytes("frage;lösung\n1+1, or 2?;007\n".encode("latin-1"))
    (tmp_path / "plain.jsonl").write_text('{"frage": "1+1", "lösung": "2"}\n')
    (tmp_path / "tabs.tsv").write_text("frage\tlösung\n1+1\t2\n")
    options = {"sep": ";", "encoding": "latin-1", "split": "train[:-1]"}
    fields = {"problem_field": "frage", "answer_field": "lösung"}
    one = PromptsSection(source="train.csv", dataset_options=options, **fields)
    listed = [{"source": "owner/name"}, {"source": "train.csv", "dataset_options": options}]
    for prompts in (one, PromptsSection(source=listed, **fields)):
        for name, answer in (("test.csv", "007"), ("plain.jsonl", "2"), ("tabs.tsv", "2")):
            wanted = settings(str(tmp_path / name))
            (benchmark,) = find_benchmarks(wanted, prompts)
            (problem,) = load_problems(benchmark, wanted)
            assert problem.answer == answer


def test_two_files_with_the_same_name_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="both called 'mine'"):
        names(str(tmp_path / "a" / "mine.jsonl"), str(tmp_path / "b" / "mine.jsonl"))


def test_an_unknown_name_suggests_a_similar_one():
    with pytest.raises(RecipeError, match="did you mean 'aime25'"):
        names("aime2025")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no problems"),
        ([{"problem": "p"}], r"mine\.jsonl:1: no field 'answer'"),
        ([{"problem": "p", "answer": "1"}, {"answer": "1"}], r"mine\.jsonl:2: no field 'problem'"),
        ([{"problem": "p", "answer": None}], r"mine\.jsonl:1: field 'answer' found None"),
        ([{"problem": "p", "answer": [1]}], r"found \[1\]"),
        ([{"problem": "p", "answer": True}], "found True"),
        ([{"problem": "p", "answer": " "}], "is empty"),
    ],
)
def test_errors_of_bad_rows_name_file_and_line(tmp_path, rows, message):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DatasetError, match=message):
        load(str(path))


def test_duplicate_ids_are_refused(tmp_path):
    path = tmp_path / "mine.jsonl"
    row = json.dumps({"problem": "p", "answer": "1", "id": "same"}) + "\n"
    path.write_text(row + row)
    with pytest.raises(DatasetError, match=r":2: id 'same' in field .* is also the id of .*:1"):
        load(str(path), id_field="id")


def test_the_error_for_a_missing_file_says_what_to_download(tmp_path):
    with pytest.raises(DatasetError) as caught:
        load("hmmt_feb26", data_folder=str(tmp_path))
    message = str(caught.value)
    for part in (
        *("no hmmt_feb26.jsonl or hmmt_feb26.parquet", "MathArena/hmmt_feb_2026"),
        *("'train'", "problem_idx, problem, answer", "eval.data_folder", "hf download"),
    ):
        assert part in message


def test_the_error_for_an_unreachable_hub_says_what_to_download(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(DatasetError) as caught:
        load("aime25")
    message = str(caught.value)
    for part in (
        *("'aime25' cannot be read from the hub", "hf download", "MathArena/aime_2025"),
        *("aime25.jsonl or aime25.parquet", "--data-folder"),
    ):
        assert part in message
