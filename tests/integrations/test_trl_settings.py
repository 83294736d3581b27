"""Where replay has nothing to replay, and drops nothing, it is TRL's trainer bit for bit, also with
an active buffer: rows, their order and weight, losses and what TRL logs. Then it replays."""

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")

from slow_tests import slow_except
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl_runs import make, weights_of

from grpo_replay import ReplayConfig
from grpo_replay.integrations.trl import ReplayGRPOTrainer

WARM_UP = ReplayConfig.of("ours", warmup_steps=2, drop_zero_variance=False)
UPDATES = 4  # of two generation batches: the warm-up


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == UPDATES


def trained(folder, kind, changes):
    trainer = make(folder, WARM_UP, kind, learning_rate=1e-3, **changes)
    trainer.add_callback(Stop())
    trainer.train()
    return trainer


def seen(trainer):
    """What TRL logs, without times."""
    return [
        {k: v for k, v in line.items() if "time" not in k and "per_second" not in k
         and not k.startswith(("fresh/", "replay/", "buffer/", "cost/"))}
        for line in trainer.state.log_history
    ]  # fmt: skip


QUICK = [
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1,
     "per_device_train_batch_size": 8},
]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    slow_except(QUICK, [
        *QUICK,
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4},
        {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 10.0},
        {"loss_type": "vespo"},
        {"loss_type": "bnpo"},
        {"loss_type": "sapo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"beta": 0.1, "use_bias_correction_kl": True},
        {"entropy_coef": 0.01},
        {"top_entropy_quantile": 0.5},
        {"off_policy_mask_threshold": 1e-4},
        {"pad_to_multiple_of": 16, "temperature": 0.7, "top_p": 0.9, "weight_decay": 0.1},
        {"gradient_checkpointing": True, "bf16": True},
    ]),
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items())[:60],
)  # fmt: skip
def test_what_is_not_replayed_trains_as_in_trl_bit_for_bit(tmp_path, changes):
    plain = trained(tmp_path / "plain", GRPOTrainer, changes)
    replaying = trained(tmp_path / "replay", ReplayGRPOTrainer, changes)
    assert len(replaying.replay_buffer) == 64
    assert weights_of(replaying) == weights_of(plain)
    assert seen(replaying) == seen(plain)
