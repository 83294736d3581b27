"""Messages between ranks over a CPU process group. DeepSpeed exchanges gradients and parameters.

Payloads are bytes (JSON, Arrow IPC, or `encode`), never pickles. A single process needs no process
group.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

_Value = TypeVar("_Value")


class Comm:
    """The ranks of a run. `group` is a torch gloo process group, or None for one process.

    Every method is collective: all ranks call it, in the same order. Rank 0 is the root.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order, on every rank."""
        if self.world_size == 1:
            return [payload]
        import torch
        import torch.distributed as dist

        sizes, padded = self._padded(payload)
        received = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(received, padded, group=self._group)
        return _unpadded(received, sizes)

    def gather(self, payload: bytes | bytearray) -> list[bytes] | None:
        """Every rank's payload, in rank order, on rank 0; None on the other ranks, which hold only
        their own payload."""
        if self.world_size == 1:
            return [bytes(payload)]
        import torch
        import torch.distributed as dist

        sizes, padded = self._padded(payload)
        received = [torch.empty_like(padded) for _ in sizes] if self.is_main else None
        dist.gather(padded, received, dst=0, group=self._group)
        return None if received is None else _unpadded(received, sizes)

    def gather_values(self, kind: type[_Value], value: _Value) -> list[_Value] | None:
        """Every rank's value of this kind (`encode`), in rank order, on rank 0; None on others."""
        if self.world_size == 1:
            return [value]
        gathered = self.gather(encode(value))
        return None if gathered is None else [decode(kind, payload) for payload in gathered]

    def _padded(self, payload: bytes | bytearray) -> tuple[list[int], Any]:
        """The length of every rank's payload, and this rank's payload padded to the longest."""
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(payload)], dtype=torch.int64)
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size, group=self._group)
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return list(map(int, sizes)), padded

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's payload on every rank."""
        if self.world_size == 1:
            assert payload is not None
            return payload
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(payload or b"")], dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._group)
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if self.is_main and payload:
            buffer[:] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=self._group)
        return buffer.numpy().tobytes()

    def scatter(self, payloads: Iterable[bytearray] | None) -> bytearray | memoryview:
        """On each rank, the payload with its index. Rank 0 gives all payloads and sends each one
        before it takes the next, so a generator is never held in memory as a whole. Payloads must
        be writable, because torch shares their memory."""
        if self.world_size == 1:
            assert payloads is not None
            return next(iter(payloads))
        if not self.is_main:
            return self._receive()
        assert payloads is not None
        mine = bytearray()
        for rank, payload in enumerate(payloads):
            if rank == self.rank:
                mine = payload
            else:
                self._send(payload, rank)
        return mine

    def _send(self, payload: bytearray, rank: int) -> None:
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(payload)], dtype=torch.int64)
        dist.send(size, dst=rank, group=self._group)
        if payload:
            dist.send(torch.frombuffer(payload, dtype=torch.uint8), dst=rank, group=self._group)

    def _receive(self) -> memoryview:
        """The payload that rank 0 sends."""
        import torch
        import torch.distributed as dist

        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=0, group=self._group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        if len(payload):
            dist.recv(payload, src=0, group=self._group)
        return payload.numpy().data

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank."""
        return [json.loads(payload) for payload in self.all_gather(json.dumps(value).encode())]

    def broadcast_json(self, value: Any = None) -> Any:
        """Rank 0's JSON value on every rank."""
        return json.loads(self.broadcast(json.dumps(value).encode() if self.is_main else None))

    def barrier(self) -> None:
        """Returns when every rank has arrived."""
        self.all_gather(b"")


def encode(value: Any) -> bytearray:
    """Dataclasses, tuples and lists of numbers, texts and arrays, for another rank. An array whose
    bytes are all 0 costs its shape only."""
    import msgspec  # which one rank does without

    payload = bytearray()
    msgspec.msgpack.Encoder(enc_hook=_packed).encode_into(value, payload)
    return payload


def decode(kind: type[_Value], payload: bytes | bytearray | memoryview) -> _Value:
    """The value of this kind that `encode` packed. Its arrays cannot be written to."""
    import msgspec

    return msgspec.msgpack.Decoder(kind, dec_hook=_unpacked).decode(payload)


def _packed(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    values = array.tobytes()
    return array.dtype.str, array.shape, b"" if values.count(0) == len(values) else values


def _unpacked(_: type, packed: Any) -> np.ndarray:
    kind, shape, values = packed
    return np.frombuffer(values, kind).reshape(shape) if values else np.zeros(shape, kind)


def _unpadded(received: Sequence[Any], sizes: Sequence[int]) -> list[bytes]:
    return [tensor.numpy()[:size].tobytes() for tensor, size in zip(received, sizes, strict=True)]
