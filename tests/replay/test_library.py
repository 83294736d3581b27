"""The buffer for other trainers: one call a step, saved and continued, and the traps refused."""

import doctest
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from buffer_makers import ids, make_group, make_rollout

from grpo_replay import Entry, ReplayBuffer, ReplayConfig
from grpo_replay.errors import RecipeError, SnapshotError
from grpo_replay.recipe import REPLAY_PRESETS, Recipe, ReplaySection, load_recipe, resolve_recipe
from grpo_replay.replay import replay_buffer
from grpo_replay.replay.compose import buffer_step
from grpo_replay.replay.insertion import LARGEST_LOGPROB
from grpo_replay.replay.snapshot import restore_snapshot, write_snapshot
from grpo_replay.types import stream

G = 4
PAPER_A = {"warmup_steps": 3, "max_age_steps": 3, "capacity_rollouts": 30}
CHANGES = {
    "grpo": {},
    "fifo": {"capacity_rollouts": 30, "ratio": 0.7},
    "ours": PAPER_A,
    "uniform": PAPER_A,
    "group_std": PAPER_A,
}


def config_of(preset):
    return ReplayConfig.of(preset, **CHANGES[preset])


def fresh_of(step):
    """0 to 4 groups, a function of the step alone."""
    rng = np.random.default_rng(step)
    rewards = rng.choice([-1.0, 0.25, 1.0], (int(rng.integers(5)), G))
    rewards[:, :2] = -1, 1
    return [
        rollout
        for g, rewards_G in enumerate(rewards)
        for rollout in make_group(100 * step + G * g, 10 * step + g, step, rewards_G)
    ]


def seen(buffer, batch):
    """What a step returned and left, to be compared."""
    state = buffer.get_state()
    arrays = (batch.ages, batch.replayed, batch.draw.probabilities, state["priority"],
              state["times_used"], state["last_used_step"])  # fmt: skip
    counters = [state[name] for name in ("evicted_by_capacity", "evicted_at")]
    whole = [each.tolist() for each in arrays]
    return ids(batch.entries), ids(state["entries"]), whole, counters


def test_presets_of_the_tests_are_all():
    assert CHANGES.keys() == REPLAY_PRESETS.keys()


def test_a_step_draws_as_a_run_does_from_the_stream_of_its_seed_and_step():
    buffer, other = ReplayBuffer(config_of("fifo"), G, seed=7), ReplayBuffer(config_of("fifo"), G)
    for step in range(1, 8):
        expected = buffer_step(other, fresh_of(step), step, 16, stream(7, step, 1))
        assert seen(buffer, buffer.step(fresh_of(step), generated=16)) == seen(other, expected)
    assert len(expected.draw.entries) > 10


@pytest.mark.parametrize("preset", CHANGES)
def test_saved_and_continued_is_never_interrupted(tmp_path, preset):
    buffer, path = ReplayBuffer(config_of(preset), G, seed=3), tmp_path / "buffer.parquet"
    for step in range(1, 10):
        buffer.step(fresh_of(step), generated=16)
    assert buffer.next_rollout_id == 1 + max(
        r.rollout_id for s in range(1, 10) for r in fresh_of(s)
    )
    buffer.save(path)
    restored = ReplayBuffer.load(path)
    names = ("settings", "group_size", "seed", "last_step", "next_rollout_id", "next_group_id")
    for step in range(10, 20):
        for name in names:
            assert getattr(restored, name) == getattr(buffer, name), name
        batches = buffer.step(fresh_of(step), 16), restored.step(fresh_of(step), 16)
        assert seen(buffer, batches[0]) == seen(restored, batches[1])
    buffer.save(path)
    restored.save(tmp_path / "other.parquet")
    assert path.read_bytes() == (tmp_path / "other.parquet").read_bytes()


