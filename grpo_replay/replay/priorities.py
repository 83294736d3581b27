"""Computes priorities p_i, and draws rollouts or whole queries by them (paper A, section 4).

The draw probability is `P(i) = p_i^α / Σ_j p_j^α`; with `replay.age_decay_steps` τ it is
`P(i) ∝ p_i^α · exp(-age_i/τ)`, computed in float64 from logarithms, so that no exponent overflows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import numpy as np

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import ReplaySection
from grpo_replay.recipe.open_lists import PRIORITIES
from grpo_replay.types import Entry, Rollout

Columns = Mapping[str, np.ndarray]

EPSILON = 1e-6
"""ε, added to every priority but `uniform`."""

ENTRY_FIELDS = ("rollout_id", "group_id", "birth_step")
"""The columns that are fields of an entry."""

COLUMNS: Mapping[str, tuple[type, Callable[[Rollout], Any]]] = {
    **{name: (np.int64, attrgetter(name)) for name in ENTRY_FIELDS},
    "reward": (np.float64, attrgetter("reward")),
    "advantage": (np.float64, attrgetter("advantage")),
    "group_reward_std": (np.float64, attrgetter("group_reward_std")),
    "behavior_logprob_mean": (np.float64, attrgetter("behavior_logprob_mean")),
    "group_correct": (np.int64, attrgetter("group_correct")),
    "completion_tokens": (np.int64, lambda rollout: len(rollout.completion_token_ids)),
    "truncated": (np.bool_, lambda rollout: rollout.finish_reason == "length"),
}
"""The logged columns that a priority may read: the type of each, and its value for a rollout."""


def needs(*columns: str, epsilon: bool = True) -> Callable[[Any], Any]:
    """Decorator of a priority function: declares the columns that it reads, and whether `EPSILON`
    is added to its result, by setting the function's attributes `columns` and `epsilon`."""

    def decorate(function: Any) -> Any:
        function.columns, function.epsilon = columns, epsilon
        return function

    return decorate


@needs("advantage")
def abs_advantage(columns: Columns) -> np.ndarray:
    """|A_i|, the priority of paper A."""
    return np.abs(columns["advantage"])


@needs("group_reward_std")
def group_std(columns: Columns) -> np.ndarray:
    """σ_g, the standard deviation of the rewards of the rollout's group."""
    return columns["group_reward_std"]


@needs("rollout_id", epsilon=False)
def uniform(columns: Columns) -> np.ndarray:
    """1 for every rollout."""
    return np.ones(len(columns["rollout_id"]))


def load_priority(name: str) -> Any:
    """Load a priority function. Raises RecipeError, also if it reads unlogged columns."""
    function = PRIORITIES.load(name)
    columns: Any = getattr(function, "columns", None)
    is_collection = bool(columns) and not isinstance(columns, str)
    if not (is_collection and set(columns) <= set(COLUMNS)):
        raise RecipeError(
            f"replay.priority {name}: its columns are {columns!r}; set {function.__name__}.columns "
            f"to a tuple of {', '.join(COLUMNS)}"
        )
    return function


