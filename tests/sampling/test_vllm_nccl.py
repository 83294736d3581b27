"""Weights over NCCL, with gloo in its place: who gets them, who is in the group, and who is left
with a communicator."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from gloo_communicator import (
    LONGEST_WAIT_SECONDS,
    TransferServer,
    gloo_for_nccl,
    receiving_worker,
)
from tiny_policy import changed, gaps, make_requests, named_tensors, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.weights import expected_weights
from grpo_replay.errors import SamplerError
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.server.routes import VllmServer
from grpo_replay.sampling.server.weight_nccl import NcclTransfer, master_address_for

pytestmark = pytest.mark.vllm

BUCKET_BYTES = 30_000  # several buckets; the largest tensor does not fit into one


@pytest.fixture(scope="module")
def sampler(tied) -> Iterator:
    """A real engine that can receive, as a server's would be."""
    from grpo_replay.sampling import vllm_local

    honest = vllm_local._colocation_arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            vllm_local,
            "_colocation_arguments",
            lambda *each: honest(*each) | {"weight_transfer_config": {"backend": "nccl"}},
        )
        recipe = tiny_recipe(tied.folder)
        sampler = vllm_local.VllmLocalSampler.open(
            SamplerOpening.of(recipe, str(tied.folder), Comm())
        )
    yield sampler
    sampler.close()


@pytest.fixture
def network(sampler, tied) -> Iterator[SimpleNamespace]:
    """A trainer's side, and two servers: a whole engine, and one that keeps what it receives."""
    engine = sampler._engine

    def call(method: str, *arguments: object) -> None:
        engine.collective_rpc(method, args=arguments)

    keep, received = receiving_worker(engine.vllm_config)
    with gloo_for_nccl() as communicators:
        both = [TransferServer(call), TransferServer(keep)]
        transfer = NcclTransfer(expected_weights(tiny_recipe(tied.folder).model), BUCKET_BYTES, 30)
        try:
            yield SimpleNamespace(
                both=both,
                servers=[VllmServer(each.url, "tests") for each in both],
                transfer=transfer,
                received=received,
                communicators=communicators,
                sampler=sampler,
            )
        finally:
            transfer.close()
            for server in both:
                server.stop()
            for each in list(communicators):
                each.destroy()


def ranks(network) -> list[int]:
    return sorted(each.rank for each in network.communicators)


def assert_has(network, model) -> None:
    for name, tensor in named_tensors(model):
        assert torch.equal(network.received[name], tensor), name


def assert_samples(sampler, model) -> None:
    requests = make_requests(count=8)
    assert sampler._engine.reset_prefix_cache()
    assert gaps(model, requests, list(sampler.generate(requests))).max() < 1e-4


def test_every_server_gets_every_version_over_one_group(network, tied):
    for version in (1, 2):
        model = changed(tied, version)
        network.transfer.stage(named_tensors(model), version, network.servers)
        assert_has(network, model)
        assert_samples(network.sampler, model)
        assert ranks(network) == [0, 1, 2], "formed once"
    assert network.both[1].asked.count("init_weight_transfer_engine") == 1


def test_a_group_that_is_formed_again_leaves_no_communicator_behind(network, tied):
    network.transfer.stage(named_tensors(tied.model), 1, network.servers)
    lost = next(each for each in network.communicators if each.rank == 1)
    model = changed(tied, 3)
    network.transfer.stage(named_tensors(model), 2, network.servers[1:])
    assert_has(network, model)
    assert sorted(each.rank for each in network.communicators if each is not lost) == [0, 1]
    assert {each.world_size for each in network.communicators if each is not lost} == {2}


def test_closing_frees_the_communicators_of_both_sides(network, tied):
    network.transfer.stage(named_tensors(tied.model), 1, network.servers)
    network.transfer.close()
    network.transfer.close()
    assert network.communicators == []


@pytest.mark.timeout(90)
def test_a_server_that_fails_to_receive_ends_the_broadcast(network, tied):
    """NCCL would wait for it for ever, and the other server does: it is not asked to leave."""
    network.transfer.stage(named_tensors(tied.model), 1, network.servers)
    network.both[0].refuse = {"update_weights"}
    stuck = next(each for each in network.communicators if each.rank == 2)
    end_of_its_worker = threading.Timer(1.0, stuck.destroy)
    end_of_its_worker.start()
    started = time.monotonic()
    with pytest.raises(SamplerError, match=r"version 2 did not reach .*: HTTP 500: as told"):
        network.transfer.stage(named_tensors(tied.model), 2, network.servers)
    assert time.monotonic() - started < 2 * LONGEST_WAIT_SECONDS
    end_of_its_worker.join()
    assert ranks(network) == [1], "the trainer's is gone"
    network.transfer.close()
    assert "shutdown_weight_transfer_engine" not in network.both[0].asked


def test_the_master_address_is_reachable_by_remote_servers():
    assert master_address_for(["127.0.0.1", "10.0.0.7"]) == "10.0.0.7"
    assert master_address_for(["10.0.0.7", "127.0.0.1"]) == "10.0.0.7"
    assert master_address_for(["127.0.0.1"]) == "127.0.0.1"
