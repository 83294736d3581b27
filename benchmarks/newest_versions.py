"""The newest versions of what we cap, in an environment of their own: what breaks?

    python benchmarks/newest_versions.py --output DIR                            every cap lifted
    python benchmarks/newest_versions.py --output DIR --lift transformers peft   only these
    python benchmarks/newest_versions.py --output DIR --tests tests/engine       only these tests

Installs the requirements of the extras `train`, `lora` and `test` without the upper bounds of the
lifted packages into DIR/env, and runs the default tests there. Without a GPU torch keeps its
bound unless it is named: newer builds bring gigabytes of CUDA. Prints versions above the bounds
and every failed test with the first line of its error. Exit code 0 if all passed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("train", "lora", "test")
UPPER = ("<", "<=", "==", "~=")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--lift", nargs="+", metavar="PACKAGE", help="lift only their bounds")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders")
    options = parser.parse_args()
    asked = requirements()
    lifted = set(options.lift or asked) - ({"torch"} if cpu_torch(options.lift) else set())
    python = install(options.output, [without_bound(each, lifted) for each in asked.values()])
    for name, version in versions(python).items():
        bounds = asked[name].specifier if name in asked else SpecifierSet()
        if not bounds.contains(version, prereleases=True):
            print(f"{name} {version} is outside {bounds}", flush=True)
    return run_tests(options.output.resolve() / "junit.xml", python, options.tests)


def cpu_torch(named: list[str] | None) -> bool:
    """Whether torch stays as it is: not named, and no GPU here."""
    return "torch" not in (named or ()) and shutil.which("nvidia-smi") is None


def requirements() -> dict[str, Requirement]:
    """Those of the base and the extras, by name; an extra's stand for the base's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"]]
    for extra in EXTRAS:
        texts += project["optional-dependencies"][extra]
    found = {each.name: each for each in map(Requirement, texts)}
    found.pop("grpo-replay", None)
    return found


def without_bound(requirement: Requirement, lifted: set[str]) -> str:
    """The requirement; of a lifted package only what it says about the oldest version."""
    if requirement.name not in lifted:
        return str(requirement)
    kept = [str(each) for each in requirement.specifier if each.operator not in UPPER]
    return f"{requirement.name}{','.join(kept)}"


def install(output: Path, wanted: list[str]) -> Path:
    """The Python of a new environment with these packages."""
    folder = output / "env"
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    command = [python, "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {each["name"].lower(): each["version"] for each in json.loads(listed)}


def run_tests(results: Path, python: Path, tests: list[str]) -> int:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
    done = subprocess.run([*command, *tests], cwd=ROOT, env=environment, check=False)
    for case in ElementTree.parse(results).iter("testcase"):
        for problem in (*case.iter("failure"), *case.iter("error")):
            first = (problem.get("message") or "").strip().splitlines()[:1]
            print(f"{case.get('classname')}::{case.get('name')}: {' '.join(first)[:200]}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
