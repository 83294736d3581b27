"""The files of a run in another trainer, for `inspect-buffer` and `plan --from-run`:

    recipe.yaml   the replay settings, and the others as far as they are known
    rollouts/ draws/ metrics.jsonl   as in a run of this package (docs/buffer.md, docs/metrics.md)

Loads no torch.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_replay.errors import CheckpointError, OutputDirectoryError, RecipeError
from grpo_replay.integrations.host_words import HostWords
from grpo_replay.recipe import ReplaySection, resolve_recipe
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.storage.rollout_log import first_steps, remove_later
from grpo_replay.storage.stored_recipe import (
    RECIPE_FILE,
    differences,
    read_recipe_file,
    write_recipe,
)

METRICS = "metrics.jsonl"
_UNKNOWN = "The known settings of a run in another trainer. Its prompts and rewards are unknown."


class OutputFolder:
    """Writes the files of one run, on the main process."""

    def __init__(
        self, folder: Path, settings: ReplaySection, sections: Mapping[str, Any], words: HostWords
    ) -> None:
        """`sections` are those besides `replay`. Raises RecipeError in the host's names."""
        replay = settings.model_dump(mode="json")
        try:
            self.recipe = resolve_recipe([{**sections, "replay": replay}], source=words.settings)
        except RecipeError as error:
            raise RecipeError(words.renamed(str(error))) from error
        self.folder, self.words = folder, words
        self.metrics = folder / METRICS

    def open(self, step: int, resumes: bool) -> None:
        """Begin a run, or resume it after `step`: what later steps wrote is removed. Raises
        OutputDirectoryError if a new run finds another one in the folder."""
        if not resumes:
            refuse_another_run(self.folder, self.words)
        for name in ("rollouts", "draws"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if resumes:
            kept = self._first_steps(step)
            write_text_whole(self.metrics, "".join(f"{line}\n" for line in kept))
        remove_later(self.folder, step)
        path = self.folder / RECIPE_FILE
        if step > 0 and path.exists():
            changes = differences(read_recipe_file(path), self.recipe)
            if changed := "; ".join(f"{key}: {old!r} -> {new!r}" for key, old, new in changes):
                warnings.warn(
                    f"the run resumes with other settings: {changed}. {RECIPE_FILE} now has the "
                    "new ones, and --verify recomputes all steps by them",
                    stacklevel=2,
                )
        write_recipe(path, self.recipe, _UNKNOWN)

    def _first_steps(self, step: int) -> list[str]:
        """Returns the lines of metrics up to `step`. Raises CheckpointError if one is missing."""
        try:
            return first_steps(self.metrics, step)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.metrics} has fewer than the {step} steps of this checkpoint, because the "
                "run went on from an earlier one: resume from that one, or delete the later ones"
            ) from error

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one step."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")


def refuse_another_run(folder: Path, words: HostWords, may_resume: bool = False) -> None:
    """Raises OutputDirectoryError if the folder holds a run(`may_resume`: without checkpoint)."""
    resumable = may_resume and any(folder.glob(words.checkpoints))
    if (folder / METRICS).exists() and not resumable:
        raise OutputDirectoryError(
            f"{folder} already holds the rollouts and metrics of another run: choose another "
            f"{words.folder}, or continue that run with {words.resume}"
        )


def refuse_without_history(folder: Path, origin: Path, step: int, words: HostWords) -> None:
    """Raises CheckpointError if the files of the steps up to `step` are not in the folder."""
    if step and not (folder / METRICS).exists():
        raise CheckpointError(
            f"{folder} has no {METRICS}, rollouts/ and draws/ of the {step} steps that filled the "
            f"buffer of the checkpoint: resume with {words.folder} {origin}, or copy them and "
            f"{RECIPE_FILE} from there"
        )
