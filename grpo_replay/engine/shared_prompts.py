"""Which rollouts of a mini-batch are computed behind one copy of their prompt.

P prompt tokens and n completions of T tokens are P + n·T positions in one sequence, and n·(P + T)
in sequences of their own. Each completion sees the prompt and itself, at the positions it would
have alone, so both are the same function. numpy only.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grpo_replay.replay.batch import TrainRow

LEAST_SAVING = 0.3
"""Share of a mini-batch's cost that sharing must save. Below it, masks cost what tokens save."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows become forward passes of at most `max_tokens` positions.

    With `packing`, sequences lie end to end without padding. Prompts are shared if
    `pairs_per_token` is set: the number of pairs of positions that attention compares at the cost
    of one token in all other layers; infinite where attention skips the pairs that its mask leaves
    out.
    """

    max_tokens: int
    packing: bool = False
    pairs_per_token: float | None = None


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
    """The rows of each sequence: one row, or several of one prompt.

    Prompts are shared where that saves `LEAST_SAVING` of the whole mini-batch's cost. A sequence
    of several rows is no longer than `max_tokens`, and is split where that balances the ranks.
    """
    alone = [[index] for index in range(len(rows))]
    if layout.pairs_per_token is None:
        return alone
    groups = _rows_by_prompt(rows)
    total = sum(row.length_tokens for row in rows)
    repeated = total - sum(tokens_of(group, rows) for group in groups)
    if repeated < LEAST_SAVING * total:
        return alone
    pairs = layout.pairs_per_token
    shared: list[list[int]] = []
    for group in groups:
        splits = _splits(group, rows, layout.max_tokens)
        cheapest: list[list[int]] = min(splits, key=lambda parts: _costs(parts, rows, pairs))
        shared += cheapest
    if _costs(shared, rows, pairs) > (1 - LEAST_SAVING) * _costs(alone, rows, pairs):
        return alone
    return _balanced(shared, rows, ranks)


def deal(sequences: Sequence[list[int]], rows: Sequence[TrainRow], ranks: int) -> list[list[int]]:
    """Indices of each rank's sequences, the longest first.

    Single rows go round in snake order, so that all ranks get similar lengths; sequences that share
    a prompt differ more, and each goes to the rank with the fewest tokens so far.
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
        halved = [*others, longest[::2], longest[1::2]]
        if busiest(halved) >= busiest(sequences):
            break
        sequences = halved
    return sequences


def _rows_by_prompt(rows: Sequence[TrainRow]) -> list[list[int]]:
    """Row indices of each distinct prompt, the longest row first."""
    groups: dict[bytes, list[int]] = {}
    for index in sorted(range(len(rows)), key=lambda i: (-rows[i].length_tokens, i)):
        groups.setdefault(rows[index].prompt_token_ids.tobytes(), []).append(index)
    return list(groups.values())


def _splits(
    group: Sequence[int], rows: Sequence[TrainRow], limit: int
) -> Iterator[list[list[int]]]:
    """Ways to spread a prompt's rows over sequences of at most `limit` tokens: over 1, 2, 3, 4, 6,
    9, …, and over as many as there are rows."""
    count = 1
    while count < len(group):
        parts = [list(group[start::count]) for start in range(count)]
        if all(len(part) == 1 or tokens_of(part, rows) <= limit for part in parts):
            yield parts
        count += max(1, count // 2)
    yield [[index] for index in group]


def tokens_of(sequence: Sequence[int], rows: Sequence[TrainRow]) -> int:
    """Positions of a sequence: the prompt once, and every completion."""
    prompt = len(rows[sequence[0]].prompt_token_ids)
    return prompt + sum(len(rows[index].completion_token_ids) for index in sequence)


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
