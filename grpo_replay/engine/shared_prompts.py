"""Which rollouts of a mini-batch are computed behind one copy of their prompt, or of the tokens
with which their prompts begin.

P prompt tokens and n completions of T tokens are P + n·T positions in one sequence, and n·(P + T)
in sequences of their own. Prompts that begin with the same F tokens (examples, instructions,
tools) are F + n·(P - F + T) behind them. Each completion sees its prompt and itself, at the
positions it would have alone, so all are the same function. numpy only.
"""

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
    of one token in all other layers.
    """

    max_tokens: int
    packing: bool = False
    pairs_per_token: float | None = None


def pairs_per_token(attention: str, hidden_size: int) -> float | None:
    """`Layout.pairs_per_token` for an attention of transformers; None for one without such masks.

    A layer multiplies a token by about 12·h² weights, and compares a pair with 2·h numbers twice:
    6·h pairs to a token. Attention with a mask was measured to run at half the speed of
    matrix products, which makes 3·h.
    """
    return 3.0 * hidden_size if attention in ("sdpa", "eager") else None


class Lengths:
    """Numbers of tokens of a mini-batch's rows, of their prompts, and of what prompts have in
    common: planning asks for sums of them thousands of times."""

    def __init__(self, rows: Sequence[TrainRow]) -> None:
        prompts = {row.prompt_token_ids.tobytes(): row.prompt_token_ids for row in rows}
        place = {prompt: index for index, prompt in enumerate(sorted(prompts))}
        self.completions = [len(row.completion_token_ids) for row in rows]
        self.prompt_of = [place[row.prompt_token_ids.tobytes()] for row in rows]
        """Of each row. Prompts are sorted, so that those that begin alike are neighbours."""
        self.prompts = [len(prompts[prompt]) for prompt in place]
        self.common = [_same_tokens(prompts[one], prompts[other]) for one, other in pairwise(place)]
        """With how many tokens each prompt and the next one begin alike."""
        self.rows = [
            self.prompts[prompt] + completion
            for prompt, completion in zip(self.prompt_of, self.completions, strict=True)
        ]

    def of_completions(self, sequence: Sequence[int]) -> int:
        return sum([self.completions[row] for row in sequence])

    def of_prefix(self, sequence: Sequence[int]) -> int:
        """Number of tokens with which all prompts of the rows begin; all of a single prompt."""
        return self._of_prefix({self.prompt_of[row] for row in sequence})

    def of_sequence(self, sequence: Sequence[int]) -> int:
        """Positions of a sequence: what its prompts begin with once, the rest of each prompt once,
        and every completion."""
        if len(sequence) == 1:
            return self.rows[sequence[0]]
        prompts = {self.prompt_of[row] for row in sequence}
        all_prompts = sum([self.prompts[prompt] for prompt in prompts])
        shared = self._of_prefix(prompts) * (len(prompts) - 1)
        return all_prompts - shared + self.of_completions(sequence)

    def _of_prefix(self, prompts: set[int]) -> int:
        first, last = min(prompts), max(prompts)
        return min(self.common[first:last], default=self.prompts[first])


def sequences_of(lengths: Lengths, layout: Layout, ranks: int) -> list[list[int]]:
    """The rows of each sequence: one row, or several whose prompts begin with the same tokens.
    Rows of the same prompt are neighbours.

    Prompts are shared where that saves `LEAST_SAVING` of the whole mini-batch's cost. A sequence
    of several rows is no longer than `max_tokens`, and is split where that balances the ranks.
    """
    alone = [[row] for row in range(len(lengths.rows))]
    if layout.pairs_per_token is None or not alone:
        return alone
    total = sum(lengths.rows)
    if total - _fewest_tokens(lengths) < LEAST_SAVING * total:
        return alone
    pairs, limit = layout.pairs_per_token, layout.max_tokens

    def cheapest(ways: Iterable[list[list[int]]]) -> list[list[int]]:
        return min(ways, key=lambda sequences: _costs(sequences, lengths, pairs))

    groups = _rows_by_prompt(lengths)
    of_prompts = [part for group in groups for part in cheapest(_splits(group, lengths, limit))]
    shared = cheapest(_joins(of_prompts, lengths, limit, ranks))
    if _costs(shared, lengths, pairs) > (1 - LEAST_SAVING) * _costs(alone, lengths, pairs):
        return alone
    return _balanced(shared, lengths, ranks)


def deal(sequences: Sequence[list[int]], lengths: Lengths, ranks: int) -> list[list[int]]:
    """Indices of each rank's sequences, the longest first.

    Single rows go round in snake order, so that all ranks get similar lengths; sequences of several
    rows differ more, and each goes to the rank with the fewest tokens so far.
    """
    tokens = list(map(lengths.of_sequence, sequences))
    order = sorted(range(len(sequences)), key=lambda i: (-tokens[i], sequences[i][0]))
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    shares = any(len(sequence) > 1 for sequence in sequences)
    for position, index in enumerate(order):
        turn, seat = divmod(position, ranks)
        snake = seat if turn % 2 == 0 else ranks - 1 - seat
        rank = loads.index(min(loads)) if shares else snake
        dealt[rank].append(index)
        loads[rank] += tokens[index]
    return dealt


def _balanced(sequences: list[list[int]], lengths: Lengths, ranks: int) -> list[list[int]]:
    """The sequences, the longest one halved as long as the busiest rank then has fewer tokens."""

    def busiest(of: list[list[int]]) -> int:
        dealt = deal(of, lengths, ranks)
        return max(sum(lengths.of_sequence(of[index]) for index in its) for its in dealt)

    while ranks > 1:
        longest = max(
            sequences, key=lambda sequence: (len(sequence) > 1, lengths.of_sequence(sequence))
        )
        if len(longest) == 1:
            break
        others = [sequence for sequence in sequences if sequence is not longest]
        halved = [*others, *_halves(longest, lengths)]
        if busiest(halved) >= busiest(sequences):
            break
        sequences = halved
    return sequences


def _halves(sequence: list[int], lengths: Lengths) -> tuple[list[int], list[int]]:
    """Rows of several prompts are cut in the middle; those of one prompt, the longest first, are
    dealt in turn."""
    if len({lengths.prompt_of[row] for row in sequence}) > 1:
        middle = len(sequence) // 2
        return sequence[:middle], sequence[middle:]
    return sequence[::2], sequence[1::2]


def _rows_by_prompt(lengths: Lengths) -> list[list[int]]:
    """The rows of each prompt, the longest first."""
    groups: list[list[int]] = [[] for _ in lengths.prompts]
    for row in sorted(range(len(lengths.rows)), key=lambda row: -lengths.rows[row]):
        groups[lengths.prompt_of[row]].append(row)
    return groups


def _fewest_tokens(lengths: Lengths) -> int:
    """Positions if every token that prompts begin with were computed once (the nodes of their
    prefix tree), and every completion."""
    return sum(lengths.prompts) - sum(lengths.common) + sum(lengths.completions)


def _splits(group: Sequence[int], lengths: Lengths, limit: int) -> Iterator[list[list[int]]]:
    """Ways to spread a prompt's rows over sequences of at most `limit` tokens: over 1, 2, 3, 4, 6,
    9, …, and over as many as there are rows."""
    for count in _counts(len(group)):
        parts = [list(group[start::count]) for start in range(count)]
        if all(len(part) == 1 or lengths.of_sequence(part) <= limit for part in parts):
            yield parts
    yield [[row] for row in group]


def _joins(
    sequences: list[list[int]], lengths: Lengths, limit: int, ranks: int
) -> Iterator[list[list[int]]]:
    """Ways to join neighbours to sequences of at most `limit` tokens: as they are, and to 1, 2, 3,
    4, 6, 9, … for each rank, with about the same number of completion tokens."""
    yield sequences
    ends = np.cumsum(list(map(lengths.of_completions, sequences)))
    for each_rank in _counts(-(-len(sequences) // ranks)):
        count = each_rank * ranks
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="right")
        bounds = [0, *cuts.tolist(), len(sequences)]
        runs = (sequences[start:end] for start, end in pairwise(bounds) if start < end)
        joined = [list(chain.from_iterable(run)) for run in runs]
        if all(len(each) == 1 or lengths.of_sequence(each) <= limit for each in joined):
            yield joined


def _counts(most: int) -> Iterator[int]:
    count = 1
    while count < most:
        yield count
        count += max(1, count // 2)


def common_prefix(prompts: Sequence[np.ndarray]) -> int:
    """Number of tokens with which all prompts begin; all of them if there is one prompt."""
    first = prompts[0]
    return reduce(lambda least, other: min(least, _same_tokens(first, other)), prompts, len(first))


def _same_tokens(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _costs(sequences: Sequence[Sequence[int]], lengths: Lengths, pairs_per_token: float) -> float:
    """In tokens. Attention compares half of all pairs of one row, and with a mask all of them."""
    cost = 0.0
    for sequence in sequences:
        tokens = lengths.of_sequence(sequence)
        pairs = tokens**2 if len(sequence) > 1 else tokens**2 / 2
        cost += tokens + pairs / pairs_per_token
    return cost
