"""The shipped base models: they load, speak their tokenizers, and are what the script makes."""

import json
from dataclasses import asdict

import pytest
import torch
from make_tiny_base import BOX, EOS, MAKERS, PAD, Maker, weights_sha256
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
