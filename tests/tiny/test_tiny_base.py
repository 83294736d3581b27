"""The shipped base models: they load, speak their tokenizers, and are what the script makes."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from make_tiny_base import (
    BOX,
    EOS,
    MAKERS,
    PAD,
    Lessons,
    Maker,
    WarmUp,
    learning_rate_factor,
    make_base,
    save_base,
    weights_sha256,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_replay.tiny import BASES, TASKS, Task
from grpo_replay.tiny.problems import PROMPT_TEMPLATE

SOLVED = {"tiny": (5, 25), "tiny-long": (12, 28)}
"""Of 40 problems solved greedily: the base is neither hopeless nor already taught."""

LONGEST = {"tiny": 20, "tiny-long": 300}


@pytest.fixture(scope="module", params=BASES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def task(name) -> Task:
    return TASKS[name]


@pytest.fixture(scope="module")
def maker(name) -> Maker:
    return MAKERS[name]


@pytest.fixture(scope="module")
def model(task):
    return AutoModelForCausalLM.from_pretrained(task.base_dir)


@pytest.fixture(scope="module")
def tokenizer(task):
    return AutoTokenizer.from_pretrained(task.base_dir)


def test_every_task_has_a_maker_and_the_other_way_round():
    assert set(BASES) == set(MAKERS) == {"tiny", "tiny-long"}
    assert [maker.recipe for maker in MAKERS.values()] == list(MAKERS)


def test_the_shipped_weights_are_those_of_the_script(task, maker):
    record = json.loads((task.base_dir / "recipe.json").read_text())
    constants = json.loads(json.dumps(asdict(maker.warm_up)))
    sha256 = weights_sha256(task.base_dir)
    assert record == {"warm_up": constants, "model_safetensors_sha256": sha256}


def test_the_model_is_a_small_fp32_qwen3_with_tied_embeddings(model, task):
    assert model.config.model_type == "qwen3"
    assert model.config.head_dim in (32, 48, 64)  # vLLM on a CPU has no other small ones
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert (task.base_dir / "model.safetensors").stat().st_size < 2 * 1024**2


def test_the_last_message_of_a_chat_is_the_prompt(tokenizer):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "12+34"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == PROMPT_TEMPLATE.format(problem="12+34")


def test_model_and_tokenizer_agree_on_the_special_tokens(tokenizer, task, maker):
    config = AutoConfig.from_pretrained(task.base_dir)
    generation = GenerationConfig.from_pretrained(task.base_dir)
    eos, pad = maker.vocabulary.index(EOS), maker.vocabulary.index(PAD)
    assert tokenizer.eos_token_id == config.eos_token_id == generation.eos_token_id == eos
    assert tokenizer.pad_token_id == config.pad_token_id == generation.pad_token_id == pad
    assert config.bos_token_id is None and tokenizer.bos_token_id is None
    assert len(tokenizer) == config.vocab_size == len(maker.vocabulary)


def test_the_shipped_tokenizer_is_the_one_of_the_script(tokenizer, maker):
    built = maker.tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.backend_tokenizer.to_str() == built.backend_tokenizer.to_str()


def test_texts_survive_the_tokenizer(tokenizer, task):
    rows = [row for each in task.benchmarks for row in task.benchmark_problems(each)]
    texts = [PROMPT_TEMPLATE.format(**row) for row in rows]
    texts += [r"27-56;9,2\boxed{-29}", r"\boxed{\boxed{1}} , = ( )  2 ", "}", ""]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_one_token_a_character_and_one_for_the_box(tokenizer):
    assert tokenizer.tokenize(r"15,8\boxed{85}") == ["1", "5", ",", "8", BOX, "8", "5", "}"]
    assert tokenizer("A\n")["input_ids"] == [tokenizer.unk_token_id] * 2


def test_greedy_answers_are_boxed_and_end_in_eos(model, tokenizer, task, name):
    each = 40 // len(task.benchmarks) + 1
    rows = [row for b in task.benchmarks for row in task.benchmark_problems(b)[:each]][:40]
    texts = [PROMPT_TEMPLATE.format(**row) for row in rows]
    prompts = tokenizer(texts, return_tensors="pt", padding=True)
    output = model.generate(**prompts, do_sample=False, max_new_tokens=LONGEST[name])
    completions = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :])
    assert len(completions) == 40
    finished = [c for c in completions if BOX in c and EOS in c]
    assert len(finished) >= 38
    right = sum(f"{BOX}{row['answer']}}}" in c for row, c in zip(rows, completions, strict=True))
    fewest, most = SOLVED[name]
    assert fewest <= right <= most


def test_lessons_train_the_answer_and_its_eos_only(maker):
    lessons = Lessons(maker)
    ids, labels = lessons.batch(64)
    assert ids.shape == labels.shape == (64, ids.shape[1])
    for row, targets in zip(ids, labels, strict=True):
        trained = targets != -100
        assert torch.equal(row[trained], targets[trained])
        answer = lessons.tokenizer.decode(row).split("=", 1)[1].split(PAD)[0]
        assert answer.endswith("}" + EOS)
        assert lessons.tokenizer.decode(row[trained]) == answer


def test_learning_rate_rises_then_falls_to_zero():
    warm_up = WarmUp()
    assert learning_rate_factor(0, warm_up) == 1 / warm_up.learning_rate_rise_steps
    assert learning_rate_factor(warm_up.learning_rate_rise_steps, warm_up) == 1.0
    assert learning_rate_factor(warm_up.steps, warm_up) == pytest.approx(0.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["tiny"], indirect=True)  # the longer one takes many minutes
def test_the_script_rebuilds_the_shipped_model(tmp_path, model, maker):
    """Minutes. Rounding differs between processors, so the losses are compared, not bits.

    A coarse check: it finds a broken warm-up, not slightly other habits (the constants' test does).
    """
    torch.set_num_threads(1)
    rebuilt = make_base(maker)
    save_base(rebuilt, maker, tmp_path)
    others = replace(maker, warm_up=replace(maker.warm_up, seed=99))
    ids, labels = Lessons(others).batch(512)
    with torch.no_grad():
        shipped_loss = model(input_ids=ids, labels=labels).loss.item()
        rebuilt_loss = rebuilt(input_ids=ids, labels=labels).loss.item()
    assert rebuilt_loss == pytest.approx(shipped_loss, abs=0.02)
