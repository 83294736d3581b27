"""Prompts: templates, messages, lengths, and an order that needs only a seed and a cursor."""

import datetime
import json
from collections import Counter
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from grpo_replay.engine.models import EOS_ID, PAD_ID, byte_tokenizer, load_tokenizer
from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.prompts.prompt_set import load_prompts, render_prompt, with_date
from grpo_replay.recipe import ModelSection, PromptsSection, load_recipe, recipe_to_yaml


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows and returns the path."""

    def write(*rows):
        path = tmp_path / "problems.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


def section(source, **changes):
    return PromptsSection(**{"source": source, "template": "plain", **changes})


def numbered(count):
    return [{"problem": f"{i}+1", "answer": str(i + 1)} for i in range(count)]


def first(chosen, tokenizer):
    return load_prompts(chosen, tokenizer, 0).take(0, 1)[0]


def test_a_prompt_carries_text_tokens_answer_and_row(jsonl, tokenizer):
    row = {"problem": r"\frac{1}{x} {answer}", "answer": "2", "level": 3}
    prompt = first(section(jsonl(row), user_template="Q {problem} {{}}"), tokenizer)
    text = r"Q \frac{1}{x} {answer} {}"  # braces in a problem are no placeholders
    assert (prompt.prompt_id, prompt.text, prompt.answer) == ("0", text, "2")
    assert prompt.token_ids.dtype == np.int32
    assert bytes(prompt.token_ids.tolist()).decode() == text
    assert prompt.row == row


def test_the_chat_template_takes_system_and_user_message(jsonl, tokenizer):
    path = jsonl({"problem": "é+1", "answer": "2"})
    chat = section(path, template="chat", system_prompt="S", user_template="Q {problem}")
    prompt = first(chat, tokenizer)
    assert prompt.text == "system: S\nuser: Q é+1\nassistant: "
    text, tokens_P = render_prompt(chat, tokenizer, "é+1")
    assert (text, tokens_P.tolist()) == (prompt.text, prompt.token_ids.tolist())
    without = chat.model_copy(update={"system_prompt": None})
    assert first(without, tokenizer).text == "user: Q é+1\nassistant: "


def test_a_tokenizer_may_begin_plain_prompts_and_not_end_them(jsonl):
    path = jsonl({"problem": "A", "answer": "2"})
    plain = section(path, user_template="{problem}")
    special = [("<|eos|>", EOS_ID), ("<|pad|>", PAD_ID)]

    def tokenizer(pattern):
        made = byte_tokenizer()
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=pattern, special_tokens=special
        )
        return made

    starting = tokenizer("<|pad|> $A")
    assert first(plain, starting).token_ids.tolist() == [PAD_ID, ord("A")]
    chat = plain.model_copy(update={"template": "chat", "system_prompt": None})
    assert PAD_ID not in first(chat, starting).token_ids
    with pytest.raises(RecipeError, match=r"<\|eos\|>"):
        load_prompts(plain, tokenizer("$A <|eos|>"), 0)


def test_variables_reach_the_chat_template_and_one_that_does_not_serve_is_refused(jsonl):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}{% if think %}<think>{% endif %}"
    chat = section(jsonl(*numbered(1)), template="chat", user_template="{problem}")
    thinking = chat.model_copy(update={"template": {"think": True}})
    assert [first(each, tokenizer).text for each in (chat, thinking)] == ["0+1", "0+1<think>"]
    for template in (None, "{{ raise_exception('System role not supported') }}"):
        tokenizer.chat_template = template
        with pytest.raises(RecipeError, match=r"prompts\.|System role"):
            load_prompts(chat, tokenizer, 0)


def test_a_date_of_the_chat_template_is_that_of_the_recipe_on_every_day(jsonl, tmp_path):
    """As Llama's: a run that goes on after midnight would change its prompts."""
    tokenizer = byte_tokenizer()
    asks = (
        "{{ messages[-1].content }}{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}"
    )
    tokenizer.chat_template = asks + "{% endif %}"
    chat = section(jsonl(*numbered(1)), template="chat", user_template="{problem} ")
    later = chat.model_copy(update={"date": "2031-12-05"})
    texts = [first(each, tokenizer).text for each in (chat, later)]
    assert texts == ["0+1 26 Jul 2024", "0+1 05 Dec 2031"]
    (notice,) = load_prompts(later, tokenizer, 0).notices
    assert "2031-12-05" in notice and "prompts.date" in notice
    (written := tmp_path / "recipe.yaml").write_text("prompts: {date: 2031-12-05}\n")
    assert load_recipe(str(written)).prompts.date == later.date
    written.write_text(recipe_to_yaml(load_recipe(str(written))))  # as a run records it
    assert load_recipe(str(written)).prompts.date == later.date
    with pytest.raises(RecipeError, match=r"prompts\.date.*2024-07-26"):
        load_recipe("tiny", ["prompts.date=today"])


