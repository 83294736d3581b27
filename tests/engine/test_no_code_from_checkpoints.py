"""A checkpoint that someone else made is data: nothing in it is called."""

import os
from pathlib import Path

import pytest
import torch
from slow_tests import slow_except
from small_runs.trained import FinishedRun, train_small_run

from grpo_replay.errors import CheckpointError
from grpo_replay.storage.atomic import write_json_whole
from grpo_replay.storage.checkpoint import MANIFEST, file_facts, read_json


class Planted:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def forge(checkpoint: Path, kind: str, planted: object) -> None:
    """Put an object into an engine file, and give the manifest the file's new digest."""
    (file,) = checkpoint.glob(f"engine/**/*{kind}.pt")
    content = torch.load(file, weights_only=False)
    torch.save({**content, "planted": planted}, file)
    manifest = read_json(checkpoint / MANIFEST, "")
    name = str(file.relative_to(checkpoint))
    manifest["files"] |= file_facts(checkpoint, [name])
    write_json_whole(checkpoint / MANIFEST, manifest)


def small(path: Path, stage: int, steps: int, **options) -> FinishedRun:
    return train_small_run(
        path, engine={"zero_stage": stage}, run={"steps": steps},
        eval={"benchmarks": []}, checkpoint={"every_steps": 1}, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("written", "resumed", "kind"),
    slow_except([(2, 0, "optim_states")], [(2, 0, "optim_states"), (0, 0, "model_states")]),
)  # fmt: skip
def test_a_planted_call_is_refused_and_not_made(tmp_path, processes, written, resumed, kind):
    run, marker = small(tmp_path / "run", written, 3), tmp_path / "executed"
    checkpoint = run.path / "checkpoints/step_000003"
    forge(checkpoint, kind, Planted(marker))
    with pytest.raises(CheckpointError, match=r"mkdir.*Nothing of it was run"):
        small(tmp_path / "run", resumed, 4, resume=True)
    assert not marker.exists()
