"""TRL tensors and rollouts: nothing of a row is lost, and only what trains trains."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_replay import ReplayBuffer, ReplayConfig
from grpo_replay.errors import UsageError
from grpo_replay.integrations.grpo_config import GRPO_CONFIG
from grpo_replay.integrations.host_rows import rollouts_of_groups
from grpo_replay.integrations.outcomes import outcomes_of
from grpo_replay.integrations.trl_rows import ROW, Texts, rows_of, to_tensors, trained_mask

PAD, EOS = 0, 9
TOKENS = [[7, 8, EOS], [EOS], [7, EOS], [7, 7]]


def batch(**changes):
    """Two groups of two rows: prompts of 2 and 1 tokens, completions of 3, 1, 2 and 2."""
    return {
        "prompt_ids": torch.tensor([[4, 5], [4, 5], [PAD, 6], [PAD, 6]]),
        "prompt_mask": torch.tensor([[1, 1], [1, 1], [0, 1], [0, 1]]),
        "completion_ids": torch.tensor([[7, 8, EOS], [EOS, PAD, PAD], [7, EOS, PAD], [7, 7, PAD]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]]),
        "advantages": torch.tensor([0.75, -0.75, 0.5, -0.5]),
        "old_per_token_logps": -torch.arange(1, 13).reshape(4, 3) / 8,
        "num_items_in_batch": torch.tensor(8),
        **changes,
    }


def rows(output, rewards=(1.0, -1.0, 1.0, -1.0)):
    scores_BF = np.array(rewards, dtype=float).reshape(4, -1)
    texts = Texts(["4+5", "4+5", "6", "6"], list("abcd"), TOKENS, scores_BF)
    return rows_of(output, texts, np.ones(scores_BF.shape[1]), [EOS])


def rollouts(output, rewards=(1.0, -1.0, 1.0, -1.0), keep_zero_variance=False):
    return in_pairs(rows(output, rewards), keep_zero_variance)


def in_pairs(rows, keep_zero_variance=False):
    """Their rollouts in step 3, with ids from 10 on, groups from 5 on."""
    settings = ReplayConfig.of("ours", drop_zero_variance=not keep_zero_variance)
    buffer = ReplayBuffer(settings, group_size=2)
    buffer.last_step, buffer.next_rollout_id, buffer.next_group_id = 2, 10, 5
    groups = [rows[:2], rows[2:]]
    return rollouts_of_groups(groups, buffer, "population", GRPO_CONFIG)


def test_a_row_becomes_a_rollout():
    first, second, third, fourth = rollouts(batch())
    assert (first.rollout_id, first.group_id, first.birth_step, first.policy_version) == (
        10, 5, 3, 2,
    )  # fmt: skip
    assert (fourth.rollout_id, fourth.group_id, fourth.completion_index) == (13, 6, 1)
    assert third.prompt_token_ids.tolist() == [6]
    assert third.completion_token_ids.tolist() == [7, EOS]
    assert second.behavior_logprobs.tolist() == [-0.5]
    assert (first.reward, first.group_reward_mean, first.group_reward_std) == (1.0, 0.0, 1.0)
    assert first.advantage == 0.75  # TRL's own
    assert [each.finish_reason for each in (first, second, third, fourth)] == [
        "stop", "stop", "stop", "length",
    ]  # fmt: skip
    assert first.prompt_id == second.prompt_id != third.prompt_id
    assert first.completion_text == "a"


@pytest.mark.parametrize("extra", [{}, {"tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]] * 2)}])
def test_rollouts_become_the_rows_they_were(extra):
    ratio = torch.tensor([[1.5, 0.5, 1.0], [2.0, 1.0, 1.0], [1.0, 0.25, 1.0], [1.0, 3.0, 1.0]])
    given = batch(
        importance_sampling_ratio=ratio,
        ref_per_token_logps=-torch.arange(1, 13).reshape(4, 3) / 4,
        sampling_per_token_logps=-torch.arange(1, 13).reshape(4, 3) / 16,
        **extra,
    )
    back = to_tensors(rollouts(given), range(4), given, PAD)
    mask = given["completion_mask"].bool()
    assert set(back) == set(given) - {"num_items_in_batch"} | {ROW}
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"):
        assert torch.equal(back[name], given[name]), name
    for name in ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps",
                 "importance_sampling_ratio", *extra):  # fmt: skip
        assert torch.equal(back[name][mask], given[name][mask]), name
    assert (back["importance_sampling_ratio"][~mask] == 1).all()  # no weight where nothing is


def test_a_ratio_of_the_sequence_stays_one_number():
    given = batch(importance_sampling_ratio=torch.tensor([[1.5], [2.0], [0.5], [1.0]]))
    back = to_tensors(rollouts(given), range(4), given, PAD)
    assert torch.equal(back["importance_sampling_ratio"], given["importance_sampling_ratio"])


def test_a_row_of_padding_trains_on_nothing():
    given = batch()
    back = to_tensors(rollouts(given)[:2], [0, -1], given, PAD)
    assert back["completion_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert back["advantages"].tolist() == [0.75, 0.0]


@pytest.mark.parametrize("logprob", [-1e-9, -400.0])
def test_where_no_token_trains_the_loss_is_finite_for_every_log_prob(logprob):
    """TRL multiplies it by 0 there, so it may not be infinite or NaN (rows of padding, and the
    padding behind a completion)."""
    given = batch(ref_per_token_logps=torch.full((4, 3), -0.5))
    given["old_per_token_logps"][1] = -400.0  # the row of padding is a copy of this
    composed = to_tensors(rollouts(given)[:2], [0, -1], given, PAD, multiple=4)
    idle = ~composed["completion_mask"].bool()
    now = torch.full(idle.shape, logprob)
    ratio = torch.exp(now - composed["old_per_token_logps"])[idle]
    gap = (composed["ref_per_token_logps"] - now)[idle]
    assert idle.sum() == 5 and ratio.isfinite().all()
    assert (torch.exp(gap) - gap - 1).isfinite().all()


@pytest.mark.parametrize("width", [1, 3])
def test_prompts_and_completions_are_padded_to_the_multiple(width):
    given = batch(
        importance_sampling_ratio=torch.full((4, width), 0.5), tool_mask=torch.ones(4, 3).long()
    )
    back = to_tensors(rollouts(given), range(4), given, PAD, multiple=4)
    plain = to_tensors(rollouts(given), range(4), given, PAD)
    assert back["importance_sampling_ratio"].shape == (4, 4 if width == 3 else 1)
    for name in ("completion_ids", "completion_mask", "old_per_token_logps", "tool_mask"):
        assert back[name].shape == (4, 4) and torch.equal(back[name][:, :3], plain[name])
    assert back["prompt_ids"].tolist()[2] == [PAD, PAD, PAD, 6]
    assert back["prompt_mask"].tolist()[0] == [0, 0, 1, 1]


def test_a_log_prob_that_vllm_does_not_have_is_the_trainers():
    sampler = torch.full((4, 3), -0.25)
    sampler[0, 1] = torch.nan
    first = rollouts(batch(sampling_per_token_logps=sampler))[0]
    assert first.sampler_logprobs.tolist() == [-0.25, first.behavior_logprobs[1], -0.25]


def test_groups_without_signal_are_dropped_or_kept():
    output = batch(advantages=torch.tensor([0.0, 0.0, 0.5, -0.5]))
    rewards = (1.0, 1.0, 1.0, -1.0)
    dropped = rollouts(output, rewards)
    assert [each.kept for each in dropped] == [False, False, True, True]
    assert dropped[0].advantage is None and dropped[0].behavior_logprobs is None
    assert all(each.kept for each in rollouts(output, rewards, keep_zero_variance=True))


def test_a_reward_that_did_not_come_and_a_truncated_row_leave_the_batch():
    masked = batch()
    masked["completion_mask"][3] = 0
    found = rollouts(masked, (1.0, np.nan, 1.0, -1.0))
    assert [each.kept for each in found] == [False, False, True, False]  # one reward is no group
    assert found[1].reward is None and found[1].verdict == "none"
    assert found[3].completion_token_ids.tolist() == [7, 7]  # without padding
    assert found[3].finish_reason == "length"


def test_a_group_of_one_reward_is_dropped_also_if_groups_without_signal_are_kept(tmp_path):
    found = rollouts(batch(), (1.0, np.nan, 1.0, -1.0), keep_zero_variance=True)
    assert [each.kept for each in found] == [False, False, True, True]
    assert found[0].group_reward_std is None and found[0].advantage is None
    buffer = ReplayBuffer(ReplayConfig.of("fifo"), 2)
    fresh = [replace(each, birth_step=1) for each in found if each.kept]
    buffer.step(fresh, generated=4)
    buffer.save(tmp_path / "buffer.parquet")
    assert len(ReplayBuffer.load(tmp_path / "buffer.parquet")) == 2


def test_several_rewards_are_summed_with_their_weights():
    scores_BF = np.array([[1.0, 0.5], [0.0, 0.5], [1.0, np.nan], [0.0, 1.0]])
    texts = Texts(["p"] * 4, ["c"] * 4, TOKENS, scores_BF)
    found = rows_of(batch(), texts, np.array([1.0, 2.0]), [EOS])
    assert [row.reward for row in found] == [2.0, 1.0, 1.0, 2.0]
    assert found[0].reward_scores == (1.0, 0.5)
    assert found[2].reward_scores == pytest.approx((1.0, np.nan), nan_ok=True)


@pytest.mark.parametrize(
    "scores, correct",
    [
        ([[1.0, 0.0], [0.5, 1.0]], 1),  # sums 0.7 and 1.35
        ([[1.0, np.nan], [0.5, np.nan]], 1),  # sums 0.7 and 0.35
        ([[np.nan, 1.0], [np.nan, 0.5]], 1),  # a task of the second function
        ([[0.0, 2.0], [np.nan, np.nan]], 0),
    ],
)
def test_of_several_functions_the_first_decides_what_is_correct(scores, correct):
    """As `inspect-buffer --verify` counts from the log."""
    scores_BF = np.array([*scores, [0.0, 0.0], [1.0, 0.0]])
    texts = Texts(["p"] * 4, ["c"] * 4, TOKENS, scores_BF)
    first = in_pairs(rows_of(batch(), texts, np.array([0.7, 1.0]), [EOS]))
    assert first[0].group_correct == correct
    assert len({len(each.reward_scores) for each in first if each.reward is not None}) == 1


def test_images_and_advantages_per_token_are_refused():
    with pytest.raises(UsageError, match="pixel_values"):
        rows(batch(pixel_values=torch.zeros(4, 2)))
    with pytest.raises(UsageError, match="advantages have shape"):
        rows(batch(advantages=torch.zeros(4, 3)))


def test_outcomes_count_the_tokens_that_train():
    """Ratios 1.5, (masked), 0.5, of which the first is clipped."""
    given = batch(tool_mask=torch.tensor([[1, 0, 1]] * 4))
    composed = to_tensors(rollouts(given), [0, -1, 2, 3], given, PAD)
    shift = torch.log(torch.tensor([1.5, 99.0, 0.5]))
    logprobs = composed["old_per_token_logps"] + shift
    clipped = torch.tensor([[True, True, False]] + 3 * [[False] * 3])
    of_batch = (
        composed[ROW].tolist(),
        composed["old_per_token_logps"],
        trained_mask(composed),
    )
    found = outcomes_of(*of_batch, logprobs, clipped, torch.full((4, 3), 0.25))
    assert set(found) == {0, 2, 3}
    assert (found[0].tokens, found[0].clip_fraction, found[0].entropy) == (2, 0.5, 0.25)
    assert found[0].ratio_mean == pytest.approx(1.0) and found[0].ratio_max == pytest.approx(1.5)
    assert found[0].ratio_squared_mean == pytest.approx(1.25)
    assert found[3].clip_fraction == 0.0
    logratios = np.log([1.5, 0.5])
    assert found[0].log_ratio_mean == pytest.approx(logratios.mean())
    assert found[0].log_ratio_var == pytest.approx(logratios.var())
    assert found[0].approx_kl == pytest.approx(np.mean([0.5, -0.5] - logratios))
    unknown = outcomes_of(*of_batch)[0]
    assert unknown.tokens == 2 and np.isnan([unknown.clip_fraction, unknown.ratio_max]).all()


def test_a_rollout_that_was_stored_without_a_key_of_the_batch_is_refused_by_its_name():
    given = batch(ref_per_token_logps=torch.zeros(4, 3))
    with pytest.raises(UsageError, match=r"has ref_per_token_logps, .* without it"):
        to_tensors(rollouts(batch()), range(4), given, PAD)


def test_the_text_of_an_episode_has_its_tool_calls():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    episode = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    texts = Texts(["p"] * 4, [episode, *"bcd"], TOKENS, np.ones((4, 1)))
    first = rows_of(batch(), texts, np.ones(1), [EOS])[0]
    assert first.completion_text == '{"name": "add", "arguments": {"a": 1}}\n3\nIt is 3.'


def test_a_group_of_several_prompts_is_refused():
    own = batch(prompt_ids=torch.tensor([[4, 5], [4, 6], [PAD, 6], [PAD, 6]]))
    with pytest.raises(UsageError, match=r"2 completions of group 0 have 2 different.*reset\(seed"):
        rollouts(own)
