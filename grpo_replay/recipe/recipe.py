"""The complete recipe, checked for contradictions between sections."""

from pydantic import model_validator

from grpo_replay.recipe.contradictions import find_contradictions
from grpo_replay.recipe.sections import RecipeSections


class Recipe(RecipeSections):
    """All settings of a run, valid together."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "Recipe":
        if problems := find_contradictions(self):
            raise ValueError("; ".join(problems))
        return self
