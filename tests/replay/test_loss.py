"""The loss per token, by hand; its gradient, by finite differences; its statistics, by a loop."""

import math

import numpy as np
import pytest
import torch

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import LossSection, RatioBounds
from grpo_replay.replay.batch import token_weights
from grpo_replay.replay.loss import (
    ROW_STATISTICS,
    asymmetric_reinforce,
    clipped_surrogate,
    kl_to_reference,
    row_statistics,
    sequence_log_ratios,
    token_loss,
)

PAPER = LossSection()  # ε_low 0.2, ε_high 0.28, c 10, β 0


def surrogate(ratio: float, advantage: float, settings: LossSection = PAPER):
    """(loss, clipped, d loss / d log-prob) of one token whose ratio is `ratio`."""
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([-1.0], dtype=torch.float64)
    result = clipped_surrogate(logprob, behavior, torch.tensor([advantage]).double(), settings)
    result.losses_C.sum().backward()
    return result.losses_C.item(), bool(result.clipped_C), logprob.grad.item()


# ratio, advantage, loss = -max(min(ρA, clip(ρ)A), cA if A < 0), clipped, d loss / d log-prob = -ρA
HAND_WORKED = [
    (1.0, 1.0, -1.0, False, -1.0),
    (1.0, -1.0, 1.0, False, 1.0),
    (1.27, 1.0, -1.27, False, -1.27),  # just below 1 + ε_high
    (1.29, 1.0, -1.28, True, 0.0),  # just above
    (1.5, 2.0, -2.56, True, 0.0),
    (0.5, 1.0, -0.5, False, -0.5),  # A > 0: the lower clip never binds
    (0.81, -1.0, 0.81, False, 0.81),  # just above 1 - ε_low
    (0.79, -1.0, 0.8, True, 0.0),  # just below
    (0.5, -3.0, 2.4, True, 0.0),
    (5.0, -1.0, 5.0, False, 5.0),  # A < 0: the upper clip never binds
    (9.9, -2.0, 19.8, False, 19.8),  # just below the dual clip
    (10.1, -2.0, 20.0, True, 0.0),  # just above: c·|A|
    (1e4, -1.0, 10.0, True, 0.0),
    (3.0, 0.0, 0.0, False, 0.0),  # no advantage, no loss, and nothing to clip
    (0.1, 0.0, 0.0, False, 0.0),
    (20.0, 0.0, 0.0, False, 0.0),  # nor to clip by the dual clip
]


@pytest.mark.parametrize("ratio, advantage, loss, clipped, gradient", HAND_WORKED)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, clipped, gradient):
    found = surrogate(ratio, advantage)
    assert found[0] == pytest.approx(loss, abs=1e-12)
    assert found[1] is clipped
    assert found[2] == pytest.approx(gradient, abs=1e-12)


def test_a_ratio_exactly_at_an_edge_is_inside():
    settings = LossSection(epsilon=0.5, epsilon_high=1.0, dual_clip=4.0)  # edges are exact floats
    logprobs = torch.tensor([0.5, 2.0, 4.0], dtype=torch.float64).log()
    advantages = torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)
    result = clipped_surrogate(logprobs, torch.zeros(3).double(), advantages, settings)
    assert result.losses_C.tolist() == pytest.approx([0.5, -2.0, 4.0], abs=1e-15)
    edge = torch.tensor([0.5, 2.0, 4.0], dtype=torch.float64).log().exp()
    strictly_outside = [edge[0] < 0.5, edge[1] > 2.0, edge[2] > 4.0]
    assert result.clipped_C.tolist() == [bool(flag) for flag in strictly_outside]


def test_without_dual_clip_a_negative_advantage_has_no_floor():
    loss, clipped, gradient = surrogate(50.0, -1.0, LossSection(dual_clip=None))
    assert (loss, clipped, gradient) == (pytest.approx(50.0), False, pytest.approx(50.0))


def test_log_ratios_are_clamped_before_exp_and_logged_raw():
    logprobs = torch.tensor([0.0, -100.0], dtype=torch.float64)
    behavior = torch.tensor([-100.0, 0.0], dtype=torch.float64)
    settings = LossSection(dual_clip=None)
    result = clipped_surrogate(logprobs, behavior, torch.tensor([-1.0, 1.0]).double(), settings)
    assert result.losses_C[0].item() == pytest.approx(math.exp(20))
    assert result.losses_C[1].item() == pytest.approx(-math.exp(-20))
    assert result.log_ratios_C.tolist() == [100.0, -100.0]


