"""Runs the buffer's part of a training step and composes the batch (paper A, Algorithm 1, steps 2
to 5; paper B, section 4). `buffer_step` runs all of it, in one order for every composition:

| composition    | trains on                                   | drawn rollouts, or queries   |
|----------------|---------------------------------------------|------------------------------|
| fresh_anchored | all fresh, and a draw from the buffer       | round(r·B'), round(r·B'/G)   |
| pool           | one draw from fresh and buffer together     | round((1+r)·B'), …/G         |
| buffer_only    | a draw from the buffer, fresh ones included | round(r·R), round(r·R/G)     |

B' = fresh survivors, R = rollouts generated in the step (in an asynchronous run
prompts_per_step · G, whatever arrived), G = group size, r = `replay.ratio`. Queries are drawn when
`replay.unit` is query. `round` is Python's: halves round to even (r = 0.5 and B' = 113 draw 56).
Without replacement, a draw of more units than can be drawn takes all of them.

The unit of paper B is the optimizer update: a buffer_only step of several updates makes a draw of
its share of the units for each, and its `ComposedBatch.ages` are in updates; limits and `Draw.ages`
are in steps always. Groups enter before the first.

Without replay (`enabled` false or r = 0) and during the warm-up, a step trains on all fresh
survivors. A step with B' = 0 trains on nothing, except with buffer_only, which still draws. With
`replay.shadow` every step makes its draw and trains on the fresh survivors alone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.batch import even_sizes
from grpo_replay.replay.entry_store import EntryStore
from grpo_replay.replay.insertion import entries_of
from grpo_replay.types import ComposedBatch, Draw, Entry, Rollout


def buffer_step(
    buffer: EntryStore,
    fresh: Sequence[Entry | Rollout],
    step: int,
    generated: int,
    rng: np.random.Generator,
    draws: int = 1,
) -> ComposedBatch:
    """Run the buffer's part of a step, and return the batch that the step trains on.

    `fresh` are rollouts or entries; the other arguments are those of `compose_batch`. The order:
    evict entries that are too old; draw; store the fresh survivors, with their uses in this step,
    because a pool draw also draws fresh ones (buffer_only stores them before the draw); evict
    entries that would be too old at the next step. Optimizer updates change nothing that is stored,
    so a trainer makes them afterwards.
    """
    settings, entries = buffer.settings, entries_of(fresh)
    stores_first = settings.composition == "buffer_only"
    buffer.evict(step)
    if settings.replays and stores_first:
        buffer.insert(entries, step)
    batch = compose_batch(buffer, entries, step, generated, rng, draws)
    if settings.replays and not stores_first:
        uses = Counter(entry.rollout_id for entry in batch.draw.entries)
        times_used_N = np.array([uses[entry.rollout_id] for entry in entries], dtype=np.int32)
        buffer.insert(entries, step, times_used_N)
    if settings.replays:
        buffer.evict_ahead(step)
    if settings.shadow:
        return replace(
            _fresh_and_drawn(entries, Draw.empty()), draw=batch.draw, trains_on_draw=False
        )
    return batch


def compose_batch(
    buffer: EntryStore,
    fresh: Sequence[Entry],
    step: int,
    generated: int,
    rng: np.random.Generator,
    draws: int = 1,
) -> ComposedBatch:
    """Compose the batch of `step` from its fresh survivors (ordered by group) and a draw.

    `generated` is R, the rollouts of dropped groups included. `draws` is the number of draws of a
    buffer_only step (`Recipe.draws_per_step`). Only steps that draw use `rng`.
    """
    settings = buffer.settings
    if not settings.replays or step <= settings.warmup_steps:
        return _fresh_and_drawn(fresh, Draw.empty())
    if settings.composition == "buffer_only":
        count = draw_count(settings, buffer.group_size, generated)
        draw = _draw_for_updates(buffer, count, step, rng, draws)
        replayed = np.ones(len(draw.entries), bool)
        return ComposedBatch(draw.entries, replayed, draw.in_updates(draw.ages), draw)
    count = draw_count(settings, buffer.group_size, len(fresh))
    births = buffer.column("birth_step")
    if len(births) and births.max() >= step:
        raise ValueError(
            f"before the draw of step {step} the buffer holds a rollout born at step "
            f"{births.max()}: a rollout must not be replayed in its birth step"
        )
    if settings.composition == "pool":
        draw = buffer.draw(count, step, rng, fresh=fresh)
        return ComposedBatch(draw.entries, draw.ages > 0, draw.ages, draw)
    return _fresh_and_drawn(fresh, buffer.draw(count, step, rng))


def _draw_for_updates(
    buffer: EntryStore, count: int, step: int, rng: np.random.Generator, updates: int
) -> Draw:
    """Draw for each optimizer update of the step by itself, `count` units in all and sizes that
    differ by at most one, and join the draws; `update_N` says to which update an entry belongs."""
    if updates == 1:
        return buffer.draw(count, step, rng)
    draws = [buffer.draw(size, step, rng) for size in even_sizes(count, updates)]
    return replace(
        draws[0],
        entries=tuple(entry for draw in draws for entry in draw.entries),
        probabilities=np.concatenate([draw.probabilities for draw in draws]),
        ages=np.concatenate([draw.ages for draw in draws]),
        updates=updates,
        update_N=np.repeat(np.arange(updates), [len(draw.entries) for draw in draws]),
    )


def draw_count(settings: ReplaySection, group_size: int, base: int) -> int:
    """Counts the units (rollouts or queries) to draw. `base` is B', or R for buffer_only."""
    per_rollout = 1 + settings.ratio if settings.composition == "pool" else settings.ratio
    rollouts = per_rollout * base
    return round(rollouts / group_size) if settings.unit == "query" else round(rollouts)


def _fresh_and_drawn(fresh: Sequence[Entry], draw: Draw) -> ComposedBatch:
    """Composes a batch of all fresh entries (age 0), then those of a draw from the buffer."""
    fresh_ages = np.zeros(len(fresh), dtype=np.int64)
    return ComposedBatch(
        entries=(*fresh, *draw.entries),
        replayed=np.repeat([False, True], [len(fresh), len(draw.entries)]),
        ages=np.concatenate([fresh_ages, draw.ages]),
        draw=draw,
    )


def relative_compute(y: float, mu: float) -> float:
    """Return a step's compute relative to one without a buffer (paper B): γ = (1 + W/T)/(1 + μ).

    With inference workers W and trainers T in balance, W/T = μ/y. The deterministic form
    (B + μR)/(B + μB) is equal. If groups are dropped, pass y and μ of survivors (B/B' and μR/B'):
    γ without a buffer is then 1.
    """
    return (1 + mu / y) / (1 + mu)