@pytest.mark.parametrize(
    "template",
    [
        "\n  {% if messages %}{{ strftime_now('%Y-%m-%d') }}{% endif %}\n",
        "  {% if messages %}{{ strftime_now('%Y-%m-%d') }}{% endif %}",
        "{#- gpt-oss #}\n{%- macro build() -%}{{ strftime_now(format='%A, %-d %B %y') }}"
        "{%- endmacro -%}\n {{- build() }} ",
        "{%- set day = strftime_now('%d %b %Y, %H:%M') %}{{ day | upper }}{{ day == '%d' }}",
    ],
)
def test_the_template_is_rendered_as_before_but_for_the_date(template):
    """Compared with transformers' own rendering of today."""
    tokenizer, today = byte_tokenizer(), datetime.date.today()
    chat = [{"role": "user", "content": "x"}]
    render = partial(tokenizer.apply_chat_template, chat, tokenize=False)
    now = datetime.datetime.now().strftime("%H:%M")
    expected = render(chat_template=template).replace(now, "00:00")
    assert render(chat_template=with_date(template, today.isoformat())) == expected


VERL_ROW = {
    "prompt": [{"role": "user", "content": "What is 2 + 2? Answer after ####."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
}
"""A row in the form of verl's data preprocessing."""
VERL = {
    "template": "chat", "problem_field": "prompt", "answer_field": "reward_model.ground_truth",
    "id_field": "extra_info.index",
}  # fmt: skip
TRL_ROW = {
    "prompt": [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "What is {2} + 2?", "name": None},
    ],
    "solution": "4",
}
"""A conversational row in the form that TRL's GRPOTrainer takes."""
TRL = {"template": "chat", "problem_field": "prompt", "answer_field": "solution"}


@pytest.mark.parametrize("whole_rows", [True, False])
def test_message_lists_and_nested_answers_as_in_verl(jsonl, tokenizer, whole_rows):
    prompts = load_prompts(section(jsonl(VERL_ROW), **VERL), tokenizer, 0, whole_rows)
    (prompt,) = prompts.take(0, 1)
    assert prompt.text == "user: What is 2 + 2? Answer after ####.\nassistant: "
    assert (prompt.answer, prompt.prompt_id) == ("4", "7")
    assert prompt.row == (VERL_ROW if whole_rows else {})


def test_message_lists_as_in_trl_keep_their_system_message_and_need_the_chat_template(
    jsonl, tokenizer
):
    path = jsonl(TRL_ROW)
    text = first(section(path, **TRL), tokenizer).text
    assert text == "system: Think.\nuser: What is {2} + 2?\nassistant: "
    with pytest.raises(RecipeError, match=r"prompts\.template"):
        load_prompts(section(path, **TRL | {"template": "plain"}), tokenizer, 0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt": []}, r":1: field 'prompt'"),
        ({"prompt": ["hello"]}, "has the message 'hello'"),
        ({"prompt": [{"role": "assistant", "content": "b"}]}, ":1: .*assistant"),
        ({"reward_model": {"style": "rule"}}, r":1: .*'reward_model\.ground_truth'"),
        ({"reward_model": "4"}, r":1: .*'reward_model\.ground_truth'"),
    ],
)
def test_bad_messages_and_nested_fields_are_refused(jsonl, tokenizer, changes, match):
    with pytest.raises(DatasetError, match=match):
        load_prompts(section(jsonl(VERL_ROW | changes), **VERL), tokenizer, 0)


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
    rows = [{"problem": "x" * length, "answer": "1"} for length in (9, 3, 4, 5, 12)]
    chosen = section(jsonl(*rows), user_template="{problem}", max_prompt_length=5)
    prompts = load_prompts(chosen, tokenizer, 0)
    assert any(n.startswith("2 ") and "max_prompt_length" in n for n in prompts.notices)
    kept = {p.prompt_id: p.text for p in prompts.take(0, 3)}
    assert len(prompts) == 3, "ids are row numbers before the filter"
    assert kept == {"1": "xxx", "2": "xxxx", "3": "xxxxx"}
    assert all(p.row["problem"] == p.text for p in prompts.take(0, 3))
    with pytest.raises(DatasetError, match=r"prompts\.max_prompt_length 2.*3"):
        load_prompts(chosen.model_copy(update={"max_prompt_length": 2}), tokenizer, 0)


def test_duplicates_and_characters_without_a_token_are_counted(jsonl, tokenizer):
    rows = [("What is 1+1?", "2"), ("what is 1 + 1?", "2"), ("What  is 1+1?", "3"), ("é+1", "ü")]
    path = jsonl(*({"problem": problem, "answer": answer} for problem, answer in rows))
    (notice,) = load_prompts(section(path), tokenizer, 0).notices
    assert notice.startswith("2 of 4") and "1 of them with another answer" in notice
    digits = load_tokenizer(ModelSection(path="builtin:tiny"))
    path = jsonl({"problem": "1+1", "answer": "2"}, {"problem": "1×1 ÷", "answer": "½"})
    (notice,) = load_prompts(section(path, user_template="{problem}="), digits, 0).notices
    assert notice.startswith("1 of 2")


