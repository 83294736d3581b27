"""The shipped base model: it loads plainly, speaks its tokenizer, and is what the script makes."""

import json
from dataclasses import asdict

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_replay.tiny import BASE_DIR
from grpo_replay.tiny.make_base import (
    Lessons,
    WarmUp,
    build_tokenizer,
    learning_rate_factor,
    make_base,
    save_base,
    weights_sha256,
)
from grpo_replay.tiny.problems import BENCHMARKS, PROMPT_TEMPLATE, benchmark_problems
from grpo_replay.tiny.tokenizer import BOX, EOS, PAD, VOCABULARY


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(BASE_DIR)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE_DIR)


def test_the_shipped_weights_are_those_of_the_script():
    record = json.loads((BASE_DIR / "recipe.json").read_text())
    constants = json.loads(json.dumps(asdict(WarmUp())))
    assert record == {"warm_up": constants, "model_safetensors_sha256": weights_sha256(BASE_DIR)}


def test_the_model_is_a_small_fp32_qwen3_with_tied_embeddings(model):
    assert model.config.model_type == "qwen3"
    assert model.config.head_dim == 32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert (BASE_DIR / "model.safetensors").stat().st_size < 2 * 1024**2


def test_model_and_tokenizer_agree_on_the_special_tokens(tokenizer):
    config = AutoConfig.from_pretrained(BASE_DIR)
    generation = GenerationConfig.from_pretrained(BASE_DIR)
    eos, pad = VOCABULARY.index(EOS), VOCABULARY.index(PAD)
    assert tokenizer.eos_token_id == config.eos_token_id == generation.eos_token_id == eos
    assert tokenizer.pad_token_id == config.pad_token_id == generation.pad_token_id == pad
    assert config.bos_token_id is None and tokenizer.bos_token_id is None
    assert len(tokenizer) == config.vocab_size == len(VOCABULARY)


def test_the_shipped_tokenizer_is_the_one_of_the_script(tokenizer):
    built = build_tokenizer(WarmUp().architecture.max_position_embeddings)
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.backend_tokenizer.to_str() == built.backend_tokenizer.to_str()


def test_texts_survive_the_tokenizer(tokenizer):
    texts = [PROMPT_TEMPLATE.format(**row) for b in BENCHMARKS for row in benchmark_problems(b)]
    texts += [r"27-56;9,2\boxed{-29}", r"\boxed{\boxed{1}} , = ( )  2 ", "}", ""]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_one_token_a_character_and_one_for_the_box(tokenizer):
    assert tokenizer.tokenize(r"15,8\boxed{85}") == ["1", "5", ",", "8", BOX, "8", "5", "}"]
    assert tokenizer("a\n")["input_ids"] == [tokenizer.unk_token_id] * 2


def test_greedy_answers_are_boxed_and_end_in_eos(model, tokenizer):
    rows = [row for name in BENCHMARKS for row in benchmark_problems(name)[:8]]
    texts = [PROMPT_TEMPLATE.format(**row) for row in rows]
    prompts = tokenizer(texts, return_tensors="pt", padding=True)
    output = model.generate(**prompts, do_sample=False, max_new_tokens=20)
    completions = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :])
    assert len(completions) == 40
    finished = [c for c in completions if BOX in c and EOS in c]
    assert len(finished) >= 38
    right = sum(f"{BOX}{row['answer']}}}" in c for row, c in zip(rows, completions, strict=True))
    assert 5 <= right <= 25  # the base is neither hopeless nor already taught


def test_lessons_train_the_answer_and_its_eos_only():
    lessons = Lessons(WarmUp())
    ids, labels = lessons.batch(64)
    assert ids.shape == labels.shape == (64, ids.shape[1])
    for row, targets in zip(ids, labels, strict=True):
        trained = targets != -100
        assert torch.equal(row[trained], targets[trained])
        answer = lessons.tokenizer.decode(row).split("=")[1].split(PAD)[0]
        assert answer.endswith("}" + EOS)
        assert lessons.tokenizer.decode(row[trained]) == answer


def test_learning_rate_rises_then_falls_to_zero():
    warm_up = WarmUp()
    assert learning_rate_factor(0, warm_up) == 1 / warm_up.learning_rate_rise_steps
    assert learning_rate_factor(warm_up.learning_rate_rise_steps, warm_up) == 1.0
    assert learning_rate_factor(warm_up.steps, warm_up) == pytest.approx(0.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_script_rebuilds_the_shipped_model(tmp_path, model):
    """Two minutes. Rounding differs between processors, so the losses are compared, not bits.

    A coarse check: it finds a broken warm-up, not slightly other habits (the constants' test does).
    """
    torch.set_num_threads(1)
    rebuilt = make_base(WarmUp())
    save_base(rebuilt, WarmUp(), tmp_path)
    ids, labels = Lessons(WarmUp(seed=99)).batch(512)
    with torch.no_grad():
        shipped_loss = model(input_ids=ids, labels=labels).loss.item()
        rebuilt_loss = rebuilt(input_ids=ids, labels=labels).loss.item()
    assert rebuilt_loss == pytest.approx(shipped_loss, abs=0.02)
