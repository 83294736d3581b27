"""What ranks computed finds its row again, whatever the packing. Worked by hand; no engine."""

import numpy as np
import pytest

from grpo_replay.engine.microbatches import (
    MicroBatch,
    RankStatistics,
    join_statistics,
    join_values,
    rank_statistics,
    update_result,
    values_of_rows,
)
from grpo_replay.replay.loss import ROW_STATISTICS


def micro_batch(rows: list[int], lengths: list[int]) -> MicroBatch:
    """Of these rows of the mini-batch, of three tokens in six positions, with as many completion
    tokens each; the rest is zeros."""
    row_of_C = np.repeat(np.arange(len(rows)), lengths)
    zeros_C, zeros_R = np.zeros(sum(lengths)), np.zeros(len(rows))
    return MicroBatch(
        np.array(rows), np.full(len(rows), 6), np.zeros((len(rows), 6)), None, None, 3 * len(rows),
        zeros_C, zeros_C, row_of_C, zeros_C, zeros_C, zeros_R, zeros_R, np.zeros(0),
    )  # fmt: skip


def values(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def test_tokens_of_two_ranks_come_back_in_the_order_of_the_mini_batch():
    first = [
        *values_of_rows(micro_batch([3, 0], [1, 2]), values(30, 1, 2)),
        *values_of_rows(micro_batch([2], [0]), values()),
    ]
    second = [
        *values_of_rows(micro_batch([1], [3]), values(11, 12, 13)),
        *values_of_rows(micro_batch([-1], [1]), values(99)),  # padding
    ]
    rows = join_values([first, second], 4)
    assert [row.tolist() for row in rows] == [[1, 2], [11, 12, 13], [], [30]]
    assert {row.dtype for row in rows} == {np.dtype(np.float32)}
    assert join_values(None, 0) == [] and join_statistics(None, 0) is None  # off rank 0


def test_the_share_of_padding_is_of_the_positions_of_all_ranks():
    """2 of 8 positions on one rank and 1 of 2 on the other: 3 of 10, not the mean of the shares."""
    nothing = np.zeros(0, np.int64), np.zeros((0, len(ROW_STATISTICS)))
    ranks = [RankStatistics(6, 8, *nothing), RankStatistics(1, 2, *nothing)]
    assert join_statistics(ranks, 0)[1] == pytest.approx(0.3)


def test_statistics_of_two_ranks_come_back_in_the_order_of_the_mini_batch():
    def table(*rows: float) -> np.ndarray:
        return np.array([[row] * len(ROW_STATISTICS) for row in rows])

    first = rank_statistics([micro_batch([2, 0], [1, 1])], [table(2.5, 0.5)])
    second = rank_statistics(
        [micro_batch([-1], [1]), micro_batch([1], [1])], [table(-9.0), table(1.5)]
    )
    found, padding = join_statistics([first, second], 3)
    np.testing.assert_array_equal(found, table(0.5, 1.5, 2.5))
    assert padding == 0.5  # four rows, padding row included, have three tokens in six positions


def test_sums_over_tokens_become_means():
    """Two tokens with log-ratios 0 and 2: mean 1, variance 1; and a row without tokens."""
    sums = {
        "loss": 0.25, "tokens": 2, "clipped": 1, "log_ratio": 2, "log_ratio_squared": 4,
        "approx_kl": 3, "ratio": 1 + np.exp(2), "ratio_squared": 1 + np.exp(4),
        "log_ratio_max": 2, "entropy": 1, "reference_kl": 0.5,
    }  # fmt: skip
    nothing = dict.fromkeys(ROW_STATISTICS, 0.0) | {"log_ratio_max": -np.inf}
    assert sums.keys() == nothing.keys()
    table = np.array([[row[name] for name in ROW_STATISTICS] for row in (sums, nothing)])
    result = update_result(table, 0.25, 1.5, 3, 1e-3)
    assert (result.loss, result.grad_norm, result.reference_kl) == (0.25, 1.5, 0.25)
    assert (result.micro_batches, result.padding_share, result.learning_rate) == (3, 0.25, 1e-3)
    whole, empty = result.outcomes
    assert (whole.tokens, whole.clip_fraction, whole.entropy) == (2, 0.5, 0.5)
    assert (whole.log_ratio_mean, whole.log_ratio_var, whole.approx_kl) == (1.0, 1.0, 1.5)
    assert whole.ratio_mean == pytest.approx((1 + np.exp(2)) / 2)
    assert whole.ratio_squared_mean == pytest.approx((1 + np.exp(4)) / 2)
    assert whole.ratio_max == pytest.approx(np.exp(2))
    assert (empty.tokens, empty.ratio_mean, empty.ratio_max, empty.log_ratio_var) == (0, 0, 0, 0)
    assert update_result(table[1:], 0.0, 0.0, 1, 1e-3).reference_kl == 0.0
