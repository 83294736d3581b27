"""Steps of opening a run that only long runs take: by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_replay.recipe import resolve_recipe
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training.opening import RunOpener
from grpo_replay.training.resuming import open_other_logs


def opener(folder: Path, **sections) -> SimpleNamespace:
    return SimpleNamespace(
        recipe=resolve_recipe([sections]), run_dir=SimpleNamespace(path=folder), notices=[]
    )


@pytest.mark.parametrize("resumed", [False, True])
def test_vllm_opens_a_random_model_from_the_folder_of_its_first_weights(tmp_path, resumed):
    sections = {
        "model": {"path": "builtin:qwen3-0.6b", "random_init": True, "tokenizer": "builtin:bytes"},
        "sampling": {"backend": "vllm"},
    }
    saved: list[Path] = []
    engine = SimpleNamespace(save_model=saved.append)
    folder = tmp_path / "initial_model"
    if resumed:
        folder.mkdir()
    found = RunOpener._model_path(opener(tmp_path, **sections), engine, resumed)
    assert (found, saved) == (str(folder), [] if resumed else [folder])


@pytest.mark.parametrize(("rank", "logs"), [(0, []), (2, ["attempt_004.rank_2.log"])])
def test_every_other_rank_logs_beside_rank_0(tmp_path, rank, logs):
    """Three attempts were logged before; rank 0 has opened the fourth."""
    folder = tmp_path / "log"
    folder.mkdir()
    for attempt in range(1, 5):
        (folder / f"attempt_{attempt:03d}.log").touch()
    comm = SimpleNamespace(
        rank=rank, is_main=rank == 0,
        broadcast_json=lambda value=None: 4 if value is None else value,
        all_gather_json=lambda value: [value],
    )  # fmt: skip
    open_other_logs(RunDirectory(tmp_path), comm)
    assert sorted(path.name for path in folder.glob("*rank*")) == logs
