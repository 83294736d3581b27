"""The forward pass of a loss, and its clipped tokens, are found without a change of the host."""

import pytest
import torch

from grpo_replay.integrations.interception import ForwardPasses


@pytest.mark.parametrize("per_token", [False, True])
def test_clipped_tokens_are_those_whose_ratio_has_no_gradient(per_token):
    """Ratios 1, 2 (clipped) and 0.5; tokens of advantage 0 have none, and are not clipped."""
    old = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    weights = (old + torch.tensor([1.0, 2.0, 0.5]).log()).requires_grad_()
    advantages = torch.tensor([1.0, 0.0])
    given = advantages[:, None].expand_as(old) if per_token else advantages
    forwards = ForwardPasses(old)
    logprobs, _ = forwards.record(lambda: (weights * 1.0, torch.zeros(2, 3)))
    forwards.record(lambda: ((weights * 1.0)[:, :2], None))  # a pass of other rows
    with torch.no_grad():
        forwards.record(lambda: (weights * 1.0, None))  # of a reference
    ratio = (logprobs - forwards.old_BT).exp()
    gained = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    forwards.trace(-gained.mean(), given)
    assert forwards.outputs[0] is logprobs
    assert forwards.clipped_BT.tolist() == [[False, True, False], [False] * 3]
