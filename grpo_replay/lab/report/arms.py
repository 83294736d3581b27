"""Arms of an experiment: runs that differ only in their seed, and the seeds that are missing."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_replay.errors import UsageError, did_you_mean
from grpo_replay.lab.report.finished_run import FinishedRun
from grpo_replay.recipe import REPLAY_PRESETS, Recipe
from grpo_replay.storage.recipe_history import flatten

NOT_AN_AXIS = ("name", "run.seed", "tracking.run_name", "tracking.project")
"""Keys in which the runs of one arm may differ."""

OF_THE_MACHINE = (
    "batch.max_tokens_per_microbatch", "batch.packing", "checkpoint.", "engine.", "eval.",
    "model.attn_implementation", "model.gradient_checkpointing", "reward.memory_limit_mib",
    "reward.time_limit_seconds", "reward.workers", "run.stop_grace_seconds",
    "sampling.collection.replay_journal", "sampling.logprob_gap_limit",
    "sampling.max_batch_rollouts", "sampling.servers.", "sampling.sync_bucket_mib",
    "sampling.vllm.", "tracking.",
)  # fmt: skip
"""Keys, and sections of keys, that change where and how a run is computed, not its method. How it
is evaluated is compared by `evaluation.comparison`."""


@dataclass(frozen=True, slots=True, eq=False)
class Arm:
    """The finished runs of one arm by seed, and why others are missing.

    The seed of an evaluation file is None.
    """

    name: str
    runs: dict[int | None, FinishedRun]
    missing: dict[int, str] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        return [seed for seed in self.runs if seed is not None]

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the first run; None for evaluation files and without a finished run."""
        return next((run.recipe for run in self.runs.values()), None)


def add_run(runs: dict[int | None, FinishedRun], run: FinishedRun, arm: str) -> None:
    """Add a run to those of its arm. Raises UsageError if its seed is there already, or if its
    method is another one."""
    if run.seed in runs:
        raise UsageError(
            f"arm {arm} has seed {run.seed} twice: {runs[run.seed].path} and {run.path}; give one "
            "of them"
        )
    if runs:
        _refuse_other_method(next(iter(runs.values())), run, arm)
    runs[run.seed] = run


def _refuse_other_method(first: FinishedRun, other: FinishedRun, arm: str) -> None:
    a, b = _method_of(first), _method_of(other)
    noted = {note.partition(":")[0] for run in (first, other) for note in run.recipe_changes}
    keys = [key for key in differing_keys([a, b]) if key not in noted]
    if keys:
        found = ", ".join(
            f"{key} is {a.get(key)!r} in {first.path} and {b.get(key)!r} in {other.path}"
            for key in keys
        )
        raise UsageError(
            f"arm {arm} has runs of several recipes: {found}; the runs of an arm must have the "
            "same recipe except for the seed and for settings of the machine: give the two to "
            "separate reports"
        )


def _method_of(run: FinishedRun) -> dict[str, Any]:
    """The recipe without what is `OF_THE_MACHINE`, and the steps that the run trained."""
    settings = settings_of(run.recipe)
    method = {
        key: _without_folders(each)
        for key, each in settings.items()
        if not key.startswith(OF_THE_MACHINE)
    }
    return {**method, "run.steps": len(run.log)}


def _without_folders(value: Any) -> Any:
    """Absolute paths (`recipe.paths` makes them) as names: each machine has its own folders."""
    if isinstance(value, str) and os.path.isabs(value):
        return os.path.basename(value)
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    return value


def group_by_recipe(runs: Sequence[FinishedRun]) -> list[Arm]:
    """Runs outside a sweep as arms: one for each recipe, apart from `NOT_AN_AXIS`."""
    groups: dict[tuple[tuple[str, str], ...], list[FinishedRun]] = {}
    for run in runs:
        key = tuple((name, repr(value)) for name, value in settings_of(run.recipe).items())
        groups.setdefault(key, []).append(run)
    names = name_recipes([members[0].recipe for members in groups.values()])
    arms = []
    for name, members in zip(names, groups.values(), strict=True):
        seeds: dict[int | None, FinishedRun] = {}
        for run in members:
            add_run(seeds, run, name)
        arms.append(Arm(name, dict(sorted(seeds.items(), key=lambda item: item[0] or 0))))
    return arms


def evaluation_arms(files: Sequence[FinishedRun]) -> list[Arm]:
    """One arm for each evaluation file, named by its stem, or its path if stems are equal."""
    stems = [run.path.stem for run in files]
    unique = len(set(stems)) == len(stems)
    return [Arm(run.path.stem if unique else os.fspath(run.path), {None: run}) for run in files]


def settings_of(recipe: Recipe | None) -> dict[str, Any]:
    """The recipe as dotted keys, without `NOT_AN_AXIS`; empty for an evaluation file."""
    if recipe is None:
        return {}
    flat = flatten(recipe.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if key not in NOT_AN_AXIS}


def name_recipes(recipes: Sequence[Recipe | None]) -> list[str]:
    """A name for each recipe: its preset, and in which keys it differs from others with it."""
    names = []
    for recipe in recipes:
        preset = _preset(recipe)
        peers = [settings_of(other) for other in recipes if _preset(other) == preset]
        own = settings_of(recipe)
        words = [f"{key.split('.')[-1]}={own[key]}" for key in differing_keys(peers)]
        names.append(" ".join([preset, *words]))
    return names


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all recipes."""
    keys: Iterable[str] = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def chosen_keys(arms: Sequence[Arm]) -> list[str]:
    """The keys in which arms differ by choice: not those that only follow from the preset."""
    recipes = [arm.recipe for arm in arms if arm.recipe is not None]
    keys = differing_keys([settings_of(recipe) for recipe in recipes])
    return [key for key in keys if not all(_follows(recipe, key) for recipe in recipes)]


def _follows(recipe: Recipe, key: str) -> bool:
    """True if the value of a replay key is that of the preset, or if it has no effect."""
    section, _, name = key.partition(".")
    if section != "replay" or name == "preset":
        return False
    preset = REPLAY_PRESETS[recipe.replay.preset]
    if name in preset:
        return bool(getattr(recipe.replay, name) == preset[name])
    return not recipe.replay.replays


def _preset(recipe: Recipe | None) -> str:
    return recipe.replay.preset if recipe else ""


def choose_baseline(arms: Sequence[Arm], wanted: str | None) -> str:
    """The name of the baseline: `wanted`; else the arm `grpo`, the only arm that does not replay,
    or the first. Raises UsageError if there is no such arm, or it has no finished run."""
    names = [arm.name for arm in arms]
    if wanted is None:
        finished = [arm for arm in arms if arm.runs]
        plain = [arm.name for arm in finished if arm.recipe and not arm.recipe.replays]
        if "grpo" in (arm.name for arm in finished):
            return "grpo"
        return plain[0] if len(plain) == 1 else finished[0].name
    if wanted not in names:
        hint = did_you_mean(wanted, names)
        raise UsageError(f"--baseline {wanted}: no such arm{hint}; arms: {', '.join(names)}")
    if not next(arm for arm in arms if arm.name == wanted).runs:
        raise UsageError(f"--baseline {wanted}: this arm has no finished run yet")
    return wanted


def short_path(path: Path) -> str:
    """A path relative to the working folder if it is inside."""
    try:
        return os.fspath(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return os.fspath(path)
