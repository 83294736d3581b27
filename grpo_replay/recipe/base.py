"""The base classes of recipe sections, and the field types they share."""

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
"""A time limit, of a week at most: clocks of the system overflow."""
MOST_COST_RATIO = 1e9
"""μ beyond it means nothing, and overflows."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises smaller positive temperatures to this one, and logs it."""


def distinct(values: list[T]) -> list[T]:
    """A list in which nothing is there twice."""
    if len(set(values)) < len(values):
        raise ValueError(f"one of {values} is named more than once")
    return values


_HALF = re.compile(".{0,20}[\ud800-\udfff].{0,20}", re.DOTALL)


def whole_characters(value: T) -> T:
    """The value, if all text in it is valid Unicode: no tokenizer and no file takes a half of the
    pair of surrogates that is an emoji in JSON. Raises ValueError for one."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if half := _HALF.search(text):
        raise ValueError(
            f"has half a character, in {half[0]!r}: write it whole, as UTF-8 or with both of its "
            "\\u escapes, or remove it"
        )
    return value


def one_of(functions: OpenList) -> Any:
    """The type of a key that names one entry of an open list."""
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
    """A mapping of another library's own settings, by its own names: the library checks those that
    are no fields here."""

    model_config = ConfigDict(extra="allow")
    TAKEN: ClassVar[frozenset[str]] = frozenset()
    """Settings that this package decides."""

    @model_validator(mode="before")
    @classmethod
    def _leaves_what_is_taken(cls, given: Any) -> Any:
        for name in given if isinstance(given, Mapping) else ():
            if name in cls.TAKEN:
                raise ValueError(f"{name} is set by other keys of the recipe: remove it")
        return given

    @property
    def others(self) -> dict[str, Any]:
        """The settings that are no fields."""
        return self.model_extra or {}
