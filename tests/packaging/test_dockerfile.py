"""The container cannot be built without a network: its versions are those of pyproject.toml."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def test_the_container_installs_what_the_extras_pin():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    pinned = {
        Requirement(line).name: Requirement(line) for each in extras.values() for line in each
    }
    text = (ROOT / "Dockerfile").read_text()
    lines = re.findall(r"^RUN pip install --no-cache-dir (.*)$", text, re.MULTILINE)
    early, package = (re.findall(r'"([^"]+)"', line) for line in lines)
    assert len(early) == 3
    for requirement in map(Requirement, early):
        assert requirement == pinned[requirement.name]
    name, wanted = re.fullmatch(r"(.*)\[(.*)\]", package[0]).groups()
    assert set(wanted.split(",")) <= set(extras) and f"COPY . {name}\n" in text
