"""Base classes of recipe sections, and field types that they share."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from grpo_replay.recipe.open_lists import OpenList

T = TypeVar("T")

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
"""A time limit of at most a week; longer ones overflow the system's clocks."""
MAX_COST_RATIO = 1e9
"""Maximum μ; a larger one is meaningless, and overflows."""
MIN_TEMPERATURE = 0.01
"""Minimum positive temperature: vLLM raises smaller ones to it."""


def distinct(values: list[T]) -> list[T]:
    """Return the list. Raises ValueError if an element occurs twice."""
    if len(set(values)) < len(values):
        raise ValueError(f"one of {values} is named more than once")
    return values


_HALF_CHARACTER = re.compile(".{0,20}[\ud800-\udfff].{0,20}", re.DOTALL)


def whole_characters(value: T) -> T:
    """Return the value as it is. Raises ValueError if a text in it has half of a surrogate pair, as
    of an emoji in JSON: no tokenizer and no file accepts it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if half := _HALF_CHARACTER.search(text):
        raise ValueError(
            f"has half a character, in {half[0]!r}: write it whole, as UTF-8 or with both of its "
            "\\u escapes, or remove it"
        )
    return value


def one_of(functions: OpenList) -> Any:
    """Make the type of a recipe key that names one entry of an open list."""
    names: dict[str, Any] = {"enum": [*functions.names, "module:function", "file.py:function"]}
    check = AfterValidator(functions.check)
    return Annotated[str, check, Field(json_schema_extra=names)]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys. The docstring under a field is its
    entry in docs/recipe.md."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class Passthrough(Section):
    """Settings of another library, by its names, which checks those that are no fields here."""

    model_config = ConfigDict(extra="allow")
    RESERVED: ClassVar[frozenset[str]] = frozenset()
    """Settings that this package sets itself."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_reserved(cls, values: Any) -> Any:
        for name in values if isinstance(values, Mapping) else ():
            if name in cls.RESERVED:
                raise ValueError(f"{name} is set by other keys of the recipe: remove it")
        return values

    @property
    def extra_settings(self) -> dict[str, Any]:
        """The settings that are not fields."""
        return self.model_extra or {}
