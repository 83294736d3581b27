"""What is unhealthy about a buffer, in plain words, with what to do about it.

The limits are rules of thumb (docs/buffer.md, "Healthy ranges"); each warning shows its number.
"""

from collections.abc import Iterator, Mapping

from grpo_replay.inspection.summary import Inspection, plural

DOMINANT_PROMPT_SHARE = 0.10
SMALL_ESS_SHARE = 0.10
HIGH_CLIP_FRACTION = 0.10
RISING_CLIP_FACTOR = 2.0
NOTABLE_CLIP_FRACTION = 0.005
HIGH_KL_NATS = 0.1
ONE_SIDED_SHARE = 0.9
STARVED_SHARE = 0.9
FEW_SURVIVORS_SHARE = 0.1


def find_warnings(seen: Inspection) -> Iterator[str]:
    """One sentence per finding, most important first; none for a healthy buffer."""
    yield from _survivors(seen)
    if not seen.replays:
        return
    yield from _never_replayed(seen)
    yield from _capacity(seen)
    yield from _starved(seen)
    yield from _draw_law(seen)
    yield from _prompts(seen)
    yield from _one_sided(seen)
    yield from _clipping(seen)
    yield from _kl(seen)


def _never_replayed(seen: Inspection) -> Iterator[str]:
    warmup = seen.settings["warmup_steps"]
    has_run = bool(seen.trends) or any(p.name == "generated" for p in seen.populations)
    if has_run and seen.step > warmup + 1 and seen.replayed_rollouts == 0:
        yield (
            f"Nothing was ever replayed by step {seen.step}, though warm-up ended at step "
            f"{warmup}: the buffer was empty whenever it was drawn from, or tracking.log_rollouts "
            "is off."
        )


def _capacity(seen: Inspection) -> Iterator[str]:
    occupancy, max_age = seen.occupancy, seen.settings["max_age_steps"]
    capacity = occupancy.capacity_rollouts
    if max_age is None or capacity is None:
        return
    if (occupancy.evicted_by_capacity or 0) > 0 or occupancy.stored_rollouts >= capacity:
        oldest = max((row.age_steps for row in seen.staleness if row.stored), default=0)
        yield (
            f"The capacity of {capacity:,} rollouts binds: the oldest stored rollout is "
            f"{oldest} steps old, so max_age_steps {max_age} is not what limits age. "
            "Raise replay.capacity_rollouts."
        )


def _starved(seen: Inspection) -> Iterator[str]:
    """Fewer drawn than asked for, over the last quarter of the steps."""
    if seen.settings["composition"] != "fresh_anchored":
        return
    ratios = [value for _, value in seen.trends.get("replay/ratio", ())]
    recent = ratios[-max(1, len(ratios) // 4) :]
    asked = seen.settings["ratio"]
    if recent and seen.step > seen.settings["warmup_steps"] + 1:
        got = sum(recent) / len(recent)
        if 0 < got < STARVED_SHARE * asked:
            yield (
                f"Only {got:.2f} rollouts were replayed per fresh one, {asked:.2f} were asked "
                "for: the buffer holds too few. Raise replay.max_age_steps or lower replay.ratio."
            )


def _draw_law(seen: Inspection) -> Iterator[str]:
    law = seen.draw_law
    if law.units >= 20 and law.effective_sample_size < SMALL_ESS_SHARE * law.units:
        yield (
            f"The draw is narrow: its effective sample size is {law.effective_sample_size:.0f} of "
            f"{law.units:,} {plural(law.unit)}, so a few are replayed again and again. Lower "
            "replay.priority_exponent."
        )
    points = seen.trends.get("replay/ess", ())
    if len(points) >= 8:
        early = _mean(points[: len(points) // 4])
        late = _mean(points[-len(points) // 4 :])
        if late < early / 3:
            yield (
                f"The effective sample size of the draw fell from {early:.0f} to {late:.0f}: "
                "fewer groups have mixed rewards, or priorities have become uneven."
            )


def _prompts(seen: Inspection) -> Iterator[str]:
    for name in ("replayed", "stored"):
        for rows in (p for p in seen.populations if p.name == name and p.prompts >= 5):
            share = rows.largest_prompt_share
            if share > max(DOMINANT_PROMPT_SHARE, 3 / rows.prompts):
                yield (
                    f"One prompt dominates: {rows.largest_prompt!r} is {share:.0%} of the {name} "
                    f"rollouts, over {rows.prompts} prompts."
                )
                return


def _one_sided(seen: Inspection) -> Iterator[str]:
    for rows in (p for p in seen.populations if p.name == "replayed"):
        share = rows.correct_share
        if share is None or rows.rollouts < 50:
            continue
        if share > ONE_SIDED_SHARE or share < 1 - ONE_SIDED_SHARE:
            kind = "correct" if share > 0.5 else "incorrect"
            yield (
                f"{max(share, 1 - share):.0%} of what is replayed is {kind}: replay pushes in one "
                "direction. Rare outcomes have the largest |advantage|; a lower "
                "replay.priority_exponent evens this out."
            )


def _clipping(seen: Inspection) -> Iterator[str]:
    points = seen.trends.get("replay/clip_fraction", ())
    if len(points) >= 6:
        third = len(points) // 3
        early, late = _mean(points[:third]), _mean(points[-third:])
        if late > RISING_CLIP_FACTOR * early and late > NOTABLE_CLIP_FRACTION:
            yield (
                f"The clip fraction of replayed tokens is rising, from {early:.2%} to {late:.2%}: "
                "the policy moves away from what is stored faster than before. Lower "
                "replay.max_age_steps or optimizer.learning_rate."
            )
    old = {age: row for age, row in seen.by_age.items() if age > 0}
    if old:
        age, worst = max(old.items(), key=lambda item: item[1].clip_fraction)
        if worst.clip_fraction > HIGH_CLIP_FRACTION:
            yield (
                f"At age {age}, {worst.clip_fraction:.1%} of the replayed tokens are clipped and "
                "teach nothing. Lower replay.max_age_steps."
            )


def _kl(seen: Inspection) -> Iterator[str]:
    high = {a: r for a, r in seen.by_age.items() if a > 0 and r.approx_kl > HIGH_KL_NATS}
    if high:
        age = min(high)
        yield (
            f"From age {age} on, replayed tokens are {high[age].approx_kl:.2f} nats from the "
            "policy that sampled them: too far for importance ratios. Lower replay.max_age_steps."
        )


def _survivors(seen: Inspection) -> Iterator[str]:
    counts: Mapping[str, int] = {p.name: p.rollouts for p in seen.populations}
    if counts.get("generated", 0) >= 100:
        share = counts.get("kept", 0) / counts["generated"]
        if share < FEW_SURVIVORS_SHARE:
            yield (
                f"Only {share:.1%} of the generated rollouts are in groups with mixed rewards: "
                "most prompts are too hard or too easy for this model."
            )


def _mean(points: tuple[tuple[int, float], ...]) -> float:
    return sum(value for _, value in points) / len(points)
