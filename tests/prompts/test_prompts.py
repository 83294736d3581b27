"""Prompts: what is read, what is refused and where, and an order that needs only a cursor."""

import gzip
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from grpo_replay.engine.models import EOS_ID, PAD_ID, byte_tokenizer, load_tokenizer
from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.prompts.prompt_set import load_prompts, read_problems, render_prompt
from grpo_replay.prompts.sources import answer_text, checked_column, read_local_rows
from grpo_replay.recipe import ModelSection, PromptsSection


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows (or raw lines) and returns the path."""

    def write(*rows):
        path = tmp_path / "problems.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write


def section(source, **changes):
    return PromptsSection(**{"source": source, "template": "plain", **changes})


def numbered(count, **more):
    return [{"problem": f"{i}+1", "answer": str(i + 1), **more} for i in range(count)]


def refused(path, tokenizer, match, error=DatasetError, **changes):
    for whole_rows in (True, False):
        with pytest.raises(error, match=match):
            load_prompts(section(path, **changes), tokenizer, 0, whole_rows)


def test_a_prompt_carries_text_tokens_answer_and_row(jsonl, tokenizer):
    path = jsonl({"problem": "1+1", "answer": "2", "level": 3})
    (prompt,) = load_prompts(section(path, user_template="Q {problem} {{}}"), tokenizer, 0).take(
        0, 1
    )
    assert (prompt.prompt_id, prompt.text, prompt.answer) == ("0", "Q 1+1 {}", "2")
    assert prompt.token_ids.dtype == np.int32
    assert bytes(prompt.token_ids.tolist()).decode() == "Q 1+1 {}"
    assert prompt.row == {"problem": "1+1", "answer": "2", "level": 3}


def test_braces_in_a_problem_are_not_placeholders(jsonl, tokenizer):
    path = jsonl({"problem": r"\frac{1}{x} {answer}", "answer": "secret"})
    (prompt,) = load_prompts(section(path, user_template="{problem}"), tokenizer, 0).take(0, 1)
    assert prompt.text == r"\frac{1}{x} {answer}"


def test_the_chat_template_takes_system_and_user_message(jsonl, tokenizer):
    path = jsonl({"problem": "1+1", "answer": "2"})
    chat = section(path, template="chat", system_prompt="S", user_template="Q {problem}")
    text = load_prompts(chat, tokenizer, 0).take(0, 1)[0].text
    assert text == "system: S\nuser: Q 1+1\nassistant: "
    without = chat.model_copy(update={"system_prompt": None})
    assert load_prompts(without, tokenizer, 0).take(0, 1)[0].text == "user: Q 1+1\nassistant: "


def test_a_tokenizer_that_ends_every_text_is_refused_for_plain_prompts(jsonl):
    """One that only begins with a token of its own is not."""
    path = jsonl({"problem": "1+1", "answer": "2"})
    eos, pad = ("<|eos|>", EOS_ID), ("<|pad|>", PAD_ID)
    for pattern in ("$A <|eos|>", "<|pad|> $A"):
        tokenizer = byte_tokenizer()
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=pattern, special_tokens=[eos, pad]
        )
        if pattern.endswith("$A"):
            (prompt,) = load_prompts(section(path), tokenizer, 0).take(0, 1)
            assert prompt.token_ids[0] == PAD_ID
        else:
            refused(path, tokenizer, r"EOS token <\|eos\|>.*add_eos_token", RecipeError)


def test_render_prompt_equals_the_prompt_of_the_set(jsonl, tokenizer):
    path = jsonl({"problem": "é+1", "answer": "2"})
    chat = section(path, template="chat")
    (prompt,) = load_prompts(chat, tokenizer, 0).take(0, 1)
    text, tokens_P = render_prompt(chat, tokenizer, "é+1")
    assert text == prompt.text
    assert tokens_P.tolist() == prompt.token_ids.tolist()


def test_plain_prompts_get_the_tokenizers_own_start_token_and_chat_prompts_do_not(tokenizer):
    from tokenizers.processors import TemplateProcessing

    starting = byte_tokenizer()
    starting.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 256)]
    )
    plain = PromptsSection(template="plain", user_template="{problem}")
    assert render_prompt(plain, starting, "A")[1].tolist() == [256, 65]
    chat = plain.model_copy(update={"template": "chat", "system_prompt": None})
    assert 256 not in render_prompt(chat, starting, "A")[1]


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own(jsonl, tokenizer):
    prompts = load_prompts(section(jsonl(*numbered(7))), tokenizer, 0)
    epochs = [[p.prompt_id for p in prompts.take(7 * e, 7)] for e in range(4)]
    assert all(Counter(epoch) == Counter(map(str, range(7))) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


def test_the_order_depends_only_on_seed_and_cursor(jsonl, tokenizer):
    path = jsonl(*numbered(11))

    def ids(prompts, cursor, count):
        return [p.prompt_id for p in prompts.take(cursor, count)]

    whole = ids(load_prompts(section(path), tokenizer, 3), 0, 60)
    resumed = load_prompts(section(path), tokenizer, 3)
    assert ids(resumed, 37, 23) == whole[37:]
    assert ids(resumed, 0, 37) == whole[:37]
    in_steps = [each for cursor in range(0, 60, 4) for each in ids(resumed, cursor, 4)]
    assert in_steps == whole
    assert ids(load_prompts(section(path), tokenizer, 4), 0, 60) != whole
    assert resumed.take(5, 0) == ()
    with pytest.raises(ValueError, match="cursor=-1"):
        resumed.take(-1, 1)


def test_long_prompts_are_skipped_and_counted(jsonl, tokenizer):
    rows = [{"problem": "x" * length, "answer": "1"} for length in (3, 9, 4, 5, 12)]
    prompts = load_prompts(
        section(jsonl(*rows), user_template="{problem}", max_prompt_length=5), tokenizer, 0
    )
    longer = "2 prompts are longer than prompts.max_prompt_length 5 and were left out; 3 remain"
    assert len(prompts) == 3 and longer in prompts.notices
    kept = {p.prompt_id: len(p.token_ids) for p in prompts.take(0, 3)}
    assert kept == {"0": 3, "2": 4, "3": 5}, "ids are row numbers before the filter"
    assert all(p.row["problem"] == p.text for p in prompts.take(0, 3))


def test_no_prompt_left_says_limit_and_shortest(jsonl, tokenizer):
    rows = [{"problem": "x" * length, "answer": "1"} for length in (9, 7, 8)]
    refused(
        jsonl(*rows),
        tokenizer,
        r"none of 3 prompts has at most prompts.max_prompt_length 6 tokens; the shortest has 7",
        user_template="{problem}",
        max_prompt_length=6,
    )


def test_numeric_answers_become_text(jsonl, tokenizer):
    numbers = (72, -3, 18.0, 0.25, 12345678901234567)
    path = jsonl(*({"problem": "a", "answer": n} for n in numbers))
    prompts = load_prompts(section(path), tokenizer, 0)
    texts = ["72", "-3", "18", "0.25", "12345678901234567"]
    assert [p.answer for p in prompts.sample(5)] == texts
    refused(jsonl({"problem": "a", "answer": 1e300}), tokenizer, r"1e\+300, a number with more")


@pytest.mark.parametrize("name", ["a.json", "folder", "a.jsonl.gz"])
def test_a_number_that_lost_digits_beside_a_fraction_is_refused(tmp_path, tokenizer, name):
    """A reader with one type for a column makes floats of all its numbers."""
    rows = "".join(
        json.dumps({"problem": "a", "answer": n}) + "\n" for n in (0.5, 3, 12345678901234567)
    )
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        (path / "a.jsonl").write_text(rows)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(rows.encode()))
    else:
        path.write_text(f"[{','.join(rows.splitlines())}]")
    refused(
        str(path), tokenizer, r"row 2: field 'answer' found 1.234.*e\+16, .* write them as text"
    )


def test_only_the_text_after_the_last_marker_is_the_answer(jsonl, tokenizer):
    """As in GSM8K."""
    marked = {"problem": "a", "answer": "9 + 9 = <<9+9=18>>18\n#### first\n#### 1,018 "}
    path = jsonl(marked, {"problem": "b", "answer": "7"})
    prompts = load_prompts(section(path), tokenizer, 0)
    assert [p.answer for p in prompts.sample(2)] == ["1,018", "7"]
    assert prompts.sample(2)[0].row == marked
    (notice,) = prompts.notices
    assert "1 of 2 answers contain '####'" in notice
    refused(
        jsonl({"problem": "a", "answer": "7 ####  "}), tokenizer, ":1: .*nothing after the mark"
    )


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 2 + 2? Answer after ####."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
}
"""A row in the form of verl's data preprocessing."""
TRL_ROW = {
    "prompt": [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "What is {2} + 2?", "name": None},
    ],
    "solution": "4",
}
"""A conversational row in the form that TRL's GRPOTrainer takes."""


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("whole_rows", [True, False])
def test_message_lists_and_nested_answers_as_in_verl(
    jsonl, tokenizer, tmp_path, suffix, whole_rows
):
    path = jsonl(VERL_ROW)
    if suffix == "parquet":
        path = str(tmp_path / "verl.parquet")
        pq.write_table(pa.Table.from_pylist([VERL_ROW]), path)
    fields = {"problem_field": "prompt", "answer_field": "reward_model.ground_truth"}
    chat = section(path, template="chat", id_field="extra_info.index", **fields)
    prompts = load_prompts(chat, tokenizer, 0, whole_rows)
    (prompt,) = prompts.take(0, 1)
    assert prompt.text == "user: What is 2 + 2? Answer after ####.\nassistant: "
    assert (prompt.answer, prompt.prompt_id) == ("4", "7")
    assert prompt.row["reward_model"] == VERL_ROW["reward_model"]
    assert ("ability" in prompt.row) == whole_rows
    assert "1 of 1 problems are chat messages" in prompts.notices[0]