def test_a_sequence_ratio_is_the_geometric_mean_of_its_tokens_ratios_by_hand():
    """GSPO. Rollout 0: log-ratios 0.1 and 0.3, s = e^0.2, not clipped at 1.28. Rollout 1: log-ratio
    0.5, s = e^0.5, clipped. Rollout 2: -0.4, A < 0, s = e^-0.4 below 0.8, clipped."""
    settings = LossSection(kind="gspo", aggregation="sequence_mean")
    log_ratios = torch.tensor([0.1, 0.3, 0.5, -0.4], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 2.0, -1.0], dtype=torch.float64)
    lengths = [2, 1, 1]
    result = clipped_surrogate(
        log_ratios, torch.zeros(4).double(), advantages, settings, lengths_R=lengths
    )
    s = math.exp(0.2)
    assert result.losses_C.tolist() == pytest.approx([-s, -s, -2.56, 0.8])
    assert result.clipped_C.tolist() == [False, False, True, True]
    assert result.log_ratios_C.tolist() == [0.1, 0.3, 0.5, -0.4]  # logged per token
    weights = torch.from_numpy(np.repeat(token_weights(np.array(lengths), settings, 9), lengths))
    total = (result.losses_C * weights).sum()
    assert total.item() == pytest.approx((-s - 2.56 + 0.8) / 3)  # the mean over rollouts
    total.backward()
    # d s/d log π_t = s/T: the tokens of a rollout share its gradient.
    assert log_ratios.grad.tolist() == pytest.approx([-s / 6, -s / 6, 0, 0])


def test_a_rollout_without_tokens_has_no_part_in_the_sequence_ratios_of_others():
    log_ratios = torch.tensor([0.1, 0.3, -0.4], dtype=torch.float64, requires_grad=True)
    means = sequence_log_ratios(log_ratios, [2, 0, 1])
    assert means.tolist() == pytest.approx([0.2, 0.2, -0.4])
    means.sum().backward()
    assert log_ratios.grad.tolist() == pytest.approx([1, 1, 1])


def test_sampler_weights_multiply_the_surrogate_but_not_the_kl_term():
    logprobs = torch.tensor([0.1, -0.1], dtype=torch.float64)
    behavior, reference = torch.zeros(2).double(), torch.tensor([0.0, -0.4]).double()
    advantages, settings = torch.tensor([1.0, -1.0]).double(), LossSection(beta=0.04)
    result = token_loss(
        logprobs, behavior, reference, advantages, settings,
        sampler_weights_C=torch.tensor([0.5, 2.0]).double(),
    )  # fmt: skip
    penalty = 0.04 * kl_to_reference(logprobs, reference)
    surrogate = torch.tensor([-0.5 * math.exp(0.1), 2 * math.exp(-0.1)]).double()
    assert torch.allclose(result.losses_C, surrogate + penalty, atol=1e-12)


def plain_reinforce(logprobs_C, behavior_logprobs_C, coefficients_C, settings, lengths_R):
    return -coefficients_C * logprobs_C


def test_a_loss_of_the_user_may_return_the_losses_alone():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    behavior, advantages = torch.tensor([-1.5, -1.75]), torch.tensor([1.0, -1.0])
    settings = LossSection(kind=f"{__file__}:plain_reinforce")
    result = token_loss(logprobs, behavior, behavior, advantages, settings)
    assert result.losses_C.tolist() == [1.0, -2.0]
    assert result.clipped_C.tolist() == [False, False]
    assert result.log_ratios_C.tolist() == [0.5, -0.25] and not result.log_ratios_C.requires_grad


def mean_loss(logprobs_C, behavior_C, coefficients_C, settings, lengths_R):
    return -(coefficients_C * logprobs_C).mean()


def one_short(logprobs_C, behavior_C, coefficients_C, settings, lengths_R):
    return -logprobs_C[1:]


def detached(logprobs_C, behavior_C, coefficients_C, settings, lengths_R):
    return -logprobs_C.detach()


