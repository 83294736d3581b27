"""YAML as recipes are written, in files and after `--set`: PyYAML's, with these differences.

- `1e3` is a number, as in YAML 1.2.
- The value of a text setting stays as it is written: `revision: 1e3`, `answer_field: on`. After
  `--set` that holds for `#` and all else; in a file, what YAML would drop is refused (`####`).
- A key written twice, nesting deeper than 20 levels, an alias inside what it stands for and
  integers beyond 64 bits are refused.
"""

import contextlib
import re
import reprlib
from collections.abc import Iterator
from typing import Any, get_args

import yaml

from grpo_replay.recipe.base import Section

DEEPEST = 20
"""Levels of nesting that are read; a recipe needs four."""

_TAG = "tag:yaml.org,2002:"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


class _Loader(yaml.SafeLoader):
    """Reads one document. `yaml.YAMLError` names the line of what it refuses."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._inside: list[str | None] = []  # anchors, or None, of the nodes around

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if len(self._inside) >= DEEPEST:
            raise _refusal(f"nested deeper than {DEEPEST} levels", event)
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._inside:
            raise _refusal(f"the alias '*{event.anchor}' stands for what it is part of", event)
        self._inside.append(event.anchor)
        try:
            return super().compose_node(parent, index)
        finally:
            self._inside.pop()

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        first_line: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
                continue
            if key.value in first_line:
                raise _refusal(
                    f"{shown(key.value)} is written twice, first in line "
                    f"{first_line[key.value]}: keep one",
                    key,
                )
            first_line[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_int(self, node: Any) -> int:
        digits = len(node.value.strip("+-"))
        if digits > 80 or not -(2**63) <= (value := super().construct_yaml_int(node)) < 2**63:
            raise _refusal(f"an integer of {digits:,} digits does not fit in 64 bits", node)
        return value


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_int)
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+\Z"),
    list("-+.0123456789"),
)


def _refusal(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def parse_yaml(text: str, kind: Any = None) -> Any:
    """The value of a YAML document; None if it is empty. `kind` is the type that is expected: a
    section of the recipe or the type of a setting; what it says is text stays as it is written.
    Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _keep_text(node, kind)
        return loader.construct_document(node)
    except (ValueError, IndexError) as error:  # a date such as 2026-99-99, an empty `!!int`
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def parse_text(text: str) -> str | None:
    """The value of a text setting after `--set`: `text` without the space around it. None if it is
    empty, `~` or `null`; what is in quotes if it is one quoted YAML text."""
    word = text.strip()
    if word in ("", "~", "null", "Null", "NULL"):
        return None
    if word[0] in "'\"":
        with contextlib.suppress(yaml.YAMLError):
            node = yaml.compose(word, Loader=_Loader)
            if isinstance(node, yaml.ScalarNode) and node.end_mark.index == len(word):
                return str(node.value)
    return word


def problem_of(error: yaml.YAMLError) -> str:
    """What is wrong, in one line."""
    return getattr(error, "problem", None) or str(error).partition("\n")[0]


def is_text(annotation: Any, value: str = "") -> bool:
    """Whether a setting of this type is text (or null), given as `value`: a setting that may also
    be a list is text unless it begins as a list."""
    if annotation in (str, str | None):
        return True
    return str in get_args(annotation) and not value.lstrip().startswith(("[", "{"))


def is_number(annotation: Any) -> bool:
    """Whether a setting of this type takes a number, and neither true nor false."""
    parts = list(_parts(annotation))
    if Any in parts or bool in parts:
        return False
    return any(part in (int, float) or type(part) is int for part in parts)


def _parts(annotation: Any) -> Iterator[Any]:
    """The types and literal values that an annotation is made of."""
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for each in inner:
        yield from _parts(each)


def shown(value: Any) -> str:
    """The value for an error message, shortened if it is long or deep, and without the user name
    and password of a URL."""
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", _SHORT.repr(value))


def _keep_text(node: yaml.Node, kind: Any) -> None:
    """Mark the scalars below `node` that `kind` says are text."""
    if isinstance(kind, type) and issubclass(kind, Section):
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key.value, str) and (annotation := kind.annotation(key.value)):
                _keep_text(value, annotation)
    elif isinstance(node, yaml.SequenceNode) and _is_text_list(kind):
        for item in node.value:
            _keep_text(item, str)
    elif isinstance(node, yaml.ScalarNode) and is_text(kind):
        _refuse_lost_text(node)
        if node.tag != f"{_TAG}null":
            node.tag = f"{_TAG}str"


def _refuse_lost_text(node: yaml.ScalarNode) -> None:
    """Refuse text that YAML reads as a comment or a tag, and would drop."""
    if node.tag.startswith("!"):
        raise _refusal(f"YAML reads {node.tag!r} as a tag: put the text in quotes", node)
    mark = node.start_mark
    after = (mark.buffer or "")[mark.pointer :].partition("\n")[0].strip(" \0")
    if not node.value and after.startswith("#"):
        raise _refusal(
            f"YAML reads {shown(after)} as a comment: put the text in quotes, or write null", node
        )


def _is_text_list(kind: Any) -> bool:
    types = {part for part in _parts(kind) if isinstance(part, type)}
    return str in types and types <= {str, type(None)} and kind not in (str, str | None)
