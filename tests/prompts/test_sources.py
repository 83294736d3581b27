"""Rows of problems from files and the hub: golds kept as text, bad rows refused by their place."""

import json
import os
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_replay.engine.models import byte_tokenizer
from grpo_replay.errors import DatasetError
from grpo_replay.evaluation.benchmarks import find_benchmarks, load_problems
from grpo_replay.prompts import sources
from grpo_replay.prompts.prompt_set import load_prompts
from grpo_replay.prompts.sources import answer_text, checked_column, read_local_rows
from grpo_replay.recipe import EvalSection, PromptsSection, RewardSection
from grpo_replay.recipe.layers import is_on_hub
from grpo_replay.rewards.scorer import RewardScorer

TOKENIZER = byte_tokenizer()


@pytest.fixture
def jsonl(tmp_path) -> Callable[..., str]:
    """Writes rows (or raw lines) and returns the path."""

    def write(*rows):
        path = tmp_path / "problems.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write


def section(source, **changes):
    return PromptsSection(
        **{"source": str(source), "template": "plain", "user_template": "{problem}", **changes}
    )


def found(source, whole_rows=True, **changes):
    prompts = load_prompts(section(source, **changes), TOKENIZER, 0, whole_rows)
    return [(p.text, p.answer) for p in prompts.sample(9)]


def refused(source, match, **changes):
    for whole_rows in (True, False):
        with pytest.raises(DatasetError, match=match):
            load_prompts(section(source, **changes), TOKENIZER, 0, whole_rows)


