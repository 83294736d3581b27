"""A push of weights by hand: its buckets, its version, and the copy of a lagging sampler."""

from types import SimpleNamespace

import torch

from grpo_replay.training import weight_sync
from grpo_replay.training.weight_sync import PushedWeights, read_pushed_weights, sync_weights


class Policy:
    """An engine whose only tensor has as many elements as a bucket has MiB."""

    def __init__(self) -> None:
        self.weight = torch.zeros(0)

    def pushed_tensors(self, bucket_bytes: int):
        assert bucket_bytes % 2**20 == 0
        self.weight = torch.arange(bucket_bytes // 2**20, dtype=torch.float32)
        yield "w", self.weight


def test_a_push_is_gathered_in_buckets_and_has_its_version(tmp_path, monkeypatch):
    policy, loaded = Policy(), []
    sampler = SimpleNamespace(load_weights=lambda pairs, label: loaded.append((label, dict(pairs))))
    monkeypatch.setattr(weight_sync, "SYNC_BUCKET_BYTES", 5 * 2**20)
    sync_weights(policy, sampler, 3)
    pushed = PushedWeights()
    assert pushed.version == 0
    monkeypatch.setattr(weight_sync, "SYNC_BUCKET_BYTES", 2 * 2**20)
    sync_weights(policy, sampler, 4, pushed)
    assert [(label, pairs["w"].tolist()) for label, pairs in loaded] == [
        (3, [0.0, 1.0, 2.0, 3.0, 4.0]), (4, [0.0, 1.0]),
    ]  # fmt: skip
    policy.weight += 1  # the next update: the copy is of the push
    pushed.save(tmp_path)
    weights, version = read_pushed_weights(tmp_path)
    assert (pushed.version, version, weights["w"].tolist()) == (4, 4, [0.0, 1.0])
    assert read_pushed_weights(tmp_path / "none") is None
