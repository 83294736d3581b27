"""Which rollouts of a mini-batch are computed behind one copy of their prompt, or of the tokens
with which their prompts begin.

P prompt tokens and n completions of T tokens are P + n·T positions in one sequence, and n·(P + T)
in sequences of their own. Prompts that begin with the same F tokens (examples, instructions,
tools) are F + n·(P - F + T) behind them. Each completion sees its prompt and itself, at the
positions it would have alone, so all are the same function. numpy only.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, pairwise

import numpy as np

from grpo_replay.replay.batch import TrainRow

LEAST_SAVING = 0.3
"""Share of a mini-batch's cost that sharing must save. Below it, masks cost what tokens save."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows become forward passes of at most `max_tokens` positions.

    With `packing`, sequences lie end to end without padding. Prompts are shared if
    `pairs_per_token` is set: the number of pairs of positions that attention compares at the cost
    of one token in all other layers; infinite where attention skips the pairs that its mask leaves
    out. A pack is padded to a multiple of `pack_multiple` positions
    (`microbatches.pack_multiple`).
    """

    max_tokens: int
    packing: bool = False
    pairs_per_token: float | None = None
    pack_multiple: int | None = None


def pairs_per_token(attention: str, packing: bool, hidden_size: int) -> float | None:
    """`Layout.pairs_per_token` for an attention of transformers; None for one without such masks.

    A layer multiplies a token by about 12·h² weights, and compares a pair with 2·h numbers twice:
    6·h pairs to a token. Attention with a mask was measured to run at half the speed of
    matrix products, which makes 3·h.
    """
    if attention == "flex_attention":
        return math.inf if packing else None
    return 3.0 * hidden_size if attention in ("sdpa", "eager") else None


def sequences_of(rows: Sequence[TrainRow], layout: Layout, ranks: int) -> list[list[int]]:
    """The rows of each sequence: one row, or several whose prompts begin with the same tokens.
    Rows of the same prompt are neighbours.

    Prompts are shared where that saves `LEAST_SAVING` of the whole mini-batch's cost. A sequence
    of several rows is no longer than `max_tokens`, and is split where that balances the ranks.
    """
    alone = [[index] for index in range(len(rows))]
    if layout.pairs_per_token is None:
        return alone
    groups = _rows_by_prompt(rows)
    total = sum(row.length_tokens for row in rows)
    if total - _fewest_tokens(groups, rows) < LEAST_SAVING * total:
        return alone
    pairs, limit = layout.pairs_per_token, layout.max_tokens

    def cheapest(ways: Iterable[list[list[int]]]) -> list[list[int]]:
        return min(ways, key=lambda sequences: _costs(sequences, rows, pairs))

    of_prompts = [part for group in groups for part in cheapest(_splits(group, rows, limit))]
    shared = cheapest(_joins(of_prompts, rows, limit, ranks))
    if _costs(shared, rows, pairs) > (1 - LEAST_SAVING) * _costs(alone, rows, pairs):
        return alone
    return _balanced(shared, rows, ranks)


def deal(sequences: Sequence[list[int]], rows: Sequence[TrainRow], ranks: int) -> list[list[int]]:
    """Indices of each rank's sequences, the longest first.

    Single rows go round in snake order, so that all ranks get similar lengths; sequences of several
    rows differ more, and each goes to the rank with the fewest tokens so far.
    """
    lengths = [tokens_of(sequence, rows) for sequence in sequences]
    order = sorted(range(len(sequences)), key=lambda i: (-lengths[i], sequences[i][0]))
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    shares = any(len(sequence) > 1 for sequence in sequences)
    for position, index in enumerate(order):
        turn, seat = divmod(position, ranks)
        snake = seat if turn % 2 == 0 else ranks - 1 - seat
        rank = loads.index(min(loads)) if shares else snake
        dealt[rank].append(index)
        loads[rank] += lengths[index]
    return dealt


def _balanced(sequences: list[list[int]], rows: Sequence[TrainRow], ranks: int) -> list[list[int]]:
    """The sequences, the longest one halved as long as the busiest rank then has fewer tokens."""

    def busiest(of: list[list[int]]) -> int:
        dealt = deal(of, rows, ranks)
        return max(sum(tokens_of(of[index], rows) for index in its) for its in dealt)

    while ranks > 1:
        longest = max(
            sequences, key=lambda sequence: (len(sequence) > 1, tokens_of(sequence, rows))
        )
        if len(longest) == 1:
            break
        others = [sequence for sequence in sequences if sequence is not longest]
        halved = [*others, *_halves(longest, rows)]
        if busiest(halved) >= busiest(sequences):
            break
        sequences = halved
    return sequences


def _halves(sequence: list[int], rows: Sequence[TrainRow]) -> tuple[list[int], list[int]]:
    """Rows of several prompts are cut in the middle; those of one prompt, the longest first, are
    dealt in turn."""
    if len(distinct_prompts(sequence, rows)) > 1:
        middle = len(sequence) // 2
        return sequence[:middle], sequence[middle:]
    return sequence[::2], sequence[1::2]


def _rows_by_prompt(rows: Sequence[TrainRow]) -> list[list[int]]:
    """Row indices of each distinct prompt, the longest row first. Prompts that begin alike are
    neighbours."""
    groups: dict[bytes, list[int]] = {}
    for index in sorted(range(len(rows)), key=lambda i: (-rows[i].length_tokens, i)):
        groups.setdefault(rows[index].prompt_token_ids.tobytes(), []).append(index)
    return [groups[prompt] for prompt in sorted(groups)]


def _fewest_tokens(groups: Sequence[Sequence[int]], rows: Sequence[TrainRow]) -> int:
    """Positions if every token that prompts begin with were computed once (the nodes of their
    prefix tree), and every completion."""
    prompts = [rows[group[0]].prompt_token_ids for group in groups]
    shared = sum(_same_tokens(one, other) for one, other in pairwise(prompts))
    completions = sum(len(row.completion_token_ids) for row in rows)
    return sum(map(len, prompts)) - shared + completions


def _splits(
    group: Sequence[int], rows: Sequence[TrainRow], limit: int
) -> Iterator[list[list[int]]]:
    """Ways to spread a prompt's rows over sequences of at most `limit` tokens: over 1, 2, 3, 4, 6,
    9, …, and over as many as there are rows."""
    for count in _counts(len(group)):
        parts = [list(group[start::count]) for start in range(count)]
        if all(len(part) == 1 or tokens_of(part, rows) <= limit for part in parts):
            yield parts
    yield [[index] for index in group]


def _joins(
    sequences: list[list[int]], rows: Sequence[TrainRow], limit: int, ranks: int
) -> Iterator[list[list[int]]]:
    """Ways to join neighbours to sequences of at most `limit` tokens: as they are, and to 1, 2, 3,
    4, 6, 9, … for each rank, with about the same number of completion tokens."""
    yield sequences
    ends = np.cumsum(
        [sum(len(rows[index].completion_token_ids) for index in each) for each in sequences]
    )
    for each_rank in _counts(-(-len(sequences) // ranks)):
        count = each_rank * ranks
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="right")
        bounds = [0, *cuts.tolist(), len(sequences)]
        runs = (sequences[start:end] for start, end in pairwise(bounds) if start < end)
        joined = [list(chain.from_iterable(run)) for run in runs]
        if all(len(each) == 1 or tokens_of(each, rows) <= limit for each in joined):
            yield joined


def _counts(most: int) -> Iterator[int]:
    count = 1
    while count < most:
        yield count
        count += max(1, count // 2)


def tokens_of(sequence: Sequence[int], rows: Sequence[TrainRow]) -> int:
    """Positions of a sequence: what its prompts begin with once, the rest of each prompt once, and
    every completion."""
    prompts = distinct_prompts(sequence, rows)
    shared = common_prefix(prompts) * (len(prompts) - 1)
    completions = sum(len(rows[index].completion_token_ids) for index in sequence)
    return sum(map(len, prompts)) - shared + completions


def distinct_prompts(sequence: Sequence[int], rows: Sequence[TrainRow]) -> list[np.ndarray]:
    """int32 [P] of each prompt, in the order of the rows."""
    prompts = (rows[index].prompt_token_ids for index in sequence)
    return list({prompt.tobytes(): prompt for prompt in prompts}.values())


def common_prefix(prompts: Sequence[np.ndarray]) -> int:
    """Number of tokens with which all prompts begin; all of them if there is one prompt."""
    first = prompts[0]
    return reduce(lambda least, other: min(least, _same_tokens(first, other)), prompts, len(first))


def _same_tokens(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _costs(
    sequences: Sequence[Sequence[int]], rows: Sequence[TrainRow], pairs_per_token: float
) -> float:
    """In tokens. Attention compares half of all pairs of one row, and with a mask all of them."""
    cost = 0.0
    for sequence in sequences:
        tokens = tokens_of(sequence, rows)
        pairs = tokens**2 if len(sequence) > 1 else tokens**2 / 2
        cost += tokens + pairs / pairs_per_token
    return cost