@pytest.fixture(scope="module")
def pasted(tmp_path_factory):
    """A folder with the same two rows in every form."""
    import datasets

    folder = tmp_path_factory.mktemp("pasted")
    rows = [{"question": "1+1, or\n2?", "answer": "007"}, {"question": "NA", "answer": "1.50"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "a.jsonl").write_text(lines)
    for name, sep in (("a.csv", ","), ("semi.csv", ";")):
        (folder / name).write_text(
            f'Question{sep} Answer \n"1+1, or\n2?"{sep}007\nNA{sep}1.50\n{sep}\n \n',
            encoding="utf-8-sig",
        )
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(folder / "saved")
    datasets.DatasetDict(train=dataset, rest=dataset.select([0])).save_to_disk(folder / "splits")
    dataset.to_parquet(folder / "a.parquet")
    return folder


@pytest.mark.parametrize(
    "name",
    ["a.csv", "semi.csv", "a.json", "a.jsonl", "a.parquet", "saved", "splits/train"],
)
def test_the_same_rows_come_from_every_form_with_their_answers_as_text(pasted, name):
    """GSM8K's `question` is found by its name; a spreadsheet's separator, capitals, blanks in the
    header and blank rows at the end make no difference."""
    chosen = section(f"{pasted}/{name}")
    for whole_rows in (True, False):
        prompts = load_prompts(chosen, TOKENIZER, 0, whole_rows)
        rows = [(p.prompt_id, p.text, p.answer) for p in prompts.sample(2)]
        assert rows == [("0", "1+1, or\n2?", "007"), ("1", "NA", "1.50")]
    row = load_prompts(chosen, TOKENIZER, 0).sample(2)[0].row
    assert {key.lower(): value for key, value in row.items()} == {
        "question": "1+1, or\n2?", "answer": "007"
    }  # fmt: skip
    assert "'question'" in prompts.notices[0]


def test_a_part_of_a_file_is_a_slice_or_a_file_of_its_own(pasted):
    sliced = {"dataset_options": {"split": "train[1:]"}}
    for name in ("a.csv", "a.parquet"):
        assert found(f"{pasted}/{name}", **sliced) == [("NA", "1.50")]
    for name in ("a.jsonl", "saved"):
        refused(f"{pasted}/{name}", r"'split': 'train\[1:\]'.*file of its own", **sliced)
    refused(f"{pasted}/splits", "splits train, rest: name the folder of one, .*splits/train")


def test_numeric_answers_become_text_with_all_their_digits(jsonl):
    numbers = (72, -3, 18.0, 0.25, 12345678901234567)
    path = jsonl(*({"problem": "a", "answer": n} for n in numbers))
    texts = ["72", "-3", "18", "0.25", "12345678901234567"]
    assert [answer for _, answer in found(path)] == texts


def parquet(path, answers):
    pq.write_table(pa.table({"problem": ["x"] * len(answers), "answer": answers}), path)
    return path


def test_a_number_of_json_becomes_the_decimal_that_was_written(jsonl):
    """602000000000000000000000 as a float is 601999999999999995805696."""
    numbers = ("6.02e23", "1e-10", "-2.50", "0.12345678901234567891", "-0.0")
    path = jsonl(*(f'{{"problem": "a", "answer": {number}}}' for number in numbers))
    expected = ["602000000000000000000000", "0.0000000001", "-2.5", "0.12345678901234567891", "0"]
    assert [answer for _, answer in found(path)] == expected
    row = load_prompts(section(path), TOKENIZER, 0).sample(1)[0].row
    assert row["answer"] == 6.02e23 and json.dumps(row["answer"]) == "6.02e+23"
    with RewardScorer.open(RewardSection(function="boxed", workers=1)) as scorer:
        for written in (r"6.02\times10^{23}", "6.02e23", expected[0]):
            (verdict,) = scorer.score([(rf"\boxed{{{written}}}", expected[0], None)])
            assert verdict.status == "correct", written


def test_numbers_of_parquet_keep_their_digits(tmp_path):
    large = Decimal("12345678901234567890.5")
    columns = {
        "decimal": (pa.array([large, Decimal("1.5")], pa.decimal128(30, 4)), [str(large), "1.5"]),
        "uint64": (pa.array([2**63 + 1], pa.uint64()), [str(2**63 + 1)]),
        "float64": (
            pa.array([6.02e23, 0.1, 2.0**53 - 1]), ["602" + "0" * 21, "0.1", "9007199254740991"]
        ),
        "float32": (pa.array([0.1, 2e7], pa.float32()), ["0.1", "20000000"]),
    }  # fmt: skip
    for name, (answers, expected) in columns.items():
        path = parquet(tmp_path / f"{name}.parquet", answers)
        assert [answer for _, answer in found(path)] == expected, name
    nested = parquet(tmp_path / "nested.parquet", pa.array([{"gold": np.float32(0.1)}]))
    assert found(nested, answer_field="answer.gold") == [("x", "0.1")]


@pytest.mark.parametrize(
    ("kind", "value"),
    [("float64", 12345678901234567), ("float32", 16777217), ("float16", 2049)],
)
def test_a_float_that_stands_for_several_whole_numbers_is_refused(tmp_path, jsonl, kind, value):
    floats = pa.array(np.array([1, value]).astype(kind))
    refused(
        parquet(tmp_path / "a.parquet", floats), r"a\.parquet row 1: field 'answer' found \d+ as"
    )
    if kind == "float64":
        rounded = f'{{"problem": "a", "answer": {float(value)}}}'  # as a data frame writes it
        refused(jsonl(rounded), r"jsonl:1: field 'answer' found 12345678901234568 as a float")


def test_a_class_is_its_name(tmp_path):
    """In a file, in a saved folder, inside a column, and in rows that Python gives."""
    import datasets

    letters = datasets.ClassLabel(names=list("ABCD"))
    of_answer = {"answer": letters, "more": {"gold": letters}}
    features = datasets.Features({"problem": datasets.Value("string"), **of_answer})
    rows = [{"problem": "x", "answer": i, "more": {"gold": 3 - i}} for i in range(4)]
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    for source in ("a.parquet", "saved"):
        assert [answer for _, answer in found(tmp_path / source)] == list("ABCD")
        inside = found(tmp_path / source, answer_field="more.gold")
        assert [answer for _, answer in inside] == list("DCBA")
    row = load_prompts(section(tmp_path / "saved"), TOKENIZER, 0).sample(1)[0].row
    assert row == {"problem": "x", "answer": "A", "more": {"gold": "D"}}
    unlabelled = datasets.Dataset.from_list([{**rows[0], "answer": -1}], features=features)
    unlabelled.to_parquet(tmp_path / "b.parquet")
    refused(tmp_path / "b.parquet", r"b\.parquet row 0: field 'answer' found None")


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_text_beside_numbers_in_one_column_stays_as_it_is(tmp_path, name):
    mixed = [
        {"problem": "a", "answer": "1/2", "more": {"v": "x"}},
        {"problem": "b", "answer": 3, "more": {"v": 1}},
    ]
    lines = "\n".join(map(json.dumps, mixed)) + "\n"
    (tmp_path / name).write_text(json.dumps(mixed) if name == "rows.json" else lines)
    rows = read_local_rows(str(tmp_path / name), {"split": "train"})
    assert rows.column("answer") == ["1/2", 3] and rows.column("more.v") == ["x", 1]
    assert rows.row(1) == mixed[1] and list(rows.names) == ["problem", "answer", "more"]
    assert checked_column(rows, "answer", answer_text) == ["1/2", "3"]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_date_stays_text(tmp_path, name):
    row = json.dumps({"problem": "when?", "answer": "2020-01-02"})
    (tmp_path / name).write_text(f"[{row}]" if name == "rows.json" else row)
    assert found(tmp_path / name) == [("when?", "2020-01-02")]


def test_only_the_text_after_the_last_marker_is_the_answer(jsonl):
    """As in GSM8K."""
    marked = {"problem": "a", "answer": "9 + 9 = <<9+9=18>>18\n#### first\n#### 1,018 "}
    prompts = load_prompts(section(jsonl(marked, {"problem": "b", "answer": "7"})), TOKENIZER, 0)
    assert [p.answer for p in prompts.sample(2)] == ["1,018", "7"]
    assert prompts.sample(2)[0].row == marked
    (notice,) = prompts.notices
    assert "1 of 2" in notice
    refused(jsonl({"problem": "a", "answer": "7 ####  "}), ":1: ")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"problem": "p"}, r"problems.jsonl:3: .*'answer'"),
        ({"problem": "p", "anwser": "1"}, r":3: .*'answer' .*'anwser'"),
        ({"problem": "p", "answer": " "}, r":3: field 'answer'"),
        ({"problem": "p", "answer": float("nan")}, r":3: field 'answer' found nan"),
        ({"problem": "p", "answer": True}, r":3: field 'answer' found True"),
        ({"problem": "p", "answer": ["1"]}, r":3: field 'answer' found \['1'\]"),
        ({"problem": 5, "answer": "1"}, r":3: field 'problem' found 5"),
        ({"problem": "a \ud83d b", "answer": "1"}, r":3: field 'problem' has half .*ud83d"),
        ({"problem": "p", "answer": "x\ude00"}, r":3: field 'answer' has half .*ude00"),
        ({"problem": [{"role": "user", "content": "\ud83d"}], "answer": "1"}, ":3: .*has half"),
        (
            {"problem": [{"role": "user", "content": "p", "more": ["\ud83d"]}], "answer": "1"},
            ":3: .*has half",
        ),
        ("{broken", r":3: "),
        ('["a", "b"]', r":3: "),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_line(jsonl, row, match):
    refused(jsonl({"problem": "ok", "answer": "1"}, "", row), match)


