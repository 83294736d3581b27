"""Do two commits give the same bits? A table: a row per scenario, "equal" or the first difference.

    python benchmarks/same_bits.py A B [--only NAME …] [--new NAME …] [--python PATH] [--keep]
    python benchmarks/same_bits.py --list

A and B are any names of commits of this repository. Each is unpacked under build/same_bits, and
runs the same short scenarios side by side with the other, on a core and a thread of its own.
Compared is what a run writes (rollouts, draws, metrics without clocks, weights byte by byte), what
the reading commands print, and every request that a scripted vLLM server was sent. The exit code is
1 if anything differs. Six to eight minutes on two idle cores.

A commit with the dependencies of this checkout runs with this interpreter, any other in a virtual
environment for its dependencies, which pip makes once; --python names one for both.
"""

import argparse
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path

from same_bits_parts.compare import first_difference
from same_bits_parts.inputs import make_inputs
from same_bits_parts.scenarios import REQUESTS, SCENARIOS, ScenarioError, Side

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "same_bits"
Row = tuple[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="two names of commits")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SCENARIOS, default=None)
    parser.add_argument("--new", nargs="+", default=(), help="columns and keys that one may lack")
    parser.add_argument("--list", action="store_true", help="print the scenarios")
    parser.add_argument("--python", default=None, help="interpreter for both commits")
    parser.add_argument("--keep", action="store_true", help="keep what the commits wrote")
    options = parser.parse_args()
    if options.list:
        print(*SCENARIOS, sep="\n")
        return 0
    if len(options.commits) != 2:
        parser.error("name two commits")
    work = BUILD / f"work-{os.getpid()}"
    try:
        sides = make_sides(options.commits, options.python, work)
        names = with_needs(options.only or list(SCENARIOS))
        rows = table(sides, names, run_sides(sides, names), options.new)
        for letter, commit, side in zip("AB", options.commits, sides, strict=True):
            print(f"{letter} is {commit}, {side.tree.name[:12]}")
        print("\n| scenario | B against A |\n|---|---|")
        print(*(f"| {name} | {result} |" for name, result in rows), sep="\n")
        different = sum(result != "equal" for _, result in rows)
        print(f"\n{len(rows) - different} of {len(rows)} rows are equal")
        return 1 if different else 0
    finally:
        if options.keep:
            print(f"kept: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


def with_needs(names: Sequence[str]) -> list[str]:
    """These scenarios and those that they need, in the order of the list."""
    wanted = set(names) | {need for name in names for need in SCENARIOS[name].needs}
    return [name for name in SCENARIOS if name in wanted]


def make_sides(commits: Sequence[str], python: str | None, work: Path) -> list[Side]:
    """Both commits, unpacked, with an interpreter and a core each."""
    inputs, cores = make_inputs(work / "inputs"), sorted(os.sched_getaffinity(0))
    sides = []
    for index, commit in enumerate(commits):
        tree = unpack(commit)
        out = work / "ab"[index]
        core = cores[index % len(cores)]
        sides.append(Side(python or interpreter(tree), tree, core, inputs, out, work / "a"))
    return sides


def unpack(commit: str) -> Path:
    """The folder with the files of a commit."""
    name = git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    tree = BUILD / "trees" / name
    if not tree.exists():
        making = tree.with_name(f"{name}-{os.getpid()}")
        with tarfile.open(fileobj=io.BytesIO(git("archive", name))) as archive:
            archive.extractall(making, filter="data")
        making.rename(tree)
    return tree


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True).stdout


def interpreter(tree: Path) -> str:
    """One with what the commit's pyproject.toml asks for: this one if this checkout asks for the
    same, else that of an environment named after the dependencies, made if it is not there."""
    wanted, ours = dependencies(tree), dependencies(ROOT)
    if wanted == ours:
        return sys.executable
    home = BUILD / "environments" / hashlib.sha256(wanted.encode()).hexdigest()[:12]
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", f"{tree}[test]"], check=True)
        (home / "complete").touch()
    return str(python)


def dependencies(tree: Path) -> str:
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = {name: extras[name] for name in ("train", "lora", "test") if name in extras}
    return repr([project["requires-python"], project["dependencies"], used])


Failures = dict[str, str | None]
"""Scenario -> why it did not run to its end, or None if it did."""


def run_sides(sides: Sequence[Side], names: Sequence[str]) -> tuple[Failures, Failures]:
    """Run the scenarios of both sides at once; those that read the first commit's runs last."""
    failures: tuple[Failures, Failures] = ({}, {})
    ready = threading.Barrier(2)

    def work(index: int) -> None:
        for reads in (False, True):
            for name in (name for name in names if SCENARIOS[name].reads is reads):
                given = failures[0 if reads else index]
                missing = [need for need in SCENARIOS[name].needs if given[need] is not None]
                why = f"needs {missing[0]}" if missing else run_one(sides[index], name)
                failures[index][name] = why
                print(f"{'AB'[index]} {name}: {why or 'ran'}", file=sys.stderr, flush=True)
            ready.wait()

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def run_one(side: Side, name: str) -> str | None:
    folder = side.out / name
    folder.mkdir(parents=True)
    try:
        SCENARIOS[name].run(side, folder)
    except Exception as error:  # whatever it is, the other rows are worth having
        return str(error) if isinstance(error, ScenarioError) else repr(error)
    return None


def table(
    sides: Sequence[Side],
    names: Sequence[str],
    failures: Sequence[Failures],
    new: Sequence[str] = (),
) -> list[Row]:
    """A row for the files of each scenario, and one for what its servers were asked. `new` are
    columns and keys that one side may lack."""
    rows: list[Row] = []
    for name in names:
        failed = [f"{'AB'[i]} did not run: {why}" for i in (0, 1) if (why := failures[i][name])]
        for part in (name, name + REQUESTS):
            one, other = (side.out / part for side in sides)
            if part == name and failed:
                rows.append((part, "; ".join(failed)))
            elif part == name or one.exists():
                rows.append((part, first_difference(one, other, new) or "equal"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
