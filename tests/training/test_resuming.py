"""What a checkpoint is made of, and what a resume looks at, refuses and removes: by hand."""

import errno
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs.trained import small_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import CheckpointError, OutputDirectoryError, RecipeError
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.recipe_history import recipe_file, shareable_yaml
from grpo_replay.training import journal_rules, resuming
from grpo_replay.training.resuming import StartingPoint

GIB = 2**30


@pytest.fixture
def disk(monkeypatch):
    """Sets what is free on the disk, and the sizes of the checkpoints that are there, in GiB."""

    def say(free: float, *sizes: float) -> None:
        kept = [Path(f"step_{step:06d}") for step in range(1, len(sizes) + 1)]
        on_disk = dict(zip(kept, sizes, strict=True))
        monkeypatch.setattr(resuming, "free_bytes", lambda _: int(free * GIB))
        monkeypatch.setattr(resuming, "list_checkpoints", lambda _: kept)
        monkeypatch.setattr(
            resuming, "checkpoint_bytes_on_disk", lambda path: int(on_disk[path] * GIB)
        )

    return say


@pytest.mark.parametrize(
    ("keep", "sizes", "more", "each"),
    [(3, [], 4, 10), (3, [20, 12], 2, 12), (3, [4], 3, 10), (1, [10, 10, 10], 1, 10)],
    ids=["none yet", "larger than expected", "smaller than expected", "more than are kept"],
)
def test_a_disk_that_will_be_full_is_noticed_at_the_start(disk, keep, sizes, more, each):
    disk(more * each, *sizes)
    assert resuming.notices_of_room(Path("run"), keep, 10 * GIB) == []
    if more == 1:
        return
    disk(more * each - 1, *sizes)
    assert resuming.notices_of_room(Path("run"), keep, 10 * GIB) == [
        f"run has {more * each - 1:.1f} GiB free, and {more} more checkpoints (checkpoint.keep "
        f"{keep} and one being written) take {more * each:.1f} GiB: the run stops at the one that "
        "does not fit; make room"
    ]


