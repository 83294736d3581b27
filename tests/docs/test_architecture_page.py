"""docs/architecture.md shows the package as it is, and the floors that are enforced."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "grpo_replay"


def floors_of_the_page() -> dict[str, int]:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    return {
        name.removesuffix("/").removesuffix(".py"): int(floor)
        for floor, names in rows
        for name in re.findall(r"`([^`]+)`", names)
    }


def floors_of_the_contract() -> dict[str, int]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c for c in settings["contracts"] if c["type"] == "layers")["layers"]
    return {
        name.strip(): len(layers) - index
        for index, names in enumerate(layers)
        for name in names.split("|")
    }


def test_every_folder_is_on_the_map_at_its_floor():
    contract = floors_of_the_contract()
    del contract["__main__"]
    assert floors_of_the_page() == contract
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= contract.keys() and len(folders) > 15


def test_every_file_that_the_page_names_is_there():
    names = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", PAGE))
    names -= {"rollouts/", "draws/", "checkpoints/", "tests/support/"}
    inside = {name for name in names if (PACKAGE / name).exists()}
    beside = {name for name in names - inside if (ROOT / name).exists()}
    assert names - inside - beside == {"server/"}
    assert len(inside) > 25


def test_the_top_of_the_package_stays_small():
    assert len(list(PACKAGE.glob("*.py"))) <= 8
