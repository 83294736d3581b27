"""Which rows go to which micro-batch of which process, by hand."""

import numpy as np
import pytest

from grpo_replay.integrations.accelerated import update_by_update
from grpo_replay.integrations.shares import shares_of, spread


def test_fresh_rows_alone_are_where_a_host_that_does_not_shuffle_has_them():
    rows = spread([7] * 16)
    assert rows == list(range(16))
    assert shares_of(rows, 2, range(2)) == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10, 11], [12, 13, 14, 15]],
    ]


def test_replayed_rows_are_spread_evenly_over_the_micro_batches():
    births = [9] * 8 + [6, 7, 8, 8]
    shares = shares_of(spread(births), 1, range(4))[0]
    assert shares == [[0, 8, 1], [2, 9, 3], [4, 10, 5], [6, 11, 7]]


def test_the_rows_of_micro_batches_differ_by_one_and_every_process_has_equally_many():
    assert shares_of(range(5), 2, range(2)) == [[[0, 1], [2]], [[3, -1], [4]]]
    assert shares_of(range(3), 1, range(2)) == [[[0, 1], [2]]]


def test_a_row_that_is_left_over_goes_to_the_next_update_first():
    # Two updates of two micro-batches: 0 and 1, 2 and 3.
    order = update_by_update(4, accumulated=2, done=0)
    assert order == [0, 2, 1, 3]
    assert shares_of(range(6), 1, order)[0] == [[0, 1], [2], [3, 4], [5]]
    assert shares_of(range(2), 1, order)[0] == [[0], [-1], [1], [-1]]
    assert shares_of([], 2, order) == [[[-1]] * 4] * 2


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_one_micro_batch(seed):
    rng = np.random.default_rng(seed)
    count, processes, micro_batches = rng.integers([0, 1, 1], [40, 5, 7])
    rows = spread(rng.integers(1, 4, count).tolist())
    shares = shares_of(rows, processes, update_by_update(micro_batches, 2, 1))
    flat = [row for process in shares for micro_batch in process for row in micro_batch]
    assert sorted(row for row in flat if row >= 0) == list(range(count))
    sizes = {tuple(len(micro_batch) for micro_batch in process) for process in shares}
    assert len(sizes) == 1 and min(*sizes) and len(*sizes) == micro_batches
    real = [sum(row >= 0 for process in shares for row in process[m]) for m in range(micro_batches)]
    assert max(real) - min(real) <= 1
