"""A float32 policy on a GPU holds whole score matrices: said at the start, counted beforehand."""

import pytest

from grpo_replay.engine.models import float32_warning, has_whole_scores, load_config
from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.lab.dry_run.trace import Microbatch, forward_memory
from grpo_replay.recipe import Recipe, load_recipe

SHAPE = "model.path=builtin:qwen3-0.6b"


def qwen(*overrides: str) -> Recipe:
    return load_recipe("qwen3-0.6b", [SHAPE, *overrides])


@pytest.mark.parametrize(
    ("overrides", "on_cuda", "whole"),
    [
        (["model.dtype=float32"], True, True),
        (["model.dtype=float32"], False, False),
        (["model.dtype=bfloat16"], True, False),
        (["model.attn_implementation=eager"], False, True),
        (["model.dtype=float32", "model.attn_implementation=flex_attention"], True, False),
        (  # no grouped heads: the memory-efficient kernel takes float32
            ["model.dtype=float32", "model.random_init={num_key_value_heads: 16}"], True, False,
        ),
    ],
)  # fmt: skip
def test_scores_are_whole_where_no_fused_kernel_takes_the_tensors(overrides, on_cuda, whole):
    recipe = qwen(*overrides)
    assert has_whole_scores(recipe.model, load_config(recipe.model), on_cuda) is whole


def test_the_warning_says_how_much_and_what_to_set():
    recipe = qwen("model.dtype=float32")
    config = load_config(recipe.model)
    warning = float32_warning(recipe.model, config, 9216, on_cuda=True)
    # 16 heads x 9,216 x 9,216 scores of 4 bytes
    assert "9,216 tokens takes 5.1 GiB of scores a layer (16 heads)" in warning
    assert "model.dtype bfloat16" in warning
    assert float32_warning(recipe.model, config, 512, on_cuda=True) is None, "0.02 GiB"
    assert float32_warning(recipe.model, config, 9216, on_cuda=False) is None


def test_the_trace_counts_the_scores():
    def peak(length: int, on_cuda: bool) -> int:
        recipe = qwen("model.dtype=float32")
        chunk = recipe.logprob_chunk_tokens(151_936)
        batch = Microbatch(1, length, 16, chunk)
        return forward_memory(recipe.model, load_config(recipe.model), batch, on_cuda).peak

    scores = 16 * 8192**2 * 4
    assert peak(8192, on_cuda=True) - peak(8192, on_cuda=False) > 2 * scores
    assert peak(16384, on_cuda=True) > 3.5 * peak(8192, on_cuda=True)


@pytest.mark.slow
def test_the_dry_run_says_and_counts_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = dry_run(qwen("model.dtype=float32", "engine.num_processes=8"), 80)
    assert any("GiB of scores a layer" in each for each in report["assumptions"])
    # two rollouts to a micro-batch, and scores before and after the softmax
    assert report["memory"]["backward_work_gib"] > 2 * 2 * 5.06
    half = dry_run(qwen("model.dtype=bfloat16"), 80)
    assert not any("scores" in each for each in half["assumptions"])
    assert half["memory"]["fits"]