def entry_priorities(name: str, entries: Sequence[Entry]) -> np.ndarray:
    """Compute p_i before the exponent, float64 [N], by the priority function `name` (a shipped name
    or `file.py:function`), plus ε unless the function declines it. Called when entries are stored.

    Raises RecipeError for values that are not priorities, if an entry lacks a column, and if the
    priority of a row depends on other rows: an entry keeps the priority with which it was stored.
    """
    function, option = load_priority(name), f"replay.priority {name}"
    columns = {column: entry_column(entries, column, option) for column in function.columns}
    try:
        returned = function(columns)
    except KeyError as error:
        raise RecipeError(f"{option} reads {error}, which its columns do not name") from error
    p_N = one_number_per_row(option, returned, len(entries))
    if not (np.isfinite(p_N).all() and (p_N >= 0).all()):
        bad = int(np.flatnonzero(~(np.isfinite(p_N) & (p_N >= 0)))[0])
        raise RecipeError(
            f"{option}: {p_N[bad]} for rollout {entries[bad].rollout_id}: return finite numbers of "
            "0 or more"
        )
    for row in {0, len(entries) - 1} if entries else ():
        single_row = {column: values[row : row + 1] for column, values in columns.items()}
        p_single = one_number_per_row(option, function(single_row), 1)[0]
        if not math.isclose(p_single, p_N[row], rel_tol=1e-9):
            raise RecipeError(
                f"{option}: {p_N[row]} for rollout {entries[row].rollout_id} among others, "
                f"{p_single} by itself; return one number per row, computed from that row only"
            )
    return p_N + EPSILON if getattr(function, "epsilon", True) else p_N


def entry_column(entries: Sequence[Entry], name: str, reader: str) -> np.ndarray:
    """Returns a column of the entries, [N]. Raises RecipeError if an entry lacks the column;
    `reader` is the recipe option whose function reads it, for the message."""
    dtype = COLUMNS[name][0]
    if name in ENTRY_FIELDS:
        return np.array([getattr(entry, name) for entry in entries], dtype)
    try:
        return np.array([entry.columns[name] for entry in entries], dtype)
    except KeyError:
        lacking = next(entry.rollout_id for entry in entries if name not in entry.columns)
        raise RecipeError(
            f"{reader} reads {name}, which the columns of entry {lacking} lack: give each entry "
            f"columns={{..., {name!r}: ...}}"
        ) from None


def one_number_per_row(option: str, returned: Any, count: int) -> np.ndarray:
    """Convert what a user's function returned for `count` rows to float64 [N]. Raises RecipeError,
    with the recipe `option` that names the function, if it is not one number per row."""
    try:
        numbers_N = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError):
        numbers_N = np.empty(0)
    if numbers_N.shape != (count,):
        shape = list(np.shape(returned)) if isinstance(returned, np.ndarray | Sequence) else []
        kind = f"shape {shape}" if shape else f"a {type(returned).__name__}"
        raise RecipeError(
            f"{option}: returned {kind} for {count} rows; return one number per row, an array of "
            f"shape [{count}]"
        )
    return numbers_N


@dataclass(frozen=True, slots=True, eq=False)
class DrawLaw:
    """The distribution of the first draw from N candidates.

    `log_weight_N` (float64 [N]) is `α ln p_i - age_i/τ` minus its maximum, and -inf for candidates
    that are never drawn. `weight_N` is its exponential, `total` the sum of the weights.
    """

    log_weight_N: np.ndarray
    weight_N: np.ndarray
    total: float

    @property
    def probability_N(self) -> np.ndarray:
        """P(i), float64 [N]. 0 for log-weights below -745, where exp underflows."""
        return self.weight_N / self.total

    @property
    def effective_sample_size(self) -> float:
        """`1 / Σ P²`, in candidates: N if uniform, 1 if one has all the mass, 0 without any."""
        # No BLAS dot product: its rounding depends on the number of threads.
        return self.total**2 / float(np.square(self.weight_N).sum()) if self.total else 0.0

    @property
    def entropy(self) -> float:
        """`-Σ P ln P` in nats: ln N if uniform, 0 without candidates."""
        if not self.total:
            return 0.0
        finite = np.where(self.weight_N > 0, self.log_weight_N, 0.0)
        return math.log(self.total) - float((self.weight_N * finite).sum()) / self.total


