"""Columns that grow at the tail and shrink at the head, in amortised constant time per row."""

from collections.abc import Mapping

import numpy as np

_SMALLEST_ALLOCATION = 1024


class ColumnQueue:
    """Aligned numpy columns in insertion order, oldest row first.

    Rows are appended at the tail and dropped at the head; reallocation leaves as much room as
    there are rows, so each row is copied once on average and memory stays within about twice
    what is stored (plus the old copy while it moves).
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
        """Add rows at the tail; every column must be there, with the same length."""
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
        """Remove the rows where `removed_N` is True; returns how many."""
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
        # An object column would keep what was removed alive.
        for name, dtype in self._dtypes.items():
            if dtype.kind == "O":
                self._arrays[name][start:end] = None

    def _allocate(self, rows: int) -> dict[str, np.ndarray]:
        return {name: np.empty(rows, dtype=dtype) for name, dtype in self._dtypes.items()}
