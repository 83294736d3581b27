"""The shipped recipes: each loads, says what it is, and holds the papers' settings."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import grpo_replay
from grpo_replay.recipe import Recipe, load_recipe, recipe_to_yaml, shipped_recipes_folder
from grpo_replay.replay.batch import mini_batch_indices

QWEN_RECIPES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
FIFO_RECIPES = ("fifo-qwen3-0.6b", "fifo-qwen2.5-7b", "fifo-tiny")
OTHERS = (*FIFO_RECIPES, "two-gpus", "tiny", "tiny-async", "tiny-long", "smollm2")
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


def test_every_shipped_recipe_loads_and_survives_a_round_trip(tmp_path):
    files = sorted(shipped_recipes_folder().glob("*.yaml"))
    for file in files:
        recipe = load_recipe(str(file))
        copy = tmp_path / file.name
        copy.write_text(recipe_to_yaml(recipe), encoding="utf-8")
        assert load_recipe(str(copy)) == recipe
    assert {file.stem for file in files} >= set(QWEN_RECIPES + OTHERS) - {"tiny"}


@pytest.mark.parametrize("name", MINE)
def test_a_recipe_begins_with_what_it_shows_hardware_command_and_expected_result(name):
    text = header(name)
    for word in ("Hardware:", "Command:", f"grpo-replay train {name}", "Expected:", "--set"):
        assert word in text, f"{name}.yaml does not say {word!r} in its first comment"
    assert recipe_ids_in(text) <= {name, "qwen3-0.6b"}


def recipe_ids_in(text: str) -> set[str]:
    return set(re.findall(r"grpo-replay train (\S+)", text))


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
@pytest.mark.parametrize("path", PAPER_A)
def test_the_paper_recipes_hold_paper_a(name, path):
    assert leaf(load_recipe(name), path) == PAPER_A[path]


@pytest.mark.parametrize("name", QWEN_RECIPES)
def test_the_paper_recipes_hold_what_differs_by_size(name):
    recipe = load_recipe(name)
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


BASELINES = {
    "replay.preset=grpo": {"replay.enabled": False, "replays": False},
    "replay.preset=uniform": {
        "replay.unit": "query", "replay.priority": "uniform", "replay.composition": "pool",
    },
    "replay.preset=group_std": {
        "replay.unit": "query", "replay.priority": "group_std", "replay.composition": "pool",
    },
    "replay.composition=pool": {
        "replay.unit": "rollout", "replay.priority": "abs_advantage", "replay.composition": "pool",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [*QWEN_RECIPES, "two-gpus"])
@pytest.mark.parametrize("override", BASELINES)
def test_each_baseline_is_one_override_that_changes_nothing_else(name, override):
    ours, baseline = load_recipe(name), load_recipe(name, [override])
    for path, value in BASELINES[override].items():
        assert leaf(baseline, path) == value
    keep = ("ratio", "max_age_steps", "warmup_steps", "priority_exponent", "capacity_rollouts")
    for field in keep:
        assert getattr(baseline.replay, field) == getattr(ours.replay, field)
    assert baseline.model_copy(update={"replay": ours.replay}) == ours
    assert override.split("=")[1] in header(name)


SURVIVORS = {"qwen3-0.6b": 86.5, "qwen3-1.7b": 112.7, "qwen3-4b": 124.9}
"""Paper A: rollouts out of 256 that the zero-variance filter leaves."""


def readings(name: str) -> list[list[str]]:
    """The overrides in the header below "Other interpretations of the paper", by `--set` line."""
    _, below = header(name).split("# Other interpretations of the paper")
    lines = [line for line in below.splitlines() if line.startswith("#   --set")]
    return [shlex.split(line[1:])[1::2] for line in lines]


@pytest.mark.parametrize("name", QWEN_RECIPES)
def test_other_interpretations_of_the_paper_are_in_the_headers_and_load(name):
    literal, prompts, stop = (load_recipe(name, words) for words in readings(name))
    ours = load_recipe(name)
    rng = np.random.default_rng(0)
    updates = {"grpo": SURVIVORS[name], "replay": 1.5 * SURVIVORS[name]}
    for method, expected in (("grpo", 1), ("replay", 2)):
        parts = mini_batch_indices(round(updates[method]), literal.batch, rng)
        assert len(parts) == expected and max(map(len, parts)) <= 128
        assert len(mini_batch_indices(round(updates[method]), ours.batch, rng)) == 2
    assert literal.model_copy(update={"batch": ours.batch}) == ours

    assert (prompts.sampling.prompts_per_step, prompts.rollouts_per_step) == (256, 2048)
    assert prompts.batch.mini_batch_rollouts == 128 * prompts.sampling.group_size
    kept = {"sampling": ours.sampling, "batch": ours.batch}
    assert prompts.model_copy(update=kept) == ours
    bound = 60 * prompts.rollouts_per_step * SURVIVORS[name] / 256
    assert prompts.replay.capacity_rollouts < bound  # at τ_max = 60, as the header says
    assert prompts.replay.capacity_rollouts > 10 * prompts.rollouts_per_step

    assert stop.sampling.stop_tokens == ["<|endoftext|>"] and ours.sampling.stop_tokens is None
    assert stop.model_copy(update={"sampling": ours.sampling}) == ours


def test_overrides_named_in_the_headers_load():
    words = 0
    for name in (*QWEN_RECIPES, "two-gpus"):
        text = header(name)
        for override in re.findall(r"[a-z_]+\.[a-z_]+=[\w.]+", text):
            load_recipe(name, [override])
            words += 1
    assert words >= 20


def arms(name: str) -> list[tuple[str, ...]]:
    """The overrides of each line of a header that begins with --set."""
    lines = re.findall(r"^#\s+(--set .*)$", header(name), re.MULTILINE)
    return [tuple(re.findall(r"--set (\S+)", line)) for line in lines]


@pytest.mark.parametrize("name, count", [("fifo-qwen3-0.6b", 15), ("fifo-qwen2.5-7b", 5),
                                         ("fifo-tiny", 7)])  # fmt: skip
def test_every_arm_in_the_header_of_a_fifo_recipe_loads(name, count):
    found = arms(name)
    assert len(found) == count
    for overrides in found:
        assert load_recipe(name, overrides) != load_recipe(name), overrides


def batch_sizes(recipe: Recipe) -> set[int]:
    """Rollouts of the updates of one step, once the buffer is full."""
    replay, generated = recipe.replay, recipe.rollouts_per_step
    total = round(replay.ratio * generated) if recipe.replays else generated
    small, larger = divmod(total, recipe.batch.updates_per_step)
    return {small, small + (larger > 0)}


def test_the_arms_of_paper_b_are_those_that_their_lines_say():
    name = "fifo-qwen3-0.6b"
    recipes = [load_recipe(name, overrides) for overrides in arms(name)]
    assert {frozenset(batch_sizes(recipe)) for recipe in recipes} == {frozenset({60})}
    replayed = [recipe for recipe in recipes if recipe.replays]
    assert {r.replay.capacity_rollouts for r in replayed} == {64, 84, 128, 256, 4608}
    ratios = {recipe.replay.ratio for recipe in replayed}
    assert ratios == {2.25, 3.75, 5.625, 17.5}
    assert {recipe.replay.ratio * recipe.rollouts_per_step % 60 for recipe in replayed} == {0.0}
    large = [recipe for recipe in replayed if recipe.replay.capacity_rollouts == 4608]
    assert [(r.replay.positive_fraction, r.loss.kind) for r in large] == [
        (0.5, "clipped"), (0.0, "asymre"),
    ]  # fmt: skip
    (plain,) = [recipe for recipe in recipes if not recipe.replays]
    assert not plain.replay.drop_zero_variance
    assert plain.run.steps * plain.batch.updates_per_step == load_recipe(name).run.steps


def test_the_7b_recipe_has_the_paper_s_batch_and_is_charged_by_five_workers_and_three_trainers():
    name = "fifo-qwen2.5-7b"
    recipe = load_recipe(name)
    assert (recipe.replay.capacity_rollouts, batch_sizes(recipe)) == (84, {60})
    assert recipe.replay.machines is not None
    assert recipe.replay.machines.gamma == pytest.approx(0.425, abs=0.0005)
    assert "x = N/R = 5.25, y = B/R = 3.75" in header(name).replace("\n# ", " ")
    (plain,) = [r for r in map(lambda o: load_recipe(name, o), arms(name)) if not r.replays]
    assert batch_sizes(plain) == {60}


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
    "eval.benchmarks": ["paper_b"],
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


def test_the_fifo_recipe_trains_on_batches_of_60_at_the_horizon_it_names():
    recipe = load_recipe("fifo-qwen3-0.6b")
    generated, drawn = recipe.rollouts_per_step, recipe.replay.ratio * recipe.rollouts_per_step
    assert (generated, drawn, recipe.batch.updates_per_step) == (16, 60.0, 1)
    assert recipe.replay.capacity_rollouts / generated == 5.25
    assert "x = N/R = 5.25, y = B/R = 3.75" in header("fifo-qwen3-0.6b")


def test_the_short_recipe_replays_well_before_it_ends():
    recipe = load_recipe("two-gpus")
    assert recipe.engine.num_processes == 2
    assert recipe.replays and recipe.replay.warmup_steps < recipe.run.steps // 2


PUBLISHED_PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
}


def test_the_7b_configuration_has_the_published_parameter_count_and_an_untied_head():
    import torch

    folder = Path(grpo_replay.__file__).parent / "models" / "qwen2.5-7b"
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert (config.model_type, config.vocab_size) == ("qwen2", 152_064)
    assert sum(p.numel() for p in model.parameters()) == 7_615_616_512
    assert model.lm_head.weight is not model.model.embed_tokens.weight


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_the_shipped_configuration_has_the_published_parameter_count_with_a_tied_head(name):
    import torch

    folder = Path(grpo_replay.__file__).parent / "models" / name
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED_PARAMETERS[name]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # ... and 151,936 x hidden more if they were not tied
    untied = sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False))
    assert untied - PUBLISHED_PARAMETERS[name] == 151_936 * config.hidden_size
