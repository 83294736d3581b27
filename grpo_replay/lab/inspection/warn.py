"""Warnings about an unhealthy buffer, each with the measured value and a remedy.

The thresholds are rules of thumb (docs/buffer.md, "Healthy ranges").
"""

from collections.abc import Iterator, Mapping

from grpo_replay.lab.inspection.buffer_summary import Inspection, plural

DOMINANT_PROMPT_SHARE = 0.10
SMALL_ESS_SHARE = 0.10
HIGH_CLIP_FRACTION = 0.10
RISING_CLIP_FACTOR = 2.0
NOTABLE_CLIP_FRACTION = 0.005
HIGH_KL_NATS = 0.1
ONE_SIDED_SHARE = 0.9
STARVED_SHARE = 0.9
FEW_SURVIVORS_SHARE = 0.1


def find_warnings(inspection: Inspection) -> Iterator[str]:
    """One warning per finding, most important first; nothing for a healthy buffer."""
    yield from _missing_rewards(inspection)
    yield from _survivors(inspection)
    if not inspection.replays:
        return
    yield from _never_replayed(inspection)
    yield from _capacity(inspection)
    yield from _starved(inspection)
    yield from _draw_law(inspection)
    yield from _prompts(inspection)
    yield from _one_sided(inspection)
    yield from _clipping(inspection)
    yield from _kl(inspection)


def _never_replayed(inspection: Inspection) -> Iterator[str]:
    warmup = inspection.settings["warmup_steps"]
    has_run = bool(inspection.trends) or any(p.name == "generated" for p in inspection.populations)
    if has_run and inspection.step > warmup + 1 and inspection.replayed_rollouts == 0:
        yield (
            f"Nothing was replayed up to step {inspection.step}, although warm-up ended at step "
            f"{warmup}: the buffer was empty at every draw, or tracking.log_rollouts is off."
        )


def _capacity(inspection: Inspection) -> Iterator[str]:
    occupancy, max_age = inspection.occupancy, inspection.settings["max_age_steps"]
    capacity = occupancy.capacity_rollouts
    if max_age is None or capacity is None:
        return
    if (occupancy.evicted_by_capacity or 0) > 0 or occupancy.stored_rollouts >= capacity:
        oldest = max((row.age_steps for row in inspection.staleness if row.stored), default=0)
        yield (
            f"The buffer reached its capacity of {capacity:,} rollouts: the oldest stored rollout "
            f"is {oldest} steps old, so the capacity limits age instead of max_age_steps "
            f"{max_age}. Raise replay.capacity_rollouts."
        )


