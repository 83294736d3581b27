"""Replay in ms-swift's own trainer, on the tiny model: `.ci/check_swift` runs these tests in an
environment of their own, because ms-swift needs an older TRL."""

import json

import pyarrow.parquet as pq
import pytest

pytest.importorskip("swift.rl_core", reason="ms-swift 4.6 is not installed: .ci/check_swift")

import torch
from swift.rlhf_trainers import GRPOTrainer
from swift_runs import BASE, FRESH, LORA, OURS, TURNS, in_this_process, rlhf, weights_of
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.errors import CheckpointError
from grpo_replay.integrations.swift import ReplayGRPOTrainer, ReplayMixin
from grpo_replay.training.metrics import depends_on_time

FOUR = {"steps_per_generation": 4, "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 8}  # fmt: skip


def succeeded(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def logged(folder, kind="rollouts"):
    files = sorted((folder / kind).glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def metrics(folder):
    lines = lines_of(folder)
    return [{k: v for k, v in line.items() if not depends_on_time(k)} for line in lines]


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def replays(folder):
    return [line["replay/rollouts"] for line in metrics(folder)]


def check(folder, *more):
    """`inspect-buffer --verify` passes."""
    said = CliRunner().invoke(app, ["inspect-buffer", str(folder), "--verify"])
    assert said.exit_code == 0, said.output
    return said.output


# Without replay


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """`swift rlhf` without the plugin."""
    folder = tmp_path_factory.mktemp("swift") / "plain"
    succeeded(rlhf(folder, None))
    return folder


@pytest.mark.parametrize("replay", [{"ratio": 0}, {"preset": "grpo"}])
def test_without_replay_the_plugin_trains_the_hosts_own_model_bit_for_bit(plain, replay, tmp_path):
    folder = tmp_path / "run"
    succeeded(rlhf(folder, replay))
    assert weights_of(folder / "checkpoint-12") == weights_of(plain / "checkpoint-12")
    assert not (folder / "rollouts").exists()
    assert not (folder / "checkpoint-12" / "buffer.parquet").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        FOUR | {"loss_type": "grpo"},
        {"torch_dtype": "bfloat16", "bf16": "true"},
        {"beta": 0.05},
        LORA,
        TURNS,
        {"dynamic_sample": "true"},
        {"loss_type": "sapo"},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "scale_rewards": "none"},
    ],
    ids=[
        "dapo",
        "accumulated",
        "bfloat16",
        "reference",
        "lora",
        "turns",
        "dynamic",
        "sapo",
        "gspo",
    ],
)
def test_fresh_rows_that_pass_the_buffer_train_the_hosts_own_model_bit_for_bit(changes, tmp_path):
    in_this_process(tmp_path / "plain", None, **changes)
    trainer = in_this_process(tmp_path / "run", FRESH, **changes)
    found, wanted = tmp_path / "run", tmp_path / "plain"
    assert weights_of(found / "checkpoint-10") == weights_of(wanted / "checkpoint-10")
    assert weights_of(found / "checkpoint-12") != weights_of(wanted / "checkpoint-12")
    assert replays(found) == [0, 0, 0, 0, 0, 16]  # a half of 32
    assert len(trainer.replay_buffer) == 6 * 32
    check(found)


@pytest.mark.parametrize("changes", [{}, {"beta": 0.05}, LORA | {"lora_dropout": 0.1}],
                         ids=["dapo", "reference", "lora"])  # fmt: skip
def test_in_shadow_the_model_is_the_hosts_own_and_the_buffer_says_what_it_would_do(
    changes, tmp_path
):
    in_this_process(tmp_path / "plain", None, **changes)
    shadow = OURS | {"shadow": True, "probe_every_steps": 2, "ratio": 1}
    in_this_process(tmp_path / "run", shadow, **changes)
    found, wanted = tmp_path / "run", tmp_path / "plain"
    assert weights_of(found / "checkpoint-12") == weights_of(wanted / "checkpoint-12")
    drawn = {step for step, count in enumerate(replays(found), start=1) if count}
    assert len(drawn) > 2
    probed = [row for row in logged(found, "draws") if row["log_ratio_mean"] is not None]
    assert {row["step"] for row in probed} == drawn & {2, 4, 6} != set()
    assert max(abs(row["log_ratio_mean"]) for row in probed) > 0
    assert max(line["cost/shadow_seconds"] for line in lines_of(found)) > 0
    check(found)


class WithSampler(GRPOTrainer):
    """As with vLLM: the sampler reports log-probs, with which ms-swift corrects its loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.request_config.logprobs = True
        self.disable_rollout_importance_sampling = False


class Packed(GRPOTrainer):
    """`padding_free`, which ms-swift allows with flash attention alone."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.template.padding_free = True


