"""Writes checkpoints: the shards of all ranks, then a manifest.

Every rank flushes and hashes its own files; rank 0 completes the folder.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import run_on_main
from grpo_replay.errors import OutputDirectoryError
from grpo_replay.replay.snapshot import write_snapshot
from grpo_replay.storage.atomic import (
    describe_write_failure,
    flush_files,
    write_text_whole,
)
from grpo_replay.storage.checkpoint import (
    MODEL_CARDS,
    FileFacts,
    RunState,
    begin_checkpoint,
    complete_checkpoint,
    file_facts,
    list_checkpoints,
    model_cards,
    temporary_folder,
)
from grpo_replay.training.disk_room import how_to_continue
from grpo_replay.training.rollout_source import Parts, RolloutSource

_SHARD = re.compile(r"zero_pp_rank_(\d+)_")


def write_checkpoint(
    parts: Parts,
    source: RolloutSource,
    state: RunState,
    model_card: Callable[[], str],
) -> None:
    """Write the checkpoint of `state.step` and drop the oldest. Collective.

    It has model/ (weights, tokenizer, card) if the recipe `saves_model`, adapter/ with LoRA,
    engine/ (each rank's shards), buffer.parquet, the files of the source, state.json and, written
    last, the manifest. Rollouts and draws of earlier steps are flushed first.

    Raises OutputDirectoryError if the disk runs full; earlier checkpoints are unchanged.
    """
    comm = parts.comm
    temporary = temporary_folder(parts.run_dir.checkpoints, state.step)

    def begin() -> None:
        with removed_if_unwritable(temporary):
            parts.run_dir.flush_steps(state.step)
            begin_checkpoint(temporary)

    def complete() -> None:
        with removed_if_unwritable(temporary):
            for card in model_cards(temporary):
                write_text_whole(card, model_card())
            write_snapshot(temporary / "buffer.parquet", parts.buffer, state.step)
            source.save(temporary)
            complete_checkpoint(temporary, state, parts.recipe.checkpoint.keep, facts)

    run_on_main(comm, begin)
    with removed_if_unwritable(temporary):
        parts.engine.save(temporary / "engine")
        if parts.recipe.saves_model(state.step):
            parts.engine.save_model(temporary / "model")
        parts.engine.save_adapter(temporary / "adapter")
        facts = _gather_file_facts(comm, temporary)
    run_on_main(comm, complete)


def _gather_file_facts(comm: Comm, folder: Path) -> FileFacts:
    """Returns size and SHA-256 of every file in `folder`, for the manifest. Collective: every rank
    flushes and hashes the files that it wrote (DeepSpeed's shards have the rank in their names,
    rank 0 wrote the others)."""
    local = [name for name in _files_in(folder) if _writer(name) % comm.world_size == comm.rank]
    flush_files([folder / name for name in local])
    facts: FileFacts = {}
    for rank_facts in comm.all_gather(file_facts(folder, local)):
        facts |= rank_facts
    return facts


def _files_in(folder: Path) -> list[str]:
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [name for name in names if name not in MODEL_CARDS]  # peft writes a card too


def _writer(name: str) -> int:
    shard = _SHARD.search(name)
    return int(shard[1]) if shard else 0


@contextmanager
def removed_if_unwritable(temporary: Path) -> Iterator[None]:
    """Turn an error of a full or failing disk, or of a folder without write permission, into an
    OutputDirectoryError, and remove the unfinished checkpoint."""
    try:
        yield
    except Exception as error:
        reason = describe_write_failure(error)
        if reason is None:
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        raise OutputDirectoryError(
            f"{temporary} cannot be written: {reason}. The unfinished checkpoint was removed. "
            f"{how_to_continue(list_checkpoints(temporary.parent))}"
        ) from error
