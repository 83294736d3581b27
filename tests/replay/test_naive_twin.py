"""The buffer against a slow, obvious twin, driven by the same random operations."""

import math

import numpy as np
from buffer_makers import check_valid, ids, make_rollout
from hypothesis import event, given, settings
from hypothesis import strategies as st

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.insertion import entries_of
from grpo_replay.replay.priorities import EPSILON


class NaiveBuffer:
    """A list of dicts, oldest first; nothing is clever."""

    def __init__(self, section):
        self.section = section
        self.rows = []
        self.lost_to_capacity = 0

    def insert(self, rollouts, times_used, step):
        for rollout, used in zip(rollouts, times_used, strict=True):
            if self.section.priority == "abs_advantage":
                priority = abs(rollout.advantage) + EPSILON
            elif self.section.priority == "group_std":
                priority = rollout.group_reward_std + EPSILON
            else:
                priority = 1.0
            row = {"id": rollout.rollout_id, "group": rollout.group_id, "priority": priority}
            row |= {"birth": rollout.birth_step, "correct": rollout.advantage > 0}
            row |= {"used": used, "last": step if used else None}
            self.rows.append(row)
        before = len(self.rows)
        self.apply_capacity()
        self.lost_to_capacity += before - len(self.rows)
        return before - len(self.rows)

    def apply_capacity(self):
        capacity = self.section.capacity_rollouts
        if self.section.positive_fraction > 0:
            reserved = round(self.section.positive_fraction * capacity)
            window = capacity - reserved
            kept, reserve = [], 0
            for position, row in enumerate(reversed(self.rows)):
                if position < window:
                    kept.append(row)
                elif row["correct"] and reserve < reserved:
                    kept.append(row)
                    reserve += 1
            self.rows = kept[::-1]
            return
        while len(self.rows) > capacity:
            oldest = self.rows[0]
            if self.section.unit == "query":
                self.rows = [row for row in self.rows if row["group"] != oldest["group"]]
            else:
                self.rows.remove(oldest)

    def evict(self, now):
        limit = self.section.max_age_steps
        if limit is None:
            return 0
        before = len(self.rows)
        self.rows = [row for row in self.rows if not now - row["birth"] > limit]
        return before - len(self.rows)

    def first_draw_probabilities(self, fresh_rows):
        """Probability of every unit, by the key of the unit."""
        units = {}
        for row in [*self.rows, *fresh_rows]:
            key = row["group"] if self.section.unit == "query" else row["id"]
            units.setdefault(key, []).append(row["priority"])
        weights = {
            key: (sum(values) / len(values)) ** self.section.priority_exponent
            for key, values in units.items()
        }
        total = math.fsum(weights.values())
        return {key: weight / total for key, weight in weights.items()}

    def record(self, rollout_id, step):
        for row in self.rows:
            if row["id"] == rollout_id:
                row["used"] += 1
                row["last"] = step


@st.composite
def sections(draw):
    unit = draw(st.sampled_from(["rollout", "query"]))
    kinds = ["uniform", "group_std"] + (["abs_advantage"] if unit == "rollout" else [])
    return ReplaySection(
        unit=unit,
        priority=draw(st.sampled_from(kinds)),
        priority_exponent=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        max_age_steps=draw(st.sampled_from([None, 1, 2, 4])),
        capacity_rollouts=draw(st.integers(1, 25)),
        with_replacement=draw(st.booleans()),
        positive_fraction=draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])) if unit == "rollout" else 0.0,
    )


group_sizes = st.lists(st.integers(1, 4), max_size=4)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), group_sizes),
        st.tuples(st.just("next step"), st.integers(1, 2)),
        st.tuples(st.just("evict ahead"), st.none()),
        st.tuples(st.just("draw"), st.integers(0, 12)),
        st.tuples(st.just("draw with fresh"), st.tuples(st.integers(0, 12), group_sizes)),
        st.tuples(st.just("restore"), st.none()),
    ),
    max_size=25,
)