def draw_law(
    priority_N: np.ndarray, exponent: float, log_factor_N: np.ndarray | None = None
) -> DrawLaw:
    """Compute the distribution `P ∝ p^α · exp(log_factor)`. With α = 0 priorities have no effect,
    not even those of 0. With α > 0 a candidate of priority 0 is never drawn.

    Raises RecipeError if α > 0 and all priorities are 0, as those of a user's function may be, and
    ValueError for a priority that is negative or not finite.
    """
    priority_N = np.asarray(priority_N, dtype=np.float64)
    if priority_N.size and not (np.isfinite(priority_N).all() and priority_N.min() >= 0):
        bad = int(np.flatnonzero(~(np.isfinite(priority_N) & (priority_N >= 0)))[0])
        raise ValueError(f"priority {bad} is {priority_N[bad]}: expected a finite number ≥ 0")
    if priority_N.size == 0:
        return DrawLaw(priority_N, priority_N, 0.0)
    if exponent == 0:
        return _law_from_log_weights(np.zeros_like(priority_N), log_factor_N)
    with np.errstate(divide="ignore"):
        log_priority_N = np.log(priority_N)
    largest = log_priority_N.max()
    if largest == -np.inf:
        raise RecipeError(
            f"replay.priority: all {priority_N.size} priorities are 0, so no draw has a "
            "probability; return a number above 0, or leave the function's epsilon True"
        )
    return _law_from_log_weights(exponent * (log_priority_N - largest), log_factor_N)


def _law_from_log_weights(log_weight_N: np.ndarray, log_factor_N: np.ndarray | None) -> DrawLaw:
    if log_factor_N is not None:
        log_weight_N = log_weight_N + log_factor_N
        log_weight_N = log_weight_N - log_weight_N.max()
    weight_N = np.exp(log_weight_N)
    return DrawLaw(log_weight_N, weight_N, float(weight_N.sum()))


