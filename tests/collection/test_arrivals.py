"""The queue on rank 0: which groups a step takes, duplicates, and where a resume goes on."""

import msgspec
import pytest
from collected import group, row

from grpo_replay.collection.arrivals import Amount, Arrivals, Arrived
from grpo_replay.collection.messages import Drop, Restart
from grpo_replay.errors import JournalError


def arrivals(per_step: int | None = 2, newest_first=False, max_age=None) -> Arrivals:
    return Arrivals(per_step, newest_first, max_age)


def filled(queue: Arrivals, count: int, version: int = 0) -> Arrivals:
    for index in range(count):
        queue.apply_record(group((0, index), version))
    return queue


def numbers(groups) -> list[int]:
    return [each.number for each in groups]


def test_the_oldest_finished_groups_come_first():
    queue = filled(arrivals(), 5)
    assert numbers(queue.select(1).taken) == [0, 1]
    assert numbers(queue.select(2).taken) == [2, 3]
    assert numbers(queue.young(9)) == [4]


def test_the_use_once_queue_takes_the_newest_first_and_nothing_twice():
    queue = filled(arrivals(newest_first=True), 5)
    assert numbers(queue.select(1).taken) == [3, 4]
    queue.apply_record(group((0, 5)))
    assert numbers(queue.select(2).taken) == [2, 5]
    assert numbers(queue.young(9)) == [0, 1]


def test_buffer_only_takes_whatever_is_there_and_never_waits():
    queue = filled(arrivals(per_step=None), 3)
    assert numbers(queue.select(1).taken) == [0, 1, 2]
    assert numbers(queue.select(2).taken) == []


def test_the_age_limit_is_on_the_oldest_version_of_a_group():
    """Age = step - (version + 1): at step 5, version 1 is 3 steps old and version 2 is 2."""
    queue = arrivals(max_age=2)
    queue.apply_record(group((0, 0), version=1))
    queue.apply_record(group((0, 1), version=2))
    queue.apply_record(group((0, 2), version=4))
    assert len(queue.young(5)) == 2
    selection = queue.select(5)
    assert numbers(selection.stale) == [0]
    assert numbers(selection.taken) == [1, 2]
    assert queue.stale_groups == 1


def test_a_group_is_born_with_its_oldest_token_whichever_row_has_it():
    """Version v samples step v + 1. The second row begins with version 2 and ends with 6."""
    young = group((0, 0), version=6)
    rows = (young.rows[0], row(spans=[(2, 0, 1), (6, 1, 3)]))
    for order in (rows, rows[::-1]):
        assert Arrived(0, msgspec.structs.replace(young, rows=order)).birth_step == 3


def test_too_few_groups_in_a_journal_are_named():
    with pytest.raises(JournalError, match="step 3 takes 2 groups, 1 have arrived"):
        filled(arrivals(), 1).select(3)


def test_a_second_copy_of_a_group_is_recognised():
    queue = filled(arrivals(), 2)
    queue.apply_record(Drop(0, 2, "lost", 0, 0))
    for index in range(3):
        with pytest.raises(JournalError, match=rf"\(0, {index}\) is journalled twice"):
            queue.apply_record(group((0, index)))


@pytest.mark.parametrize("reason", ["cancelled", "lost"])
def test_a_group_that_will_not_come_is_counted_and_written_off_once(reason):
    """Two of its members had finished, with 30 tokens."""
    queue = filled(arrivals(), 1)
    queue.apply_record(Drop(0, 1, reason, 2, 30))
    assert (queue.records, queue.arrived_groups, queue.dropped_groups) == (2, 1, 1)
    closed = {name: each for name, each in queue.ledger.closed.items() if each != Amount()}
    assert closed == {reason: Amount(2, 30)}
    queue.ledger.report(Amount(2 + 2, 6 + 30), held=Amount())
    queue.ledger.check(1)


def test_a_resume_goes_on_with_the_outstanding_places_not_the_smallest():
    """trl#7274: one dropped group made a resume train everything after it again."""
    queue = arrivals()
    for place in [(0, 0), (0, 2), (0, 3), (1, 1)]:
        queue.apply_record(group(place))
    queue.apply_record(Drop(0, 1, "cancelled", 0, 0))
    assert queue.outstanding(epoch_length=5) == ([(0, 4), (1, 0)], 7)
    assert arrivals().outstanding(5) == ([], 0)


def test_what_a_dead_collector_held_is_lost_and_balances():
    queue = filled(arrivals(), 1)
    queue.apply_record(Restart(3, 40))
    queue.ledger.report(Amount(2 + 3, 6 + 40), Amount())
    queue.ledger.check(1)
    assert queue.ledger.closed["lost"] == Amount(3, 40)
