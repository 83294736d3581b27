"""Whether prompts and completions fit in the model, by the rule that a run applies at its start."""

from collections.abc import Callable
from typing import Any

from grpo_replay.errors import GrpoReplayError, RecipeError
from grpo_replay.lab.dry_run.findings import Findings
from grpo_replay.lab.dry_run.fit import with_known_model
from grpo_replay.recipe import Recipe


def check_room(recipe: Recipe, prompts: Any, findings: Findings) -> None:
    """Whether prompts and completions fit in the model, by the rule that a run applies when it
    starts. `prompts` is None if they were not read."""
    # Loads transformers.
    from grpo_replay.engine.sequence_length import (
        check_evaluation_room,
        check_training_room,
        model_length,
    )

    known = with_known_model(recipe)
    try:
        room = model_length(known, known.model)
    except GrpoReplayError:
        return  # reported with the sizes of the model
    completion = recipe.sampling.max_completion_length
    if prompts is not None:
        _note_refusal(lambda: check_training_room(known, prompts.longest_prompt), findings)
    elif recipe.prompts.max_prompt_length + completion > room > completion:
        findings.unchecked.append(
            f"prompts of more than {room - completion} tokens: with a completion of {completion} "
            f"they would exceed the {room} tokens that {recipe.model.path} has room for, and the "
            "run would stop at its start"
        )
    if recipe.eval.benchmarks:
        _note_refusal(lambda: check_evaluation_room(known, 1), findings)


def _note_refusal(check: Callable[[], None], findings: Findings) -> None:
    try:
        check()
    except RecipeError as error:
        findings.problems.append(str(error))
