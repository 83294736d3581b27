"""Stands in for `grpo-replay train` where tests are about processes: writes the files of a run in
milliseconds. Started as the cell's entry, `python -m fake_trainer PARENT_PID train RECIPE …`.

The file `behaviour.json` beside the sweep's folder says how runs behave, by `ARM/seed-N`: `fail`
(an error message), `hold` (stay after the first step) and `deaf` (ignore SIGTERM), the last two
until the file no longer says so.
"""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

from grpo_replay.distributed.environment import stop_with_parent
from grpo_replay.recipe import load_recipe, recipe_to_yaml
from grpo_replay.storage.recipe_history import read_history
from grpo_replay.storage.run_directory import RunDirectory

SCORES = {"5e-05": 0.4, "0.0001": 0.5, "0.0002": 0.5}


def main() -> None:
    stop_with_parent(int(sys.argv[1]))
    assert sys.argv[2] == "train"
    words = sys.argv[3:]
    run = RunDirectory(Path(words[words.index("--output-dir") + 1]))
    if "--resume" in words:
        assert words[0] == "--resume" and "--set" not in words
        recipe = read_history(run.path).latest
    else:
        overrides = [after for word, after in itertools.pairwise(words) if word == "--set"]
        recipe = load_recipe(words[0], overrides)
    run.path.parent.mkdir(parents=True, exist_ok=True)
    (run.path.parent / f"{run.path.name}.threads").write_text(
        f"{os.environ.get('OMP_NUM_THREADS')} {os.environ.get('GRPO_REPLAY_CORES')}"
    )
    if "--resume" in words:
        assert run.exists
        run.lock()
    else:
        run.create(recipe)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    rows = run.read_metrics()
    for step in range(len(rows) + 1, recipe.run.steps + 1):
        if failure := _told(run.path, "fail"):
            print(f"a line before it\nerror: {failure}\nmore lines", file=sys.stderr)
            raise SystemExit(3)
        run.append_metrics({"step": step, "eval/mean": step / 100})
        while _told(run.path, "deaf") or (_told(run.path, "hold") and not stopped):
            time.sleep(0.05)
        if stopped:
            raise SystemExit(130)
    assert recipe_to_yaml(recipe) == run.recipe_path.read_text()
    score = SCORES.get(str(recipe.optimizer.learning_rate), 0.3)
    final = {"tiny": score, "mean": score}
    run.summary_path.write_text(
        json.dumps({"steps": recipe.run.steps, "wall_seconds": 1, "final": final})
    )


def _told(folder: Path, what: str) -> object:
    """What behaviour.json says of this run: it lies in a folder above."""
    path = next(above / "behaviour.json" for above in folder.parents if _is_told(above))
    told = json.loads(path.read_text())
    return next((told[name].get(what) for name in told if str(folder).endswith(name)), None)


def _is_told(folder: Path) -> bool:
    return (folder / "behaviour.json").exists()


if __name__ == "__main__":
    main()
