"""docs/architecture.md shows the package as it is, and the floors that are enforced."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "grpo_replay"


def floors_of_the_page(pattern: str) -> dict[str, int]:
    rows = re.findall(rf"^\| {pattern} \| ([^|]+) \|", PAGE, re.MULTILINE)
    return {
        name.removesuffix("/").removesuffix(".py").removeprefix("lab/"): int(floor)
        for floor, names in rows
        for name in re.findall(r"`([^`]+)`", names)
    }


def floors_of_the_contract(container: str) -> dict[str, int]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = [c for c in settings["contracts"] if c["type"] == "layers"]
    layers = next(c["layers"] for c in contracts if c["containers"] == [container])
    return {
        name.strip(): len(layers) - index
        for index, names in enumerate(layers)
        for name in names.split("|")
    }


def test_every_folder_is_on_the_map_at_its_floor():
    contract = floors_of_the_contract("grpo_replay")
    del contract["__main__"]
    assert floors_of_the_page(r"(\d+)") == contract
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= contract.keys() and len(folders) > 12
    lab = floors_of_the_contract("grpo_replay.lab")
    assert floors_of_the_page(r"10\.(\d)") == lab
    assert {path.parent.name for path in PACKAGE.glob("lab/*/__init__.py")} == lab.keys()


def test_no_two_modules_have_the_same_name():
    names = [path.name for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))


def test_every_file_that_the_page_names_is_there():
    names = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", PAGE))
    names -= {"rollouts/", "draws/", "checkpoints/", "tests/support/"}
    inside = {name for name in names if (PACKAGE / name).exists()}
    beside = {name for name in names - inside if (ROOT / name).exists()}
    assert names - inside - beside == {"server/"}
    assert len(inside) > 25


def test_every_function_that_the_page_names_is_there():
    named = re.findall(r"`([a-z_/]+\.py):(\w+)`", PAGE)
    assert len(named) > 12
    for file, name in named:
        assert re.search(rf"^ *(def|class) {name}\b", (PACKAGE / file).read_text(), re.MULTILINE)


def test_the_top_of_the_package_stays_small():
    assert len(list(PACKAGE.glob("*.py"))) <= 8
