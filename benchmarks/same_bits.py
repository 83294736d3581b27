"""Do two commits give the same bits? A table: a row per scenario, "equal" or the first difference.

    python benchmarks/same_bits.py A B [--only NAME …] [--python PATH] [--keep]
    python benchmarks/same_bits.py --list

A and B are any names of commits of this repository. Each is unpacked under build/same_bits, and
runs the same short scenarios side by side with the other, on a core and a thread of its own.
Compared is what a run writes (rollouts, draws, metrics without clocks, weights byte by byte), what
the reading commands print, and every request that a scripted vLLM server was sent. The exit code is
1 if anything differs. About six minutes on two idle cores.

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
from same_bits_parts.scenarios import SCENARIOS, ScenarioError, Side

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "same_bits"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="two names of commits")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SCENARIOS, default=None)
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
        results = run_sides(sides, names)
        return print_table(options.commits, sides, names, results)
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


class Results:
    """What became of each scenario of each side: None, or why it did not run to its end."""

    def __init__(self) -> None:
        self.failures: list[dict[str, str | None]] = [{}, {}]


def run_sides(sides: Sequence[Side], names: Sequence[str]) -> Results:
    """Run the scenarios of both sides at once; those that read the first commit's runs last."""
    results, ready = Results(), threading.Barrier(2)

    def work(index: int) -> None:
        side, failures = sides[index], results.failures[index]
        for reads in (False, True):
            for name in (name for name in names if SCENARIOS[name].reads is reads):
                given = results.failures[0] if reads else failures
                missing = [
                    need for need in SCENARIOS[name].needs if given.get(need, "") is not None
                ]
                failures[name] = f"needs {missing[0]}" if missing else run_one(side, name)
                print(
                    f"{'AB'[index]} {name}: {failures[name] or 'ran'}", file=sys.stderr, flush=True
                )
            ready.wait()

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def run_one(side: Side, name: str) -> str | None:
    try:
        SCENARIOS[name].run(side, side.out / name)
    except (ScenarioError, OSError, ValueError, subprocess.SubprocessError) as error:
        return str(error) or repr(error)
    return None


def rows_of(name: str, one: Path, other: Path) -> list[tuple[str, str]]:
    """The rows of a scenario that ran in both: of its files, and of what servers were asked."""
    asked = [folder / "requests.json" for folder in (one, other)]
    rows = []
    if all(path.exists() for path in asked):
        for path in asked:
            (path.parent / "asked").mkdir()
            path.rename(path.parent / "asked" / path.name)
        pairs = [folder / "asked" for folder in (one, other)]
        rows.append((f"{name}: requests", first_difference(*pairs) or "equal"))
        for folder in pairs:
            shutil.rmtree(folder)
    return [(name, first_difference(one, other) or "equal"), *rows]


def print_table(
    commits: Sequence[str], sides: Sequence[Side], names: Sequence[str], results: Results
) -> int:
    rows: list[tuple[str, str]] = []
    for name in names:
        failed = [
            f"{'AB'[index]} did not run: {reason}"
            for index in (0, 1)
            if (reason := results.failures[index][name]) is not None
        ]
        if failed:
            rows.append((name, "; ".join(failed)))
        else:
            rows += rows_of(name, *(side.out / name for side in sides))
    print(f"\nA is {commits[0]} ({sides[0].tree.name[:12]}), B {commits[1]} "
          f"({sides[1].tree.name[:12]})\n")  # fmt: skip
    print("| scenario | B against A |\n|---|---|")
    for name, result in rows:
        print(f"| {name} | {result} |")
    different = sum(result != "equal" for _, result in rows)
    print(f"\n{len(rows) - different} of {len(rows)} rows are equal")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
