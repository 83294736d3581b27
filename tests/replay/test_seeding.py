"""Random streams: one for each purpose and step, and the same in every version of the tool."""

import numpy as np

from grpo_replay.types import RequestKey, completion_seed, stream


def test_every_completion_has_a_seed_of_its_own():
    keys = [RequestKey(s, p, c) for s in range(6) for p in range(6) for c in range(6)]
    seeds = {completion_seed(run, key) for run in (42, 43) for key in keys}
    assert len(seeds) == 2 * 6**3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sum(seed > 2**62 for seed in seeds) > 100, "all 63 bits are used"


def test_seeds_are_those_of_earlier_runs():
    sequence = np.random.SeedSequence([42, 3, 1, 7])
    assert completion_seed(42, RequestKey(3, 1, 7)) == sequence.generate_state(1, np.uint64)[0] // 2
    expected = np.random.default_rng(np.random.SeedSequence([42, 3, 1])).random(4)
    assert stream(42, 3, 1).random(4).tolist() == expected.tolist()


def test_streams_differ_by_run_step_and_purpose():
    first = {stream(*path).random() for path in [(42, 1, 1), (42, 1, 2), (42, 2, 1), (43, 1, 1)]}
    assert len(first) == 4
