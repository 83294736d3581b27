"""Replay in shadow beside verl, by whole runs of verl on a CPU: training is verl's own bit for bit,
the probe has the figures of the present policy, resumed is never killed. Slow; .ci/check_verl."""

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="needs an environment with verl: .ci/check_verl")

from verl_runs import OURS, PLAIN, VerlRun, assert_equal_tensors, logprobs_of

from grpo_replay.lab.verification.verify import verify_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
OF_REPLAY = ("fresh/", "replay/", "shadow/", "buffer/")
SHADOW = (*OURS, "+trainer.v1.replay.shadow=True", "+trainer.v1.replay.probe_every_steps=3")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SAVED = ("trainer.save_freq=2", f"{ACTOR}.optim.lr=1e-3")  # a rate at which ratios are clipped
LOW, HIGH, DUAL = 0.2, 0.28, 3.0


@pytest.fixture(scope="module")
def in_shadow(tmp_path_factory):
    """Four steps, a probe in the third, checkpoints after the second and the fourth."""
    return VerlRun(tmp_path_factory.mktemp("shadow"), *SHADOW, *SAVED).ended()


def compare_probe(run, step, ranks=1, limit=32):
    """The outcomes of the probe of a step, computed again from the weights before its update."""
    model = run.policy(step - 1, ranks)
    rollouts = {r["rollout_id"]: r for s in range(1, step) for r in run.rows("rollouts", s)}
    draws = run.rows("draws", step)
    scored = [draw for draw in draws if draw["tokens"] is not None]
    assert len(scored) == min(limit, len(draws)) > 20
    clipped = 0.0
    for draw in scored:
        rollout = rollouts[draw["rollout_id"]]
        with torch.no_grad():
            gap = logprobs_of(model, rollout).numpy() - np.array(rollout["behavior_logprobs"])
        ratio, advantage = np.exp(gap), rollout["advantage"]
        outside = ratio > 1 + HIGH if advantage > 0 else (ratio < 1 - LOW) | (ratio > DUAL)
        assert draw["tokens"] == len(gap)
        assert draw["log_ratio_mean"] == pytest.approx(gap.mean(), abs=2e-5)
        assert draw["ratio_max"] == pytest.approx(ratio.max(), rel=1e-4)
        assert draw["clip_fraction"] == pytest.approx(outside.mean(), abs=1e-6)
        clipped += outside.mean()
    assert clipped > 0 and {draw["age_steps"] for draw in scored} == {1, 2}


def test_training_is_verl_s_own_bit_for_bit(tmp_path, in_shadow):
    plain = VerlRun(tmp_path, *SAVED, module=PLAIN).ended()
    for step, logged in in_shadow.verl_metrics().items():
        own = {name: value for name, value in logged.items() if not name.startswith(OF_REPLAY)}
        assert own == plain.verl_metrics()[step] and len(logged) > len(own) > 60
    assert_equal_tensors(plain, in_shadow, step=4)


def test_a_probe_has_the_figures_of_the_policy_before_the_update(in_shadow):
    compare_probe(in_shadow, step=3)
    for step in (1, 2, 4):
        assert all(draw["tokens"] is None for draw in in_shadow.rows("draws", step))
    assert len(in_shadow.rows("draws", 4)) > 20
    assert in_shadow.verl_metrics()[3]["replay/ratio_max"] > 1
    assert "replay/ratio_max" not in in_shadow.verl_metrics()[4]
    assert verify_run(in_shadow.output).passed


def test_a_probe_on_two_ranks_with_padding(tmp_path):
    words = (
        f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
        "+trainer.v1.replay.probe_rollouts=30", "trainer.total_training_steps=3",
    )  # fmt: skip
    run = VerlRun(tmp_path, *SHADOW, *SAVED, *words, ranks=2).ended()
    compare_probe(run, 3, ranks=2, limit=30)  # of 16 on each rank, in micro-batches of 8
    assert verify_run(run.output).passed


def test_a_killed_and_resumed_run_in_shadow_is_the_one_never_killed(tmp_path, in_shadow):
    killed = VerlRun(tmp_path, *SHADOW, *SAVED)
    killed.wait_for_steps(2)
    killed.kill()
    assert not (killed.output / "global_step_4").exists(), "killed too late"
    resumed = VerlRun(tmp_path, *SHADOW, *SAVED).ended()
    assert sorted(resumed.verl_metrics()) == [3, 4], "it began again"
    assert resumed.metrics() == in_shadow.metrics()
    for step in (1, 2, 3, 4):
        for kind in ("rollouts", "draws"):
            assert resumed.rows(kind, step) == in_shadow.rows(kind, step)
    assert_equal_tensors(resumed, in_shadow, step=4)