@pytest.mark.parametrize(
    "kind, changes",
    [(WithSampler, {"rollout_importance_sampling_mode": "token_truncate"}), (Packed, {})],
)
def test_what_needs_vllm_or_a_gpu_passes_bit_for_bit_where_it_is_imitated(kind, changes, tmp_path):
    class Ours(ReplayMixin, kind):
        pass

    in_this_process(tmp_path / "plain", None, kind, **changes)
    trainer = in_this_process(tmp_path / "run", FRESH, Ours, **changes)
    found, wanted = tmp_path / "run", tmp_path / "plain"
    assert weights_of(found / "checkpoint-10") == weights_of(wanted / "checkpoint-10")
    assert replays(found)[-1] == 16
    if kind is WithSampler:
        apart = [
            abs(each.sampler_logprobs - each.behavior_logprobs).max()
            for each in trainer.replay_buffer.rollouts()
        ]
        assert max(apart) > 0  # without the temperature
    check(found)


def test_log_probs_of_birth_are_without_dropout(tmp_path):
    gaps = []

    class Still(ReplayGRPOTrainer):
        def _postprocess_batch(self, samples, batches):
            self.model.eval()
            for batch in batches:
                own = batch["grpo_batch"]
                with torch.no_grad():
                    logprobs_BT = self._get_per_token_logps_and_entropies(
                        self.model, batch["model_inputs"], own
                    )[0]
                gaps.append(
                    (logprobs_BT - own.old_per_token_logps)[own.completion_mask].abs().max()
                )
            self.model.train()
            super()._postprocess_batch(samples, batches)

    in_this_process(tmp_path / "run", OURS, Still, **LORA | {"lora_dropout": 0.5})
    assert len(gaps) == 12 and max(gaps) == 0


def test_two_processes_pass_fresh_rows_bit_for_bit_and_replay(tmp_path):
    half = {"processes": 2, "per_device_train_batch_size": 8}
    succeeded(rlhf(tmp_path / "plain", None, **half))
    succeeded(rlhf(tmp_path / "fresh", FRESH, **half))
    found, wanted = tmp_path / "fresh", tmp_path / "plain"
    assert weights_of(found / "checkpoint-10") == weights_of(wanted / "checkpoint-10")
    check(found)
    succeeded(rlhf(tmp_path / "run", OURS, **half))
    check(tmp_path / "run")
    assert sum(replays(tmp_path / "run")) > 0


# The loss


class Twin(ReplayGRPOTrainer):
    """Compares the loss of every micro-batch with that of rows one by one, without padding."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compared, self.reference = [], AutoModelForCausalLM.from_pretrained(BASE)

    def logprobs(self, model, rollout):
        prompt, tokens = rollout.prompt_token_ids, torch.tensor(rollout.completion_token_ids).long()
        ids = torch.cat([torch.tensor(prompt).long(), tokens])[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / self.temperature
        return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    def loss_of(self, rollout):
        """Per token [T], by hand: the dual clip of paper A with the log-probs of birth, and the KL
        to the base model."""
        assert len(rollout.behavior_logprobs) == len(rollout.completion_token_ids)
        now, birth = self.logprobs(self.model, rollout), torch.tensor(rollout.behavior_logprobs)
        ratio, advantage = (now - birth).exp(), rollout.advantage
        clipped = ratio.clamp(0.8, 1.28) * advantage
        loss = -torch.minimum(ratio.clamp(max=10) * advantage, clipped)
        gap = self.logprobs(self.reference, rollout) - now
        loss = loss + self.beta * (gap.exp() - gap - 1)
        mask = rollout.completion_mask
        return loss[slice(None) if mask is None else torch.tensor(mask)]

    def compute_loss(self, model, inputs, *args, **kwargs):
        rows = [row for row in inputs["replay_row"] if row >= 0]
        trained = self._batch.rollouts
        losses = [self.loss_of(trained[row]) for row in rows]
        if self.loss_type == "dapo":
            tokens = sum(rollout.trained_tokens for rollout in trained)
            accumulated = self.current_gradient_accumulation_steps
            wanted = sum(each.sum() for each in losses) * accumulated / max(1, tokens)
        else:
            micro_batches = self.args.steps_per_generation
            wanted = sum(each.mean() for each in losses) * micro_batches / max(1, len(trained))
        found = super().compute_loss(model, inputs, *args, **kwargs)
        births = [trained[row].birth_step for row in rows]
        self.compared.append((len(rows), births, float(wanted), found.item()))
        return found


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1},
        FOUR | {"loss_type": "grpo"},
        FOUR | {"loss_type": "dapo", "learning_rate": 1e-3},
        TURNS | {"learning_rate": 1e-3},
    ],
    ids=["reference", "sequence mean", "token mean", "turns"],
)
def test_the_loss_of_replayed_rows_is_that_of_each_row_alone_with_its_log_probs_of_birth(
    changes, tmp_path
):
    replay = OURS | {"ratio": 0.7}
    trainer = in_this_process(tmp_path / "run", replay, Twin, reward_funcs="length", **changes)
    sizes = {size for size, *_ in trainer.compared}
    assert len(sizes) > 1, "micro-batches of one size"
    ages = [max(births) - min(births) for _, births, *_ in trainer.compared if births]
    assert max(ages) >= 2
    for _, _, wanted, found in trainer.compared:
        assert found == pytest.approx(wanted, rel=1e-3, abs=2e-6)
    assert max(abs(found) for *_, found in trainer.compared) > 1e-3
    check(tmp_path / "run")


def test_a_step_without_survivors_and_with_too_few_rows_is_trained_on_as_padding(tmp_path):
    # Rewards of the second function are the same: no group has a signal.
    class Equal(Twin):
        def _compute_rewards_per_func(self, samples):
            scores = super()._compute_rewards_per_func(samples)
            return scores * 0 if self.replay_buffer.next_step in (1, 3) else scores

    changes = FOUR | {"reward_funcs": "length"}
    trainer = in_this_process(tmp_path / "run", OURS | {"max_age_steps": 1}, Equal, **changes)
    sizes = [size for size, *_ in trainer.compared]
    assert sizes[:4] == [0] * 4
    assert sizes[8:12] == [0] * 4
    assert sum(sizes[4:8]) > 0
    assert all(wanted == found == 0 for size, _, wanted, found in trainer.compared if size == 0)
    clipped = ["clip_ratio/region_mean" in line for line in trainer.state.log_history[:4]]
    assert clipped == [False, False, True, True]  # nothing is logged of padding
    check(tmp_path / "run")


def test_truncated_rows_that_ms_swift_masks_are_dropped(tmp_path):
    changes = {"overlong_filter": "true", "max_completion_length": 11, "reward_funcs": "length"}
    in_this_process(tmp_path / "run", OURS, Twin, **changes)
    rows = logged(tmp_path / "run")
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert 0 < len(cut) < len(rows) and not any(row["kept"] for row in cut)
    assert any(row["kept"] for row in rows)
    check(tmp_path / "run")


def test_a_missing_reward_counts_as_0_as_in_ms_swift(tmp_path):
    changes = {"reward_funcs": "sometimes"}
    in_this_process(tmp_path / "plain", None, **changes)
    in_this_process(tmp_path / "run", FRESH, **changes)
    found, wanted = tmp_path / "run", tmp_path / "plain"
    assert weights_of(found / "checkpoint-10") == weights_of(wanted / "checkpoint-10")
    rows = logged(found)
    missing = [row for row in rows if row["reward"] == 0]
    assert 0 < len(missing) < len(rows) and all(row["kept"] for row in missing)
    check(found)


def test_several_reward_functions_are_weighted_and_each_score_is_logged(tmp_path):
    changes = {"reward_funcs": ["length", "tiny"], "reward_weights": [1, 0.5]}
    in_this_process(tmp_path / "run", OURS, **changes)
    for row in logged(tmp_path / "run"):
        length, right = row["reward_scores"]
        assert row["reward"] == pytest.approx(length + 0.5 * right) and right in (-1, 1)
    check(tmp_path / "run")


# Kill and resume


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """24 updates, twelve generation batches, with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("swift") / "whole"
    succeeded(rlhf(folder, OURS, max_steps=24, save_steps=12))
    return folder


