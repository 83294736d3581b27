"""Engines are expensive (a 15 s import, then about 3 s each), so each is opened once per session.

Tests that change weights put nothing back: whoever needs certain weights pushes them first.
"""

from collections.abc import Iterator

import pytest
import torch
from naive_sampler import qwen3
from tiny_policy import Policy, save_policy, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.sampling.sampler_protocol import SamplerOpening


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return save_policy(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return save_policy(tmp_path_factory.mktemp("untied"), tie=False)


@pytest.fixture(scope="session")
def tied_sampler(tied: Policy) -> Iterator:
    yield from _opened_sampler(tied)


@pytest.fixture(scope="session")
def untied_sampler(untied: Policy) -> Iterator:
    yield from _opened_sampler(untied)


def _opened_sampler(policy: Policy) -> Iterator:
    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    sampler = VllmLocalSampler.open(
        SamplerOpening.from_recipe(tiny_recipe(policy.folder), str(policy.folder), Comm())
    )
    yield sampler
    sampler.close()


@pytest.fixture(scope="session", params=["tied", "untied"])
def opened(request: pytest.FixtureRequest) -> tuple:
    """A policy and an in-process sampler of it; everything with the tied one, then the other."""
    policy = request.getfixturevalue(request.param)
    return policy, request.getfixturevalue(f"{request.param}_sampler")


@pytest.fixture
def model():
    return qwen3()
