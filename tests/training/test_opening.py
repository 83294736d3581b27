"""What a run looks at, says and refuses before its first step."""

import json
import logging
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs.trained import Listener, small_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import PeerFailure
from grpo_replay.engine.engine_state import LAYOUT
from grpo_replay.errors import DatasetError, ModelError, OutputDirectoryError, RecipeError
from grpo_replay.recipe import resolve_recipe
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training import disk_room, opening
from grpo_replay.training.opening import Hardware, RunOpener, missing_packages
from grpo_replay.training.resuming import open_follower_logs
from grpo_replay.training.run import run_training


def opener(folder: Path, **sections) -> RunOpener:
    """Of one rank."""
    device = SimpleNamespace(type="cpu")
    recipe = resolve_recipe([sections])
    return RunOpener(recipe, Comm(), device, RunDirectory(folder), ExitStack())


def test_a_package_that_the_attention_needs_is_named(monkeypatch):
    monkeypatch.setattr(opening, "has_module", lambda _: False)
    recipe = resolve_recipe([{"model": {"attn_implementation": "flash_attention_2"}}])
    (named,) = missing_packages(recipe)
    assert "model.attn_implementation" in named and "flash_attn" in named
    assert not missing_packages(resolve_recipe([{}]))


def test_a_run_says_what_it_leaves_out(tmp_path, processes, monkeypatch):
    """The room that the model has is compared with the longest prompt that remains."""
    rooms = []

    def check_room(recipe, longest: int) -> None:
        rooms.append(longest)
        logging.getLogger("grpo_replay.engine").warning("said by a check")

    monkeypatch.setattr(opening, "check_room", check_room)
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: 50_000_000)  # one checkpoint, not 100
    recipe = small_recipe(
        run={"steps": 1}, replay={"preset": "grpo"}, prompts={"max_prompt_length": 6},
        checkpoint={"keep": 99},
    )  # fmt: skip
    listener = Listener()
    run_training(recipe, tmp_path / "run", False, listener)
    assert "said by a check" in (tmp_path / "run/log/attempt_001.log").read_text()
    assert len(rooms) == 1 and 3 <= rooms[0] <= 6
    (left_out,) = [each for each in listener.at_start if "left out" in each]
    assert "prompts.max_prompt_length 6" in left_out
    assert any("100 more checkpoints" in each for each in listener.at_start)


def test_a_start_opens_the_workers_of_the_recipe_and_a_plan_one(tmp_path, monkeypatch):
    opened = opener(tmp_path, reward={"workers": 3})
    sections = []

    def note(section):
        sections.append(section)
        return nullcontext()

    monkeypatch.setattr(opening.RewardScorer, "open", note)
    monkeypatch.setattr(opened, "_notices_of_rewards", list)
    opened._try_rewards()
    opened.scorer, opened.hardware = None, replace(opened.hardware, is_plan=True)
    opened._try_rewards()
    assert [section.workers for section in sections] == [3, 1]


def test_the_engine_has_the_zero_stage_that_was_chosen_for_the_hardware(tmp_path, processes):
    """ZeRO 2 on two GPUs that hold the state twice; for one rank alone it would be 0."""
    recipe = small_recipe(engine={"zero_stage": "auto"})
    hardware = Hardware(ranks=2, ranks_here=2, gpu_bytes=2**30)
    with ExitStack() as stack:
        opened = RunOpener(
            recipe, *processes, RunDirectory(tmp_path / "run"), stack, hardware=hardware
        )
        opened._load_tokenizer()
        opened._open_engine()
        opened.engine.save(tmp_path)
    assert json.loads((tmp_path / LAYOUT).read_text())["zero_stage"] == opened.zero_stage == 2


def test_of_several_ranks_the_lowest_that_a_check_refuses_speaks(tmp_path):
    """This is rank 1, which has no such function; rank 0 has another reason."""
    opened = opener(tmp_path / "run", replay={"priority": "nowhere.py:f"})
    opened.comm = SimpleNamespace(
        rank=1, is_main=False, all_gather=lambda mine: [["no such model", 3], mine]
    )
    with pytest.raises(PeerFailure, match="rank 0: no such model") as refused:
        opened.check()
    assert refused.value.exit_code == 3
    assert not (tmp_path / "run").exists()


def test_a_sampler_that_reads_files_is_refused_for_a_random_model_by_a_check(tmp_path):
    opened = opener(
        tmp_path,
        model={"path": "builtin:qwen3-0.6b", "random_init": True, "tokenizer": "builtin:bytes"},
        sampling={"backend": "vllm"},
    )
    opened._load_tokenizer()
    with pytest.raises(RecipeError, match=r"random_init: sampling\.backend vllm"):
        opened._check_sampler()


@pytest.mark.parametrize(("rank", "logs"), [(0, []), (2, ["attempt_004.rank_2.log"])])
def test_every_other_rank_logs_beside_rank_0(tmp_path, rank, logs):
    """Three attempts were logged before; rank 0 has opened the fourth."""
    folder = tmp_path / "log"
    folder.mkdir()
    for attempt in range(1, 5):
        (folder / f"attempt_{attempt:03d}.log").touch()
    comm = SimpleNamespace(
        rank=rank, is_main=rank == 0,
        broadcast=lambda value: value or 4,
        all_gather=lambda value: [value],
    )  # fmt: skip
    open_follower_logs(RunDirectory(tmp_path), comm)
    assert sorted(path.name for path in folder.glob("*rank*")) == logs


def test_a_rank_whose_folder_is_on_another_disk_is_refused_and_leaves_nothing(tmp_path):
    comm = SimpleNamespace(
        rank=1, is_main=False, broadcast=lambda _: 1, all_gather=lambda mine: [None, mine]
    )
    with pytest.raises(OutputDirectoryError, match=r"attempt_001\.log is missing .* all nodes"):
        open_follower_logs(RunDirectory(tmp_path / "run"), comm)
    assert not (tmp_path / "run").exists()


def test_other_prompts_than_at_the_checkpoint_are_refused(tmp_path):
    opened, state = opener(tmp_path), RunState()
    for _ in range(2):
        opened._store_prompts_digest(SimpleNamespace(sha256="some"), state)
    assert state.prompts == "some"
    with pytest.raises(DatasetError, match=r"prompts\.source: .* restore them"):
        opened._store_prompts_digest(SimpleNamespace(sha256="others"), state)


def test_another_model_than_the_run_began_with_is_refused(tmp_path):
    opened = opener(tmp_path)
    opened._store_base_digest("the base", RunState(base="the base"))
    with pytest.raises(ModelError, match="builtin:tiny"):
        opened._store_base_digest("another", RunState(base="the base"))
    opened.comm = SimpleNamespace(rank=1, all_gather=lambda mine: [mine, mine])
    with pytest.raises(PeerFailure, match="rank 0"):  # which says it once for both
        opened._store_base_digest("another", RunState(base="the base"))