def draw_without_replacement(law: DrawLaw, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw distinct indices, int64 [≤ count], in the order drawn; fewer if fewer can be drawn.

    The distribution is that of successive draws, each from the remaining candidates with
    renormalised probabilities, as in `Generator.choice(replace=False, p=P)`. Implemented as
    Gumbel-top-k (Efraimidis–Spirakis): the `count` smallest keys `ln E_i - ln w_i`, in increasing
    order, with E_i exponential. Candidates of weight 0 have key infinity and are never drawn.
    """
    count = min(count, int(np.count_nonzero(law.log_weight_N > -np.inf)))
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        key_N = np.log(rng.standard_exponential(law.log_weight_N.size)) - law.log_weight_N
    first = np.argpartition(key_N, count - 1)[:count]
    return first[np.argsort(key_N[first], kind="stable")].astype(np.int64)


def draw_with_replacement(law: DrawLaw, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw indices independently of each other, int64 [count]; empty without candidates."""
    if count <= 0 or law.total == 0:
        return np.zeros(0, dtype=np.int64)
    cumulative_N = np.cumsum(law.weight_N)
    targets = rng.random(count) * cumulative_N[-1]
    indices = np.searchsorted(cumulative_N, targets, side="right")
    # Rounding can place a target at the end of the range.
    last = int(np.flatnonzero(law.weight_N)[-1])
    return np.minimum(indices, last).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The rollouts that can be drawn, one per index. Rollouts of a group are adjacent."""

    priority_N: np.ndarray  # float64, p before the exponent
    group_id_N: np.ndarray  # int64
    used_N: np.ndarray  # bool, True if the rollout was ever drawn
    age_N: np.ndarray  # int64, training steps

    def __add__(self, other: "Candidates") -> "Candidates":
        return Candidates(
            *(
                np.concatenate([getattr(self, field.name), getattr(other, field.name)])
                for field in fields(self)
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class Picks:
    """Indices of the drawn candidates in the order drawn, with first-draw probabilities (those of
    their queries if `replay.unit` is query), and effective sample size and entropy of the
    distribution. `unused_first` draws from two distributions, one over the rollouts never drawn and
    one over the others; effective sample size and entropy are those of the first one used."""

    indices: np.ndarray  # int64
    probabilities: np.ndarray  # float64
    effective_sample_size: float
    entropy: float


def pick(
    candidates: Candidates, count: int, settings: ReplaySection, rng: np.random.Generator
) -> Picks:
    """Draw `count` units from the candidates: rollouts, or queries with all their rollouts.

    Without replacement at most as many units are drawn as there are candidates. The priority of a
    query is the mean over its rollouts.
    """
    if settings.unit == "rollout":
        return _pick_units(candidates, count, settings, rng)
    starts_Q, sizes_Q = query_spans(candidates.group_id_N)
    query_candidates = Candidates(
        np.add.reduceat(candidates.priority_N, starts_Q) / sizes_Q,
        candidates.group_id_N[starts_Q],
        np.logical_or.reduceat(candidates.used_N, starts_Q),
        candidates.age_N[starts_Q],
    )
    queries = _pick_units(query_candidates, count, settings, rng)
    sizes = sizes_Q[queries.indices]
    return Picks(
        indices=_expand_spans(starts_Q[queries.indices], sizes),
        probabilities=np.repeat(queries.probabilities, sizes),
        effective_sample_size=queries.effective_sample_size,
        entropy=queries.entropy,
    )


def query_spans(group_id_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the runs of equal group ids: their start indices and lengths, both int64 [Q]."""
    if group_id_N.size == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    starts = np.concatenate([[0], np.flatnonzero(group_id_N[1:] != group_id_N[:-1]) + 1])
    return starts, np.diff(starts, append=group_id_N.size)


def check_groups_adjacent(group_id_N: np.ndarray) -> None:
    """Raise ValueError if the rollouts of a group are not adjacent."""
    starts, _ = query_spans(group_id_N)
    ids, runs = np.unique(group_id_N[starts], return_counts=True)
    if (runs > 1).any():
        raise ValueError(
            f"the rollouts of group {ids[runs > 1][0]} are not adjacent: order them by group"
        )


def _pick_units(
    units: Candidates, count: int, settings: ReplaySection, rng: np.random.Generator
) -> Picks:
    """Draw from all units; with `unused_first` from the units never drawn, and if there are too few
    of them, the rest from the others."""
    priority_U, used_U, age_U = units.priority_N, units.used_N, units.age_N
    if not settings.unused_first:
        return _pick_by_law(priority_U, age_U, count, settings, rng)
    drawable_U = (priority_U != 0) | (settings.priority_exponent == 0)
    if not drawable_U.any():
        drawable_U[:] = True  # `draw_law` refuses priorities that are all 0
    first, second = np.flatnonzero(drawable_U & ~used_U), np.flatnonzero(drawable_U & used_U)
    if first.size == 0:
        first, second = second, first
    head = _pick_by_law(priority_U[first], age_U[first], count, settings, rng)
    rest = count - head.indices.size
    tail = _pick_by_law(priority_U[second], age_U[second], rest, settings, rng)
    return replace(
        head,
        indices=np.concatenate([first[head.indices], second[tail.indices]]),
        probabilities=np.concatenate([head.probabilities, tail.probabilities]),
    )


def _pick_by_law(
    priority_U: np.ndarray,
    age_U: np.ndarray,
    count: int,
    settings: ReplaySection,
    rng: np.random.Generator,
) -> Picks:
    """Draw `count` of U units by the law `P ∝ p^α · exp(-age/τ)`, with or without replacement."""
    decay = settings.age_decay_steps
    law = draw_law(
        priority_U, settings.priority_exponent, None if decay is None else -age_U / decay
    )
    draw = draw_with_replacement if settings.with_replacement else draw_without_replacement
    indices = draw(law, count, rng)
    return Picks(
        indices=indices,
        probabilities=law.probability_N[indices] if indices.size else np.zeros(0),
        effective_sample_size=law.effective_sample_size,
        entropy=law.entropy,
    )


def _expand_spans(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the indices of all spans, concatenated: start, start + 1, … of each, int64."""
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(starts, sizes) + within
