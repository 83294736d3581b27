"""The files that each training step leaves in a run: rollouts/, draws/ and eval/."""

import re
from collections.abc import Iterator
from pathlib import Path

from grpo_replay.errors import SnapshotError
from grpo_replay.storage.parquet import open_parquet
from grpo_replay.storage.recipe_history import RecipeHistory
from grpo_replay.storage.rollout_log import (
    DRAW_SCHEMA,
    ROLLOUT_FILE_SCHEMA,
    ROLLOUT_LOG_VERSION,
    step_path,
)

STEP_FOLDERS = ("rollouts", "draws", "eval")
_STEP_FILE = re.compile(r"step_(\d{6,})\.(?:parquet|json)(?:\.tmp)?")


def step_files(run_dir: Path, first: int, last: int) -> list[Path]:
    """The files of rollouts/ and draws/ of the steps `first` … `last`."""
    steps = range(first, last + 1)
    paths = [step_path(run_dir / kind, step) for step in steps for kind in ("rollouts", "draws")]
    return [path for path in paths if path.exists()]


def remove_later(run_dir: Path, step: int) -> None:
    """Remove the files of the steps after `step`. Files with other names stay."""
    for folder in STEP_FOLDERS:
        for file in (run_dir / folder).glob("step_*"):
            match = _STEP_FILE.fullmatch(file.name)
            if match and int(match[1]) > step:
                file.unlink()


def describe_damage(run_dir: Path, history: RecipeHistory, step: int) -> str | None:
    """One sentence if files of rollouts/ or draws/ up to `step` are missing or cannot be opened.
    Training on does not need them."""
    problems = list(_problems(run_dir, history, step))
    if not problems:
        return None
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return (
        f"{problems[0]}{more}: training goes on without, but inspect-buffer, plan --from-run and "
        "--verify cannot tell all of this run; restore from a copy"
    )


def _problems(run_dir: Path, history: RecipeHistory, step: int) -> Iterator[str]:
    for each in range(1, step + 1):
        recipe = history.at(each)
        if not recipe.tracking.log_rollouts:
            continue
        kinds = [("rollouts", ROLLOUT_FILE_SCHEMA)]
        kinds += [("draws", DRAW_SCHEMA)] if recipe.replays else []
        for kind, schema in kinds:
            path = step_path(run_dir / kind, each)
            try:
                with open_parquet(path, kind, ROLLOUT_LOG_VERSION, schema):
                    pass
            except SnapshotError as error:
                yield str(error)