def test_message_lists_as_in_trl_keep_their_system_message(jsonl, tokenizer):
    path = jsonl(TRL_ROW)
    chat = section(path, template="chat", problem_field="prompt", answer_field="solution")
    (prompt,) = load_prompts(chat, tokenizer, 0).take(0, 1)
    assert prompt.text == "system: Think.\nuser: What is {2} + 2?\nassistant: "


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt": []}, r":1: field 'prompt' is a list without messages"),
        ({"prompt": ["hello"]}, r"has 'hello' as message 1, expected \{role: text, content: text"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "as message 1, expected"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "ends with a message of the assistant",
        ),
        (
            {"reward_model": {"style": "rule"}},
            r"'reward_model\.ground_truth': reward_model has style",
        ),
        ({"reward_model": "4"}, r":1: no field .* reward_model is a str, without keys"),
    ],
)
def test_bad_messages_and_nested_fields_are_refused(jsonl, tokenizer, changes, match):
    fields = {"problem_field": "prompt", "answer_field": "reward_model.ground_truth"}
    refused(jsonl(VERL_ROW | changes), tokenizer, match, template="chat", **fields)


def test_messages_that_the_template_leaves_out_are_told(jsonl):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    path = jsonl({"messages": chat, "answer": "2"}, {"messages": chat[1:], "answer": "2"})
    fields = {"problem_field": "messages", "template": "chat"}
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}="  # as that of the tiny models
    prompts = load_prompts(section(path, **fields), tokenizer, 0)
    (notice,) = [each for each in prompts.notices if "leaves" in each]
    assert notice == (
        "the chat template leaves messages out of 1 of 2 prompts; the first is of the system: "
        "'Be brief.'. The model does not see them"
    )


