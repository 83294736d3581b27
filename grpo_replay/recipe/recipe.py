"""The complete recipe, and the replay section of a trainer that has no recipe: both checked for
contradictions."""

from typing import TYPE_CHECKING, Any, final

from pydantic import model_validator

from grpo_replay.recipe.contradictions import find_contradictions, replay_contradictions
from grpo_replay.recipe.grpo_sections import ReplaySection
from grpo_replay.recipe.sections import RecipeSections


class Recipe(RecipeSections):
    """All settings of a run, valid together."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "Recipe":
        if problems := find_contradictions(self):
            raise ValueError("; ".join(problems))
        return self


@final
class ReplayConfig(ReplaySection):
    """The settings of a replay buffer: the keys of `replay` in docs/recipe.md.

    `ReplayConfig.preset(name, **changes)` has the values of a preset, and `changes`. A bad value,
    an unknown key or a contradiction raises pydantic's ValidationError, which is a ValueError.
    """

    if TYPE_CHECKING:

        @classmethod  # type: ignore[misc]
        def preset(cls, name: str, **changes: Any) -> "ReplayConfig": ...  # type: ignore[override]

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "ReplayConfig":
        if problems := list(replay_contradictions(self)):
            raise ValueError("; ".join(problems))
        return self


def _preset(cls: type[ReplayConfig], name: str, **changes: Any) -> ReplayConfig:
    """The settings of the preset `name`: grpo, uniform, group_std, ours or fifo."""
    return cls.model_validate({**changes, "preset": name})


# Set here, because the field of an instance has the same name.
ReplayConfig.preset = classmethod(_preset)  # type: ignore[method-assign, assignment]
