"""A weight that is no number is named wherever it comes in: at load, at a push, in evaluations."""

import math
import shutil

import numpy as np
import pytest
import torch
from commands import run_eval
from naive_sampler import EOS, PAD, copied_sampler, make_requests, qwen3

from grpo_replay.engine.finite_weights import is_finite, refuse_not_finite, stored_tensors
from grpo_replay.engine.models import load_policy
from grpo_replay.errors import ModelError, SamplerError
from grpo_replay.recipe import ModelSection
from grpo_replay.tiny import BASE_DIR

BROKEN = [
    ("model.embed_tokens.weight", math.nan),
    ("model.layers.1.mlp.up_proj.weight", math.inf),
    ("model.norm.weight", -math.inf),
]


@pytest.fixture(params=BROKEN, ids=[name for name, _ in BROKEN])
def broken(request, tmp_path):
    """The tiny base with a number that is none, and the tensor that it is in."""
    name, value = request.param
    folder = shutil.copytree(BASE_DIR, tmp_path / "model")
    model = load_policy(ModelSection(), 0)
    with torch.no_grad():
        model.get_parameter(name)[3] = value
    model.save_pretrained(folder)
    return folder, name


def test_at_load_and_in_the_files_that_a_sampler_reads(broken):
    folder, name = broken
    with pytest.raises(ModelError, match=rf"model\.path .*: NaN or infinity in {name}: take"):
        load_policy(ModelSection(path=str(folder)), 0)
    with pytest.raises(ModelError, match=f"here: NaN or infinity in {name}:"):
        refuse_not_finite(stored_tensors(folder), "here")
    refuse_not_finite(stored_tensors(BASE_DIR), "here")


def test_in_an_evaluation(broken, tmp_path):
    folder, name = broken
    with pytest.raises(ModelError, match=name):
        run_eval(str(folder), recipe="tiny", output=str(tmp_path / "eval.json"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_at_a_push_of_which_nothing_is_sampled(value):
    sampler, name = copied_sampler(qwen3(), (EOS,), PAD), "model.layers.0.mlp.down_proj.weight"
    named = {each: tensor.clone() for each, tensor in qwen3().state_dict().items()}
    named[name][0, -1] = value
    with pytest.raises(SamplerError, match=f"version 1 .*: NaN or infinity in {name}: look at gr"):
        sampler.load_weights(named.items(), 1)
    with pytest.raises(SamplerError, match="incomplete"):
        sampler.generate(make_requests())
    named[name][0, -1] = 0.0
    sampler.load_weights(named.items(), 2)
    assert all(np.isfinite(c.sampler_logprobs).all() for c in sampler.generate(make_requests()))


def test_numbers_that_are_large_or_whole_or_none_at_all_are_finite():
    for tensor in (
        torch.tensor([3e38, -3e38]), torch.tensor([3e38], dtype=torch.bfloat16),
        torch.tensor([1.0]).to(torch.float8_e4m3fn),
        torch.tensor([1, 2]), torch.tensor([True]), torch.zeros(0),
    ):  # fmt: skip
        assert is_finite(tensor)