def test_message_lists_need_the_chat_template(jsonl, tokenizer):
    fields = {"problem_field": "prompt", "answer_field": "solution", "template": "plain"}
    refused(jsonl(TRL_ROW), tokenizer, "set prompts.template chat", RecipeError, **fields)


def test_a_column_with_dots_in_its_name_comes_before_a_nested_field(jsonl, tokenizer):
    path = jsonl({"problem": "p", "a.b": "whole", "a": {"b": "nested"}})
    (prompt,) = load_prompts(section(path, answer_field="a.b"), tokenizer, 0).take(0, 1)
    assert prompt.answer == "whole"


def test_variables_reach_the_chat_template(jsonl):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}{% if think %}<think>{% endif %}"
    chat = section(jsonl(*numbered(1)), template="chat", user_template="{problem}")
    thinking = chat.model_copy(update={"template": {"think": True}})
    texts = [load_prompts(each, tokenizer, 0).take(0, 1)[0].text for each in (chat, thinking)]
    assert texts == ["0+1", "0+1<think>"]
    with pytest.raises(ValueError, match="tokenize: not a variable of the chat template"):
        section("x.jsonl", template={"tokenize": True})


def test_a_sample_is_evenly_spaced_over_the_source(jsonl, tokenizer):
    prompts = load_prompts(section(jsonl(*numbered(10))), tokenizer, 0)
    assert [p.prompt_id for p in prompts.sample(4)] == ["0", "2", "5", "7"]
    assert len(prompts.sample(100)) == 10


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"problem": "p"}, r"problems.jsonl:3: no field 'answer'; there are: problem"),
        ({"problem": "p", "anwser": "1"}, r":3: no field 'answer' \(did you mean 'anwser'\?\)"),
        ({"answer": "1"}, r":3: no field 'problem'"),
        ({"problem": "p", "answer": " "}, r":3: field 'answer' is empty"),
        ({"problem": "", "answer": "1"}, r":3: field 'problem' is empty"),
        ({"problem": "p", "answer": None}, r":3: field 'answer' found None"),
        ({"problem": "p", "answer": float("nan")}, r":3: field 'answer' found nan \(float\)"),
        ({"problem": "p", "answer": True}, r":3: field 'answer' found True \(bool\)"),
        ({"problem": "p", "answer": ["1"]}, r":3: field 'answer' found \['1'\] \(list\)"),
        ({"problem": 5, "answer": "1"}, r":3: field 'problem' found 5 \(int\)"),
        ("{broken", r":3: not valid JSON"),
        ('["a", "b"]', r":3: found a list; every line is one JSON object"),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_line(jsonl, tokenizer, row, match):
    refused(jsonl({"problem": "ok", "answer": "1"}, "", row), tokenizer, match)


