"""Rollouts of a sampler whose weights are in fp8, as vLLM's `quantization: fp8_per_tensor`."""

import json

import pytest
import torch
from small_runs.trained import train_small_run

from grpo_replay.errors import LogprobGapError
from grpo_replay.sampling.hf import HfSampler


def fp8_samples(monkeypatch):
    """The hf sampler with weights as vLLM's `fp8_per_tensor` stores them: e4m3, one scale each."""
    generate = HfSampler.generate

    def quantized(sampler, requests):
        with torch.inference_mode():
            for name, weight in sampler._open_model().named_parameters():
                if weight.ndim == 2 and "embed" not in name:
                    scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
                    weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)
        return generate(sampler, requests)

    monkeypatch.setattr(HfSampler, "generate", quantized)


@pytest.mark.slow
def test_samples_of_fp8_weights_are_refused_unless_the_limit_allows_their_gap(
    tmp_path, monkeypatch
):
    fp8_samples(monkeypatch)
    with pytest.raises(LogprobGapError, match=r"more than sampling\.logprob_gap_limit 0\.001"):
        train_small_run(tmp_path / "refused", sampling={"logprob_gap_limit": 0.001})
    corrected = {"sampling": {"logprob_gap_limit": 0.1}, "loss": {"sampler_ratio_cap": 2.0}}
    train_small_run(tmp_path / "run", **corrected)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    gaps = [row["sampler/logprob_gap_mean"] for row in rows]
    assert len(gaps) > 1 and all(0.001 < gap < 0.1 for gap in gaps), gaps
