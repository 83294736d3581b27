"""Shared prompts: several rollouts of a mini-batch computed after one copy of their prompt, or of
the common prefix of their prompts.

A prompt of P tokens and n completions of T tokens take P + n·T positions in one sequence, and
n·(P + T) in sequences of their own. Prompts with a common prefix of F tokens (examples,
instructions, tools) take F + n·(P - F + T). Each completion attends to its prompt and itself, at
the positions that it would have alone, so the function is the same. numpy only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, pairwise

import numpy as np

from grpo_replay.replay.batch import TrainRow

LEAST_SAVING = 0.3
"""Share of a mini-batch's cost that sharing must save. Below it, masks cost what tokens save."""

Grouping = list[list[int]]
"""The row indices of each sequence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows become forward passes of at most `max_tokens` positions.

    With `packing`, sequences lie end to end without padding. Prompts are shared if
    `pairs_per_token` is set: the number of pairs of positions that attention compares at the cost
    of one token in all other layers.
    """

    max_tokens: int
    packing: bool = False
    pairs_per_token: float | None = None


def pairs_per_token(attention: str, hidden_size: int) -> float | None:
    """Return `Layout.pairs_per_token` for an attention; None for one without such masks.

    A layer multiplies a token by about 12·h² weights, and compares a pair with 2·h numbers twice:
    6·h pairs to a token. Attention with a mask was measured to run at half the speed of
    matrix products, which makes 3·h.
    """
    return 3.0 * hidden_size if attention in ("sdpa", "eager") else None


class Lengths:
    """Token counts of a mini-batch's rows, prompts and common prefixes, counted once."""

    def __init__(self, rows: Sequence[TrainRow]) -> None:
        """Counts; equal prompts get one index, and similar ones neighbouring indices."""
        prompts = {row.prompt_token_ids.tobytes(): row.prompt_token_ids for row in rows}
        index_of = {prompt: index for index, prompt in enumerate(sorted(prompts))}
        self.completions = [len(row.completion_token_ids) for row in rows]
        self.prompt_of = [index_of[row.prompt_token_ids.tobytes()] for row in rows]
        """Prompt index of each row. Prompts are sorted, so neighbours have common prefixes."""
        self.prompts = [len(prompts[prompt]) for prompt in index_of]
        self.common = [
            _same_tokens(prompts[one], prompts[following]) for one, following in pairwise(index_of)
        ]
        """Length of the common prefix of each prompt and the following one."""
        self.rows = [
            self.prompts[prompt] + completion
            for prompt, completion in zip(self.prompt_of, self.completions, strict=True)
        ]

    def completion_tokens(self, sequence: Sequence[int]) -> int:
        """Counts the completion tokens of these rows."""
        return sum([self.completions[row] for row in sequence])

    def prefix_tokens(self, sequence: Sequence[int]) -> int:
        """Length of the common prefix of the rows' prompts; all of it if they have one prompt."""
        return self._prefix_tokens({self.prompt_of[row] for row in sequence})

    def sequence_tokens(self, sequence: Sequence[int]) -> int:
        """Count the positions of a sequence: the common prefix of its prompts once, the rest of
        each prompt once, and every completion."""
        if len(sequence) == 1:
            return self.rows[sequence[0]]
        prompts = {self.prompt_of[row] for row in sequence}
        all_prompts = sum([self.prompts[prompt] for prompt in prompts])
        saved = self._prefix_tokens(prompts) * (len(prompts) - 1)
        return all_prompts - saved + self.completion_tokens(sequence)

    def _prefix_tokens(self, prompts: set[int]) -> int:
        first, last = min(prompts), max(prompts)
        return min(self.common[first:last], default=self.prompts[first])


def group_rows(lengths: Lengths, layout: Layout, ranks: int) -> Grouping:
    """Group the rows of a mini-batch into sequences: single rows, or several rows whose prompts
    have a common prefix. Rows of the same prompt are neighbours.

    Prompts are shared where that saves `LEAST_SAVING` of the whole mini-batch's cost. A sequence
    of several rows is no longer than `max_tokens`, and is split where that balances the ranks.
    """
    single_rows = [[row] for row in range(len(lengths.rows))]
    if layout.pairs_per_token is None or not single_rows:
        return single_rows
    total = sum(lengths.rows)
    if total - _fewest_tokens(lengths) < LEAST_SAVING * total:
        return single_rows
    pairs, limit = layout.pairs_per_token, layout.max_tokens

    def cheapest(candidates: Iterable[Grouping]) -> Grouping:
        return min(candidates, key=lambda sequences: _cost(sequences, lengths, pairs))

    by_prompt = _rows_by_prompt(lengths)
    parts = [part for rows in by_prompt for part in cheapest(_splits(rows, lengths, limit))]
    shared = cheapest(_joins(parts, lengths, limit, ranks))
    if _cost(shared, lengths, pairs) > (1 - LEAST_SAVING) * _cost(single_rows, lengths, pairs):
        return single_rows
    return _balance(shared, lengths, ranks)


