"""A model whose head the trainer would get wrong never samples a token."""

import pytest
from architectures import random_model
from small_runs.trained import train_small_run

from grpo_replay.engine.models import byte_tokenizer
from grpo_replay.engine.policy_module import LogitSettings
from grpo_replay.errors import ModelError
from grpo_replay.sampling.hf import HfSampler


def test_a_head_without_its_scale_is_refused_before_anything_is_sampled(tmp_path, monkeypatch):
    random_model("granite").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    sections = {"model": {"path": str(tmp_path / "model")}, "replay": {"preset": "grpo"}}
    monkeypatch.setattr(LogitSettings, "of", lambda config: LogitSettings())
    monkeypatch.setattr(HfSampler, "generate", lambda *_: pytest.fail("a token was sampled"))
    with pytest.raises(ModelError, match=r"type granite .*logits_scaling 8\.0"):
        train_small_run(tmp_path / "run", **sections)
    assert not list((tmp_path / "run").glob("rollouts/*"))