def test_a_checkpoints_buffer_can_be_loaded_and_a_saved_one_restored(tmp_path):
    buffer = ReplayBuffer(config_of("ours"), G)
    for step in range(1, 6):
        buffer.step(fresh_of(step))
    write_snapshot(tmp_path / "run.parquet", buffer, 5)
    assert (
        b"library" not in pq.read_schema(tmp_path / "run.parquet").metadata[b"grpo_replay.buffer"]
    )
    loaded = ReplayBuffer.load(tmp_path / "run.parquet")
    assert (loaded.next_step, loaded.seed) == (6, 0)
    assert loaded.next_rollout_id == 1 + max(ids(buffer.rollouts()))
    buffer.save(tmp_path / "library.parquet")
    restored = ReplayBuffer(buffer.settings, G)
    restore_snapshot(tmp_path / "library.parquet", restored)
    assert ids(restored.rollouts()) == ids(buffer.rollouts())


@pytest.mark.parametrize("preset", REPLAY_PRESETS)
@pytest.mark.parametrize("section", [ReplaySection, ReplayConfig])
def test_a_preset_is_applied_to_a_section_as_to_a_recipe(preset, section):
    recipe = resolve_recipe([{"replay": {"preset": preset}}])
    assert section(preset=preset).model_dump() == recipe.replay.model_dump()
    assert ReplayConfig.of(preset).preset == preset
    changed = section(preset=preset, ratio=0.25, drop_zero_variance=False)
    assert (changed.ratio, changed.drop_zero_variance) == (0.25, False)
    whole = load_recipe("tiny", [f"replay.preset={preset}", "replay.unit=rollout"])
    assert Recipe.model_validate(whole.model_dump()) == whole


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("paper", {}, r"replay.preset: .*'grpo'.*'paper'"),
        ("ours", {"ratoi": 1}, r"'replay.ratoi'.*'ratio'"),
        ("ours", {"priority": len}, "replay.priority: Input should be a valid string"),
        ("fifo", {"unused_first": True}, "replay.with_replacement"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(name, changes, message):
    with pytest.raises(RecipeError, match=message):
        ReplayConfig.of(name, **changes)
    with pytest.raises(RecipeError, match=message):
        ReplayConfig(preset=name, **changes)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 0.01])
@pytest.mark.parametrize("preset", ["ours", "fifo"])
def test_log_probs_that_are_none_are_refused_with_the_id_and_nothing_changes(preset, value):
    buffer = ReplayBuffer(config_of(preset), G)
    for step in range(1, 5):
        before = seen(buffer, buffer.step(fresh_of(step)))[1:]
    fresh = fresh_of(8)
    fresh = [replace(rollout, birth_step=5) for rollout in fresh]
    fresh[2].behavior_logprobs[-1] = value
    with pytest.raises(ValueError, match=rf"rollout {fresh[2].rollout_id}: .*log-prob of token"):
        buffer.step(fresh)
    assert buffer.last_step == 4
    state = buffer.get_state()
    assert (ids(state["entries"]), state["times_used"].tolist()) == (before[0], before[1][4])
    fresh[2].behavior_logprobs[-1] = 0.0
    fresh[1].behavior_logprobs[-1] = LARGEST_LOGPROB
    buffer.step(fresh)


@pytest.mark.parametrize(
    "name, value",
    [
        ("sampler_logprobs", np.zeros(2, np.float32)),
        ("sampler_logprobs", np.zeros(3)),
        ("advantage", 1 / 3),
        ("group_reward_std", None),
        ("reward", 1e300),
        ("completion_token_ids", np.zeros(3, np.int64)),
    ],
)
def test_other_lengths_types_and_numbers_that_cannot_be_saved_are_refused(name, value):
    words = name.split("_")[0]
    with pytest.raises(ValueError, match=f"rollout 1: .*{words}"):
        ReplayBuffer(config_of("fifo"), G).step([replace(make_rollout(1), **{name: value})])


def test_a_reward_that_is_no_number_is_not_to_be_rounded():
    with pytest.raises(ValueError, match=r"reward is nan: .*leave the rollout out"):
        ReplayBuffer(config_of("fifo"), G).step([replace(make_rollout(1), reward=np.nan)])