@pytest.mark.parametrize(
    ("sizes", "left"),
    [
        ([], "There is no earlier checkpoint: free the place, and start again"),
        ([9, 9], "step_000002 is complete: free the place, and go on from there with --resume"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(disk, sizes, left):
    disk(10, *sizes)
    resuming.refuse_full_disk(Path("run"), "it", 10 * GIB)
    disk(9.5, *sizes)
    with pytest.raises(OutputDirectoryError) as refused:
        resuming.refuse_full_disk(Path("run"), "it", 10 * GIB)
    assert str(refused.value) == (
        f"it needs 10.0 GiB, and run has 9.5 GiB free: nothing was written. {left}"
    )


def test_what_was_written_of_a_checkpoint_is_removed_if_the_disk_is_full(tmp_path, disk):
    disk(0, 1)
    for error in (OSError(errno.ENOSPC, "No space left on device"), ZeroDivisionError()):
        folder = tmp_path / "tmp"
        folder.mkdir()
        is_disks = isinstance(error, OSError)
        with (
            pytest.raises(OutputDirectoryError if is_disks else ZeroDivisionError) as seen,
            resuming.removed_if_unwritable(folder),
        ):
            raise error
        assert folder.exists() is not is_disks
        if is_disks:
            assert str(seen.value).startswith(f"{folder} cannot be written (")
            assert "; 0.0 GiB free then): what was written of it was removed. step_000001" in str(
                seen.value
            )


def recorded(folder: Path, journal: bool = True, **sections) -> Path:
    """A run's folder with its recipe."""
    recipe_file(folder).parent.mkdir(parents=True, exist_ok=True)
    recipe_file(folder).write_text(shareable_yaml(small_recipe(**sections)))
    if journal:
        (folder / "journal").mkdir()
    return folder


def test_a_run_goes_on_with_as_many_draws_a_step(tmp_path):
    resuming.refuse_other_unit(2, tmp_path)  # nothing was recorded
    run = recorded(tmp_path / "run")
    resuming.refuse_other_unit(1, run)
    with pytest.raises(RecipeError, match=r"made 1 draws, and would make 2 by this recipe"):
        resuming.refuse_other_unit(2, run)


def test_a_run_goes_on_to_no_fewer_steps_than_it_has(tmp_path, found):
    found(Path("step_000003"))
    run_dir = run_directory(recorded(tmp_path))
    resuming._find_start(small_recipe(run={"steps": 3}), run_dir, True)
    with pytest.raises(RecipeError, match=r"^run.steps 2: .* step 3.*set run.steps to 3 or more"):
        resuming._find_start(
            small_recipe(run={"steps": 2}, replay={"warmup_steps": 1}), run_dir, True
        )


def test_a_buffer_of_another_step_is_refused(monkeypatch):
    restored = []
    monkeypatch.setattr(resuming, "restore_snapshot", lambda *words: restored.append(words) or 3)
    resuming.restore_buffer(Path("there"), 3, "buffer")
    assert restored == [(Path("there/buffer.parquet"), "buffer")]
    with pytest.raises(CheckpointError, match="buffer after step 3, in the checkpoint of step 4"):
        resuming.restore_buffer(Path("there"), 4, "buffer")


def test_a_checkpoint_that_a_rank_does_not_see_is_named(tmp_path):
    """Rank 0 found it; --output-dir of another node is another disk."""
    assert resuming._seen_by_all(None, tmp_path, Comm()) is None
    seen = tmp_path / "step_000003"
    seen.mkdir()
    assert resuming._seen_by_all(Path("of/rank/0/step_000003"), tmp_path, Comm()) == seen
    with pytest.raises(CheckpointError, match=r"step_000004 is not there on .*though rank 0 sees"):
        resuming._seen_by_all(Path("step_000004"), tmp_path, Comm())


class Calls(list):
    """Writes down what is called, and answers as told."""

    def __init__(self, **answers) -> None:
        super().__init__()
        self.answers = answers

    def __getattr__(self, name: str):
        if name in self.answers and not callable(self.answers[name]):
            return self.answers[name]

        def call(*words, **named):
            self.append((name, *words, *named.values()))
            return self.answers.get(name, lambda *_: None)(*words)

        return call


@pytest.fixture
def found(monkeypatch):
    """Sets the newest checkpoint; the functions that look for it are not the real ones."""

    def say(checkpoint: Path | None) -> None:
        monkeypatch.setattr(resuming, "adopt_latest", lambda _: None)
        monkeypatch.setattr(resuming, "find_checkpoint", lambda _: checkpoint)
        monkeypatch.setattr(resuming, "read_state", lambda path: RunState(step=int(path.name[-1])))

    return say


def run_directory(folder: Path, unborn: bool = False, damage: str | None = None) -> Calls:
    return Calls(
        path=folder, checkpoints=folder / "checkpoints", is_unborn=unborn,
        check=lambda step: damage and f"{damage} before step {step}",
        next_attempt=lambda: 4, go_back=lambda recipe, step: ["run.steps 9, was 4"],
    )  # fmt: skip


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_had_not_begun_is_created(tmp_path, resume):
    recipe, run_dir = small_recipe(), run_directory(tmp_path, unborn=resume)
    start = resuming._find_start(recipe, run_dir, resume)
    assert run_dir == [("create", recipe)]
    assert (start.checkpoint, start.state) == (None, RunState())
    assert start.notices == (["the run had not begun yet: it starts now"] if resume else [])


@pytest.mark.parametrize("damage", [None, "a hole"])
def test_a_resume_begins_at_the_last_checkpoint_and_tells_of_damage(tmp_path, found, damage):
    found(Path("step_000003"))
    run_dir = run_directory(recorded(tmp_path), damage=damage)
    start = resuming._find_start(small_recipe(), run_dir, True)
    assert run_dir == [("lock",), ("check", 3)]
    assert start.checkpoint == Path("step_000003")
    assert start.notices == (["a hole before step 3"] if damage else [])
    found(None)
    start = resuming._find_start(small_recipe(), run_dir, True)
    again = "the run had no checkpoint yet: it starts again from its first step"
    assert start.checkpoint is None and start.notices[-1] == again
    assert start.notices[:-1] == (["a hole before step 0"] if damage else [])


def test_a_journal_that_is_repeated_must_have_the_same_rules(tmp_path):
    journal = recorded(tmp_path / "journal-of-a-run", sampling={"prompts_per_step": 8})
    (journal / "journal/segment_000001.journal").touch()
    recipe = small_recipe()
    recipe.sampling.collection.__dict__["replay_journal"] = str(journal)
    run_dir = run_directory(tmp_path / "run")
    with pytest.raises(RecipeError, match=r"prompts_per_step 6, was 8"):
        resuming._find_start(recipe, run_dir, False)
    assert run_dir == []


def test_the_rest_of_the_journal_is_looked_at_after_the_checkpoint_is_found(
    tmp_path, found, monkeypatch
):
    found(Path("step_000003"))
    asked = []
    monkeypatch.setattr(journal_rules, "refuse_other_steps", lambda *words: asked.append(words))
    recipe, run_dir = small_recipe(), run_directory(recorded(tmp_path))
    resuming._find_start(recipe, run_dir, True)
    found(None)
    resuming._find_start(recipe, run_dir, True)
    assert asked == [(recipe, tmp_path, 3), (recipe, tmp_path, 0)]


def test_the_directory_is_unlocked_at_the_end_and_every_attempt_has_its_log(tmp_path, found):
    found(tmp_path / "checkpoints" / "step_000003")
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    run_dir, stack = run_directory(recorded(tmp_path)), ExitStack()
    start = resuming.take_directory(small_recipe(), run_dir, Comm(), True, stack)
    assert start.state.step == 3 and start.checkpoint == tmp_path / "checkpoints" / "step_000003"
    names = [call[:2] for call in run_dir]
    assert names[:4] == [("lock",), ("check", 3), ("next_attempt",), ("open_log", 4)]
    assert names[4] == ("write_environment", 4) and run_dir[4][2]["world_size"] == 1
    assert ("unlock",) not in names
    stack.close()
    assert run_dir[-1] == ("unlock",)


@pytest.mark.parametrize("checkpoint", [None, Path("step_000003")])
def test_what_comes_after_the_checkpoint_is_removed(tmp_path, monkeypatch, checkpoint):
    done = []
    monkeypatch.setattr(resuming, "point_latest", lambda *words: done.append(("latest", *words)))
    monkeypatch.setattr(resuming, "remove_old", lambda *words: done.append(("old", *words)))
    run_dir, recipe = run_directory(tmp_path), small_recipe(checkpoint={"keep": 6})
    start = StartingPoint(checkpoint, RunState(step=3))
    notices = resuming.go_back(recipe, run_dir, start)
    assert notices == ["the recipe changes from here on: run.steps 9, was 4"]
    assert run_dir == [("go_back", recipe, 3)]
    assert done == ([("latest", checkpoint), ("old", checkpoint, 6)] if checkpoint else [])


@pytest.mark.parametrize("is_main", [True, False])
def test_a_checkpoint_is_written_in_this_order(tmp_path, monkeypatch, is_main):
    """Room first, the manifest last; ranks other than 0 write their shards alone."""
    done = Calls()
    comm = Comm(int(not is_main))
    for name in ("refuse_full_disk", "begin_checkpoint", "write_text_whole", "write_snapshot",
                 "complete_checkpoint"):  # fmt: skip
        monkeypatch.setattr(resuming, name, getattr(done, name))
    monkeypatch.setattr(resuming, "_facts_of_all", lambda *_: "facts")
    monkeypatch.setattr(resuming, "run_collectively", lambda _, action: action())
    monkeypatch.setattr(resuming, "run_on_main", lambda _, action: is_main and action())
    run_dir = Calls(checkpoints=tmp_path)
    run_dir.append = done.append
    engine, source = Calls(), Calls()
    engine.append = source.append = done.append
    parts = SimpleNamespace(
        comm=comm, run_dir=run_dir, engine=engine, buffer="buffer",
        recipe=small_recipe(checkpoint={"keep": 6}),
    )  # fmt: skip
    state = RunState(step=3)
    resuming.write_checkpoint(parts, source, state, 77, lambda: "a card")
    folder = resuming.temporary_folder(tmp_path, 3)
    shards = [
        ("save", folder / "engine"),
        ("save_model", folder / "model"),
        ("save_adapter", folder / "adapter"),
    ]
    begun = [
        ("refuse_full_disk", tmp_path, "the checkpoint of step 3", 77),
        ("flush_steps", 3),
        ("begin_checkpoint", folder),
    ]
    completed = [
        ("write_text_whole", folder / "model" / "README.md", "a card"),
        ("write_snapshot", folder / "buffer.parquet", "buffer", 3),
        ("save", folder),
        ("complete_checkpoint", folder, state, 6, "facts"),
    ]
    assert done == ([*begun, *shards, *completed] if is_main else shards)