class Pair:
    """The buffer and its twin."""

    def __init__(self, section, seed):
        self.section = section
        self.buffer, self.naive = ReplayBuffer(section, 4), NaiveBuffer(section)
        self.rng = np.random.default_rng(seed)
        self.step, self.next_id, self.next_group = 1, 0, 0
        self.evicted = 0  # in this step

    def new_rollouts(self, sizes):
        rollouts = []
        for size in sizes:
            std = float(np.float32(self.rng.uniform(0.1, 2)))
            birth = int(self.rng.integers(max(1, self.step - 1), self.step + 1))
            for _ in range(size):
                rollouts.append(
                    make_rollout(
                        self.next_id,
                        group_id=self.next_group,
                        birth_step=birth,
                        advantage=float(np.float32(self.rng.normal())),
                        group_reward_std=std,
                    )
                )
                self.next_id += 1
            self.next_group += 1
        return rollouts

    def insert(self, rollouts, times_used):
        lost = self.buffer.insert(rollouts, self.step, np.array(times_used, dtype=np.int32))
        assert lost == self.naive.insert(rollouts, times_used, self.step)
        self.evicted += lost

    def apply(self, name, argument):
        if name == "insert":
            rollouts = self.new_rollouts(argument)
            self.insert(rollouts, [0] * len(rollouts))
        elif name == "next step":
            self.step += argument
            gone = self.buffer.evict(self.step)
            assert gone == self.naive.evict(self.step)
            self.evicted = gone
        elif name == "evict ahead":
            gone = self.buffer.evict_ahead(self.step)
            assert gone == self.naive.evict(self.step + 1)
            self.evicted += gone
        elif name == "draw":
            self.draw(argument, [])
        elif name == "draw with fresh":
            count, sizes = argument
            fresh = self.new_rollouts(sizes)
            drawn = self.draw(count, fresh)
            self.insert(fresh, [drawn.count(rollout.rollout_id) for rollout in fresh])
        else:
            state = self.buffer.get_state()
            self.buffer = ReplayBuffer(self.section, 4)
            self.buffer.set_state(state)

    def draw(self, count, fresh):
        scratch = NaiveBuffer(self.section.model_copy(update={"capacity_rollouts": 10**6}))
        scratch.section = scratch.section.model_copy(update={"positive_fraction": 0.0})
        scratch.insert(fresh, [0] * len(fresh), self.step)
        fresh_rows = scratch.rows
        law = self.naive.first_draw_probabilities(fresh_rows)
        drawn = self.buffer.draw(count, self.step, self.rng, fresh=entries_of(fresh))
        rows = {row["id"]: row for row in [*self.naive.rows, *fresh_rows]}
        keys = []
        for entry, p, age in zip(drawn.entries, drawn.probabilities, drawn.ages, strict=True):
            row = rows[entry.rollout_id]
            keys.append(row["group"] if self.section.unit == "query" else row["id"])
            assert math.isclose(p, law[keys[-1]], rel_tol=1e-12)
            assert age == self.step - row["birth"]
            self.naive.record(entry.rollout_id, self.step)
        expected = count if self.section.with_replacement and law else min(count, len(law))
        self.check_units(ids(drawn.rollouts), keys, rows, expected)
        if min(count, len(law)) > 0:
            ess = 1 / math.fsum(p * p for p in law.values())
            entropy = -math.fsum(p * math.log(p) for p in law.values())
            assert math.isclose(drawn.effective_sample_size, ess, rel_tol=1e-12)
            assert math.isclose(drawn.entropy, entropy, rel_tol=1e-10, abs_tol=1e-12)
            event("drew something")
        return ids(drawn.rollouts)

    def check_units(self, drawn_ids, keys, rows, expected_units):
        if self.section.unit == "rollout":
            assert len(drawn_ids) == expected_units
            distinct = drawn_ids
        else:
            units, position = [], 0
            while position < len(drawn_ids):
                members = [i for i, row in rows.items() if row["group"] == keys[position]]
                assert drawn_ids[position : position + len(members)] == members
                units.append(keys[position])
                position += len(members)
            assert len(units) == expected_units
            distinct = units
        if not self.section.with_replacement:
            assert len(set(distinct)) == len(distinct)

    def compare(self):
        assert check_valid(self.buffer) == (True, "")
        rows = self.naive.rows
        columns = {
            name: self.buffer.column(name).tolist()
            for name in ("rollout_id", "group_id", "birth_step", "priority", "times_used")
        }
        for name, key in zip(columns, ["id", "group", "birth", "priority", "used"], strict=True):
            assert columns[name] == [row[key] for row in rows], name
        last = [None if i < 0 else i for i in self.buffer.column("last_used_step").tolist()]
        assert last == [row["last"] for row in rows]
        stats = self.buffer.stats(self.step)
        assert stats.rollouts == len(rows)
        assert stats.evicted == self.evicted
        assert stats.evicted_by_capacity == self.naive.lost_to_capacity
        if rows:
            ages = [self.step - row["birth"] for row in rows]
            assert stats.age_max == max(ages)
            assert math.isclose(stats.age_mean, sum(ages) / len(rows), abs_tol=1e-12)
            event("compared a buffer that is not empty")


@settings(max_examples=150, deadline=None)
@given(section=sections(), seed=st.integers(0, 2**32 - 1), steps=operations)
def test_buffer_and_twin_agree_after_every_operation(section, seed, steps):
    pair = Pair(section, seed)
    for name, argument in steps:
        pair.apply(name, argument)
        pair.compare()