def assign_to_ranks(sequences: Grouping, lengths: Lengths, ranks: int) -> Grouping:
    """Assign sequences to ranks: the indices of each rank's sequences, the longest first.

    Single rows are assigned in snake order, so that all ranks get similar lengths. Sequences of
    several rows differ more, so each goes to the rank with the fewest tokens so far.
    """
    tokens = list(map(lengths.sequence_tokens, sequences))
    longest_first = sorted(range(len(sequences)), key=lambda i: (-tokens[i], sequences[i][0]))
    assigned: Grouping = [[] for _ in range(ranks)]
    loads = [0] * ranks
    has_shared_prompts = any(len(sequence) > 1 for sequence in sequences)
    for position, index in enumerate(longest_first):
        turn, offset = divmod(position, ranks)
        snake = offset if turn % 2 == 0 else ranks - 1 - offset
        rank = loads.index(min(loads)) if has_shared_prompts else snake
        assigned[rank].append(index)
        loads[rank] += tokens[index]
    return assigned


def _balance(sequences: Grouping, lengths: Lengths, ranks: int) -> Grouping:
    """Halve the longest sequence of several rows, again and again, as long as that lowers the
    number of tokens of the rank that has the most."""

    def max_load(candidate: Grouping) -> int:
        assigned = assign_to_ranks(candidate, lengths, ranks)
        return max(sum(lengths.sequence_tokens(candidate[i]) for i in rank) for rank in assigned)

    while ranks > 1:
        longest = max(
            sequences, key=lambda sequence: (len(sequence) > 1, lengths.sequence_tokens(sequence))
        )
        if len(longest) == 1:
            break
        others = [sequence for sequence in sequences if sequence is not longest]
        halved = [*others, *_halves(longest, lengths)]
        if max_load(halved) >= max_load(sequences):
            break
        sequences = halved
    return sequences


def _halves(sequence: list[int], lengths: Lengths) -> tuple[list[int], list[int]]:
    """Cut rows of several prompts in the middle; give rows of one prompt, which are sorted by
    length, to both halves in turn."""
    if len({lengths.prompt_of[row] for row in sequence}) > 1:
        middle = len(sequence) // 2
        return sequence[:middle], sequence[middle:]
    return sequence[::2], sequence[1::2]


def _rows_by_prompt(lengths: Lengths) -> Grouping:
    """Returns the rows of each prompt, the longest first."""
    groups: Grouping = [[] for _ in lengths.prompts]
    for row in sorted(range(len(lengths.rows)), key=lambda row: -lengths.rows[row]):
        groups[lengths.prompt_of[row]].append(row)
    return groups


def _fewest_tokens(lengths: Lengths) -> int:
    """Count the nodes of the prompts' prefix tree, and completions: the fewest positions."""
    return sum(lengths.prompts) - sum(lengths.common) + sum(lengths.completions)


def _splits(rows: Sequence[int], lengths: Lengths, limit: int) -> Iterator[Grouping]:
    """Yields candidates for splitting a prompt's rows into sequences of at most `limit` tokens:
    into 1, 2, 3, 4, 6, 9, … sequences, and into one for each row."""
    for count in _counts(len(rows)):
        parts = [list(rows[start::count]) for start in range(count)]
        if all(len(part) == 1 or lengths.sequence_tokens(part) <= limit for part in parts):
            yield parts
    yield [[row] for row in rows]


def _joins(sequences: Grouping, lengths: Lengths, limit: int, ranks: int) -> Iterator[Grouping]:
    """Yields candidates for joining neighbours to sequences of at most `limit` tokens: none joined,
    and joined to 1, 2, 3, 4, 6, 9, … per rank, with about the same number of completion tokens."""
    yield sequences
    ends = np.cumsum(list(map(lengths.completion_tokens, sequences)))
    for per_rank in _counts(-(-len(sequences) // ranks)):
        count = per_rank * ranks
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="right")
        bounds = [0, *cuts.tolist(), len(sequences)]
        runs = (sequences[start:end] for start, end in pairwise(bounds) if start < end)
        joined = [list(chain.from_iterable(run)) for run in runs]
        if all(len(rows) == 1 or lengths.sequence_tokens(rows) <= limit for rows in joined):
            yield joined


def _counts(limit: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 9, … below the limit: each 1.5 times the one before, rounded down."""
    count = 1
    while count < limit:
        yield count
        count += max(1, count // 2)


def common_prefix(prompts: Sequence[np.ndarray]) -> int:
    """Length of the common prefix of all prompts; all of it if there is one prompt."""
    first = prompts[0]
    return reduce(lambda least, other: min(least, _same_tokens(first, other)), prompts, len(first))


def _same_tokens(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _cost(sequences: Sequence[Sequence[int]], lengths: Lengths, pairs_per_token: float) -> float:
    """Estimates the cost of a forward pass, in tokens. Attention compares half of all pairs of
    positions in a single row, and all of them with a mask."""
    cost = 0.0
    for sequence in sequences:
        tokens = lengths.sequence_tokens(sequence)
        pairs = tokens**2 if len(sequence) > 1 else tokens**2 / 2
        cost += tokens + pairs / pairs_per_token
    return cost
