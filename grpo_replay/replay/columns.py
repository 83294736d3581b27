"""Numpy columns with rows appended at the tail and dropped at the head."""

from collections.abc import Mapping

import numpy as np

_SMALLEST_ALLOCATION = 1024


class ColumnQueue:
    """Aligned numpy columns in insertion order, oldest row first.

    Appending and dropping a row take amortised constant time: reallocation doubles the space, so
    that each row is copied once on average. Memory is at most about twice that of the stored rows,
    plus the old copy during a reallocation.
    """

    def __init__(self, dtypes: Mapping[str, np.dtype | type]) -> None:
        self._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self._arrays = self._allocate(_SMALLEST_ALLOCATION)
        self._head = 0
        self._tail = 0

    def __len__(self) -> int:
        return self._tail - self._head

    def __getitem__(self, name: str) -> np.ndarray:
        """A view of one column, oldest first. Valid until the next append or removal."""
        return self._arrays[name][self._head : self._tail]

    def append(self, columns: Mapping[str, np.ndarray]) -> None:
        """Add rows at the tail. `columns` has every column, all of the same length."""
        (count,) = {len(columns[name]) for name in self._dtypes}
        if self._tail + count > len(next(iter(self._arrays.values()))):
            self._reallocate(2 * (len(self) + count))
        for name in self._dtypes:
            self._arrays[name][self._tail : self._tail + count] = columns[name]
        self._tail += count

    def drop_oldest(self, count: int) -> None:
        """Remove `count` rows at the head."""
        self._release(self._head, self._head + count)
        self._head += count

    def remove(self, removed_N: np.ndarray) -> int:
        """Remove the rows where `removed_N` is True. Returns their number."""
        count = int(np.count_nonzero(removed_N))
        if count == 0:
            return 0
        if removed_N[:count].all():
            self.drop_oldest(count)
            return count
        end = self._tail - count
        for name in self._dtypes:
            self._arrays[name][self._head : end] = self[name][~removed_N]
        self._release(end, self._tail)
        self._tail = end
        return count

    def _reallocate(self, rows: int) -> None:
        arrays = self._allocate(max(rows, _SMALLEST_ALLOCATION))
        count = len(self)
        for name in self._dtypes:
            arrays[name][:count] = self[name]
        self._arrays, self._head, self._tail = arrays, 0, count

    def _release(self, start: int, end: int) -> None:
        # References in an object column would keep removed objects alive.
        for name, dtype in self._dtypes.items():
            if dtype.kind == "O":
                self._arrays[name][start:end] = None

    def _allocate(self, rows: int) -> dict[str, np.ndarray]:
        return {name: np.empty(rows, dtype=dtype) for name, dtype in self._dtypes.items()}
