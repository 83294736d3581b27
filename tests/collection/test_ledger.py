"""The balance of generated rollouts, in rollouts and tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_replay.collection.arrivals import CATEGORIES, Amount, Ledger
from grpo_replay.errors import LedgerError


def test_a_balance_by_hand():
    """Five rollouts of 10 tokens: two trained on, one stale, one cancelled, one still held."""
    ledger = Ledger()
    ledger.arrive(Amount(3, 30))
    ledger.close("inserted", Amount(2, 20))
    ledger.close("stale", Amount(1, 10))
    ledger.write_off("cancelled", Amount(1, 10))
    ledger.report(Amount(5, 50), held=Amount(1, 10))
    ledger.check(step=4)
    assert ledger.metrics() == {
        "ledger/generated_rollouts": 5, "ledger/generated_tokens": 50,
        "ledger/inserted_rollouts": 2, "ledger/inserted_tokens": 20,
        "ledger/zero_variance_rollouts": 0, "ledger/zero_variance_tokens": 0,
        "ledger/no_reward_rollouts": 0, "ledger/no_reward_tokens": 0,
        "ledger/stale_rollouts": 1, "ledger/stale_tokens": 10,
        "ledger/cancelled_rollouts": 1, "ledger/cancelled_tokens": 10,
        "ledger/lost_rollouts": 0, "ledger/lost_tokens": 0,
        "ledger/in_flight_rollouts": 1, "ledger/in_flight_tokens": 10,
    }  # fmt: skip


@pytest.mark.parametrize("generated", [Amount(2, 21), Amount(3, 20)])
def test_a_rollout_or_a_token_that_is_missing_stops_the_run(generated):
    ledger = Ledger()
    ledger.arrive(Amount(2, 20))
    ledger.report(generated, held=Amount())
    with pytest.raises(LedgerError, match=r"step 7: the collector generated .*queued"):
        ledger.check(step=7)


@given(st.lists(st.tuples(st.sampled_from(["arrive", *CATEGORIES]), st.integers(1, 50))))
def test_any_history_balances(events):
    """Whatever arrives and however it ends, nothing is counted twice or forgotten."""
    ledger, generated, queued = Ledger(), Amount(), 0
    for event, tokens in events:
        amount = Amount(1, tokens)
        generated = generated.plus(amount)
        if event == "arrive":
            ledger.arrive(amount)
            queued += 1
        elif event in ("cancelled", "lost"):
            ledger.write_off(event, amount)
        else:
            ledger.arrive(amount)
            ledger.close(event, amount)
        ledger.report(generated, Amount())
        ledger.check(step=1)
    assert ledger.in_flight.rollouts == queued
