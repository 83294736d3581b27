"""Messages between ranks over a CPU process group: values that torch pickles. DeepSpeed exchanges
gradients and parameters. A single process needs no process group.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

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

    def all_gather(self, value: _Value) -> list[_Value]:
        """Returns every rank's value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def gather(self, value: _Value) -> list[_Value] | None:
        """Returns every rank's value, in rank order, on rank 0; None on the other ranks."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, gathered, dst=0, group=self._group)
        return gathered

    def broadcast(self, value: _Value) -> _Value:
        """Returns rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def scatter(self, values: Iterable[_Value] | None) -> _Value:
        """Send each rank the value with its index. Rank 0 passes all values, and sends each before
        it takes the next, so a generator is never held in memory as a whole."""
        if self.world_size == 1:
            assert values is not None
            return next(iter(values))
        import torch.distributed as dist

        received: list[Any] = [None]
        if not self.is_main:
            dist.recv_object_list(received, src=0, group=self._group)
            return received[0]
        assert values is not None
        for rank, value in enumerate(values):
            if rank == self.rank:
                received = [value]
            else:
                dist.send_object_list([value], dst=rank, group=self._group)
        return received[0]

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        self.all_gather(None)
