"""What a run in another trainer leaves in its folder, for `inspect-buffer` and `plan --from-run`:

    recipe.yaml   the replay settings and what is known of the rest
    rollouts/ draws/ metrics.jsonl   as in a run of this package (docs/buffer.md, docs/metrics.md)

Loads no torch.
"""

import json
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_replay.errors import CheckpointError, OutputDirectoryError, RecipeError
from grpo_replay.recipe import ReplaySection, resolve_recipe
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.storage.recipe_history import RECIPE_FILE, record_recipe, write_recipe
from grpo_replay.storage.rollout_log import first_steps, remove_later

METRICS = "metrics.jsonl"
_UNKNOWN = "What is known of a run in another trainer. Its prompts and rewards are not."


class OutputFolder:
    """The files of one run. Only the main process writes."""

    def __init__(self, folder: Path, settings: ReplaySection, others: Mapping[str, Any]) -> None:
        """`others` are the sections of the recipe other than `replay`. Raises RecipeError, in the
        names of TRL's GRPOConfig."""
        replay = settings.model_dump(mode="json")
        try:
            self.recipe = resolve_recipe([{**others, "replay": replay}], source="GRPOConfig")
        except RecipeError as error:
            named = str(error).replace("loss.dual_clip", "delta")
            named = re.sub(r"run\.steps (\d+)", r"the \1 generation batches of max_steps", named)
            named = re.sub(r"(GRPOConfig: )(?:loss|sampling|optimizer|run)\.", r"\1", named)
            raise RecipeError(named) from error
        self.folder = folder
        self.metrics = folder / METRICS

    def open(self, step: int, goes_on: bool) -> None:
        """Begin a run, unless another is there, or go on with it after `step`: later files go."""
        if not goes_on:
            refuse_another_run(self.folder)
        for name in ("rollouts", "draws"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if goes_on:
            kept = self._first_steps(step)
            write_text_whole(self.metrics, "".join(f"{line}\n" for line in kept))
        remove_later(self.folder, step)
        if step == 0 or not (self.folder / RECIPE_FILE).exists():
            write_recipe(self.folder / RECIPE_FILE, self.recipe, _UNKNOWN)
        elif changes := record_recipe(self.folder, self.recipe, step):
            changed = "; ".join(changes)
            warnings.warn(f"the run goes on with other settings: {changed}", stacklevel=2)

    def _first_steps(self, step: int) -> list[str]:
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


def refuse_another_run(folder: Path, may_resume: bool = False) -> None:
    """Raises OutputDirectoryError if the folder holds a run, unless it `may_resume` from one of its
    checkpoints."""
    resumable = may_resume and any(folder.glob("checkpoint-*"))
    if (folder / METRICS).exists() and not resumable:
        raise OutputDirectoryError(
            f"{folder} already holds the rollouts and metrics of another run: choose another "
            "output_dir, or continue that run with resume_from_checkpoint"
        )


def refuse_without_history(folder: Path, origin: Path, step: int) -> None:
    """Raises CheckpointError if the files of the steps up to `step` are not in the folder."""
    if step and not (folder / METRICS).exists():
        raise CheckpointError(
            f"{folder} has no {METRICS}, rollouts/ and draws/ of the {step} steps that filled the "
            f"buffer of the checkpoint: resume with output_dir {origin}, or copy them and "
            f"{RECIPE_FILE} from there"
        )


AGGREGATIONS = {"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant"}
"""TRL's losses that a recipe has."""


def sections_of(args: Any, model: str, is_rounded: bool, max_steps: int) -> dict[str, Any]:
    """The recipe of a run of `max_steps` optimizer steps with TRL's GRPOConfig `args`, as far as
    known. Steps are generation batches, which make one draw each, however many updates TRL makes.
    `is_rounded`: the model computes in 16 bits, as far as log-probs are concerned in bfloat16."""
    updates = args.steps_per_generation / args.gradient_accumulation_steps
    loss, longest = {"beta": args.beta}, args.max_completion_length
    if aggregation := AGGREGATIONS.get(args.loss_type):
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        loss |= {"epsilon": args.epsilon, "epsilon_high": high, "dual_clip": args.delta}
        loss["aggregation"] = aggregation
        if (args.importance_sampling_level, args.loss_type) == ("sequence", "grpo"):
            loss["kind"] = "gspo"
    return {
        "name": "trl",
        "model": {"path": model, "dtype": "bfloat16" if is_rounded else "float32"},
        "batch": {"updates_per_step": 1},
        "loss": loss,
        "sampling": {
            "prompts_per_step": args.generation_batch_size // args.num_generations,
            "group_size": args.num_generations,
            "temperature": args.temperature,
            **({"max_completion_length": longest} if longest else {}),
        },
        "reward": {"mask_truncated": args.mask_truncated_completions},
        "advantage": {"std": "none" if args.scale_rewards == "none" else "sample", "epsilon": 1e-4},
        "optimizer": {"learning_rate": args.learning_rate},
        "run": {"seed": args.seed, "steps": math.ceil(max_steps / updates)},
    }
