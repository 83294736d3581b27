"""A change to a checkpoint that is already complete."""

import os
import shutil
from pathlib import Path

from grpo_replay.storage.atomic import (
    flush_tree,
    rename_folder,
    write_json_whole,
    write_text_whole,
)
from grpo_replay.storage.checkpoint import MANIFEST, REPLACED, file_facts, read_json


def replace_text(checkpoint: Path, name: str, text: str) -> None:
    """Replace one text file of a complete checkpoint, which is complete before and after: a copy of
    links takes its place. If this is killed in between, `adopt_latest` takes the old one back."""
    temporary, aside = checkpoint.with_name(".tmp-new"), checkpoint.with_name(REPLACED)
    for leftover in (temporary, aside):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(checkpoint, temporary, copy_function=_link_or_copy)
    write_text_whole(temporary / name, text)  # a new file: the original keeps its own
    manifest = read_json(temporary / MANIFEST, "the checkpoint is incomplete")
    manifest["files"] |= file_facts(temporary, [name])
    write_json_whole(temporary / MANIFEST, manifest)
    flush_tree(temporary)
    rename_folder(checkpoint, aside)
    rename_folder(temporary, checkpoint)
    shutil.rmtree(aside)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