def test_ids_come_from_their_field_and_must_be_unique(jsonl, tokenizer):
    rows = [{"problem": "p", "answer": "1", "uid": uid} for uid in ("a", 7, "c")]
    prompts = load_prompts(section(jsonl(*rows), id_field="uid"), tokenizer, 0)
    assert [p.prompt_id for p in prompts.sample(3)] == ["a", "7", "c"]
    rows.append({"problem": "q", "answer": "1", "uid": "7"})
    refused(
        jsonl(*rows),
        tokenizer,
        r"jsonl:4: id '7' .* also the id of .*jsonl:2; ids must",
        id_field="uid",
    )


def test_parquet_is_read_like_jsonl(jsonl, tokenizer, tmp_path):
    rows = numbered(6, tags=["x"])
    path = str(tmp_path / "problems.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    same = [
        [(p.prompt_id, p.text, p.token_ids.tolist(), p.answer, dict(p.row)) for p in s]
        for s in (
            load_prompts(section(source), tokenizer, 1).take(0, 9)
            for source in (path, jsonl(*rows))
        )
    ]
    assert same[0] == same[1]


@pytest.fixture(scope="module")
def pasted(tmp_path_factory):
    """A folder with the same two rows in every form."""
    import datasets

    folder = tmp_path_factory.mktemp("pasted")
    rows = [{"question": "1+1, or\n2?", "answer": "007"}, {"question": "NA", "answer": "1.50"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name, sep in (("a.csv", ","), ("a.tsv", "\t"), ("semi.csv", ";")):
        (folder / name).write_text(
            f'question{sep}answer\n"1+1, or\n2?"{sep}007\nNA{sep}1.50\n', encoding="utf-8-sig"
        )
    (folder / "a.csv.gz").write_bytes(gzip.compress((folder / "a.csv").read_bytes()))
    (folder / "files").mkdir()
    (folder / "files" / "train.jsonl").write_text(lines)
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(folder / "saved")
    datasets.DatasetDict(train=dataset, rest=dataset.select([0])).save_to_disk(folder / "splits")
    dataset.to_parquet(folder / "a.parquet")
    (folder / "a.arrow").write_bytes(next((folder / "saved").glob("*.arrow")).read_bytes())
    return folder


@pytest.mark.parametrize(
    "name",
    [
        *("a.csv", "a.tsv", "a.csv.gz", "a.json", "a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"),
        *("files", "saved", "splits", "semi.csv"),
    ],
)
@pytest.mark.parametrize("whole_rows", [True, False])
def test_the_same_rows_come_from_every_form(pasted, tokenizer, name, whole_rows):
    """A CSV file keeps the text as it is written, and GSM8K's `question` is found by its name."""
    more = {"dataset_options": {"sep": ";"}} if name == "semi.csv" else {}
    chosen = section(f"{pasted}/{name}", user_template="{problem}", **more)
    prompts = load_prompts(chosen, tokenizer, 0, whole_rows)
    found = [(p.prompt_id, p.text, p.answer) for p in prompts.sample(2)]
    assert found == [("0", "1+1, or\n2?", "007"), ("1", "NA", "1.50")]
    assert dict(prompts.sample(2)[0].row) == {"question": "1+1, or\n2?", "answer": "007"}
    assert "problems from 'question', answers from 'answer'" in prompts.notices[0]
    known = read_problems(chosen, 0)
    assert (known.by_id["1"], known.sha256) == (("NA", "1.50"), prompts.sha256)


def test_a_split_of_a_local_source_is_that_split(pasted, tokenizer):
    rest = section(f"{pasted}/splits", dataset_options={"split": "rest"})
    assert len(load_prompts(rest, tokenizer, 0)) == 1
    sliced = section(f"{pasted}/a.jsonl", dataset_options={"split": "train[1:]"})
    assert load_prompts(sliced, tokenizer, 0).take(0, 1)[0].answer == "1.50"
    refused(f"{pasted}/splits", tokenizer, "no split 'test' in it; there are: train, rest",
            dataset_options={"split": "test"})  # fmt: skip


def test_columns_of_open_instruct_are_found_and_unknown_ones_are_named(jsonl, tokenizer):
    chat = [{"role": "user", "content": "2+2"}]
    path = jsonl({"messages": chat, "ground_truth": "4", "dataset": "gsm8k"})
    prompts = load_prompts(section(path, template="chat"), tokenizer, 0, whole_rows=False)
    assert (prompts.take(0, 1)[0].text, prompts.take(0, 1)[0].answer) == (
        "user: 2+2\nassistant: ", "4",
    )  # fmt: skip
    refused(path, tokenizer, "no field 'target'.*set prompts.answer_field to", template="chat",
            answer_field="target")  # fmt: skip
    refused(
        jsonl({"frage": "1+1", "antwort": "2"}), tokenizer,
        "no field 'problem'; there are: frage, antwort: set prompts.problem_field and "
        "prompts.answer_field to the column",
    )  # fmt: skip


@pytest.mark.parametrize("whole_rows", [True, False])
def test_the_columns_of_the_first_row_are_those_of_every_row(jsonl, tokenizer, whole_rows):
    rows = [
        {"question": "1+1", "answer": "2"},
        {"question": "2+2", "prompt": "ignored", "answer": "4"},
    ]
    path = jsonl(*rows)
    chosen = section(path, user_template="{problem}")
    prompts = load_prompts(chosen, tokenizer, 0, whole_rows).sample(2)
    assert [(p.text, p.answer) for p in prompts] == [("1+1", "2"), ("2+2", "4")]
    refused(jsonl(*rows, {"prompt": "3+3", "ask": "x", "answer": "6"}), tokenizer,
            r"jsonl:3: no field 'question'; there are: prompt, ask, answer$")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("frage;lösung\n1+1, or 2?;007\nNA;1.50\n", {"sep": ";", "encoding": "latin-1"}),
        ("frage|lösung\n1+1, or 2?|007\nNA|1.50\n", {"delimiter": "|"}),
        ('"1+1, or 2?",007\nNA,1.50\n', {"header": None, "names": ["frage", "lösung"]}),
        ('# made by hand\nfrage,lösung\n"1+1, or 2?",007\nNA,1.50\n', {"skiprows": 1}),
        ("frage;lösung\n1+1, or 2?;007\nNA;1.50\n", {"sep": None, "engine": "python"}),
        ("frage; lösung\n1+1, or 2?; 007\nNA; 1.50\n", {"sep": "; "}),
    ],
)
def test_a_csv_file_is_read_with_the_options_of_pandas(tmp_path, tokenizer, text, options):
    path = tmp_path / "own.csv"
    path.write_text(text, encoding=options.get("encoding", "utf-8"))
    chosen = section(str(path), problem_field="frage", answer_field="lösung",
                     user_template="{problem}", dataset_options=options)  # fmt: skip
    prompts = load_prompts(chosen, tokenizer, 0).sample(9)
    assert [(p.text, p.answer) for p in prompts] == [("1+1, or 2?", "007"), ("NA", "1.50")]


