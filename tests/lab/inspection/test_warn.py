"""Each warning appears when its cause is present, and only then."""

from dataclasses import replace

import pytest

from grpo_replay.lab.inspection.buffer_summary import AgeOutcome, DrawLaw, Inspection, find_warnings
from grpo_replay.lab.inspection.compute import summarise
from grpo_replay.lab.inspection.source import open_source


@pytest.fixture(scope="module")
def healthy(runs) -> Inspection:
    """An inspection without warnings. Each test changes one value."""
    seen = summarise(open_source(runs["ours"]))
    populations = tuple(replace(p, largest_prompt_share=0.05) for p in seen.populations)
    seen = replace(seen, populations=populations)
    assert list(find_warnings(seen)) == []
    return seen


def only_warning(seen: Inspection) -> str:
    (warning,) = find_warnings(seen)
    return warning


def with_population(seen: Inspection, name: str, **changes) -> Inspection:
    populations = tuple(replace(p, **changes) if p.name == name else p for p in seen.populations)
    return replace(seen, populations=populations)


def test_nothing_replayed_after_warm_up(healthy):
    seen = replace(healthy, replayed_rollouts=0)
    assert "Nothing was replayed up to step 24, although warm-up ended at step 3" in only_warning(
        seen
    )
    assert list(find_warnings(replace(seen, step=4))) == []  # the first step that can replay


def test_capacity_reached(healthy):
    occupancy = replace(healthy.occupancy, evicted_by_capacity=7, capacity_rollouts=92)
    full = only_warning(replace(healthy, occupancy=occupancy))
    assert "is full, at its capacity of 92 rollouts" in full
    young = tuple(row for row in healthy.staleness if row.age_steps < 3)
    seen = replace(healthy, occupancy=occupancy, staleness=young)
    assert "rollout is 2 steps old, of max_age_steps 5. Raise" in only_warning(seen)
    once = replace(occupancy, capacity_rollouts=93)
    assert list(find_warnings(replace(healthy, occupancy=once))) == []
    queries = replace(healthy, occupancy=once, settings={**healthy.settings, "unit": "query"})
    assert "is full" in only_warning(queries)  # not room for one more
    fifo = replace(
        healthy, occupancy=occupancy, settings={**healthy.settings, "max_age_steps": None}
    )
    assert list(find_warnings(fifo)) == []  # a FIFO buffer is meant to be full


def test_a_draw_smaller_than_requested(healthy):
    trends = {**healthy.trends, "replay/ratio": tuple((step, 0.2) for step in range(1, 25))}
    assert (
        "Only 0.20 rollouts were replayed per fresh rollout; replay.ratio requests 0.50"
        in only_warning(replace(healthy, trends=trends))
    )


def test_the_ratios_of_the_warm_up_are_not_those_of_a_starved_buffer(healthy):
    points = tuple((step, 0.5 if step > 20 else 0.0) for step in range(1, 25))
    settings = {**healthy.settings, "warmup_steps": 20}
    trends = {**healthy.trends, "replay/ratio": points}
    assert list(find_warnings(replace(healthy, settings=settings, trends=trends))) == []


def test_a_concentrated_draw(healthy):
    law = DrawLaw("rollout", 92, 4.0, 1.4, 0.3)
    assert "effective sample size is 4 of 92 rollouts" in only_warning(
        replace(healthy, draw_law=law)
    )


def test_a_concentrated_draw_of_queries(healthy):
    law = DrawLaw("query", 92, 4.0, 1.4, 0.3)
    assert "effective sample size is 4 of 92 queries, so" in only_warning(
        replace(healthy, draw_law=law)
    )


def test_a_high_clip_fraction_at_one_age(healthy):
    by_age = {**healthy.by_age, 5: AgeOutcome(30, 600, 0.25, 0.0, 0.02, 0.02)}
    assert "At age 5, 25.0% of the replayed tokens are clipped" in only_warning(
        replace(healthy, by_age=by_age)
    )


def test_a_high_kl_from_some_age_on(healthy):
    by_age = {
        **healthy.by_age,
        4: AgeOutcome(30, 600, 0.01, 0.0, 0.3, 0.15),
        5: AgeOutcome(30, 600, 0.01, 0.0, 0.5, 0.25),
    }
    assert (
        "From age 4, the KL divergence from the policy that sampled the rollouts is 0.15 nats"
        in only_warning(replace(healthy, by_age=by_age))
    )


def test_few_survivors(healthy):
    seen = with_population(healthy, "kept", rollouts=40)
    assert "Only 5.2% of the generated rollouts" in only_warning(seen)


def test_a_run_without_replay_has_no_replay_warnings(runs):
    assert summarise(open_source(runs["grpo"])).warnings == ()
