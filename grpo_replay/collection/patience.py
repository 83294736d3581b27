"""How long rank 0 waits: no wait is endless, and each ends with a message that names its object.

A completion may take as long as it needs while its server generates (the collector watches that),
and a verdict has a time limit of its own. A wait ends when reports show no request running and no
completion in grading, when no completion finishes although the collector took every server down and
sent its requests again several times, when one group after the other is lost, or when the collector
sends no report.
"""

import time

from grpo_replay.collection.messages import Drop, Group, Report
from grpo_replay.errors import SamplerError
from grpo_replay.recipe import Recipe

PATIENCE = 4
"""`request_timeout_seconds` without a finished completion before a run gives up."""

SILENCE_SECONDS = 60.0
"""Longest time without a report of a collector, which sends one each second. On a busy machine it
may be late by several."""


class Patience:
    """Watches the reports of a collector."""

    def __init__(self, recipe: Recipe) -> None:
        self._settings = recipe.sampling.servers
        self._lost_allowed = max(3, recipe.sampling.prompts_per_step)
        self._lost_in_a_row = 0
        self._generated = 0
        self.expect_collector()

    def expect_collector(self) -> None:
        """A collector is starting, for which it has a time limit of its own."""
        self._heard = False
        self.begin()

    def begin(self) -> None:
        """A wait begins."""
        self._ran = self._progressed = self._reported = time.monotonic()

    def note(self, report: Report) -> None:
        """Process a report."""
        if not self._heard:
            self._heard = True
            self.begin()
        self._reported = time.monotonic()
        if report.running:
            self._ran = self._reported
        if report.grading or report.generated_rollouts != self._generated:
            self._generated = report.generated_rollouts
            self._ran = self._progressed = self._reported

    def note_delivery(self, body: Group | Drop) -> None:
        """Process a group or a drop. Raises SamplerError if one group after the other is lost."""
        lost = isinstance(body, Drop) and body.reason == "lost"
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost else 0
        if self._lost_in_a_row > self._lost_allowed:
            raise SamplerError(
                f"{self._lost_in_a_row} groups in a row were lost: requests fail on every server "
                f"more often than sampling.servers.max_retries {self._settings.max_retries}; see "
                "the collector's log in log/, and the servers'"
            )

    def refuse_endless(self, what: str, report: Report) -> None:
        """Raises SamplerError if the wait for `what` is not worth going on."""
        if not self._heard:
            return
        limit = self._settings.request_timeout_seconds
        silence = max(limit, SILENCE_SECONDS)
        if time.monotonic() - self._reported > silence:
            reason = f"the collector sent no report for {silence:g} s"
        elif self._reported - self._ran > limit:
            reason = f"no request was running for {limit:g} s"
        elif self._reported - self._progressed > PATIENCE * limit:
            reason = f"no completion finished for {PATIENCE * limit:g} s"
        else:
            return
        raise SamplerError(
            f"waited for {what}: {reason} (sampling.servers.request_timeout_seconds {limit:g}); "
            f"servers that are down: {report.down or 'none'}; running {report.running}, waiting "
            f"{report.waiting}. Resume with --resume when they are back"
        )