def test_a_killed_run_that_resumes_is_the_run_that_was_never_killed(whole, tmp_path):
    folder = tmp_path / "run"
    dead = rlhf(folder, OURS, kill=8, max_steps=24, save_steps=12)
    assert dead.returncode != 0 and not (folder / "checkpoint-24").exists()
    assert len(metrics(folder)) == 7  # one after the checkpoint
    resumes = {"resume_from_checkpoint": folder / "checkpoint-12", "max_steps": 24}
    succeeded(rlhf(folder, OURS, save_steps=12, **resumes))
    for name in ("model.safetensors", "buffer.parquet"):
        found, wanted = (each / "checkpoint-24" / name for each in (folder, whole))
        assert found.read_bytes() == wanted.read_bytes(), name
    for kind in ("rollouts", "draws"):
        assert logged(folder, kind) == logged(whole, kind)
    assert metrics(folder) == metrics(whole)
    assert len(metrics(folder)) == 12 and sum(replays(folder)) > 0
    check(folder)


def test_the_commands_read_the_folder_of_a_run(whole):
    check(whole)
    said = CliRunner().invoke(app, ["plan", "--from-run", str(whole)])
    assert said.exit_code == 0 and "μ" in said.output, said.output
    words = ["eval", "--ckpt", str(whole / "checkpoint-24"), "--recipe", "tiny", "--k", "1",
             "--benchmark", "tiny_add", "--output", str(whole / "report.json")]  # fmt: skip
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0 and "tiny_add" in said.output, said.output


def test_a_resume_with_other_settings_or_in_another_folder_is_refused(whole, tmp_path):
    resumes = {"resume_from_checkpoint": whole / "checkpoint-12", "max_steps": 24}
    with pytest.raises(CheckpointError, match=f"--add_version false --output_dir {whole}"):
        in_this_process(tmp_path / "other", OURS, **resumes)
    with pytest.raises(Exception, match="ratio") as found:
        in_this_process(whole, OURS | {"ratio": 0.25}, **resumes)
    assert "0.5" in str(found.value)
    with pytest.raises(CheckpointError, match=r"ref_per_token_logps.*resume with beta 0"):
        in_this_process(whole, OURS, beta=0.1, **resumes)
    assert len(metrics(whole)) == 12
