"""What became of every rollout that was generated, in rollouts and in tokens.

    generated = inserted + zero_variance + no_reward + stale + cancelled + lost + in flight

`generated` is counted by the collector, at the source; the other side by rank 0, where each rollout
ends. Both must agree at every step. In flight is what the collector holds and what has arrived but
was not trained on yet. Tokens are completion tokens of finished completions: those of a request
that was cut off are unknown to its client and count nowhere.
"""

from typing import NamedTuple

from grpo_replay.errors import LedgerError

CATEGORIES = ("inserted", "zero_variance", "no_reward", "stale", "cancelled", "lost")


class Amount(NamedTuple):
    rollouts: int = 0
    tokens: int = 0

    def plus(self, other: "Amount") -> "Amount":
        return Amount(self.rollouts + other.rollouts, self.tokens + other.tokens)

    def minus(self, other: "Amount") -> "Amount":
        return Amount(self.rollouts - other.rollouts, self.tokens - other.tokens)


class Ledger:
    """The balance of a run so far.

    A rollout that arrives is `queued` until it is settled as inserted (stored, or trained on if the
    run stores nothing), zero_variance, no_reward or stale. Cancelled and lost ones never arrive.
    """

    def __init__(self) -> None:
        self.generated = Amount()
        self.held = Amount()  # by the collector, as of the same report as `generated`
        self.queued = Amount()
        self.settled = dict.fromkeys(CATEGORIES, Amount())

    @property
    def in_flight(self) -> Amount:
        return self.queued.plus(self.held)

    def arrive(self, amount: Amount) -> None:
        self.queued = self.queued.plus(amount)

    def settle(self, category: str, amount: Amount) -> None:
        """Close the account of rollouts that had arrived."""
        self.queued = self.queued.minus(amount)
        self.settled[category] = self.settled[category].plus(amount)

    def write_off(self, category: str, amount: Amount) -> None:
        """Close the account of rollouts that will not arrive: cancelled or lost."""
        self.settled[category] = self.settled[category].plus(amount)

    def report(self, generated: Amount, held: Amount) -> None:
        """Take over the collector's count."""
        self.generated, self.held = generated, held

    @property
    def delivered(self) -> Amount:
        """What rank 0 knows of: queued or settled."""
        total = self.queued
        for amount in self.settled.values():
            total = total.plus(amount)
        return total

    def check(self, step: int) -> None:
        """Raises LedgerError if the two sides differ."""
        accounted = self.delivered.plus(self.held)
        if accounted != self.generated:
            parts = ", ".join(f"{name} {amount}" for name, amount in self.settled.items())
            raise LedgerError(
                f"step {step}: the collector generated {self.generated}, but {accounted} are "
                f"accounted for ({parts}, queued {self.queued}, held {self.held}): rollouts were "
                "lost or counted twice. This is a bug; the last checkpoint is intact"
            )

    def metrics(self) -> dict[str, int]:
        """The metrics `ledger/*`, cumulative over the run."""
        amounts = {"generated": self.generated, **self.settled, "in_flight": self.in_flight}
        return {
            f"ledger/{name}_{unit}": value
            for name, amount in amounts.items()
            for unit, value in amount._asdict().items()
        }
