"""Assignment of the rows of a step to processes and micro-batches, for a host that does not
shuffle: fresh rows stay where the host has them."""

from collections.abc import Sequence

from grpo_replay.replay.batch import even_sizes


def spread(births: Sequence[int]) -> list[int]:
    """Order the rows of a composed batch so that the older ones are spread evenly among the
    youngest; both keep their own order. `births` are the rows' birth steps. Example: births 3, 3,
    3, 3, 1, 2 give rows 0, 4, 1, 2, 5, 3."""
    youngest = max(births, default=0)
    fresh = [row for row, birth in enumerate(births) if birth == youngest]
    older = [row for row, birth in enumerate(births) if birth != youngest]
    position = {
        row: (2 * i + 1) / len(rows) for rows in (fresh, older) for i, row in enumerate(rows)
    }
    return sorted(position, key=lambda row: position[row])


def shares_of(rows: Sequence[int], processes: int, order: Sequence[int]) -> list[list[list[int]]]:
    """Distribute rows, in their order, to `[process][micro-batch]`: every process gets consecutive
    rows, and cuts them into its micro-batches. `order` lists the micro-batches in the order in
    which they get one more row if rows are left over (`accelerated.update_by_update`).

    A micro-batch has as many rows on every process, at least one: -1 is padding. Example: rows 0 to
    4 for two processes of two micro-batches are [[0, 1], [2]] and [[3, -1], [4]].
    """
    sizes = dict(zip(order, even_sizes(len(rows), len(order)), strict=True))
    parts = [even_sizes(sizes[micro_batch], processes) for micro_batch in range(len(order))]
    remaining = iter(rows)
    lengths = [max(1, sizes_P[0]) for sizes_P in parts]
    shares = []
    for process in range(processes):
        share = [[next(remaining) for _ in range(sizes_P[process])] for sizes_P in parts]
        pairs = zip(share, lengths, strict=True)
        shares.append([rows + [-1] * (length - len(rows)) for rows, length in pairs])
    return shares
