"""Each warning appears when its cause is present, and only then."""

from dataclasses import replace

import pytest

from grpo_replay.lab.inspection.buffer_summary import AgeOutcome, Inspection, find_warnings
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


def with_settings(seen: Inspection, **changes) -> dict:
    return {**seen.settings, **changes}


def ratios(share: float, after: int = 0) -> tuple:
    return tuple((step, share if step > after else 0.0) for step in range(1, 25))


def with_outcome(seen: Inspection, **ages: AgeOutcome) -> dict:
    return {**seen.by_age, **{int(age[3:]): outcome for age, outcome in ages.items()}}


def few_kept(seen: Inspection) -> tuple:
    return tuple(replace(p, rollouts=40) if p.name == "kept" else p for p in seen.populations)


CAUSES = {
    "too few to draw from": (
        lambda seen: {"trends": {**seen.trends, "replay/ratio": ratios(0.2)}}, ["0.20", "0.50"],
    ),
    "clipping at an age": (
        lambda seen: {
            "by_age": with_outcome(seen, age5=AgeOutcome(30, 600, 0.25, 0.0, 0.02, 0.02, 0.9))
        },
        ["age 5", "25.0%"],
    ),
    "few survivors": (lambda seen: {"populations": few_kept(seen)}, ["5.2%"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_has_one_warning_with_its_numbers(healthy, name):
    changes, numbers = CAUSES[name]
    (warning,) = find_warnings(replace(healthy, **changes(healthy)))
    assert all(number in warning for number in numbers)


def test_a_run_that_kept_nothing_has_no_other_age_limit_to_try(healthy):
    nothing = tuple(replace(p, rollouts=0) if p.name == "kept" else p for p in healthy.populations)
    seen = replace(healthy, populations=nothing, replayed_rollouts=0)
    (warning,) = find_warnings(seen)
    assert "Only 0.0%" in warning and "reward function" in warning


def test_a_warm_up_is_no_starved_buffer(healthy):
    assert list(find_warnings(replace(healthy, replayed_rollouts=0, step=4))) == []
    settings = with_settings(healthy, warmup_steps=20)
    trends = {**healthy.trends, "replay/ratio": ratios(0.5, after=20)}
    assert list(find_warnings(replace(healthy, settings=settings, trends=trends))) == []


def test_a_capacity_that_was_reached_is_warned_of_unless_the_buffer_is_meant_to_be_full(healthy):
    def warned(**settings) -> list[str]:
        return list(find_warnings(replace(healthy, settings=with_settings(healthy, **settings))))

    (warning,) = warned(capacity_rollouts=92)
    assert "92 rollouts" in warning and "max_age_steps 5" in warning
    assert warned(capacity_rollouts=93) == []
    assert len(warned(capacity_rollouts=93, unit="query")) == 1  # not room for one more
    assert warned(capacity_rollouts=92, max_age_steps=None) == []


def test_a_run_without_replay_has_no_replay_warnings(runs):
    assert summarise(open_source(runs["grpo"])).warnings == ()
