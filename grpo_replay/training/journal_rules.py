"""What must not change between the run that wrote a journal and one that repeats its steps."""

from pathlib import Path

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.storage.recipe_history import differences, read_recipe_file, recipe_file

JOURNAL_FOLDER = "journal"

RULES = (
    "sampling.prompts_per_step",
    "sampling.group_size",
    "sampling.collection.order",
    "sampling.collection.straddlers",
    "replay.enabled",
    "replay.composition",
    "replay.max_age_steps",
    "replay.drop_zero_variance",
)
"""Keys that decide which groups of the journal a step takes, and how each of them ends."""


def refuse_other_rules(recipe: Recipe, run_dir: Path) -> None:
    """Raises RecipeError if `recipe` cannot repeat the steps of the journal in `run_dir`: groups
    would be trained on in other steps, twice, or not at all."""
    recorded = recipe_file(run_dir)
    if not (run_dir / JOURNAL_FOLDER).is_dir() or not recorded.exists():
        return
    changes = [
        f"{key} {new!r}, was {old!r}"
        for key, old, new in differences(read_recipe_file(recorded), recipe)
        if key in RULES
    ]
    if changes:
        raise RecipeError(
            f"the steps in {run_dir / JOURNAL_FOLDER} are repeated by the rules that they were "
            f"recorded under, which the recipe changes: {'; '.join(changes)}. Leave these keys as "
            "they were, or start a new run from the last checkpoint's model (--set model.path=…)"
        )
