"""The base classes of recipe sections, and the field types they share."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from grpo_replay.recipe.open_lists import OpenList

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


GIVEN: Any = None
"""Stands for the default of a passthrough setting, for type checkers."""


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

    @classmethod
    def annotation(cls, name: str) -> Any:
        """The type of a key; None if there is no such key."""
        field = cls.model_fields.get(name)
        return field.annotation if field else None


class Passthrough(Section):
    """A mapping of another library's own settings, by its own names: the library checks them. Those
    of `DEFAULTS` always have a value, and take one of the same type (any, if it is None)."""

    model_config = ConfigDict(extra="allow")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    TAKEN: ClassVar[frozenset[str]] = frozenset()
    """Settings that this package decides."""
    TEXT: ClassVar[frozenset[str]] = frozenset()
    """Settings that are text (or null)."""

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name, value in given.items():
            default = cls.DEFAULTS.get(name)
            kinds = (int, float) if isinstance(default, float) else type(default)
            wrong_kind = isinstance(value, bool) != isinstance(default, bool)
            if default is not None and (wrong_kind or not isinstance(value, kinds)):
                raise ValueError(f"{name} {value!r}: expected a value such as {default!r}")
            if name in cls.TAKEN:
                raise ValueError(f"{name} is set by other keys of the recipe: remove it")
        return {**cls.DEFAULTS, **given}

    @classmethod
    def annotation(cls, name: str) -> Any:
        return super().annotation(name) or (str | None if name in cls.TEXT else None)

    @property
    def others(self) -> dict[str, Any]:
        """The settings without a default."""
        return {k: v for k, v in (self.model_extra or {}).items() if k not in self.DEFAULTS}
