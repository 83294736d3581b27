"""The shipped recipes: each loads, says what it is, and holds the papers' settings."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import grpo_replay
from grpo_replay.recipe import (
    Recipe,
    load_recipe,
    recipe_to_yaml,
    shipped_recipes_folder,
)
from grpo_replay.replay.batch import mini_batch_indices

QWEN_RECIPES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
FIFO_RECIPES = ("fifo-qwen3-0.6b", "fifo-qwen2.5-7b", "fifo-tiny")
MINE = (*QWEN_RECIPES, *FIFO_RECIPES, "two-gpus", "tiny-async", "tiny-long", "smollm2")


def leaf(recipe: Recipe, path: str):
    value = recipe
    for part in path.split("."):
        value = getattr(value, part)
    return value


def header(name: str) -> str:
    text = (shipped_recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line)
    return "\n".join(lines)


def test_every_shipped_recipe_loads_names_itself_and_survives_a_round_trip(tmp_path):
    files = sorted(shipped_recipes_folder().glob("*.yaml"))
    assert {file.stem for file in files} >= {*MINE, "tiny"}
    for file in files:
        recipe = load_recipe(file.stem)
        assert recipe.name == file.stem
        copy = tmp_path / file.name
        copy.write_text(recipe_to_yaml(recipe), encoding="utf-8")
        assert load_recipe(str(copy)) == recipe


def arms(name: str) -> list[tuple[str, ...]]:
    """The overrides of each line of a header that begins with --set."""
    lines = re.findall(r"^#\s+(--set .*)$", header(name), re.MULTILINE)
    return [tuple(re.findall(r"--set '?([^\s']+)", line)) for line in lines]


@pytest.mark.parametrize("name", MINE)
def test_every_set_line_of_a_header_loads(name):
    assert arms(name)
    for overrides in arms(name):
        assert load_recipe(name, overrides) != load_recipe(name), overrides
    if name in (*QWEN_RECIPES, "two-gpus"):
        for override in re.findall(r"[a-z_]+\.[a-z_]+=[\w.]+", header(name)):
            load_recipe(name, [override])


PAPER_A = {
    "prompts.source": "agentica-org/DeepScaleR-Preview-Dataset",
    "prompts.dataset_options.split": "train",
    "prompts.problem_field": "problem",
    "prompts.answer_field": "answer",
    "prompts.max_prompt_length": 1024,
    "prompts.template": "chat",
    "prompts.system_prompt": "You are a helpful assistant.",
    "sampling.backend": "vllm",
    "sampling.prompts_per_step": 32,
    "sampling.group_size": 8,
    "rollouts_per_step": 256,
    "sampling.temperature": 1.0,
    "sampling.max_completion_length": 8192,
    "sampling.vllm.gpu_memory_utilization": 0.6,
    "sampling.vllm.tensor_parallel_size": 1,
    "reward.function": "minerva",
    "reward.correct": 1.0,
    "reward.incorrect": -1.0,
    "advantage.std": "population",
    "advantage.epsilon": 1e-6,
    "replay.preset": "ours",
    "replay.enabled": True,
    "replay.unit": "rollout",
    "replay.priority": "abs_advantage",
    "replay.priority_exponent": 0.5,
    "replay.composition": "fresh_anchored",
    "replay.ratio": 0.5,
    "replay.max_age_steps": 10,
    "replay.warmup_steps": 20,
    "replay.capacity_rollouts": 30_000,
    "replay.with_replacement": False,
    "batch.updates_per_step": 2,
    "loss.kind": "clipped",
    "loss.epsilon": 0.2,
    "loss.epsilon_high": 0.28,
    "loss.dual_clip": 10.0,
    "loss.beta": 0.0,
    "loss.aggregation": "token_mean",
    "optimizer.learning_rate": 1e-6,
    "optimizer.adamw.betas": [0.9, 0.999],
    "optimizer.adamw.weight_decay": 0.01,
    "optimizer.max_grad_norm": 1.0,
    "model.dtype": "bfloat16",
    "model.gradient_checkpointing": True,
    "run.steps": 200,
    "run.seed": 42,
    "eval.benchmarks": ["paper"],
    "eval.temperature": 0.6,
    "eval.top_p": 0.8,
    "eval.reward": "math_verify_boxed",
}
"""Paper A's table of hyperparameters, sections 3 to 5 and its appendix."""

PER_SIZE = {
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B-Base", 4, 4, 8192, 9216),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B-Base", 4, 4, 8192, 9216),
    "qwen3-4b": ("Qwen/Qwen3-4B-Base", 8, 2, 16384, 17408),
}
"""Model, GPUs, micro-batch per GPU, evaluation length, vLLM's model length (paper: 9216; the 4B
evaluation's 1,024 + 16,384 need more)."""


