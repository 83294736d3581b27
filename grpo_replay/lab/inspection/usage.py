"""How often and how recently rollouts were used, and how the next draw is distributed."""

import numpy as np

from grpo_replay.lab.inspection.buffer_summary import CountRow, DrawLaw, LastUse, RunUses
from grpo_replay.lab.inspection.rebuild import find_rows
from grpo_replay.lab.inspection.rollout_columns import DrawColumns, RolloutColumns
from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.drawing import query_spans
from grpo_replay.replay.priorities import draw_law


def count_values(values: np.ndarray) -> tuple[CountRow, ...]:
    """Number of rollouts per distinct value, in ascending order of the value."""
    unique, counts = np.unique(values, return_counts=True)
    return tuple(CountRow(int(value), int(n)) for value, n in zip(unique, counts, strict=True))


def uses_over_run(
    log: RolloutColumns, draws: DrawColumns, settings: ReplaySection
) -> RunUses | None:
    """Number of uses of every survivor in the log; None if there are no survivors.

    Each draw is a use. Training as fresh in the birth step is also a use; with the pool and FIFO
    this happens only during warm-up.
    """
    kept = log.take(log.kept)
    if not len(kept):
        return None
    rows = find_rows(kept.rollout_id, draws.rollout_id)
    uses = np.bincount(rows[rows >= 0], minlength=len(kept))
    all_train = not settings.replays or settings.composition == "fresh_anchored"
    uses += all_train | (kept.logged_step <= settings.warmup_steps)
    return RunUses(count_values(uses), float(uses.mean()))


def steps_since_last_use(
    log: RolloutColumns, draws: DrawColumns, settings: ReplaySection
) -> LastUse:
    """Training steps between consecutive uses of a rollout, over all draws (paper B).

    If all fresh rollouts are trained on (fresh-anchored, and during warm-up), the gap of a first
    draw is counted from the step that took the rollout: that of its birth, in asynchronous runs a
    later one. Otherwise a first draw is new.
    """
    order = np.lexsort((draws.step, draws.rollout_id))
    ids, steps, ages = draws.rollout_id[order], draws.step[order], draws.age[order]
    first = np.append(True, ids[1:] != ids[:-1])
    gaps = np.append(0, np.diff(steps))
    taken = steps - ages
    rows = find_rows(log.rollout_id, ids)
    taken[rows >= 0] = log.logged_step[rows[rows >= 0]]
    trained_when_taken = taken <= settings.warmup_steps
    if settings.composition == "fresh_anchored":
        trained_when_taken = np.ones_like(first)
    gaps = np.where(first, steps - taken, gaps)
    new = first & ~trained_when_taken
    return LastUse(int(new.sum()), count_values(gaps[~new]))


def next_draw_law(stored: RolloutColumns, settings: ReplaySection) -> DrawLaw:
    """Distribution of a draw made now from the stored rollouts.

    With `unused_first`, only rollouts that were never drawn are candidates, if there are any.
    """
    never_drawn = stored.times_used == 0
    if settings.unused_first and never_drawn.any():
        stored = stored.take(never_drawn)
    priority_U = stored.priority
    if settings.unit == "query" and len(stored):
        starts, sizes = query_spans(stored.group_id)
        priority_U = np.add.reduceat(priority_U, starts) / sizes
    law = draw_law(priority_U, settings.priority_exponent)
    return DrawLaw(
        unit=settings.unit,
        units=len(priority_U),
        effective_sample_size=law.effective_sample_size,
        entropy_nats=law.entropy,
        largest_probability=float(law.probability_N.max()) if len(priority_U) else 0.0,
    )
