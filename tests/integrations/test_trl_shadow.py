"""In shadow TRL trains bit for bit as without this package; the buffer says what it would do."""

import copy

import numpy as np
import pytest
import torch
from slow_tests import slow_except
from trl import GRPOTrainer
from trl_runs import failures, logged, make, metrics, weights_of

from grpo_replay import ReplayConfig
from grpo_replay.integrations.trl import ReplayGRPOTrainer

SHADOW = {
    "ratio": 1.0,
    "max_age_steps": 3,
    "warmup_steps": 1,
    "shadow": True,
    "probe_every_steps": 2,
}
OURS = ("fresh/", "replay/", "shadow/", "buffer/", "cost/")


def of_training(trainer) -> list[dict]:
    return [
        {name: value for name, value in line.items()
         if not name.startswith(OURS) and "time" not in name and "per_second" not in name
         and "runtime" not in name}
        for line in trainer.state.log_history
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("accumulated", "dropout"),
    slow_except([(1, 0.3), (2, 0.0)], [(1, 0.0), (1, 0.3), (2, 0.0), (2, 0.3)]),
)
def test_weights_and_what_trl_logs_are_those_of_trl(tmp_path, accumulated, dropout, capsys):
    """TRL's own log-probs of birth have the model's dropout, which the probe must not disturb.
    The end says once what replay would cost."""
    changes = {
        "model_init_kwargs": {"dtype": "float32", "attention_dropout": dropout},
        "gradient_accumulation_steps": accumulated, "max_steps": 8 // accumulated,
    }  # fmt: skip
    trainers = []
    for name, settings, kind in (
        ("plain", None, GRPOTrainer),
        ("shadow", ReplayConfig.of("ours", **SHADOW), ReplayGRPOTrainer),
    ):
        trainers.append(make(tmp_path / name, settings, kind, **changes))
        trainers[-1].train()
    assert capsys.readouterr().out.count("replay would take") == 1
    assert weights_of(trainers[0]) == weights_of(trainers[1])
    assert of_training(trainers[0]) == of_training(trainers[1])
    draws = logged(tmp_path / "shadow", "draws")
    drawn = {line["step"] for line in metrics(tmp_path / "shadow") if line["replay/rollouts"]}
    probed = {row["step"] for row in draws if row["log_ratio_mean"] is not None}
    assert drawn == {row["step"] for row in draws}
    assert drawn or dropout  # with dropout, few groups have a signal
    assert probed == drawn & {2, 4}
    assert failures(tmp_path / "shadow") == []


class Scoring(ReplayGRPOTrainer):
    """Keeps what is scored, and the weights under which it is."""

    scored: tuple = ()

    def _score(self, rollouts, output):
        self.scored = tuple(rollouts)
        self.weights = copy.deepcopy(self.model.state_dict())
        return super()._score(rollouts, output)


def test_a_probe_has_the_ratios_and_the_clipping_of_the_policy_before_the_update(tmp_path):
    settings = ReplayConfig.of("ours", **SHADOW | {"probe_rollouts": 1000})
    trainer = make(tmp_path, settings, Scoring, max_steps=4, learning_rate=1e-3)
    trainer.train()
    rows = [row for row in logged(tmp_path, "draws") if row["tokens"] is not None]
    assert [row["rollout_id"] for row in rows] == [r.rollout_id for r in trainer.scored] != []
    trainer.model.load_state_dict(trainer.weights)
    trainer.model.eval()
    clipped = 0.0
    for row, rollout in zip(rows, trainer.scored, strict=True):
        prompt, tokens = rollout.prompt_token_ids, rollout.completion_token_ids
        ids = torch.tensor(np.concatenate([prompt, tokens]), dtype=torch.long)
        with torch.no_grad():
            logits = trainer.model(ids[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(len(tokens)), ids[len(prompt) :]].numpy()
        log_ratios = (logprobs - rollout.behavior_logprobs).astype(np.float64)
        ratios = np.exp(log_ratios)
        outside = ratios > 1.2 if rollout.advantage > 0 else ratios < 0.8
        assert row["log_ratio_mean"] == pytest.approx(log_ratios.mean(), abs=1e-5)
        assert row["approx_kl"] == pytest.approx((ratios - 1 - log_ratios).mean(), abs=1e-5)
        assert row["clip_fraction"] == pytest.approx(outside.mean())
        clipped += outside.mean()
    assert clipped > 0


def test_a_resumed_run_in_shadow_is_the_one_never_killed(tmp_path):
    settings = ReplayConfig.of("ours", **SHADOW)
    whole = make(tmp_path / "whole", settings)
    whole.train()
    halves = {"save_strategy": "steps", "save_steps": 4}
    make(tmp_path / "half", settings, **halves, max_steps=4).train()
    resumed = make(tmp_path / "half", settings, **halves)
    resumed.train(resume_from_checkpoint=True)
    assert weights_of(whole) == weights_of(resumed)
    for kind in ("rollouts", "draws"):
        assert logged(tmp_path / "whole", kind) == logged(tmp_path / "half", kind)
    assert metrics(tmp_path / "whole", timed=False) == metrics(tmp_path / "half", timed=False)