@pytest.mark.parametrize("name", QWEN_RECIPES)
def test_the_recipes_of_paper_a_hold_its_table_and_what_differs_by_size(name):
    recipe = load_recipe(name)
    assert {path: leaf(recipe, path) for path in PAPER_A} == PAPER_A
    model, gpus, rows, eval_length, model_length = PER_SIZE[name]
    longest = recipe.prompts.max_prompt_length + recipe.sampling.max_completion_length
    assert recipe.model.path == model
    assert recipe.engine.num_processes == gpus
    assert recipe.batch.max_tokens_per_microbatch == rows * longest == rows * 9216
    assert recipe.eval.max_completion_length == eval_length
    assert recipe.sampling.vllm.max_model_len == model_length
    assert recipe.prompts.user_template.format(problem="Q") == (
        "Problem: Q\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


SURVIVORS = {"qwen3-0.6b": 86.5, "qwen3-1.7b": 112.7, "qwen3-4b": 124.9}
"""Paper A: rollouts out of 256 that the zero-variance filter leaves."""


@pytest.mark.parametrize("name", QWEN_RECIPES)
def test_the_literal_reading_of_the_mini_batch_makes_one_update_without_replay_and_two_with(name):
    """Paper A's mini-batch of 128 rollouts, on the survivors that it measured."""
    ours, literal = load_recipe(name), load_recipe(name, ["batch.mini_batch_rollouts=128"])
    rng = np.random.default_rng(0)
    for count, expected in ((SURVIVORS[name], 1), (1.5 * SURVIVORS[name], 2)):
        assert len(mini_batch_indices(round(count), literal.batch, rng)) == expected
        assert len(mini_batch_indices(round(count), ours.batch, rng)) == 2
    assert "batch.mini_batch_rollouts=128" in header(name)


def batch_sizes(recipe: Recipe) -> set[int]:
    """Rollouts of the updates of one step, once the buffer is full."""
    replay, generated = recipe.replay, recipe.rollouts_per_step
    total = round(replay.ratio * generated) if recipe.replays else generated
    small, larger = divmod(total, recipe.batch.updates_per_step)
    return {small, small + (larger > 0)}


@pytest.mark.parametrize("name", ["fifo-qwen3-0.6b", "fifo-qwen2.5-7b"])
def test_every_arm_in_the_header_of_a_recipe_of_paper_b_trains_on_batches_of_60(name):
    recipes = [load_recipe(name), *(load_recipe(name, overrides) for overrides in arms(name))]
    assert {frozenset(batch_sizes(recipe)) for recipe in recipes} == {frozenset({60})}
    replayed = [recipe for recipe in recipes if recipe.replays]
    assert {recipe.replay.ratio * recipe.rollouts_per_step % 60 for recipe in replayed} == {0.0}
    assert recipes[0].replay.capacity_rollouts / recipes[0].rollouts_per_step == 5.25
    (plain,) = [recipe for recipe in recipes if not recipe.replays]
    assert not plain.replay.drop_zero_variance
    if name == "fifo-qwen3-0.6b":
        assert {r.replay.capacity_rollouts for r in replayed} == {64, 84, 128, 256, 4608}
        assert {r.replay.ratio for r in replayed} == {2.25, 3.75, 5.625, 17.5}
        large = [r for r in replayed if r.replay.capacity_rollouts == 4608]
        assert [(r.replay.positive_fraction, r.loss.kind) for r in large] == [
            (0.5, "clipped"), (0.0, "asymre"),
        ]  # fmt: skip
        assert plain.run.steps * plain.batch.updates_per_step == recipes[0].run.steps


PAPER_B = {
    "sampling.group_size": 16,
    "sampling.temperature": 1.0,
    "loss.epsilon": 0.2,
    "loss.epsilon_high": 0.2,
    "loss.beta": 0.0,
    "optimizer.learning_rate": 3.37e-7,
    "optimizer.adamw.weight_decay": 0.0,
    "prompts.source": "open-r1/OpenR1-Math-220k",
    "prompts.dataset_options.split": "train[:-500]",
    "loss.dual_clip": None,
    "loss.aggregation": "token_mean",
    "advantage.epsilon": 1e-6,
    "optimizer.max_grad_norm": 1.0,
    "replay.preset": "fifo",
    "replay.unit": "rollout",
    "replay.priority": "uniform",
    "replay.composition": "buffer_only",
    "replay.max_age_steps": None,
    "replay.warmup_steps": 0,
    "replay.capacity_rollouts": 84,
    "replay.with_replacement": True,
    "replay.unused_first": False,
    "replay.drop_zero_variance": False,
    "replay.positive_fraction": 0.0,
    "reward.function": "boxed",
    "eval.benchmarks": ["paper_b"],
    "eval.reward": "boxed",
    "eval.temperature": 0.1,
    "eval.top_p": 0.95,
    "eval.samples": None,
}
OF_7B = {
    "optimizer.learning_rate": 6.8e-8,
    "model.path": "Qwen/Qwen2.5-7B",
    "engine.num_processes": 8,
}


@pytest.mark.parametrize("name", ["fifo-qwen3-0.6b", "fifo-qwen2.5-7b"])
def test_the_fifo_recipes_hold_paper_b(name):
    recipe = load_recipe(name)
    expected = PAPER_B | (OF_7B if name == "fifo-qwen2.5-7b" else {})
    assert {path: leaf(recipe, path) for path in expected} == expected


PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_configuration_has_the_published_parameter_count_and_head(name):
    """Tied to the embeddings in Qwen3, not in Qwen2.5-7B."""
    folder = Path(grpo_replay.__file__).parent / "models" / name
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (name != "qwen2.5-7b")