def _starved(inspection: Inspection) -> Iterator[str]:
    """Fewer rollouts drawn than requested, over the last quarter of the steps after the warm-up."""
    if inspection.settings["composition"] != "fresh_anchored":
        return
    warmup, points = inspection.settings["warmup_steps"], inspection.trends.get("replay/ratio", ())
    ratios = [value for step, value in points if step > warmup]
    recent = ratios[-max(1, len(ratios) // 4) :]
    requested = inspection.settings["ratio"]
    if recent and inspection.step > warmup + 1:
        actual = sum(recent) / len(recent)
        if 0 < actual < STARVED_SHARE * requested:
            yield (
                f"Only {actual:.2f} rollouts were replayed per fresh rollout; replay.ratio "
                f"requests {requested:.2f}. The buffer has too few: raise replay.max_age_steps or "
                "lower replay.ratio."
            )


def _draw_law(inspection: Inspection) -> Iterator[str]:
    law = inspection.draw_law
    if law.units >= 20 and law.effective_sample_size < SMALL_ESS_SHARE * law.units:
        yield (
            "The draw is concentrated: its effective sample size is "
            f"{law.effective_sample_size:.0f} of {law.units:,} {plural(law.unit)}, so the same "
            "few are replayed repeatedly. Lower replay.priority_exponent."
        )
    points = inspection.trends.get("replay/ess", ())
    if len(points) >= 8:
        early = _mean(points[: len(points) // 4])
        late = _mean(points[-len(points) // 4 :])
        if late < early / 3:
            yield (
                f"The effective sample size of the draw fell from {early:.0f} to {late:.0f}: "
                "fewer groups have mixed rewards, or priorities have become more uneven."
            )


def _prompts(inspection: Inspection) -> Iterator[str]:
    for name in ("replayed", "stored"):
        for rows in (p for p in inspection.populations if p.name == name and p.prompts >= 5):
            share = rows.largest_prompt_share
            if share > max(DOMINANT_PROMPT_SHARE, 3 / rows.prompts):
                yield (
                    f"One prompt dominates: {rows.largest_prompt!r} has {share:.0%} of the {name} "
                    f"rollouts, out of {rows.prompts} prompts."
                )
                return


def _one_sided(inspection: Inspection) -> Iterator[str]:
    for rows in (p for p in inspection.populations if p.name == "replayed"):
        share = rows.correct_share
        if share is None or rows.rollouts < 50:
            continue
        if share > ONE_SIDED_SHARE or share < 1 - ONE_SIDED_SHARE:
            kind = "correct" if share > 0.5 else "incorrect"
            yield (
                f"{max(share, 1 - share):.0%} of the replayed rollouts are {kind}, so replay "
                "pushes the policy in one direction. Rare outcomes have the largest |advantage|: "
                "lower replay.priority_exponent to balance them."
            )


def _clipping(inspection: Inspection) -> Iterator[str]:
    points = inspection.trends.get("replay/clip_fraction", ())
    if len(points) >= 6:
        third = len(points) // 3
        early, late = _mean(points[:third]), _mean(points[-third:])
        if late > RISING_CLIP_FACTOR * early and late > NOTABLE_CLIP_FRACTION:
            yield (
                f"The clip fraction of replayed tokens is rising, from {early:.2%} to {late:.2%}: "
                "the policy moves away from the stored rollouts faster than before. Lower "
                "replay.max_age_steps or optimizer.learning_rate."
            )
    old = {age: row for age, row in inspection.by_age.items() if age > 0}
    if old:
        age, worst = max(old.items(), key=lambda item: item[1].clip_fraction)
        if worst.clip_fraction > HIGH_CLIP_FRACTION:
            yield (
                f"At age {age}, {worst.clip_fraction:.1%} of the replayed tokens are clipped and "
                "have no gradient. Lower replay.max_age_steps."
            )


def _kl(inspection: Inspection) -> Iterator[str]:
    high = [a for a, row in inspection.by_age.items() if a > 0 and row.approx_kl > HIGH_KL_NATS]
    if high:
        age = min(high)
        yield (
            f"From age {age}, the KL divergence from the policy that sampled the rollouts is "
            f"{inspection.by_age[age].approx_kl:.2f} nats per token, too much for importance "
            "ratios. Lower replay.max_age_steps."
        )


def _survivors(inspection: Inspection) -> Iterator[str]:
    counts: Mapping[str, int] = {p.name: p.rollouts for p in inspection.populations}
    if counts.get("generated", 0) >= 100:
        share = counts.get("kept", 0) / counts["generated"]
        if share < FEW_SURVIVORS_SHARE:
            yield (
                f"Only {share:.1%} of the generated rollouts are in groups with mixed rewards: "
                "most prompts are too hard or too easy for this model."
            )


def _missing_rewards(inspection: Inspection) -> Iterator[str]:
    missing = inspection.missing_rewards
    if missing:
        generated = next(p.rollouts for p in inspection.populations if p.name == "generated")
        yield (
            f"{missing:,} of {generated:,} generated rollouts ({missing / generated:.1%}) have no "
            "reward: the reward function failed on them, or returned None. They were left out of "
            'their groups. See which: --where "reward is null"; log/ has the first error.'
        )


def _mean(points: tuple[tuple[int, float], ...]) -> float:
    return sum(value for _, value in points) / len(points)