@pytest.mark.parametrize("function", [mean_loss, one_short, detached])
def test_what_is_no_loss_of_each_token_is_refused(function):
    logprobs, zero = torch.tensor([-1.0, -2.0], requires_grad=True), torch.zeros(2)
    settings = LossSection(kind=f"{__file__}:{function.__name__}")
    with pytest.raises(RecipeError, match=rf"loss.kind .*{function.__name__}"):
        token_loss(logprobs, zero, zero, zero, settings)


def test_asymmetric_reinforce_by_hand():
    logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([-9.0, -9.0], dtype=torch.float64)
    coefficients = torch.tensor([1.1, -0.9], dtype=torch.float64)  # r ± 1, V 0, δV -0.1
    result = asymmetric_reinforce(logprobs, behavior, coefficients)
    result.losses_C.sum().backward()
    assert result.losses_C.tolist() == pytest.approx([0.55, -1.8])
    assert logprobs.grad.tolist() == pytest.approx([-1.1, 0.9])  # behaviour plays no part
    assert not result.clipped_C.any()
    assert result.log_ratios_C.tolist() == pytest.approx([8.5, 7.0])


def test_kl_k3_by_hand():
    policy = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64)
    reference = torch.tensor([-1.0, -0.5, -3.0], dtype=torch.float64)
    expected = [0.0, math.exp(0.5) - 0.5 - 1, math.exp(-1.0) + 1.0 - 1]
    assert kl_to_reference(policy, reference).tolist() == pytest.approx(expected)
    assert kl_to_reference(torch.tensor([-100.0]), torch.tensor([0.0])).item() == pytest.approx(
        math.exp(20) - 21
    )


def test_kl_k3_is_unbiased_for_the_kl_of_two_distributions():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    estimate = (policy * kl_to_reference(policy.log(), reference.log())).sum()
    exact = (policy * (policy / reference).log()).sum()
    assert estimate.item() == pytest.approx(exact.item())


@pytest.mark.parametrize("beta", [0.04, 1.0])
def test_token_loss_adds_beta_times_kl_to_every_token_clipped_ones_too(beta):
    logprobs = torch.tensor([0.5, -0.1], dtype=torch.float64)
    behavior = torch.zeros(2, dtype=torch.float64)
    reference = torch.tensor([0.0, -0.4], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0], dtype=torch.float64)
    plain = token_loss(logprobs, behavior, reference, advantages, PAPER)
    with_kl = token_loss(logprobs, behavior, reference, advantages, LossSection(beta=beta))
    penalty = beta * kl_to_reference(logprobs, reference)
    assert torch.allclose(with_kl.losses_C, plain.losses_C + penalty, atol=1e-15)
    assert plain.clipped_C.tolist() == with_kl.clipped_C.tolist() == [True, False]


def test_token_weights_by_hand():
    lengths = np.array([2, 6, 0])
    mean = token_weights(lengths, LossSection(aggregation="token_mean"), 10)
    assert mean.tolist() == [1 / 8] * 3
    sequence = token_weights(lengths, LossSection(aggregation="sequence_mean"), 10)
    assert sequence.tolist() == [1 / 6, 1 / 18, 1 / 3]
    constant = token_weights(lengths, LossSection(aggregation="constant"), 10)
    assert constant.tolist() == [1 / 30] * 3
    assert token_weights(np.array([1]), PAPER, 10).tolist() == [1.0]
    asymre = token_weights(lengths, LossSection(kind="asymre"), 10)
    assert asymre.tolist() == [1 / 3] * 3
    assert token_weights(np.zeros(0, dtype=int), PAPER, 10).shape == (0,)


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        # losses per token: rollout 0 has [1, 2], rollout 1 has [3, 4, 5, 6]
        ("token_mean", (1 + 2 + 3 + 4 + 5 + 6) / 6),
        ("sequence_mean", (1.5 + 4.5) / 2),
        ("constant", 21 / (2 * 8)),
    ],
)
def test_aggregations_of_a_mini_batch_by_hand(aggregation, expected):
    weights = token_weights(np.array([2, 4]), LossSection(aggregation=aggregation), 8)
    losses = [np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0, 6.0])]
    total = sum(w * part.sum() for w, part in zip(weights, losses, strict=True))
    assert total == pytest.approx(expected, abs=1e-15)


GRADIENT_SETTINGS = {
    "paper": LossSection(),
    "no dual clip": LossSection(dual_clip=None),
    "kl": LossSection(beta=0.3),
    "asymre": LossSection(kind="asymre"),
    "sequence ratio": LossSection(kind="gspo"),
}


