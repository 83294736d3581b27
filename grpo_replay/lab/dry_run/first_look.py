"""Takes a first look before training: runs the first step with a few groups, and discards it.

Opening, sampling, grading and updating are the trainer's own, so a look at all prompts of a step
sees exactly what the run's first step sees.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.evaluation.statistics import accuracy_interval
from grpo_replay.lab.dry_run.estimates import Speed
from grpo_replay.lab.dry_run.rows import Row, Section
from grpo_replay.recipe import ModelSection, Recipe, SamplingSection
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.completion_text import decoded
from grpo_replay.training.reward_watch import advice_on_cut_off
from grpo_replay.types import Rollout

OFTEN_CUT = 0.2
"""Share of completions cut off at the limit that a first look warns about."""


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What a few sampled and graded groups show. `signal` counts the groups whose rewards differ,
    from which GRPO learns; `can_learn` is whether there is one, `verdict` a sentence about it.

    `success` is the share of correct rollouts, `success_interval` its 95 % interval over groups
    (`accuracy_interval`), None for a single group. `unparsable` is the share of completions without
    an answer that the verifier can read: `boxed` wants a box. `survival` is the share of rollouts
    that are kept. `example` has the prompt, completion, verdict and reward of one rollout; `speed`
    is None if nothing was trained on.
    """

    groups: int
    rollouts: int
    correct: int
    success: float
    success_interval: tuple[float, float] | None
    signal: int
    completion_tokens: float
    prompt_tokens: float
    cut_off: float
    unparsable: float
    can_learn: bool
    verdict: str
    survival: float
    example: dict[str, Any] | None = None
    speed: Speed | None = None

    @property
    def measured(self) -> dict[str, float]:
        """Returns the fields of `Expected` that were measured. Survival is left out if nothing
        survived: a few groups without survivors do not measure their share."""
        lengths = {
            "completion_tokens": self.completion_tokens, "prompt_tokens": self.prompt_tokens,
        }  # fmt: skip
        return lengths | ({"survival": self.survival} if self.survival else {})


def look_section(look: FirstLook | None) -> Section:
    """Returns the rows of a first look; none if no look was taken."""
    if look is None:
        return Section("first_look", "")
    return Section("first_look", "First look", [
        Row("groups", "groups of the first step", look.groups),
        Row("signal", "of these with signal", look.signal),
        Row("rollouts", "rollouts", look.rollouts),
        Row("correct", "of these correct", look.correct),
        Row("success", "share correct", look.success),
        Row("success_interval", "its 95 % interval", look.success_interval),
        Row("completion_tokens", "tokens of a completion", look.completion_tokens),
        Row("prompt_tokens", "tokens of a prompt", look.prompt_tokens),
        Row("cut_off", "share cut off at the limit", look.cut_off),
        Row("unparsable", "share without an answer", look.unparsable),
        Row("can_learn", "", look.can_learn),
        Row("verdict", "", look.verdict),
        Row("example", "", look.example),
    ])  # fmt: skip


def first_look(recipe: Recipe, groups: int) -> FirstLook:
    """Sample `groups` groups, train on them once in a temporary folder, and report what was seen.

    The measured speed includes work that only a first step does: later steps are usually faster.
    Needs as much memory as the run, in one process. Raises what a run raises.
    """
    share = groups / recipe.sampling.prompts_per_step
    rollouts, metrics = _throwaway_step(_smaller_recipe(recipe, groups))
    look = judge(rollouts, recipe.sampling)
    example = _example(recipe.model, rollouts[0])
    return replace(look, example=example, speed=_speed(metrics, share))


def _example(model: ModelSection, rollout: Rollout) -> dict[str, Any]:
    """Returns a rollout as text; `reward` is None if the reward function gave none."""
    from grpo_replay.engine.models import load_tokenizer

    prompt = decoded(load_tokenizer(model), rollout.prompt_token_ids.tolist())
    return {
        "prompt": prompt,
        "completion": rollout.completion_text,
        "verdict": rollout.verdict,
        "reward": rollout.reward,
    }


def _smaller_recipe(recipe: Recipe, groups: int) -> Recipe:
    """Returns the recipe, synchronous, with `groups` prompts, no evaluation, tracker or refills."""
    collection = recipe.sampling.collection.model_copy(update={"replay_journal": None})
    changes: dict[str, dict[str, Any]] = {
        "sampling": {"prompts_per_step": groups, "max_refills": 0, "collection": collection},
        "eval": {"benchmarks": []},
        "tracking": {"report_to": []},
        "run": {"mode": "sync", "sync_every_steps": 1},
    }
    sections = {
        name: getattr(recipe, name).model_copy(update=values) for name, values in changes.items()
    }
    return recipe.model_copy(update=sections)


