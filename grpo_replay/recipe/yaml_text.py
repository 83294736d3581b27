"""YAML as recipes have it: PyYAML with the scalars of YAML 1.2 (`010` is ten; `on`, `1:30` and
dates are text; `1e3` is a number), a key written twice refused, and nothing but plain data."""

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
"""Tag, form and first characters of what is no text."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # those of YAML 1.1 are others

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
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
    """Puts text in quotes that YAML 1.1 or 1.2 takes for something else."""


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)
for _tag, _form, _first in _SCALARS:
    for _each in (_Loader, _Dumper):
        _each.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(rf"(?:{_form})\Z"), _first)


def parse_yaml(text: str) -> Any:
    """The value of a YAML document; None if it is empty. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """YAML with the keys in their order, of which `parse_yaml` reads the same values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def problem_of(error: yaml.YAMLError) -> str:
    """What is wrong, in one line."""
    return getattr(error, "problem", None) or str(error).partition("\n")[0]