def test_a_csv_file_without_names_of_columns_is_refused(tmp_path, tokenizer):
    path = tmp_path / "own.csv"
    path.write_text("1+1,2\n")
    refused(str(path), tokenizer, r"own\.csv: header: null needs the names .*names: \[problem,",
            dataset_options={"header": None})  # fmt: skip


@pytest.mark.parametrize("in_folder", [True, False])
def test_commas_without_quotes_are_refused(tmp_path, tokenizer, in_folder):
    """pandas would take "What is 1" for the name of the row."""
    path = tmp_path / "own.csv"
    path.write_text("question,answer\nWhat is 1,000+1?,1001\nWhat is 2,000+1?,2001\n")
    refused(str(tmp_path if in_folder else path), tokenizer,
            r"own\.csv row 0: 3 values, \['What is 1', '000\+1\?', '1001'\], for 2 columns, "
            r"\['question', 'answer'\]: put values that contain the separator in ")  # fmt: skip
    path.write_text("question,answer\n1+1,2\nWhat is 2,000+1?,2001\n")
    refused(str(path), tokenizer, "own.csv: cannot be read: .*Expected 2 fields in line 3, saw 3")


def test_duplicates_and_characters_without_a_token_are_counted(jsonl, tokenizer):
    rows = [("What is 1+1?", "2"), ("what is 1 + 1?", "2"), ("What  is 1+1?", "3"), ("é+1", "ü")]
    path = jsonl(*({"problem": problem, "answer": answer} for problem, answer in rows))
    (notice,) = load_prompts(section(path), tokenizer, 0).notices
    assert notice.startswith("2 of 4 prompts repeat the problem of another one")
    assert notice.endswith("(but for spaces and capitals), 1 of them with another answer")
    digits = load_tokenizer(ModelSection(path="builtin:tiny"))
    path = jsonl({"problem": "1+1", "answer": "2"}, {"problem": "1×1 ÷", "answer": "½"})
    (notice,) = load_prompts(section(path, user_template="{problem}="), digits, 0).notices
    assert notice.startswith("1 of 2 prompts have characters that the tokenizer does not have")


