"""The first look: the run's own first step, and what it says about learning."""

import json
from dataclasses import replace

import pytest
from buffer_makers import make_rollout
from scipy import stats
from small_runs.trained import small_recipe
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.lab.dry_run.first_look import FirstLook, _smaller_recipe, first_look, judge
from grpo_replay.recipe import recipe_to_yaml
from grpo_replay.sampling.sampler_protocol import NoSampler, sampler_class
from grpo_replay.sampling.server.sampler import VllmServerSampler
from grpo_replay.types import Rollout


def test_a_look_at_all_prompts_of_a_step_is_the_first_step_of_the_run(ours_run):
    recipe, first, rows = ours_run.recipe, ours_run.metrics[0], ours_run.rollouts(1)
    look = first_look(recipe, recipe.sampling.prompts_per_step)
    assert (look.groups, look.rollouts) == (6, 24) == (6, len(rows))
    assert look.correct == sum(row["verdict"] == "correct" for row in rows) > 0
    assert look.completion_tokens == pytest.approx(first["completions/mean_length"])
    assert look.cut_off == pytest.approx(first["completions/clipped_ratio"])
    assert look.signal == round(6 * (1 - first["frac_reward_zero_std"])) > 0
    assert look.can_learn and f"{look.signal} of 6 groups have signal" in look.verdict
    names = ("completion_text", "verdict", "reward")
    prompt, *rest = look.example.values()
    assert tuple(rest) in {tuple(row[name] for name in names) for row in rows}
    assert prompt.endswith("=")
    assert look.example["verdict"] in {"correct", "incorrect", "unparsable"}
    assert look.measured["survival"] == first["fresh/rollouts"] / 24
    assert look.speed.generated > 0 and look.speed.trained > 0


ALWAYS_RIGHT = "def score(completion, answer):\n    return 1.0\n"


@pytest.mark.parametrize("right, word", [(0, "0 of 16 are correct"), (16, "16 of 16 are correct")])
def test_a_base_without_success_or_without_failure_cannot_learn(processes, tmp_path, right, word):
    file = tmp_path / "rewards.py"
    file.write_text(ALWAYS_RIGHT)
    sections = {"reward": {"function": f"{file}:score"}} if right else {}
    longest = 16 if right else 2
    look = first_look(small_recipe(sampling={"max_completion_length": longest}, **sections), 4)
    assert (look.correct, look.signal, look.can_learn) == (right, 0, False)
    assert word in look.verdict and ("are cut off" in look.verdict) == (longest == 2)
    assert look.speed is None and "survival" not in look.measured


def test_a_run_that_repeats_a_journal_is_looked_at_with_a_sampler():
    collection = {"replay_journal": "another/run"}
    sampling = {"backend": "vllm_server", "servers": {"urls": ["http://a:1"]}}
    recipe = small_recipe(
        run={"mode": "async"}, sampling=sampling | {"collection": collection},
        loss={"behavior_logprobs": "sampler"}, eval={"benchmarks": []},
    )  # fmt: skip
    assert sampler_class(recipe.sampling) is NoSampler
    assert sampler_class(_smaller_recipe(recipe, 4).sampling) is VllmServerSampler


def judged(rollouts: list[Rollout]) -> FirstLook:
    return judge(rollouts, small_recipe().sampling)


def test_no_success_is_no_proof_of_none():
    """Ten groups of eight without a success: every group counts as one observation, and of twelve
    with both answers the upper bound is (1 + t) / 12."""
    rollouts = [
        replace(make_rollout(i, group_id=i // 8), group_correct=0, reward=0.0) for i in range(80)
    ]
    low, high = judged(rollouts).success_interval
    assert low == 0 and high == pytest.approx((1 + stats.t.ppf(0.975, 11)) / 12)
    assert judged(rollouts[:8]).success_interval is None


def looked_at(correct: list[int], signal: float, reward: float | None = 0.0) -> FirstLook:
    """Groups of four with so many correct rollouts each, and rewards that differ by `signal`."""
    return judged([
        replace(
            make_rollout(4 * group + i, group_id=group), group_correct=right, reward=reward,
            group_reward_std=signal, verdict="incorrect" if reward is not None else "crash",
        )
        for group, right in enumerate(correct)
        for i in range(4)
    ])  # fmt: skip


def test_rewards_that_did_not_come_are_no_failures_of_the_model():
    look = looked_at([0, 0], signal=0.0, reward=None)
    assert look.can_learn is False
    assert "all 8 rewards are missing (verdict: crash)" in look.verdict
    assert "0 of 8 are correct" in looked_at([0, 0], signal=0.0).verdict


def test_completions_without_an_answer_are_a_share_of_the_look():
    ended = make_rollout(0)
    silent = judged([ended, *(replace(ended, verdict="unparsable") for _ in range(3))])
    assert silent.unparsable == 0.75 and judged([ended]).unparsable == 0
    assert "75% have no answer" in silent.verdict


def look_of(tmp_path, *options: str):
    file = tmp_path / "small.yaml"
    file.write_text(recipe_to_yaml(small_recipe()))
    return CliRunner().invoke(app, ["train", str(file), "--dry-run", "--sample", "4", *options])


@pytest.mark.slow
def test_the_dry_run_plans_with_what_the_look_saw(processes, tmp_path):
    done = look_of(tmp_path, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["first_look"]["groups"] == 4 and report["fits"] is True
    tokens = report["first_look"]["completion_tokens"]
    assert f"{tokens:,.0f} tokens a completion (measured" in str(report["assumptions"])
    example = report["first_look"]["example"]
    assert set(example) == {"prompt", "completion", "verdict", "reward"}
    shown = look_of(tmp_path)
    assert json.dumps(example["completion"]) in shown.output
    assert "it can learn" in shown.output


def test_a_run_that_would_not_start_is_not_looked_at(tmp_path):
    done = look_of(tmp_path, "--json", "--set", "sampling.stop_tokens=[nowhere]")
    assert done.exit_code == 2
    report = json.loads(done.stdout)
    assert report["first_look"] is None
    assert "the first look: the run would not start" in report["unchecked"]
