"""A float32 policy on a GPU holds whole score matrices, which the plan counts."""

import pytest

from grpo_replay.engine.models import load_config
from grpo_replay.lab.dry_run.trace import Microbatch, forward_memory, stores_attention_scores
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
        (  # no grouped heads: the memory-efficient kernel takes float32
            ["model.dtype=float32", "model.random_init={num_key_value_heads: 16}"], True, False,
        ),
    ],
)  # fmt: skip
def test_scores_are_whole_where_no_fused_kernel_takes_the_tensors(overrides, on_cuda, whole):
    recipe = qwen(*overrides)
    assert stores_attention_scores(recipe.model, load_config(recipe.model), on_cuda) is whole


def test_the_trace_counts_the_scores():
    def peak(length: int, on_cuda: bool) -> int:
        recipe = qwen("model.dtype=float32")
        chunk = recipe.logprob_chunk_tokens(151_936)
        batch = Microbatch(1, length, 16, chunk)
        return forward_memory(recipe.model, load_config(recipe.model), batch, on_cuda).peak

    scores = 16 * 8192**2 * 4
    assert peak(8192, on_cuda=True) - peak(8192, on_cuda=False) > 2 * scores