def test_half_a_character_is_refused_in_ids_and_benchmarks_too_and_a_whole_one_is_not(jsonl):
    whole = {"problem": "\ud83d\ude00", "answer": "\ud83d\ude00", "id": "\ud83d\ude00"}
    assert found(jsonl(whole), id_field="id") == [("😀", "😀")]
    path = jsonl(whole, whole | {"id": "\ud83d"})
    refused(path, r"problems.jsonl:2: field 'id' has half", id_field="id")
    for field in ("problem", "answer"):
        (benchmark,) = find_benchmarks(
            EvalSection(benchmarks=[jsonl(whole, whole | {field: "\ud83d"})])
        )
        with pytest.raises(DatasetError, match=f"problems.jsonl:2: field '{field}' has half"):
            load_problems(benchmark, EvalSection())


def test_a_bad_row_of_parquet_is_refused_with_its_file_and_row(tmp_path):
    path = tmp_path / "problems.parquet"
    pq.write_table(pa.table({"problem": ["a", "b"], "answer": ["1", None]}), path)
    refused(path, "problems.parquet row 1: field 'answer' found None")
    refused(path, "problems.parquet row 0: .*'solution'", answer_field="solution")


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.jsonl"])
def test_a_file_is_read_as_it_is_on_disk_even_with_its_old_time(tmp_path, name):
    """As after an archive is unpacked over it: also where it has other rows, and as a benchmark."""
    path = tmp_path / name
    read = []
    for golds in (["11"], ["99"], ["99", "98"]):
        rows = [{"problem": "x", "answer": gold} for gold in golds]
        if name == "rows.csv":
            path.write_text("problem,answer\n" + "".join(f"x,{gold}\n" for gold in golds))
        elif name == "rows.parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(path, (1_700_000_000, 1_700_000_000))
        read.append([answer for _, answer in found(path)])
        settings = EvalSection(benchmarks=[str(path)])
        (benchmark,) = find_benchmarks(settings)
        assert [each.answer for each in load_problems(benchmark, settings)] == golds
    assert read == [["11"], ["99"], ["99", "98"]]


