"""Makes entries of whole rollouts, and checks entries before the buffer stores them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_float
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_replay.replay.priorities import COLUMNS, check_groups_adjacent
from grpo_replay.types import Entry, Rollout

LARGEST_LOGPROB = 1e-3
"""Largest behaviour log-prob that is accepted. Samplers and the trainer give at most exactly 0. Up
to 1e-3 is rounding: of a float32 log-normaliser of up to 10^4, computed apart from its logit."""

_DTYPES = {
    "prompt_token_ids": np.dtype(np.int32),
    "completion_token_ids": np.dtype(np.int32),
    "behavior_logprobs": np.dtype(np.float32),
    "sampler_logprobs": np.dtype(np.float32),
}


class RolloutColumns(Mapping[str, Any]):
    """The columns of a whole rollout, computed when they are read."""

    __slots__ = ("_rollout",)

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    def __getitem__(self, name: str) -> Any:
        return COLUMNS[name][1](self._rollout)

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMNS)

    def __len__(self) -> int:
        return len(COLUMNS)


def entries_of(items: Sequence[Entry | Rollout]) -> list[Entry]:
    """Make an entry of every whole rollout, with the rollout as payload; entries are unchanged."""
    return [item if isinstance(item, Entry) else _entry_of(item) for item in items]


def _entry_of(rollout: Rollout) -> Entry:
    columns = RolloutColumns(rollout)
    return Entry(rollout.rollout_id, rollout.group_id, rollout.birth_step, columns, rollout)


def stored_form(entry: Entry) -> Entry:
    """Return the entry as it is stored: a whole rollout is frozen, another payload unchanged."""
    if not isinstance(entry.payload, Rollout):
        return entry
    stored = frozen(entry.payload)
    return entry if stored is entry.payload else _entry_of(stored)


def check_insertable(
    entries: Sequence[Entry], step: int, stored: Mapping[str, np.ndarray], unit: str
) -> None:
    """Raise ValueError unless all entries were born at or before `step`, are not yet stored and, if
    `unit` is "query", are ordered by group. Whole rollouts must be survivors with valid numbers
    (`number_problem`), and extras of the dtypes and shapes in `stored`, the store's columns."""
    for entry in entries:
        rollout = entry.payload
        if isinstance(rollout, Rollout):
            has_values = rollout.advantage is not None and rollout.behavior_logprobs is not None
            if not (rollout.kept and has_values):
                raise ValueError(
                    f"rollout {rollout.rollout_id}: only survivors with advantage and behaviour "
                    "log-probs are stored"
                )
            if problem := number_problem(rollout):
                raise ValueError(f"rollout {rollout.rollout_id}: {problem}")
        if entry.birth_step > step:
            raise ValueError(
                f"rollout {entry.rollout_id}: born at step {entry.birth_step}, inserted at "
                f"step {step}"
            )
    _check_same_extras(entries, stored)
    ids = np.array([entry.rollout_id for entry in entries])
    if np.unique(ids).size < ids.size or _overlap(ids, stored["rollout_id"]):
        raise ValueError(f"step {step}: a rollout of {ids.min()} to {ids.max()} is stored twice")
    if unit == "query":
        groups = np.array([entry.group_id for entry in entries])
        check_groups_adjacent(groups)
        if _overlap(groups, stored["group_id"]):
            raise ValueError(f"step {step}: part of a group is already stored")


def frozen(rollout: Rollout) -> Rollout:
    """Make a rollout's arrays read-only, and return it as the buffer stores it: without text and
    single scores, which are in rollouts/."""
    for array in (
        rollout.prompt_token_ids,
        rollout.completion_token_ids,
        rollout.behavior_logprobs,
        rollout.sampler_logprobs,
        rollout.completion_mask,
        *rollout.extras.values(),
    ):
        if array is not None:
            array.flags.writeable = False
    if rollout.completion_text or rollout.reward_scores:
        return replace(rollout, completion_text="", reward_scores=())
    return rollout


def is_correct(columns: Mapping[str, Any]) -> bool:
    """Return True if the advantage is positive or the whole group is correct. If rewards take two
    values, these are exactly the correct rollouts."""
    if columns.get("group_reward_std") == 0:
        return (columns.get("group_correct") or 0) > 0
    return (columns.get("advantage") or 0) > 0


