"""The micro-batches of every rank in one process."""

from collections.abc import Sequence

from grpo_replay.engine.microbatches import (
    MicroBatch,
    micro_batch,
    micro_batch_rows,
    plan_sequences,
)
from grpo_replay.engine.shared_prompts import Layout
from grpo_replay.replay.batch import TrainRow


def plan_microbatches(
    rows: Sequence[TrainRow], layout: Layout, ranks: int
) -> list[list[MicroBatch]]:
    """Of each rank, without an exchange."""
    return [
        [micro_batch(*micro_batch_rows(sequences, rows), layout.packing) for sequences in of_rank]
        for of_rank in plan_sequences(rows, layout, ranks)
    ]
