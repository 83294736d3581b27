"""What another trainer needs of the buffer: births, one prompt a group, splits, copies."""

from copy import copy

import numpy as np
import pytest

from grpo_replay import ReplayBuffer, ReplayConfig
from grpo_replay.errors import SnapshotError
from grpo_replay.recipe import BatchSection
from grpo_replay.replay.batch import even_sizes, update_indices
from grpo_replay.types import stream

CONFIG = ReplayConfig.of("ours", ratio=1.0, warmup_steps=0, max_age_steps=2)


def group(buffer, rewards=(1.0, -1.0), **changes):
    size = len(rewards)
    given = {
        "prompt_id": "p", "prompt_token_ids": [5, 6],
        "completion_token_ids": [[1], [2, 3], [4], [5]][:size],
        "behavior_logprobs": [[-0.5], [-1.0, -0.25], [-2.0], [-4.0]][:size],
        "rewards": list(rewards),
    }  # fmt: skip
    return buffer.new_group(**given | changes)


def test_a_group_that_was_sampled_ahead_is_as_old_as_its_policy():
    buffer = ReplayBuffer(CONFIG, 2)
    for _ in range(3):
        buffer.step(group(buffer))
    ahead = group(buffer, birth_step=2)
    assert {(each.birth_step, each.policy_version) for each in ahead} == {(2, 1)}
    assert [each.rollout_id for each in ahead] == [6, 7]
    assert {each.birth_step for each in group(buffer)} == {4}
    batch = buffer.step(ahead)
    assert batch.ages.tolist()[:2] == [0, 0] and not batch.replayed[:2].any()
    # At step 5 they are three steps old, one too many; those of step 3 are two.
    assert sorted(set(buffer.column("birth_step").tolist())) == [3]


@pytest.mark.parametrize("birth_step", [0, -1, 3])
def test_no_group_is_born_before_the_first_step_or_after_the_next(birth_step):
    buffer = ReplayBuffer(CONFIG, 2)
    buffer.step(group(buffer))
    with pytest.raises(ValueError, match=f"birth_step {birth_step}: .* at least 1 and at most 2"):
        group(buffer, birth_step=birth_step)
    assert (buffer.next_rollout_id, buffer.next_group_id) == (2, 1)


def test_a_saved_buffer_goes_on_with_the_settings_that_it_began_with(tmp_path):
    buffer, path = ReplayBuffer(CONFIG, 2), tmp_path / "buffer.parquet"
    buffer.step(group(buffer))
    buffer.save(path)
    spelled_out = ReplayConfig(**{**CONFIG.model_dump(), "preset": "uniform"})
    for same in (None, CONFIG, spelled_out):
        assert ReplayBuffer.load(path, same).settings == CONFIG
    other = ReplayConfig.of("ours", ratio=0.25, warmup_steps=0, max_age_steps=3)
    with pytest.raises(SnapshotError) as seen:
        ReplayBuffer.load(path, settings=other)
    assert str(seen.value).startswith(
        f"{path}: replay.ratio is 1.0 in the file and 0.25 in the settings given; "
        "replay.max_age_steps is 2 in the file and 3 in the settings given: a run keeps"
    )
    with pytest.raises(TypeError, match="ReplayConfig"):
        ReplayBuffer.load(path, {"ratio": 1.0})


def test_a_copy_before_a_step_is_what_a_resumed_run_goes_on_from(tmp_path):
    """A batch is planned ahead when the checkpoint is written: the resumed run plans it again."""
    buffer = ReplayBuffer(CONFIG, 2, seed=5)
    for _ in range(3):
        buffer.step(group(buffer))
    buffer.save(tmp_path / "at_the_end_of_step_3")
    before = copy(buffer)
    planned = buffer.step(group(buffer))
    before.save(tmp_path / "saved_later")
    saved = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert saved[0] == saved[1]
    resumed = ReplayBuffer.load(tmp_path / "saved_later")
    again = resumed.step(group(resumed))
    assert [each.rollout_id for each in again.entries] == [6, 7] + [
        each.rollout_id for each in planned.draw.entries
    ]
    assert np.array_equal(again.draw.probabilities, planned.draw.probabilities)
    assert before.step(group(before)).ages.tolist() == planned.ages.tolist()  # a rolled back step


