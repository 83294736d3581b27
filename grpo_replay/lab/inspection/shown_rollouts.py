"""The rollouts of a page as a document, with numbers, text, tokens, groups and every use."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.lab.inspection.compute import Records
from grpo_replay.lab.inspection.rollout_columns import stored_tables
from grpo_replay.lab.inspection.rollout_sample import (
    RolloutFacts,
    Sample,
    choose_rollouts,
    rollout_facts,
)
from grpo_replay.lab.inspection.source import Source
from grpo_replay.lab.inspection.token_text import Decoder, open_decoder
from grpo_replay.storage.rollout_log import MASK, read_rollout_table

PAGE_CHARACTERS, PAGE_TOKENS = 20_000_000, 2_000_000
FEWEST_CHARACTERS, MOST_TOKENS_SHOWN = 2_000, 20_000
"""Limits of a page: its texts share `PAGE_CHARACTERS` equally, its lists of tokens `PAGE_TOKENS`.
The page says which ones are cut."""

_READ = (
    *("rollout_id", "group_id", "prompt_token_ids", "completion_token_ids", "completion_text"),
    *("behavior_logprobs", "sampler_logprobs", "reward", "advantage", "verdict", "finish_reason"),
    MASK.name,
)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a rollout in an update, or in shadow a draw; undefined outcomes are None."""

    step: int
    age: int
    probability: float | None  # of a first draw; None: trained on as fresh
    clipped: float | None  # % of tokens without a gradient
    log_ratio: float | None  # nats, mean over tokens
    kl: float | None  # nats per token


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of a group."""

    id: int
    reward: float | None
    advantage: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """A rollout as a page shows it."""

    id: int
    group: int
    step: int  # of its birth
    prompt_id: str
    prompt: int  # index in `ShownRollouts.prompts`
    text: str | None  # as the reward saw it, or decoded; None if neither is known
    text_cut: int  # characters that were left out
    token_ids: list[int]
    tokens_cut: int
    logprobs: list[float] | None  # nats, of each token
    logprobs_of: str | None  # "the policy at birth", or of a dropped rollout "the sampler"
    trained: list[int] | None  # 1 for a token that trains; None if all do
    tokens: int
    finish: str
    verdict: str
    reward: float | None
    advantage: float | None
    kept: bool
    fate: str  # "stored", "evicted", "dropped" or "not stored"
    draws: int
    clipped: float | None  # % of tokens, the largest over its uses
    kl: float | None  # nats per token, likewise
    why: str | None  # the extreme for which it is in a sample
    uses: list[Use]


@dataclass(frozen=True, slots=True)
class ShownRollouts:
    """The rollouts of a page by id, and the groups, prompts and tokens that they share."""

    rollouts: list[ShownRollout]
    groups: dict[int, list[Member]]  # by group id, all members
    prompts: list[str]
    pieces: dict[int, str]  # the text that each token adds
    special: list[int]  # ids of special tokens
    note: str  # how these rollouts were chosen
    reason: str  # why tokens are shown as ids; empty if they are shown as text
    has_uses: bool  # false for a lone snapshot, which counts draws and does not list them


def shown_rollouts(source: Source, records: Records) -> ShownRollouts:
    """Read all or a sample of a source's rollouts. Raises SnapshotError for an unreadable file."""
    facts = rollout_facts(records)
    sample = choose_rollouts(facts)
    decoder = open_decoder(source.path)
    reader = _Reader(source, records, facts, sample, decoder)
    for table in _tables(source, facts, sample):
        reader.read(table)
    rollouts = sorted(reader.rollouts, key=lambda rollout: rollout.id)
    return ShownRollouts(
        rollouts=rollouts,
        groups=reader.groups,
        prompts=reader.prompts,
        pieces=decoder.pieces(token for rollout in rollouts for token in rollout.token_ids),
        special=decoder.special_ids(),
        note=sample.note,
        reason=decoder.reason,
        has_uses=bool(source.rollout_files),
    )


def _tables(source: Source, facts: RolloutFacts, sample: Sample) -> Iterator[pa.Table]:
    """Yield all members of groups that are in the sample, one file or batch at a time."""
    groups = pa.array(np.unique(facts.rows.group_id[sample.rows]))
    tables: Iterable[pa.Table] = ()
    if source.rollout_files:
        needed = set(facts.rows.logged_step[sample.rows].tolist())
        tables = (
            read_rollout_table(path, _READ) for step, path in source.rollout_files if step in needed
        )
    elif source.snapshot is not None:
        tables = stored_tables(source.snapshot, _READ)
    yield from (table.filter(pc.is_in(table["group_id"], groups)) for table in tables)


