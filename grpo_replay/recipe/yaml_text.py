"""Reads and writes the YAML of recipes: PyYAML with the scalars of YAML 1.2 (`010` is ten; `on`,
`1:30` and dates are text; `1e3` is a number). Refuses repeated keys, and all but plain data."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import yaml

_TAG = "tag:yaml.org,2002:"
_SCALARS = (
    ("null", "~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
    ("merge", "<<", ["<"]),
)
"""Tag, pattern and first characters of scalars that are not text."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # without those of YAML 1.1

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuses a key that is written twice; PyYAML would take the last value."""
        first_line: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if first := first_line.get(key.value if isinstance(key, yaml.ScalarNode) else ""):
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is written twice, first in line {first}: keep one",
                    problem_mark=key.start_mark,
                )
            first_line[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        return int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)
for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def parse_yaml(text: str) -> Any:
    """Returns the value of a YAML document; None if it is empty. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Format a mapping as YAML, in its order of keys, for `parse_yaml` to read the same values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def problem_of(error: yaml.YAMLError) -> str:
    """Returns the problem that an error reports, in one line."""
    return getattr(error, "problem", None) or str(error).partition("\n")[0]