def test_chats_repeat_each_other_only_if_all_their_messages_do(jsonl, tokenizer):
    def chat(system: str, *turns: str) -> dict:
        roles = ["user", "assistant"] * len(turns)
        said = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
        return {"problem": [{"role": "system", "content": system}, *said], "answer": "1"}

    chosen = {"template": "chat"}
    path = jsonl(chat("Count to 3.", "Go on."), chat("Count to 4.", "Go on."),
                 chat("S", "1+1?", "2", "Go on."), chat("S", "2+2?", "4", "Go on."))  # fmt: skip
    prompts = load_prompts(section(path, **chosen), tokenizer, 0)
    assert not any("repeat" in each for each in prompts.notices)
    path = jsonl(chat("S", "1+1?", "2", "Go on."), chat("s", "1+1?", "2", "go on."))
    prompts = load_prompts(section(path, **chosen), tokenizer, 0)
    assert any(each.startswith("1 of 2 prompts repeat") for each in prompts.notices)
    path = jsonl(chat("S", "What is 1+1?"), chat("S", "1+1?", "2", "Go on."))
    prompts = load_prompts(section(path, **chosen), tokenizer, 0)
    (notice,) = prompts.notices_of_use(2, {("a", "what is 1+1?"), ("b", "Go on.")})
    assert "'a'" in notice, "the statement of a problem, whatever the system says"


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_numbers_of_parquet_are_as_they_were_written(tmp_path, tokenizer, kind):
    answers = [0.1, 0.25, 2.0, 33.3, -1e-3]
    table = {"problem": list("abcde"), "answer": pa.array(np.array(answers, kind))}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    prompts = load_prompts(section(str(tmp_path / "rows.parquet")), tokenizer, 0)
    assert [each.answer for each in prompts.sample(5)] == ["0.1", "0.25", "2", "33.3", "-0.001"]


def test_too_few_prompts_and_held_out_ones_among_them_are_said(jsonl, tokenizer):
    prompts = load_prompts(section(jsonl(*numbered(3))), tokenizer, 0)
    held_out = {("test", "1 + 1"), ("test", "7+1"), ("easy", "2+1"), ("hard", "9+9")}
    few, easy, test = prompts.notices_of_use(4, held_out)
    assert few.startswith("3 prompts") and "prompts_per_step 4" in few
    assert easy.startswith("1 of 1") and "'easy'" in easy
    assert test.startswith("1 of 2") and "'test'" in test
    assert prompts.notices_of_use(3, {("hard", "9+9")}) == []


def test_several_sources_are_visited_by_their_weights(tmp_path, tokenizer):
    """An epoch visits each problem of a once, of b twice, and half of c, the other half next."""
    for name, count in (("a", 3), ("b", 2), ("c", 4)):
        key = "q" if name == "c" else "problem"
        rows = [{key: f"{name}{i}", "answer": i} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    listed = [
        f"{tmp_path}/a.jsonl",
        {"source": f"{tmp_path}/b.jsonl", "weight": 2},
        {"source": f"{tmp_path}/c.jsonl", "weight": 0.5, "problem_field": "q"},
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
    assert {p.prompt_id for p in prompts.sample(100)[:3]} == {"a.jsonl:0", "a.jsonl:1", "a.jsonl:2"}
    assert len(prompts.sample(100)) == 9, "each problem once"


def test_the_tiny_set_has_ids_of_its_own():
    tokenizer = load_tokenizer(ModelSection(path="builtin:tiny"))
    prompts = load_prompts(section("builtin:tiny", user_template="{problem}="), tokenizer, 0)
    assert (len(prompts), prompts.notices) == (2560, ())
    prompt = prompts.take(0, 1)[0]
    assert prompt.prompt_id == f"{prompt.row['benchmark']}:{prompt.row['problem']}"
    assert prompt.text == prompt.row["problem"] + "="
    assert len({p.prompt_id for p in prompts.take(0, 2560)}) == 2560


def test_other_ids_problems_answers_and_orders_have_other_digests(jsonl, tokenizer):
    one, two = (
        {"problem": f"{i}+{i}", "answer": str(2 * i), "id": f"{i}", "of": "a"} for i in (1, 2)
    )

    def digest(*rows: dict) -> str:
        return load_prompts(section(jsonl(*rows), id_field="id"), tokenizer, 0).sha256

    others = [
        digest(one, two),
        digest(two, one),
        digest(one),
        *(digest(one, two | {key: "5"}) for key in ("problem", "answer", "id")),
    ]
    assert len(set(others)) == len(others)
    assert digest(one, two | {"of": "5"}) == others[0]  # no prompt has it
