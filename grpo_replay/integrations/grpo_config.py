"""Conversion of TRL's GRPOConfig, whose arguments ms-swift has too, to a recipe. Loads no torch."""

import math
import re
from typing import Any

from grpo_replay.integrations.host_words import HostWords


def _renamed(message: str) -> str:
    named = message.replace("loss.dual_clip", "delta")
    named = re.sub(r"run\.steps (\d+)", r"the \1 generation batches of max_steps", named)
    return re.sub(r"(GRPOConfig: )(?:loss|sampling|optimizer|run)\.", r"\1", named)


GRPO_CONFIG = HostWords(
    settings="GRPOConfig",
    folder="output_dir",
    resume="resume_from_checkpoint",
    group_size="num_generations",
    checkpoints="checkpoint-*",
    one_prompt=(
        "an environment's reset, or a rollout_func, drew a task for each completion. Draw it from "
        "what all of a group are given: reset(seed, …) with a column seed in train_dataset"
    ),
    own_advantages="put into _calculate_rewards what changes the advantages after it",
    renamed=_renamed,
)

AGGREGATIONS = {"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant"}
"""TRL's losses that a recipe has, with their `loss.aggregation`."""


def sections_of(
    args: Any,
    model: str,
    is_rounded: bool,
    max_steps: int,
    name: str = "trl",
    masks_truncated: bool | None = None,
) -> dict[str, Any]:
    """Convert TRL's GRPOConfig `args` to the sections of a recipe, as far as they are known, for a
    run of `max_steps` optimizer steps. A step is a generation batch, which makes one draw, however
    many updates TRL makes. `is_rounded`: the model computes in 16 bits, here called bfloat16.
    `masks_truncated`: truncated completions do not train; None: as TRL's argument says."""
    if masks_truncated is None:
        masks_truncated = args.mask_truncated_completions
    updates = args.steps_per_generation / args.gradient_accumulation_steps
    loss, longest = {"beta": args.beta}, args.max_completion_length
    if aggregation := AGGREGATIONS.get(args.loss_type):
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        loss |= {"epsilon": args.epsilon, "epsilon_high": high, "dual_clip": args.delta}
        loss["aggregation"] = aggregation
        if (args.importance_sampling_level, args.loss_type) == ("sequence", "grpo"):
            loss["kind"] = "gspo"
    return {
        "name": name,
        "model": {"path": model, "dtype": "bfloat16" if is_rounded else "float32"},
        "batch": {"updates_per_step": 1},
        "loss": loss,
        "sampling": {
            "prompts_per_step": args.generation_batch_size // args.num_generations,
            "group_size": args.num_generations,
            "temperature": args.temperature,
            **({"max_completion_length": longest} if longest else {}),
        },
        "reward": {"mask_truncated": masks_truncated},
        "advantage": {"std": "none" if args.scale_rewards == "none" else "sample", "epsilon": 1e-4},
        "optimizer": {"learning_rate": args.learning_rate},
        "run": {"seed": args.seed, "steps": math.ceil(max_steps / updates)},
    }
