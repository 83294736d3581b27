"""A run that is resumed with another reward says so: stored rollouts have advantages of the old."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import Recipe, RewardSection
from grpo_replay.replay.snapshot import count_stored

SETTINGS = ("correct", "incorrect", "overlong_buffer_tokens", "overlong_weight")
"""Keys of the reward section that decide rewards, besides the functions and their weights."""


def reward_facts(section: RewardSection, sources: Mapping[str, str]) -> dict[str, Any]:
    """What decides a reward, as JSON: the settings, and for each function its name (of
    `folder/file.py:function` without the folder), its weight and the SHA-256 of its source file in
    `sources` (null if built in). What that file imports is not in it."""
    functions = [
        {
            "name": Path(each.function).name,
            "weight": each.weight,
            "sha256": sources.get(each.function),
        }
        for each in section.functions
    ]
    return {"functions": functions, **{name: getattr(section, name) for name in SETTINGS}}


def notices_of_change(
    recipe: Recipe, checkpoint: Path, before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    """Notices if the reward of a run that is resumed from `checkpoint` is `now` another.

    Raises RecipeError if its buffer would be restored with advantages of the one `before`, unless
    `checkpoint.allow_other_reward` is set.
    """
    changes = _changes(before, now)
    if not changes:
        return []
    described = f"the reward is another than before step {_step(checkpoint)}: {'; '.join(changes)}"
    stored = 0
    if recipe.replays and recipe.checkpoint.restore_buffer:
        stored = count_stored(checkpoint / "buffer.parquet")
    if stored == 0:
        return [described]
    if recipe.checkpoint.allow_other_reward:
        return [
            f"{described}. The {stored:,} stored rollouts keep the advantages of the old reward "
            "until they leave the buffer (checkpoint.allow_other_reward)"
        ]
    raise RecipeError(
        f"{described}. The buffer has {stored:,} rollouts with advantages of the old reward. "
        "Empty it with --set checkpoint.restore_buffer=false, keep them with --set "
        "checkpoint.allow_other_reward=true, or restore the old reward"
    )


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_")) + 1


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changes = [
        f"reward.{name} {now[name]!r}, was {before[name]!r}"
        for name in SETTINGS
        if now[name] != before[name]
    ]
    old, new = before["functions"], now["functions"]
    if [_named(each) for each in old] != [_named(each) for each in new]:
        return [f"{_listed(new)}, was {_listed(old)}", *changes]
    edited = [
        f"the source file of {b['name']} has changed"
        for a, b in zip(old, new, strict=True)
        if a["sha256"] != b["sha256"]
    ]
    return edited + changes


def _named(function: Mapping[str, Any]) -> tuple[str, float]:
    return function["name"], function["weight"]


def _listed(functions: list[dict[str, Any]]) -> str:
    return " + ".join(f"{each['weight']:g} · {each['name']}" for each in functions)