@pytest.mark.parametrize("name", GRADIENT_SETTINGS)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_gradient_of_a_mini_batch_matches_finite_differences(name, aggregation):
    settings = GRADIENT_SETTINGS[name].model_copy(update={"aggregation": aggregation})
    rng = np.random.default_rng(7)
    lengths = np.array([5, 1, 9, 4])
    row_of = torch.from_numpy(np.repeat(np.arange(4), lengths))
    weights = torch.from_numpy(token_weights(lengths, settings, 12))[row_of]
    coefficients = torch.tensor([1.3, -0.7, -1.9, 0.6], dtype=torch.float64)[row_of]
    behavior = torch.from_numpy(rng.uniform(-3, -0.1, size=19))
    # Ratios on every side of every clip, none within 0.02 of a kink in log-ratio.
    kinks = np.log([0.8, 1.28, 10.0])
    offsets = rng.uniform(-1.2, 3.0, size=19)
    near = np.abs(offsets[:, None] - kinks).min(1) < 0.02
    logprobs = behavior + torch.from_numpy(np.where(near, offsets + 0.05, offsets))
    reference = torch.from_numpy(rng.uniform(-3, -0.1, size=19))

    def loss(x: torch.Tensor) -> torch.Tensor:
        result = token_loss(x, behavior, reference, coefficients, settings, lengths.tolist())
        return (result.losses_C * weights).sum()

    x = logprobs.clone().requires_grad_(True)
    loss(x).backward()
    step = 1e-6
    differences = [
        (loss(logprobs + step * unit) - loss(logprobs - step * unit)).item() / (2 * step)
        for unit in torch.eye(19, dtype=torch.float64)
    ]
    assert x.grad.tolist() == pytest.approx(differences, rel=1e-6, abs=1e-9)
    assert x.grad.abs().max() > 1e-3


def test_a_token_counts_as_clipped_exactly_where_the_surrogate_has_no_gradient():
    rng = np.random.default_rng(3)
    log_ratios = torch.from_numpy(rng.uniform(-2, 4, size=500)).requires_grad_(True)
    advantages = torch.from_numpy(rng.choice([-1.5, -0.2, 0.4, 2.0], size=500))
    result = clipped_surrogate(log_ratios, torch.zeros(500).double(), advantages, PAPER)
    result.losses_C.sum().backward()
    assert torch.equal(result.clipped_C, log_ratios.grad == 0)
    assert 50 < int(result.clipped_C.sum()) < 450


def test_row_statistics_match_a_plain_loop():
    rng = np.random.default_rng(11)
    row_of = torch.from_numpy(np.repeat([0, 1, 3], [4, 1, 6]))  # row 2 has no tokens
    behavior = torch.from_numpy(rng.uniform(-3, 0, size=11))
    logprobs = behavior + torch.from_numpy(rng.normal(size=11))
    coefficients = torch.tensor([1.0, -2.0, 0.0, 0.5]).double()[row_of]
    result = token_loss(logprobs, behavior, torch.zeros(11).double(), coefficients, PAPER)
    weighted, entropies = result.losses_C * 0.25, torch.from_numpy(rng.uniform(0, 2, size=11))
    kl = torch.from_numpy(rng.uniform(0, 1, size=11))
    table = row_statistics(result, weighted, entropies, kl, row_of, rows=4)
    assert table.dtype == torch.float64
    for row in range(4):
        members = [i for i in range(11) if int(row_of[i]) == row]
        deltas = [float(logprobs[i] - behavior[i]) for i in members]
        expected = {
            "loss": sum(float(weighted[i]) for i in members),
            "tokens": len(members),
            "clipped": sum(bool(result.clipped_C[i]) for i in members),
            "log_ratio": sum(deltas),
            "log_ratio_squared": sum(d * d for d in deltas),
            "approx_kl": sum(math.exp(d) - 1 - d for d in deltas),
            "ratio": sum(math.exp(d) for d in deltas),
            "ratio_squared": sum(math.exp(2 * d) for d in deltas),
            "log_ratio_max": max(deltas, default=-math.inf),
            "entropy": sum(float(entropies[i]) for i in members),
            "reference_kl": sum(float(kl[i]) for i in members),
        }
        assert set(expected) == set(ROW_STATISTICS)
        for name, value in expected.items():
            assert table[row, ROW_STATISTICS.index(name)].item() == pytest.approx(value), name