def _check_same_extras(entries: Sequence[Entry], stored: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError if extras of one name differ in dtype or trailing shape, among `entries` or
    from those stored: a snapshot has one column for a name."""
    names = {name for entry in entries for name in _extras(entry)}
    kinds: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for entry in reversed(stored["entry"]):  # the newest entry, read first, usually has every name
        if not names - kinds.keys():
            break
        extras = _extras(entry)
        new = {name: extras[name] for name in names & extras.keys() - kinds.keys()}
        kinds |= {name: (array.dtype, array.shape[1:]) for name, array in new.items()}
    for entry in entries:
        for name, array in _extras(entry).items():
            kind = (array.dtype, array.shape[1:])
            if kinds.setdefault(name, kind) != kind:
                dtype, shape = kinds[name]
                raise ValueError(
                    f"rollout {entry.rollout_id}: extras {name}: {array.dtype} {array.shape}, "
                    f"others of this name have {dtype} and trailing shape {shape}: give every "
                    "rollout the same"
                )


def _extras(entry: Entry) -> Mapping[str, np.ndarray]:
    return entry.payload.extras if isinstance(entry.payload, Rollout) else {}


def number_problem(rollout: Rollout) -> str:
    """Describe what is wrong with a reward, the advantage, a group statistic, a log-prob, the mask
    or an extra array of a survivor; "" if the rollout can be stored and saved."""
    logprobs_T, tokens_T = rollout.behavior_logprobs, rollout.completion_token_ids
    assert logprobs_T is not None and rollout.advantage is not None
    for name, array_T in (("behaviour", logprobs_T), ("sampler", rollout.sampler_logprobs)):
        if array_T.shape != tokens_T.shape:
            return f"{array_T.shape} {name} log-probs for {tokens_T.shape} completion tokens"
    if problem := _storage_problem(rollout):
        return problem
    valid_T = np.isfinite(logprobs_T) & (logprobs_T <= LARGEST_LOGPROB)
    mask_T = rollout.completion_mask
    if mask_T is not None:
        fits_tokens = mask_T.dtype == np.bool_ and mask_T.shape == tokens_T.shape
        if not (fits_tokens and mask_T.any()):
            return (
                f"its completion_mask is {mask_T.dtype} {mask_T.shape} with "
                f"{np.count_nonzero(mask_T)} tokens that train: expected bool {tokens_T.shape} and "
                "at least one; leave a rollout out of which no token trains"
            )
        valid_T |= ~mask_T
    if not valid_T.all():
        token = int(np.flatnonzero(~valid_T)[0])
        return (
            f"the behaviour log-prob of token {token} is {logprobs_T[token]}: expected a finite "
            "number of at most 0; leave the rollout out, or compute log-probs that are missing"
        )
    return next(filter(None, map(extra_problem, rollout.extras, rollout.extras.values())), "")


def _storage_problem(rollout: Rollout) -> str:
    """Describe the first value that a snapshot cannot hold exactly: a number that is None, not
    finite or not exact in float32, or tokens or log-probs of another dtype than the stored one; ""
    if there is none."""
    for name in ("reward", "advantage", "group_reward_mean", "group_reward_std"):
        value = getattr(rollout, name)
        is_float32 = value is not None and c_float(value).value == value
        if not is_float32 or not math.isfinite(value):
            advice = "round it"
            if value is None:
                advice = "leave out groups of fewer than two rewards"
            elif not math.isfinite(value):
                advice = "leave the rollout out"
            return (
                f"its {name} is {value}: expected a finite number that is exact in float32, the "
                f"stored precision; {advice}"
            )
    for name, stored_dtype in _DTYPES.items():
        dtype = getattr(rollout, name).dtype
        if dtype != stored_dtype:
            return f"its {name} are {dtype}: expected {stored_dtype}, the stored type; convert them"
    return ""


def extra_problem(name: str, array: np.ndarray) -> str:
    """Describe what is wrong with an array of `Rollout.extras`; "" if nothing is."""
    if not name.isidentifier():
        return f"extras: {name!r} is not a name; use letters, digits and underscores"
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        return f"extras {name}: {getattr(array, 'dtype', type(array).__name__)}: give a numpy array"
    if not array.dtype.isnative or array.dtype.itemsize > 8:
        return f"extras {name}: {array.dtype}: give native byte order and at most 64 bits"
    if array.ndim == 0 or 0 in array.shape[1:]:
        return f"extras {name}: shape {array.shape}: expected one dimension or more, [n] or [n, …]"
    return ""


def _overlap(new: np.ndarray, stored: np.ndarray) -> bool:
    """Return True if an id is in both. Fast if all new ids are larger, as in a run."""
    return bool(stored.size and new.min() <= stored.max() and np.isin(new, stored).any())
