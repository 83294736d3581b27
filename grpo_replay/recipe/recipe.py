"""The recipe as a whole: sections that do not contradict each other."""

from pydantic import model_validator

from grpo_replay.recipe.contradictions import find_contradictions
from grpo_replay.recipe.sections import RecipeSections


class Recipe(RecipeSections):
    """A run, fully described."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "Recipe":
        if problems := find_contradictions(self):
            raise ValueError("; ".join(problems))
        return self