@pytest.mark.parametrize(
    "extras, refused",
    [
        ({"weight": np.ones(3, np.float32)}, ""),
        ({"experts": np.zeros((3, 2), np.int32), "empty": np.zeros(0)}, ""),
        ({"a-b": np.ones(3)}, "'a-b'"),
        ({"weight": [1.0, 2.0]}, "weight: list"),
        ({"weight": np.array(["a"])}, "weight: <U1"),
        ({"weight": np.zeros((3, 0))}, r"weight: .*\(3, 0\)"),
    ],
)
def test_extras_are_named_arrays_of_one_dimension_or_more(extras, refused):
    buffer = ReplayBuffer(config_of("fifo"), G)
    rollout = replace(make_rollout(1), extras=extras)
    if not refused:
        assert buffer.step([rollout]).rollouts[0].extras is extras
        return
    with pytest.raises(ValueError, match=f"rollout 1: .*{refused}"):
        buffer.step([rollout])
    assert len(buffer) == 0


def test_extras_of_one_name_have_one_type_and_shape_so_that_they_can_be_saved(tmp_path):
    buffer = ReplayBuffer(config_of("fifo"), G)
    given = replace(make_rollout(1), extras={"weight": np.zeros(3, np.float32)})
    for array in (np.zeros(3), np.zeros((3, 2), np.float32)):
        other = replace(make_rollout(3), extras={"weight": array, "more": np.zeros(1)})
        with pytest.raises(ValueError, match=r"rollout 3: extras weight: float"):
            buffer.step([given, other])
    buffer.step([given, make_rollout(2)])
    with pytest.raises(ValueError, match=r"rollout 3: extras weight: float"):
        buffer.step([other])
    buffer.step([replace(make_rollout(3), extras={"more": np.zeros((1, 2), np.int8)})])
    buffer.save(tmp_path / "buffer.parquet")
    assert len(ReplayBuffer.load(tmp_path / "buffer.parquet")) == 3


def test_the_capacity_counts_rollouts_and_the_group_size_completions():
    """Eight groups of four do not fit into 8; nor is a group of four one of two."""
    groups = [r for g in range(8) for r in make_group(G * g, g, 1, [1, -1, -1, -1])]
    small = ReplayBuffer(ReplayConfig.of("ours", capacity_rollouts=8), G)
    with pytest.raises(ValueError, match=r"capacity_rollouts 8 .*32"):
        small.step(groups)
    with pytest.raises(ValueError, match=r"capacity_rollouts 8 .*9"):
        small.step(groups[:4], generated=9)
    with pytest.raises(ValueError, match=r"generated 3, but 4 are fresh"):
        small.step(groups[:4], generated=3)
    small.step(groups[:8])
    assert len(small) == 8
    with pytest.raises(ValueError, match=r"group 0 .*group_size 2"):
        ReplayBuffer(config_of("ours"), 2).step(groups)


def test_a_draw_in_proportion_to_what_was_generated_must_know_it():
    dropping = ReplayBuffer(ReplayConfig.of("fifo", ratio=1, drop_zero_variance=True), G)
    groups = make_group(0, 0, 1, [1, -1, -1, -1])
    with pytest.raises(ValueError, match="pass generated"):
        dropping.step(groups)
    assert len(dropping) == 0 and len(dropping.step(groups, generated=3 * G).entries) == 3 * G


def test_new_groups_have_the_next_ids_and_keep_what_the_config_keeps():
    given = {
        "prompt_id": "p", "prompt_token_ids": [1], "completion_token_ids": [[2], [3]],
        "behavior_logprobs": [[-1.0], [-2.0]],
    }  # fmt: skip
    buffer = ReplayBuffer(config_of("ours"), 2)
    assert buffer.new_group(**given, rewards=[1.0, 1.0]) == []
    one, other = (
        buffer.new_group(**given, rewards=[1.0, 0.0]),
        buffer.new_group(**given, rewards=[None, 0.0]),
    )
    assert ids(one) == [2, 3] and one[0].group_id == 1 and one[0].birth_step == 1 and other == []
    buffer.step(one)
    assert (buffer.next_rollout_id, buffer.next_group_id, buffer.next_step) == (6, 3, 2)
    kept = ReplayBuffer(config_of("fifo"), 2).new_group(**given, rewards=[1.0, 1.0])
    assert [rollout.advantage for rollout in kept] == [0.0, 0.0]