@dataclass
class _Reader:
    """Converts tables of rollouts to `ShownRollout`s, groups and prompts."""

    source: Source
    records: Records
    facts: RolloutFacts
    sample: Sample
    decoder: Decoder
    rollouts: list[ShownRollout] = field(default_factory=list)
    groups: dict[int, list[Member]] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Sets the share of each rollout in a page's limits, and looks up the sample's uses."""
        count = max(1, len(self.sample.rows))
        self._characters = max(FEWEST_CHARACTERS, PAGE_CHARACTERS // count)
        self._tokens = min(MOST_TOKENS_SHOWN, PAGE_TOKENS // count)
        ids = self.facts.rows.rollout_id
        self._row_of = {int(ids[row]): int(row) for row in self.sample.rows}
        self._uses = _uses_of(self.source, self.records, self.sample)
        self._known_prompts: dict[tuple[int, ...], int] = {}

    def read(self, table: pa.Table) -> None:
        """Adds all rows of a table as group members, and those of the sample as rollouts."""
        members = table.select(["rollout_id", "group_id", "reward", "advantage", "verdict"])
        for row in members.to_pylist():
            member = Member(
                row["rollout_id"],
                _rounded(row["reward"]),
                _rounded(row["advantage"]),
                row["verdict"],
            )
            self.groups.setdefault(row["group_id"], []).append(member)
        wanted = pa.array(list(self._row_of), pa.int64())
        for row in table.filter(pc.is_in(table["rollout_id"], wanted)).to_pylist():
            self.rollouts.append(self._rollout(row))

    def _rollout(self, row: dict[str, Any]) -> ShownRollout:
        """Converts a row; long texts and lists of tokens are cut. A dropped rollout has no
        behaviour log-probs, and shows the sampler's."""
        index = self._row_of[row["rollout_id"]]
        facts, record = self.facts, self.facts.rows[index]
        token_ids = row["completion_token_ids"]
        text = row.get("completion_text")
        text = self.decoder.text(token_ids) if text is None else text
        shown, cut = self._cut(text)
        logprobs, source = row["behavior_logprobs"], "the policy at birth"
        if logprobs is None:
            logprobs, source = row["sampler_logprobs"], "the sampler"
        mask = row.get(MASK.name)
        return ShownRollout(
            id=row["rollout_id"],
            group=row["group_id"],
            step=int(record.birth_step),
            prompt_id=str(record.prompt_id),
            prompt=self._prompt(row["prompt_token_ids"]),
            text=shown,
            text_cut=cut,
            token_ids=token_ids[: self._tokens],
            tokens_cut=max(0, len(token_ids) - self._tokens),
            logprobs=np.round(logprobs[: self._tokens], 2).tolist() if logprobs else None,
            logprobs_of=source if logprobs else None,
            trained=None if mask is None else [int(trains) for trains in mask[: self._tokens]],
            tokens=len(token_ids),
            finish=row["finish_reason"],
            verdict=row["verdict"],
            reward=_rounded(row["reward"]),
            advantage=_rounded(row["advantage"]),
            kept=bool(record.kept),
            fate=self._fate(index),
            draws=int(facts.draws_N[index]),
            clipped=_rounded(100 * facts.clip_fraction_N[index]),
            kl=_rounded(facts.approx_kl_N[index]),
            why=self.sample.reasons.get(index),
            uses=self._uses.get(index, []),
        )

    def _fate(self, row: int) -> str:
        if self.facts.stored_N[row]:
            return "stored"
        if not self.facts.rows.kept[row]:
            return "dropped"
        return "evicted" if self.records.settings.replays else "not stored"

    def _prompt(self, token_ids: Sequence[int]) -> int:
        """Returns the index of a prompt in `prompts`; a new one is added."""
        key = tuple(token_ids)
        if key not in self._known_prompts:
            text = self.decoder.text(token_ids)
            shown, cut = self._cut(f"token ids {list(token_ids)}" if text is None else text)
            self._known_prompts[key] = len(self.prompts)
            self.prompts.append(f"{shown} … and {cut:,} more characters" if cut else str(shown))
        return self._known_prompts[key]

    def _cut(self, text: str | None) -> tuple[str | None, int]:
        """Cut a text to its share; returns it with the number of characters left out."""
        if text is None:
            return None, 0
        return text[: self._characters], max(0, len(text) - self._characters)


def _uses_of(source: Source, records: Records, sample: Sample) -> dict[int, list[Use]]:
    """Collects the uses of each row of the sample, fresh and drawn, in order of time; none without
    a log. Draws in shadow are no uses."""
    log, draws = records.log, records.draws
    if not len(log):
        return {}
    updates = source.recipe.draws_per_step if source.recipe else 1
    own_draws = draws[np.isin(draws.row, sample.rows)].view(np.recarray)
    # In shadow a draw is no use.
    is_first_step = own_draws.step == log.logged_step[own_draws.row]
    drawn_when_taken = set(own_draws.row[is_first_step & (not records.settings.shadow)].tolist())
    uses: dict[int, list[Use]] = {int(row): [] for row in sample.rows}
    for row in sample.rows.tolist():
        # With pool and FIFO, the use of a step that drew the rollout is in both logs.
        if log.tokens[row] >= 0 and row not in drawn_when_taken:
            step = int(log.logged_step[row])
            age = updates * (step - int(log.birth_step[row]))
            uses[row].append(_use(log[row], step, age, None))
    for draw in own_draws:
        uses[int(draw.row)].append(_use(draw, int(draw.step), int(draw.age), draw.probability))
    return uses


def _use(record: Any, step: int, age: int, probability: float | None) -> Use:
    outcomes = (100 * record.clip_fraction, record.log_ratio_mean, record.approx_kl)
    return Use(step, age, _rounded(probability), *map(_rounded, outcomes))


def _rounded(value: float | None) -> float | None:
    """Returns the value with five significant digits; None if it is not finite."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{float(value):.5g}")