def test_missing_sources_are_named(tmp_path, jsonl):
    jsonl({"problem": "a", "answer": "1"})
    refused(tmp_path / "problem.jsonl", r"problem\.jsonl does not exist.*'problems\.jsonl'")
    refused(tmp_path, "Directory .* is neither.*save_to_disk")
    refused("builtin:huge", "builtin:huge.*builtin:tiny")
    (tmp_path / "data.xlsx").write_text("problem,answer\n")
    refused(tmp_path / "data.xlsx", r"'.xlsx'")
    (tmp_path / "latin.jsonl").write_bytes(b'{"problem": "\xe9"}')
    refused(tmp_path / "latin.jsonl", "latin.jsonl.*UTF-8")
    refused(jsonl(), "problems.jsonl")
    (tmp_path / "empty.csv").write_text("")
    refused(tmp_path / "empty.csv", "empty.csv.* has no rows")
    (tmp_path / "latin.csv").write_bytes(b"problem,answer\n\xe9,1\n")
    refused(tmp_path / "latin.csv", r"latin\.csv.*encoding")
    encoded = {"dataset_options": {"encoding": "latin-1"}}
    assert found(tmp_path / "latin.csv", **encoded) == [("\xe9", "1")]
    (tmp_path / "bad.json").write_text('[{"problem": "a"},')
    refused(tmp_path / "bad.json", r"bad\.json: cannot be read: Expecting")


def test_a_path_may_begin_at_the_home_folder(jsonl, tmp_path, monkeypatch):
    jsonl({"problem": "a", "answer": "1"})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found("~/problems.jsonl") == [("a", "1")]


def test_commas_without_quotes_are_refused(tmp_path):
    """pandas would take "What is 1" for the name of the row."""
    path = tmp_path / "own.csv"
    path.write_text("question,answer\nWhat is 1,000+1?,1001\nWhat is 2,000+1?,2001\n")
    refused(path, r"own\.csv row 0: 3 values")


def test_ids_come_from_their_field_and_must_be_unique(jsonl):
    rows = [{"problem": "p", "answer": "1", "uid": uid} for uid in ("a", 7, "c")]
    prompts = load_prompts(section(jsonl(*rows), id_field="uid"), TOKENIZER, 0)
    assert [p.prompt_id for p in prompts.sample(3)] == ["a", "7", "c"]
    rows.append({"problem": "q", "answer": "1", "uid": "7"})
    refused(jsonl(*rows), r"jsonl:4: id '7' .*jsonl:2", id_field="uid")


def test_fields_that_no_function_reads_are_left_out(tmp_path):
    rows = [{"problem": "1+1", "answer": "1", "uid": str(i), "long": "x"} for i in range(3)]
    path = tmp_path / "problems.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    named = section(path, id_field="uid")
    assert [p.row for p in load_prompts(named, TOKENIZER, 0).sample(3)] == rows
    part = load_prompts(named, TOKENIZER, 0, whole_rows=False).sample(3)
    assert [p.row for p in part] == [{}] * 3


def test_a_hub_dataset_is_read_through_datasets(tmp_path, monkeypatch):
    """`datasets` itself reads a Parquet file here, as it does after a download."""
    import datasets

    rows = [{"problem": f"{i}+1", "answer": str(i + 1)} for i in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    real = datasets.load_dataset

    def from_folder(source, *, name, split, revision):
        assert (source, name, revision) == ("owner/name", "main", "abc")
        files, cache = str(tmp_path / "train.parquet"), str(tmp_path / "cache")
        return real("parquet", data_files=files, split=split, cache_dir=cache)

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    options = {"dataset_options": {"name": "main", "revision": "abc"}}
    expected = [(row["problem"], row["answer"]) for row in rows]
    assert found("owner/name", **options) == expected
    assert found("owner/name", whole_rows=False, **options) == expected
    refused("owner/name", r"owner/name\[train\] row 0: .*'x'", answer_field="x", **options)


def test_an_unavailable_hub_dataset_is_refused_with_its_download_command(monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refused("nobody/no-dataset", "hf download --repo-type dataset nobody/no-dataset")


@pytest.mark.parametrize(
    "source, expected",
    [
        ("openai/gsm8k", True),
        ("missing.jsonl", False),  # a file by its suffix, although it is not there
        ("./folder", False),
        ("~/folder", False),
        ("builtin:tiny", False),
        ("reasoning_gym:gcd", False),
    ],
)
def test_what_is_of_the_hub_is_told_by_its_name(source, expected):
    assert is_on_hub(source) is expected


def test_a_folder_that_exists_is_not_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_on_hub("owner/name")
    (tmp_path / "owner/name").mkdir(parents=True)
    assert not is_on_hub("owner/name")


def test_a_home_that_cannot_be_written_is_not_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    import datasets

    path = tmp_path / "q.csv"
    path.write_text("problem,answer\n1+1,2\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/nowhere/datasets")
    refused(path, "q.csv: the cache of `datasets` cannot be written: /proc/nowhere.*set HF_HOME")

    def fails(*_, **__):
        raise PermissionError(13, "Permission denied", "/nonexistent")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    monkeypatch.setattr(sources, "use_cache_without_hub", lambda: None)
    refused("owner/name", "'owner/name': the cache of .* /nonexistent: Permission .* set HF_HOME")
