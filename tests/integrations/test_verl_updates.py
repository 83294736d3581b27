"""What verl trains on with replay, computed again in plain torch from what a run saved: weights,
rollouts/, draws/. Loss, gradient norm and outcomes of every step, log-probs of every birth; with
several losses, on one rank and two, with a tool, and in an asynchronous mode. Whole runs: slow."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="needs an environment with verl: .ci/check_verl")

from verl_cpu.tool_loop import WORDS as TOOL_WORDS
from verl_runs import OURS, SEEDED, PlainPolicy, VerlRun, logprobs_of

from grpo_replay.lab.verification.verify import verify_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ONE_UPDATE = (f"{ACTOR}.ppo_mini_batch_size=8",)
LOW, HIGH, DUAL, KL_COEFFICIENT = 0.2, 0.28, 3.0, 0.1


def array(values, like):
    return torch.ones_like(like) if values is None else torch.tensor(values, dtype=like.dtype)


class Update:
    """The only update of a step, computed again: `loss` (of the policy alone), `kl`, `norm`."""

    def __init__(self, run, step, ranks=1, aggregation="token-mean", kl=0.0):
        model, self.rows = run.policy(step - 1, ranks), run.trained(step)
        model.zero_grad()
        masks = [array(row.get("completion_mask"), torch.ones(len(row["completion_token_ids"])))
                 for row, _ in self.rows]  # fmt: skip
        tokens = sum(float(mask.sum()) for mask in masks)
        self.loss = self.kl = 0.0
        for (row, outcome), mask in zip(self.rows, masks, strict=True):
            logprobs = logprobs_of(model, row)
            log_ratio = logprobs - array(row["behavior_logprobs"], logprobs)
            ratio, advantage = log_ratio.exp(), row["advantage"]
            terms = [-advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH)]
            loss = torch.maximum(*terms)
            if advantage < 0:
                loss = loss.clamp(max=-DUAL * advantage)
            loss = loss * array(row.get("extra_rollout_is_weights"), loss)
            gap = array(row.get("extra_ref_log_prob"), logprobs) - logprobs
            kld = gap.exp() - gap - 1
            weight = mask / (tokens if aggregation == "token-mean" else mask.sum() * len(self.rows))
            (weight * (loss + kl * kld)).sum().backward()
            self.loss += float((weight * loss).sum())
            self.kl += float((weight * kld).sum())
            self.compare_outcome(outcome, log_ratio.detach(), mask.bool(), advantage)
        squares = [parameter.grad.square().sum() for parameter in model.parameters()]
        self.norm = math.sqrt(float(sum(squares)))

    def compare_outcome(self, outcome, log_ratio, mask, advantage):
        """The columns of rollouts/ or draws/ that say what the update did with the rollout."""
        log_ratio, ratio = log_ratio[mask], log_ratio[mask].exp()
        clipped = ratio > 1 + HIGH if advantage > 0 else (ratio < 1 - LOW) | (ratio > DUAL)
        assert outcome["tokens"] == int(mask.sum())
        assert outcome["clip_fraction"] == pytest.approx(float(clipped.float().mean()), abs=1e-6)
        assert outcome["log_ratio_mean"] == pytest.approx(float(log_ratio.mean()), abs=2e-5)
        assert outcome["ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-4)


def compare(run, ranks=1, aggregation="token-mean", kl=0.0):
    """Every step of a run; returns the number of replayed rows."""
    replayed = 0
    for step, logged in sorted(run.verl_metrics().items()):
        update = Update(run, step, ranks, aggregation, kl)
        assert logged["actor/pg_loss"] == pytest.approx(update.loss, rel=1e-4, abs=1e-6), step
        assert logged["actor/grad_norm"] == pytest.approx(update.norm, rel=1e-4), step
        if kl:
            assert logged["actor/kl_loss"] == pytest.approx(update.kl, rel=1e-3, abs=1e-6), step
        replayed += len(run.rows("draws", step))
        print(step, len(update.rows), "rows; loss, norm", update.loss, update.norm, "verl",
              logged["actor/pg_loss"], logged["actor/grad_norm"])  # fmt: skip
    assert sorted(run.verl_metrics()) == [1, 2, 3, 4] and replayed >= 40
    return replayed


def birth_gaps(run, ranks=1):
    """Log-probs of the policy that sampled minus those of birth, of tokens that train, by row."""
    gaps = []
    for step in (1, 2, 3, 4):
        model = run.policy(step - 1, ranks)
        for row in run.rows("rollouts", step):
            if row["kept"]:
                with torch.no_grad():
                    found = logprobs_of(model, row).numpy() - np.array(row["behavior_logprobs"])
                gaps.append(found[array(row.get("completion_mask"), torch.tensor(found)).bool()])
    return gaps


def test_token_mean_on_one_rank(tmp_path):
    run = VerlRun(tmp_path, *OURS, *ONE_UPDATE).ended()
    compare(run)
    assert max(np.abs(gap).max() for gap in birth_gaps(run)) < 1e-4


def test_sequence_mean_on_two_ranks_with_padding(tmp_path):
    words = (
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{ACTOR}.use_dynamic_bsz=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3", "trainer.v1.replay.ratio=0.7",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
    )  # fmt: skip
    run = VerlRun(tmp_path, *OURS, *ONE_UPDATE, *words, ranks=2).ended()
    compare(run, ranks=2, aggregation="seq-mean-token-mean")
    assert any(len(run.trained(step)) % 6 for step in (1, 2, 3, 4)), "no padding was needed"
    assert max(np.abs(gap).max() for gap in birth_gaps(run, 2)) < 1e-4


def test_rollout_correction_with_shuffle(tmp_path):
    words = ("algorithm.rollout_correction.rollout_is=token", f"{ACTOR}.shuffle=True")
    run = VerlRun(tmp_path, *OURS, *ONE_UPDATE, *words, shift=0.2).ended()
    compare(run)
    weights = [w for row, _ in run.trained(4) for w in row["extra_rollout_is_weights"]]
    assert min(weights) == pytest.approx(math.exp(-0.2), rel=1e-3), "the sampler is off by 0.2"


def test_kl_loss_with_a_reference_model(tmp_path):
    words = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef={KL_COEFFICIENT}")
    run = VerlRun(tmp_path, *OURS, *ONE_UPDATE, *words).ended()
    compare(run, kl=KL_COEFFICIENT)
    with torch.no_grad():
        gaps = [
            logprobs_of(run.policy(0), row).numpy() - np.array(row["extra_ref_log_prob"])
            for row, _ in run.trained(4)
        ]
    assert max(np.abs(gap).mean() for gap in gaps) < 0.05, "bfloat16"


def test_bypass_mode_takes_the_log_probs_of_the_sampler(tmp_path):
    words = ("algorithm.rollout_correction.bypass_mode=True",)
    run = VerlRun(tmp_path, *OURS, *ONE_UPDATE, *words, shift=-0.1).ended()
    compare(run)
    for gap in birth_gaps(run):
        shift = 0.1 * (np.arange(len(gap)) % 2 == 0)  # the sampler's are lower
        np.testing.assert_allclose(gap, shift, atol=1e-4)


def test_steps_without_survivors_change_nothing(tmp_path):
    run = VerlRun(tmp_path, *OURS, "reward.custom_reward_function.name=no_score").ended()
    assert [row["cost/trained_rollouts"] for row in run.metrics()] == [0] * 4
    assert [row["cost/generated_rollouts"] for row in run.metrics()] == [64] * 4
    first, last = run.checkpoint(1), run.checkpoint(4)
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert "actor/pg_loss" not in run.verl_metrics()[4]
    assert verify_run(run.output).passed


def test_a_batch_smaller_than_the_number_of_ranks(tmp_path):
    words = ("data.train_batch_size=3", f"{ROLLOUT}.n=2", f"{ACTOR}.ppo_mini_batch_size=3",
             "trainer.total_training_steps=8")  # fmt: skip
    run = VerlRun(tmp_path, *OURS, *words, ranks=3).ended()
    sizes = [row["cost/trained_rollouts"] for row in run.metrics()]
    assert len(sizes) == 8 and 2 in sizes, "no step trained on two rows"
    for step, size in enumerate(sizes, start=1):
        logged = run.verl_metrics()[step]
        if size:
            update = Update(run, step, ranks=3)
            assert logged["actor/pg_loss"] == pytest.approx(update.loss, rel=1e-4, abs=1e-6)
            assert logged["actor/grad_norm"] == pytest.approx(update.norm, rel=1e-4)
    assert verify_run(run.output).passed


def test_tokens_of_a_slow_tool_have_no_gradient_fresh_or_replayed(tmp_path):
    modules = (SEEDED, "verl_cpu.tool_loop")
    run = VerlRun(tmp_path, *OURS, *ONE_UPDATE, *TOOL_WORDS, modules=modules).ended()
    compare(run)  # the loss of the tokens that the mask names, and no other
    assert max(np.abs(gap).max() for gap in birth_gaps(run)) < 1e-4
    for step in (1, 2, 3, 4):
        assert run.metrics()[step - 1]["cost/generated_rollouts"] == 64, "one output a session"
        for row in run.rows("rollouts", step):
            mask = np.array(row["completion_mask"])
            turns = np.flatnonzero(np.diff(mask.astype(int))).tolist()
            assert len(turns) == 2 and mask[0] and mask[-1], "an answer, the tool, an answer"
            tool = np.array(row["completion_token_ids"])[~mask].tolist()
            assert len(tool) == len("18+25=")
    assert run.verl_metrics()[4]["training/num_turns/mean"] == 4
    seconds = [row["cost/generation_seconds"] for row in run.metrics(timed=True)]
    assert min(seconds) > 1, "the tool takes a second"
    policies = {step: PlainPolicy(run.policy(step)) for step in (0, 1, 2, 3)}
    assert verify_run(run.output, policies.__getitem__).passed


@pytest.mark.parametrize("host_mode", ["colocate_async", "separate_async"])
def test_ages_and_staleness_of_an_asynchronous_mode(tmp_path, host_mode):
    words = [f"+trainer.v1.replay.host_mode={host_mode}"]
    local = 1
    if host_mode == "separate_async":
        local = 2
        words += [
            "trainer.v1.separate_async.parameter_sync_step=2", f"{ROLLOUT}.nnodes=1",
            f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.checkpoint_engine.backend=file_cpu",
            f"{ROLLOUT}.checkpoint_engine.custom_backend_module=verl_cpu.stand_ins",
            f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.file_cpu.folder={tmp_path}",
        ]  # fmt: skip
    run = VerlRun(tmp_path, *OURS, *words, "trainer.save_freq=4").ended()
    ours, logged = run.metrics(), run.verl_metrics()
    assert [row["step"] for row in ours] == list(range(1, 4 * local + 1)), "a step is an update"
    stale = "training/off_policy/trajectory_staleness/mean"
    assert max(logged[step][stale] for step in logged) > 0, "sampling did not run ahead"
    ages = [draw["age_steps"] for row in ours for draw in run.rows("draws", row["step"])]
    assert ages and set(ages) <= {1, 2}
    for row in ours:
        births = {each["birth_step"] for each in run.rows("rollouts", row["step"])}
        assert births == {row["step"]}, "the step that took it, however stale it was"
    assert verify_run(run.output).passed