def test_too_few_prompts_and_held_out_ones_among_them_are_said(jsonl, tokenizer):
    prompts = load_prompts(section(jsonl(*numbered(3))), tokenizer, 0)
    held_out = {("test", "1 + 1"), ("test", "7+1"), ("easy", "2+1"), ("hard", "9+9")}
    few, easy, test = prompts.notices_of_use(4, held_out)
    assert few.startswith("3 prompts are fewer than sampling.prompts_per_step 4")
    assert easy.startswith("1 of 1 problems of benchmark 'easy' are also training prompts")
    assert test.startswith("1 of 2 problems of benchmark 'test' are also training prompts")
    assert prompts.notices_of_use(3, {("hard", "9+9")}) == []


def test_several_sources_are_visited_by_their_weights(tmp_path, tokenizer):
    """An epoch visits each problem of a once, of b twice, and half of c, the other half next."""
    for name, count in (("a", 3), ("b", 2), ("c", 4)):
        rows = [
            {"q" if name == "c" else "problem": f"{name}{i}", "answer": i} for i in range(count)
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    listed = [
        f"{tmp_path}/a.json",
        {"source": f"{tmp_path}/b.json", "weight": 2},
        {"source": f"{tmp_path}/c.json", "weight": 0.5, "problem_field": "q"},
    ]
    chosen = section(listed, user_template="{problem}")
    prompts = load_prompts(chosen, tokenizer, 5)
    assert len(prompts) == 3 + 2 * 2 + 2
    epochs = [Counter(p.text for p in prompts.take(9 * e, 9)) for e in range(2)]
    for epoch in epochs:
        assert all(epoch[each] == 1 for each in ("a0", "a1", "a2"))
        assert all(epoch[each] == 2 for each in ("b0", "b1"))
    of_c = [[each for each in epoch if each.startswith("c")] for epoch in epochs]
    assert sorted(of_c[0] + of_c[1]) == ["c0", "c1", "c2", "c3"]
    again = load_prompts(chosen, tokenizer, 5)
    assert [p.text for p in again.take(7, 30)] == [p.text for p in prompts.take(0, 37)[7:]]
    assert {p.prompt_id for p in prompts.sample(100)[:3]} == {"a.json:0", "a.json:1", "a.json:2"}
    assert read_problems(chosen, 0).by_id["c.json:3"] == ("c3", "3")
    assert len(prompts.sample(100)) == 9, "each problem once"
    with pytest.raises(ValueError, match=r"a\.json is named twice: name it once, with a weight"):
        section([f"{tmp_path}/a.json"] * 2)


def test_parquet_with_bad_rows_names_file_and_row(tokenizer, tmp_path):
    path = str(tmp_path / "problems.parquet")
    pq.write_table(pa.table({"problem": ["a", "b"], "answer": ["1", None]}), path)
    refused(path, tokenizer, r"problems.parquet row 1: field 'answer' found None")
    refused(path, tokenizer, r"no column 'solution'; there are", answer_field="solution")
    (tmp_path / "text.parquet").write_text("not parquet")
    refused(str(tmp_path / "text.parquet"), tokenizer, "not a readable Parquet file")


def test_values_of_csv_files_in_a_folder_are_text(tmp_path, tokenizer):
    for name in ("one", "two"):
        (tmp_path / f"{name}.csv").write_text(f"problem;answer\n{name};007\n")
    chosen = section(str(tmp_path), dataset_options={"sep": ";"})
    prompts = load_prompts(chosen, tokenizer, 0).sample(2)
    assert sorted(p.answer for p in prompts) == ["007", "007"]


def test_a_folder_of_files_with_other_columns_names_them(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"problem": "1+1", "answer": "2", "level": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"problem": "1+1", "answer": "2", "hint": "x"}\n')
    refused(str(tmp_path), tokenizer, "only some of its files have the columns hint: name")


def test_the_working_directory_is_a_folder_as_any_other(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    assert load_prompts(section("./"), tokenizer, 0).take(0, 1)[0].answer == "2"


def test_a_folder_with_files_of_two_kinds_is_refused(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.json").write_text('[{"problem": "2+1", "answer": "3"}]')
    (tmp_path / "config.json").write_text("{}")
    assert len(load_prompts(section(str(tmp_path)), tokenizer, 0)) == 2
    (tmp_path / "b.csv").write_text("problem,answer\n1+2,3\n")
    refused(str(tmp_path), tokenizer, r"has files of two kinds, more/a\.json and b\.csv, of which "
            "one would be left out: move one kind to another folder; prompts")  # fmt: skip
    card = "---\nconfigs:\n- config_name: default\n  data_files: b.csv\n---\n"
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "a.jsonl").write_text('{"problem": "1+1, or\\n2, or 3", "answer": "2"}\n')
    assert len(load_prompts(section(str(tmp_path)), tokenizer, 0)) == 1


def test_missing_sources_are_reported(tokenizer, tmp_path, jsonl):
    refused(str(tmp_path / "none.jsonl"), tokenizer, "none.jsonl does not exist")
    (tmp_path / "empty").mkdir()
    refused(str(tmp_path / "empty"), tokenizer, "empty: cannot be read: .*any data files")
    refused("builtin:huge", tokenizer, "no such builtin; there are: builtin:tiny")
    (tmp_path / "data.xlsx").write_text("problem,answer\n")
    refused(str(tmp_path / "data.xlsx"), tokenizer, r"unknown kind of file '.xlsx'; name a .csv")
    (tmp_path / "data.csv").write_text('problem,answer\n"1+1,2\n')
    refused(str(tmp_path / "data.csv"), tokenizer, r"data.csv: cannot be read: .*EOF inside string")
    (tmp_path / "latin.jsonl").write_bytes(b'{"problem": "\xe9"}')
    refused(str(tmp_path / "latin.jsonl"), tokenizer, "not UTF-8")
    refused(jsonl(), tokenizer, "has no rows")


def test_an_unavailable_hub_dataset_is_reported_with_its_download_command(tokenizer, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refused(
        "nobody/no-dataset",
        tokenizer,
        r"hf download --repo-type dataset nobody/no-dataset .*set prompts.source",
    )


def test_a_hub_dataset_is_read_through_datasets(tokenizer, tmp_path, monkeypatch):
    """`datasets` itself reads a folder of Parquet files here, as it does after a download."""
    import datasets

    pq.write_table(pa.Table.from_pylist(numbered(9)), tmp_path / "train.parquet")
    real = datasets.load_dataset

    def from_folder(source, *, name, split, revision):
        assert (source, name, revision) == ("owner/name", "main", "abc")
        return real(
            "parquet",
            data_files=str(tmp_path / "train.parquet"),
            split=split,
            cache_dir=str(tmp_path / "cache"),
        )

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    hub = section("owner/name", dataset_options={"name": "main", "revision": "abc"})
    prompts = load_prompts(hub, tokenizer, 0)
    assert len(prompts) == 9
    assert [p.answer for p in prompts.sample(9)] == [str(i + 1) for i in range(9)]
    assert prompts.sample(9)[3].row == {"problem": "3+1", "answer": "4"}
    named = load_prompts(hub.model_copy(update={"answer_field": "problem"}), tokenizer, 0,
                         whole_rows=False).sample(9)[3]  # fmt: skip
    assert (named.answer, named.row) == ("3+1", {"problem": "3+1"})
    refused("owner/name", tokenizer, r"owner/name\[train\]: no column 'x'", answer_field="x",
            dataset_options={"name": "main", "revision": "abc"})  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_unused_fields_are_not_read(jsonl, tokenizer, tmp_path, suffix):
    rows = numbered(3, uid=1, solution="long " * 100)
    rows = [row | {"uid": str(i)} for i, row in enumerate(rows)]
    path = jsonl(*rows)
    if suffix == "parquet":
        path = str(tmp_path / "problems.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
    named = section(path, id_field="uid")
    whole = load_prompts(named, tokenizer, 0).sample(3)
    part = load_prompts(named, tokenizer, 0, whole_rows=False).sample(3)
    assert [dict(p.row) for p in whole] == rows
    for row, prompt, same in zip(rows, part, whole, strict=True):
        assert dict(prompt.row) == {name: row[name] for name in ("problem", "answer", "uid")}
        assert (prompt.prompt_id, prompt.text) == (same.prompt_id, same.text)


def test_the_tiny_set_has_ids_of_its_own():
    tokenizer = load_tokenizer(ModelSection(path="builtin:tiny"))
    tiny = section("builtin:tiny", user_template="{problem}=")
    prompts = load_prompts(tiny, tokenizer, 0)
    assert (len(prompts), prompts.notices) == (2560, ())
    first = prompts.take(0, 1)[0]
    assert first.prompt_id == f"{first.row['benchmark']}:{first.row['problem']}"
    assert first.text == first.row["problem"] + "="
    assert len({p.prompt_id for p in prompts.take(0, 2560)}) == 2560


def test_a_tokenizer_without_a_chat_template_is_a_recipe_error(jsonl):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    refused(jsonl(*numbered(1)), tokenizer, "no chat template, which renders the prompts; set "
            "prompts.template plain, or model.tokenizer", RecipeError, template="chat")  # fmt: skip
    refused(jsonl(TRL_ROW), tokenizer, "renders the messages of the data set; set model.tokenizer",
            RecipeError, template="chat")  # fmt: skip
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    refused(jsonl(*numbered(1)), tokenizer, "System role.*null", RecipeError, template="chat")


def test_problems_and_answers_are_read_without_a_tokenizer(tmp_path):
    path = tmp_path / "own.jsonl"
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]
    rows = [{"q": "1+1", "a": "it is #### 2", "key": "x"}, {"q": chat, "a": 4, "key": "y"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = PromptsSection(source=str(path), problem_field="q", answer_field="a", id_field="key")
    assert read_problems(section, 0).by_id == {"x": ("1+1", "2"), "y": ("2+2", "4")}
    builtin = read_problems(PromptsSection(source="builtin:tiny"), 3).by_id
    assert all(id.partition(":")[2] == problem for id, (problem, _) in builtin.items())


def test_other_ids_problems_answers_and_orders_have_other_digests(tmp_path):
    rows = [{"problem": "1+1", "answer": "2", "id": "x", "of": "a"}]
    rows.append({"problem": "2+2", "answer": "4", "id": "y", "of": "b"})

    def digest(*changed: dict) -> str:
        path = tmp_path / "own.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in changed))
        return read_problems(PromptsSection(source=str(path), id_field="id"), 0).sha256

    first, second = rows
    others = [
        digest(*rows),
        digest(second, first),
        digest(first),
        *(digest(first, second | {key: "5"}) for key in ("problem", "answer", "id")),
    ]
    assert len(set(others)) == len(others)
    assert digest(first, second | {"of": "5"}) == others[0]  # no prompt has it


MIXED = [
    {"problem": "a", "answer": "1/2", "more": {"v": "x"}},
    {"problem": "b", "answer": 3, "more": {"v": 1}},
]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.jsonl.gz", "folder"])
def test_text_beside_numbers_in_one_column_stays_as_it_is(tmp_path, name):
    """Arrow has one type for a column; `datasets` makes this one JSON text, with quotes."""
    lines = "\n".join(map(json.dumps, MIXED)) + "\n"
    if name == "folder":
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(lines)
    elif name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()))
    else:
        (tmp_path / name).write_text(json.dumps(MIXED) if name == "rows.json" else lines)
    rows = read_local_rows(str(tmp_path / name))
    assert rows.column("answer") == ["1/2", 3] and rows.column("more.v") == ["x", 1]
    assert rows.row(1) == MIXED[1] and list(rows.names) == ["problem", "answer", "more"]
    assert checked_column(rows, "answer", answer_text) == ["1/2", "3"]


def test_the_name_of_a_file_is_not_a_pattern(tmp_path):
    (tmp_path / "b[1].csv").write_text("problem,answer\nown,1\n")
    (tmp_path / "b1.csv").write_text("problem,answer\nother,2\n")
    assert read_local_rows(str(tmp_path / "b[1].csv")).column("problem") == ["own"]
    folder = tmp_path / "f[1]"
    folder.mkdir()
    (folder / "x.csv").write_text("problem,answer\nown,1\n")
    with pytest.raises(DatasetError, match=r"a folder with \[, \* or \? in its path"):
        read_local_rows(str(folder))


def test_a_packed_file_that_is_cut_off_is_refused(tmp_path):
    whole = gzip.compress("\n".join(map(json.dumps, MIXED * 500)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=r"cut\.jsonl\.gz: cannot be read"):
        read_local_rows(str(tmp_path / "cut.jsonl.gz"))


def test_a_date_that_was_text_in_the_file_is_refused_with_a_kind_that_keeps_it(tmp_path):
    dated = [{"problem": "when?", "answer": "2020-01-02"}]
    (tmp_path / "rows.json").write_text(json.dumps(dated))
    (tmp_path / "rows.jsonl").write_text(json.dumps(dated[0]) + "\n")
    with pytest.raises(DatasetError, match=r"found the date 2020-01-02 .*use a single \.jsonl"):
        checked_column(read_local_rows(str(tmp_path / "rows.json")), "answer", answer_text)
    kept = read_local_rows(str(tmp_path / "rows.jsonl"))
    assert checked_column(kept, "answer", answer_text) == ["2020-01-02"]


def test_a_file_beside_one_named_after_a_split_is_not_left_out(tmp_path):
    line = json.dumps({"problem": "1+1", "answer": "2"}) + "\n"
    (tmp_path / "algebra-train.jsonl").write_text(line)
    (tmp_path / "algebra-test.jsonl").write_text(line * 2)
    assert len(read_local_rows(str(tmp_path))) == 1
    (tmp_path / "geometry.jsonl").write_text(line)
    with pytest.raises(DatasetError, match=r"geometry\.jsonl would be left out, .* the split 'tr"):
        read_local_rows(str(tmp_path))
    (tmp_path / "algebra-train.jsonl").rename(tmp_path / "algebra.jsonl")
    (tmp_path / "algebra-test.jsonl").unlink()
    assert len(read_local_rows(str(tmp_path))) == 2