def _throwaway_step(recipe: Recipe) -> tuple[Sequence[Rollout], Mapping[str, Any]]:
    """Opens the run in a temporary folder, trains its first step, and returns the rollouts and
    metrics of that step. Nothing stays on disk."""
    from grpo_replay.distributed.environment import prepare_rank, rank_environment
    from grpo_replay.engine.processes import initialize_processes
    from grpo_replay.storage.run_directory import RunDirectory
    from grpo_replay.terminal.quiet import quiet_libraries
    from grpo_replay.training.opening import RunOpener
    from grpo_replay.training.trainer import Trainer

    prepare_rank(rank_environment())
    with ExitStack() as stack:
        stack.enter_context(quiet_libraries())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scorer = stack.enter_context(RewardScorer.open(recipe.reward))
        comm, device = initialize_processes(recipe)
        run_dir = RunDirectory(folder / "first-look")
        opener = RunOpener(recipe, comm, device, run_dir, stack, scorer)
        opened = opener.open()
        trainer = Trainer(opened.parts, opened.state, opened.source)
        metrics = trainer.train_step()
        assert metrics is not None  # only a request to stop skips a step
        return trainer.generated, metrics


def _speed(metrics: Mapping[str, Any], share: float) -> Speed | None:
    """Returns the speed in a step that sampled `share` of the run's prompts per step; None if
    nothing was trained on. The seconds of neither kind are scaled up to a whole step."""
    generation, training = metrics["cost/generation_seconds"], metrics["cost/training_seconds"]
    if not (generation and training and metrics["cost/trained_tokens"]):
        return None
    return Speed(
        metrics["cost/generated_tokens"] / generation,
        metrics["cost/trained_tokens"] / training,
        (metrics["step_time"] - generation - training) / share,
    )


def judge(rollouts: Sequence[Rollout], sampling: SamplingSection) -> FirstLook:
    """Summarizes sampled rollouts by group, with a sentence on whether GRPO can learn from them.

    The sentence also names the share without a readable answer, and, if more than `OFTEN_CUT` are
    cut off at the length limit, what to do about it.
    """
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    rates = np.array([group[0].group_correct / len(group) for group in groups.values()])
    correct = sum(group[0].group_correct for group in groups.values())
    mixed = any(0 < group[0].group_correct < _count_rewarded(group) for group in groups.values())
    signal = sum(any(r.group_reward_std for r in group) for group in groups.values())
    cut_off = float(np.mean([r.finish_reason == "length" for r in rollouts]))
    verdict = _verdict(rollouts, correct, len(groups), signal, mixed)
    unparsable = float(np.mean([r.verdict == "unparsable" for r in rollouts]))
    if unparsable:
        verdict += f"; {unparsable:.0%} have no answer that the verifier reads (unparsable)"
    if cut_off > OFTEN_CUT:
        verdict += f"; {cut_off:.0%} are cut off: {advice_on_cut_off(sampling)}"
    return FirstLook(
        groups=len(groups),
        rollouts=len(rollouts),
        correct=correct,
        success=correct / len(rollouts),
        success_interval=accuracy_interval([rates]),
        signal=signal,
        completion_tokens=float(np.mean([len(r.completion_token_ids) for r in rollouts])),
        prompt_tokens=float(np.mean([len(r.prompt_token_ids) for r in rollouts])),
        cut_off=cut_off,
        unparsable=unparsable,
        can_learn=signal > 0,
        verdict=verdict,
        survival=float(np.mean([rollout.kept for rollout in rollouts])),
    )


def _count_rewarded(rollouts: Sequence[Rollout]) -> int:
    return sum(rollout.reward is not None for rollout in rollouts)


def _verdict(
    rollouts: Sequence[Rollout], correct: int, groups: int, signal: int, mixed: bool
) -> str:
    """Returns a sentence: can the run learn, and if not, what to do?

    `correct` counts rollouts, `signal` the groups whose rewards differ, `mixed` is whether a group
    has both right and wrong rollouts. Rewards can differ without that, by a length penalty say.
    """
    count = len(rollouts)
    if signal and mixed:
        return f"{signal} of {groups} groups have signal: it can learn"
    if not signal and not _count_rewarded(rollouts):
        verdicts = ", ".join(sorted({rollout.verdict for rollout in rollouts}))
        return (
            f"all {count} rewards are missing (verdict: {verdicts}): nothing to learn from; fix "
            "the reward function"
        )
    text = f"{correct} of {count} are correct, and no group has both right and wrong rollouts: "
    if signal:
        return text + (
            f"in {signal} of {groups} groups the rewards differ by something else than "
            "correctness, and it can learn only that"
        )
    return text + (
        "nothing to learn from; choose problems that it solves now and then, or look at more "
        "groups; if the completion shown is right, fix the reward function or the answers"
    )
