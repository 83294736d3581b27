"""The replay section of a trainer that has no recipe."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from grpo_replay.errors import RecipeError
from grpo_replay.recipe.grpo_sections import ReplaySection
from grpo_replay.recipe.layers import check_keys, explain
from grpo_replay.recipe.recipe import replay_contradictions

_SOURCE = "ReplayConfig"
"""Where its values come from, in messages."""


@final
class ReplayConfig(ReplaySection):
    """The settings of a replay buffer: the keys of `replay` in docs/recipe.md.

    `ReplayConfig.preset(name, **changes)` has the values of a preset, and `changes`. A bad value,
    an unknown key or a contradiction raises RecipeError, as in a recipe.
    """

    if TYPE_CHECKING:

        @classmethod  # type: ignore[misc]
        def preset(cls, name: str, **changes: Any) -> "ReplayConfig": ...  # type: ignore[override]

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "ReplayConfig":
        if problems := list(replay_contradictions(self)):
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_as_a_recipe_does(
        cls, given: Any, validated: ModelWrapValidatorHandler["ReplayConfig"]
    ) -> "ReplayConfig":
        if isinstance(given, Mapping):
            check_keys(given, cls, ("replay",), _SOURCE)
        try:
            return validated(given)
        except ValidationError as error:
            raise RecipeError(explain(error, [({"replay": given}, _SOURCE)], "replay")) from None


def _preset(cls: type[ReplayConfig], name: str, **changes: Any) -> ReplayConfig:
    """The settings of the preset `name`: grpo, uniform, group_std, ours or fifo."""
    return cls.model_validate({**changes, "preset": name})


# Set here, because the field of an instance has the same name.
ReplayConfig.preset = classmethod(_preset)  # type: ignore[method-assign, assignment]