@pytest.mark.parametrize("settings", [CONFIG, ReplayConfig.of("fifo")])
def test_a_group_of_one_completion_is_empty(settings):
    """It has no deviation, whatever `drop_zero_variance` says."""
    buffer = ReplayBuffer(settings, 2)
    assert group(buffer, rewards=[1.0]) == []
    assert (buffer.next_rollout_id, buffer.next_group_id) == (1, 1)


def test_extras_are_tensors_of_any_precision_as_log_probs_are(tmp_path):
    import torch

    reference = torch.tensor([-0.5, -1.25], dtype=torch.bfloat16, requires_grad=True)
    extras = [
        {"reference": reference[:length], "experts": torch.arange(2 * length).reshape(length, 2)}
        for length in (1, 2)
    ]
    buffer = ReplayBuffer(CONFIG, 2)
    buffer.step(group(buffer, extras=extras, behavior_logprobs=[reference[:1], reference]))
    buffer.save(tmp_path / "buffer.parquet")
    for stored in (buffer.rollouts(), ReplayBuffer.load(tmp_path / "buffer.parquet").rollouts()):
        assert stored[1].extras["reference"].tolist() == [-0.5, -1.25]
        assert stored[1].extras["reference"].dtype == np.float32
        assert stored[1].extras["experts"].tolist() == [[0, 1], [2, 3]]
        assert stored[1].extras["experts"].dtype == np.int64


@pytest.mark.parametrize(
    "prompts",
    [
        [[5, 6], [5, 7]],
        [[5, 6], [5]],
        np.array([[5, 6], [5, 7]]),
        [np.array([5, 6]), np.array([5])],
    ],
)
def test_several_prompts_in_a_group_are_refused_with_what_to_do(prompts):
    buffer = ReplayBuffer(CONFIG, 2)
    with pytest.raises(ValueError, match=r"prompt p: .*not of one prompt.*Make a group of each"):
        group(buffer, prompt_token_ids=prompts)
    assert buffer.next_group_id == 0


def test_more_completions_than_a_group_has_are_refused_when_the_group_is_made():
    buffer = ReplayBuffer(CONFIG, 2)
    with pytest.raises(ValueError, match="prompt p: 3 completions, more than group_size 2: give"):
        group(buffer, rewards=[1.0, -1.0, 1.0])
    assert buffer.next_rollout_id == 0


@pytest.mark.parametrize("updates", [1, 2, 3, 9])
def test_a_batch_is_split_as_a_run_of_this_package_splits_it(updates):
    buffer = ReplayBuffer(CONFIG, 4, seed=7)
    for _ in range(3):
        batch = buffer.step(group(buffer, rewards=[1.0, -1.0, 1.0, -1.0]))
    parts = buffer.split(batch, updates)
    assert sorted(row for part in parts for row in part) == list(range(8))
    assert [len(part) for part in parts] == even_sizes(8, min(updates, 8))
    section, rng = BatchSection(updates_per_step=updates), stream(7, 3, 2)
    expected = update_indices(batch, section, rng)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    again = [part.tolist() for part in buffer.split(batch, updates)]
    assert again == [part.tolist() for part in parts]


def test_a_batch_without_rows_has_no_updates():
    buffer = ReplayBuffer(CONFIG, 4)
    assert buffer.split(buffer.step([]), 2) == []


def test_shares_differ_by_one_the_larger_first():
    assert even_sizes(8, 3) == [3, 3, 2]
    assert even_sizes(2, 4) == [1, 1, 0, 0]
    assert even_sizes(0, 2) == [0, 0]