def test_the_mean_ratio_of_impossible_tokens_is_huge_but_finite():
    """A token that the behaviour policy all but excluded: e^700 in place of infinity."""
    zeros = torch.zeros(1, dtype=torch.float64)
    result = token_loss(zeros, zeros - 1000, zeros, zeros, PAPER)
    table = row_statistics(result, zeros, zeros, zeros, torch.zeros(1, dtype=torch.int64), rows=1)
    assert table[0, ROW_STATISTICS.index("ratio")].item() == pytest.approx(math.exp(700))
    assert table[0, ROW_STATISTICS.index("log_ratio_max")].item() == 1000


# --- tokens that are masked by their ratio -------------------------------------------------------


def masked(ratios, advantages, lengths, **settings):
    """The losses at these ratios, and which of them have no gradient."""
    logs = torch.tensor(ratios).double().log().requires_grad_(True)
    advantages_C = torch.tensor(advantages).double().repeat_interleave(torch.tensor(lengths))
    zeros, chosen = torch.zeros(len(ratios)).double(), LossSection(**settings)
    result = token_loss(logs, zeros, zeros, advantages_C, chosen, lengths)
    result.losses_C.sum().backward()
    assert torch.equal(result.clipped_C, logs.grad == 0)
    return result.losses_C.tolist(), (logs.grad == 0).tolist()


def test_a_veto_takes_what_follows_the_first_ratio_outside_of_negative_rollouts():
    """The third row has A > 0, the second no ratio outside."""
    ratios = [1.0, 3.0, 1.0, 1.1, 0.9, 1.0, 1.2, 3.0, 1.0]
    lengths, wide = [4, 3, 2], {"epsilon": 0.9, "epsilon_high": 9.0}
    losses, without = masked(ratios, [-1, -1, 1], lengths, negative_veto=[0.5, 2.0], **wide)
    assert without == [False, False, True, True, *[False] * 5]
    assert losses == pytest.approx([1.0, 3.0, 0.0, 0.0, 0.9, 1.0, 1.2, -3.0, -1.0])


def test_a_mask_takes_tokens_or_whole_rollouts():
    """Products: 1.5 * 1.5 = 2.25 and 3 * 0.5 = 1.5."""
    ratios, wide = [1.5, 1.5, 3.0, 0.5], {"epsilon": 0.9, "epsilon_high": 9.0}
    bounds = {"low": 0.6, "high": 2.0}
    _, tokens = masked(ratios, [1, 1], [2, 2], ratio_mask=bounds, **wide)
    assert tokens == [False, False, True, True]
    _, rollouts = masked(ratios, [1, 1], [2, 2], ratio_mask={**bounds, "level": "sequence"}, **wide)
    assert rollouts == [True, True, False, False]


def test_the_mask_of_negative_rollouts_is_trl_s_with_its_numbers():
    """Mean of -log ρ: of the first two rows log 2 / 2 = 0.35, of the third 0.05."""
    from trl import GRPOTrainer

    ratios, lengths = [0.5, 1.0, 0.5, 1.0, math.exp(-0.05)], [2, 2, 1]
    wide = {"epsilon": 0.9, "epsilon_high": 9.0}
    _, found = masked(ratios, [-1, 1, -1], lengths, max_negative_kl=0.2, **wide)
    logps = torch.tensor([[0.5, 1.0], [0.5, 1.0], [math.exp(-0.05), 1.0]]).log()
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    advantages = torch.tensor([[-1.0], [1.0], [-1.0]])
    kept = GRPOTrainer.get_off_policy_mask(advantages, logps, torch.zeros(3, 2), mask, 0.2)
    assert found == [True, True, False, False, False]
    assert kept.flatten().tolist() == [0, 1, 1]


def test_masks_leave_the_kl_term():
    settings = LossSection(ratio_mask=RatioBounds(high=2.0), beta=1.0)
    logs, zero = torch.tensor([3.0]).log(), torch.zeros(1)
    result = token_loss(logs, zero, zero, -torch.ones(1), settings, [1])
    assert result.losses_C.tolist() == pytest.approx([1 / 3 - math.log(1 / 3) - 1])