def handles(step, count=4):
    return [
        Entry(10 * step + i, step, step,
              {"advantage": (-1.0) ** i / (i + 3), "group_reward_std": 0.7},
              payload=("row", step, i))
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("column, values", [("reward", [0.0, 1.0]), ("completion_tokens", [3, 9])])
def test_a_priority_reads_what_an_entry_was_given_and_refuses_what_it_was_not(
    tmp_path, column, values
):
    own = tmp_path / "own.py"
    own.write_text(
        f"def own(columns):\n    return columns[{column!r}] * 1.0\n\nown.columns = ({column!r},)\n"
    )
    buffer = ReplayBuffer(ReplayConfig.of("ours", priority=f"{own}:own"), G)
    whole = [Entry(i, 1, 1, {column: value}, f"row {i}") for i, value in enumerate(values)]
    with pytest.raises(RecipeError, match=rf"own.py:own reads {column}.*entry 10 "):
        buffer.step(handles(1))
    buffer.step(whole)
    assert buffer.column("priority").tolist() == [value + 1e-6 for value in map(float, values)]
    buffer.save(tmp_path / "buffer.parquet")
    loaded = ReplayBuffer.load(tmp_path / "buffer.parquet", payload_of="row {}".format)
    assert [each.columns for each in loaded.entries()] == [{column: value} for value in values]
    assert loaded.rollouts() == ("row 0", "row 1")


@pytest.mark.parametrize("composition", ["fresh_anchored", "pool", "buffer_only"])
@pytest.mark.parametrize("columns", [{"reward": 1.0}, {"advantage": np.nan}])
def test_a_step_that_the_priority_refuses_draws_nothing_and_can_be_repeated(composition, columns):
    config = ReplayConfig.of("ours", composition=composition, warmup_steps=0, ratio=1)
    buffer, other = ReplayBuffer(config, G), ReplayBuffer(config, G)
    batches = [each.step(handles(1), generated=4) for each in (buffer, other)]
    refused = [replace(entry, columns=columns) for entry in handles(2)]
    for _ in range(3):
        with pytest.raises(RecipeError, match=r"replay.priority abs_advantage.* 20\b"):
            buffer.step(refused, generated=4)
        assert buffer.last_step == 1
        assert seen(buffer, batches[0]) == seen(other, batches[1])
    batches = [each.step(handles(2), generated=4) for each in (buffer, other)]
    assert seen(buffer, batches[0]) == seen(other, batches[1])


def test_the_positive_bias_names_what_an_entry_lacks():
    buffer = ReplayBuffer(ReplayConfig.of("fifo", positive_fraction=0.5), G)
    with pytest.raises(RecipeError, match=r"replay.positive_fraction reads advantage.*entry 3 "):
        buffer.step([Entry(3, 1, 1, {}, None)])
    assert len(buffer) == 0


def test_whole_rollouts_and_handles_are_not_saved_together(tmp_path):
    buffer = ReplayBuffer(config_of("fifo"), G)
    buffer.step([*handles(1), *make_group(20, 20, 1, [1, -1])])
    with pytest.raises(ValueError, match="2 of 6 stored entries are whole rollouts"):
        buffer.save(tmp_path / "buffer.parquet")


# Where 100 rollouts have room, the age limit binds.
LIMITS = [(preset, room, 0.0) for preset in sorted(CHANGES) for room in (10, 100)]


@pytest.mark.parametrize(
    ("preset", "capacity", "fraction"), [*LIMITS, ("ours", 10, 0.5), ("fifo", 10, 0.5)]
)
def test_handles_are_reported_once_when_they_left_and_never_before_their_batch_is_done(
    preset, capacity, fraction
):
    changes = {"capacity_rollouts": capacity, "positive_fraction": fraction}
    config = ReplayConfig.of(preset, **CHANGES[preset] | changes)
    held, reported = set(), []

    def forget(gone):
        assert gone
        reported.extend(entry.payload for entry in gone)
        held.difference_update(entry.payload for entry in gone)

    buffer = ReplayBuffer(config, G, on_evict=forget)
    for step in range(1, 15):
        fresh = handles(step)
        held |= {entry.payload for entry in fresh}
        batch = buffer.step(fresh)
        assert set(batch.rollouts) <= held
    buffer.evict(15)
    stored = buffer.rollouts()
    assert held == set(stored) and len(reported) == len(set(reported)) == 14 * G - len(stored)
    assert bool(reported) == (capacity == 10 or preset != "fifo")


def test_a_buffer_set_back_to_a_state_reports_nothing_that_it_stores_as_gone():
    """Step 3 pushes out the entries of step 1, which the state from before it still has."""
    reported = []
    buffer = ReplayBuffer(ReplayConfig.of("fifo", capacity_rollouts=4), 2, on_evict=reported.extend)
    for step in (1, 2):
        buffer.step(handles(step, count=2))
    state = buffer.get_state()
    buffer.step(handles(3, count=2))
    buffer.set_state(state)
    buffer.evict(4)
    assert reported == [] and ids(buffer.entries()) == [10, 11, 20, 21]


def test_handles_are_saved_without_payloads_and_get_them_back(tmp_path):
    buffer = ReplayBuffer(config_of("fifo"), G)
    for step in range(1, 4):
        buffer.step(handles(step))
    buffer.save(tmp_path / "b.parquet")
    with pytest.raises(SnapshotError, match=r"b\.parquet.*payload"):
        ReplayBuffer.load(tmp_path / "b.parquet")
    loaded = ReplayBuffer.load(
        tmp_path / "b.parquet", payload_of=lambda i: ("row", i // 10, i % 10)
    )
    assert loaded.rollouts() == buffer.rollouts()
    assert seen(loaded, loaded.step(handles(4))) == seen(buffer, buffer.step(handles(4)))


def test_the_library_loads_no_deep_learning():
    code = (
        "import sys\n"
        "import grpo_replay\n"
        "assert not {'numpy', 'pydantic'} & set(sys.modules)\n"
        "from grpo_replay import Entry, ReplayBuffer, ReplayConfig, Rollout\n"
        "ReplayBuffer(ReplayConfig.of('ours'), group_size=8).step([])\n"
        "print(sorted({'torch', 'transformers', 'deepspeed', 'pyarrow'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    with pytest.raises(ImportError, match="ReplayBufer"):
        exec("from grpo_replay import ReplayBufer")


def test_the_example_of_the_class_is_true():
    results = doctest.testmod(replay_buffer)
    assert (results.failed, results.attempted) == (0, 4)


def test_a_group_is_made_of_tensors_of_any_precision_with_a_gradient():
    import torch

    buffer = ReplayBuffer(ReplayConfig.of("ours", warmup_steps=0), 2)
    logprobs = torch.tensor([-0.5, -1.5], dtype=torch.bfloat16, requires_grad=True)
    first, _ = buffer.new_group(
        prompt_id="p",
        prompt_token_ids=[1],
        completion_token_ids=[torch.tensor([2**24 + 1, 3]), torch.tensor([4, 5])],
        behavior_logprobs=[logprobs, logprobs],
        completion_mask=[torch.tensor([True, False]), torch.tensor([True, True])],
        rewards=[1.0, -1.0],
    )
    assert first.completion_token_ids.tolist() == [2**24 + 1, 3]
    assert first.behavior_logprobs.tolist() == [-0.5, -1.5]
    assert first.behavior_logprobs.dtype == np.float32
    assert first.completion_mask.tolist() == [True, False]
