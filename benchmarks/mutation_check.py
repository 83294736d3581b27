"""Plant small bugs and see whether the default tests fail.

    python benchmarks/mutation_check.py                                # 80 mutants, seed 0
    python benchmarks/mutation_check.py --folders replay --count 200 --seed 3
    python benchmarks/mutation_check.py --any-folder                   # the whole default suite
    python benchmarks/mutation_check.py --known                        # the list in known.py

A mutant is one change of a comparison, operator, constant, condition, return, slice or call
(`mutation_parts/mutants.py`). A random sample of those of the folders is tested, each against the
tests in the default suite of its own folder (`--any-folder`: of all folders) that run the changed
line, the quickest first, until one fails. Which tests these are is traced once for each test file
and kept in `--output`; in a source that changed since, each test that ran a line of it counts.
Prints the survivors and the share killed; a time limit that ends a mutant counts as killed. Mutants
that change no behaviour are named with a reason in `mutation_parts/equivalent.py` and left out. The
exit code is 1 if less than 95 % were killed. `--known` plants the bugs of `mutation_parts/known.py`
instead: the one test that each names must fail, and pass without it.

Outcomes are appended to results.jsonl in `--output`. A mutant that has one there is not tested
again while the package and the tests are the same, so a check that was cut off goes on where it
was.
"""

import argparse
import fcntl
import os
import random
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mutation_parts.covering import (
    FileCover,
    chosen_tests,
    is_recorded,
    mutant_task,
    named_tests,
    read_cover,
    record_task,
)
from mutation_parts.equivalent import EQUIVALENT
from mutation_parts.known import KNOWN, Known
from mutation_parts.mutants import Mutant, mutants_of
from mutation_parts.results import Results
from mutation_parts.running import FAILED, Outcome, Task, load_libraries, make_copies, run_tasks

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("training", "replay", "collection")
LEAST_KILLED = 0.95
SPARE_SECONDS = 90.0
"""Added to three times the tests' own time, as the time limit of a mutant."""
KNOWN_SECONDS = 600.0
UNCHANGED = "no mutant at all"


def all_mutants(folders: Sequence[str]) -> list[Mutant]:
    """All mutants of the folders but the equivalent ones. Exits if one of these is gone."""
    found = []
    for folder in folders:
        paths = sorted((ROOT / "grpo_replay" / folder).rglob("*.py"))
        found += [each for path in paths for each in mutants_of(ROOT, str(path.relative_to(ROOT)))]
    listed = {(path, old, new) for path, old, new, _ in EQUIVALENT}
    here = {path for path, _, _ in listed if path.split("/")[1] in folders}
    gone = {each for each in listed if each[0] in here} - {(m.path, m.old, m.new) for m in found}
    if gone:
        sys.exit(f"mutation_parts/equivalent.py names mutants that are gone: {sorted(gone)}")
    return [each for each in found if (each.path, each.old, each.new) not in listed]


def covers_of(tests: str, output: Path, copies: list[Path]) -> list[FileCover]:
    """What the test files of a folder run. Those that were not traced yet, or not as they are now,
    are traced first."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / tests).rglob("test_*.py"))
    missing = [each for each in files if not is_recorded(ROOT, each, output)]
    for outcome in run_tasks([record_task(each, output) for each in missing], copies):
        print(f"traced {outcome.task.name} in {outcome.seconds:.0f} s", flush=True)
        if outcome.code != 0:
            sys.exit(f"{outcome.task.name} ended with {outcome.code}: see {outcome.task.log}")
    return [read_cover(ROOT, output, each) for each in files]


def killer_of(outcome: Outcome) -> str:
    """The test that failed, and how; "" if the mutant survived."""
    if outcome.code is None:
        return "time limit"
    if outcome.code == 0:
        return ""
    log = outcome.task.log.read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) .*", log, re.MULTILINE)
    return failed[0] if failed else f"exit code {outcome.code}"


def try_mutants(
    mutants: Sequence[Mutant], tests: str, output: Path, copies: list[Path], results: Results
) -> None:
    """Test the mutants that have no outcome yet against a folder of tests, and note each."""
    waiting = [each for each in mutants if results.outcome(each, tests) is None]
    covers = covers_of(tests, output, copies) if waiting else []
    tasks = {}
    for number, mutant in enumerate(waiting):
        groups, seconds = chosen_tests(mutant, covers)
        if groups:
            log = output / f"mutant{number}.log"
            task = mutant_task(mutant, groups, SPARE_SECONDS + 3 * seconds, log)
            tasks[task] = mutant
        else:
            results.note(mutant, tests, "survived", killer="no default test runs it")
    for outcome in run_tasks(tasks, copies):
        if outcome.code == FAILED:
            sys.exit(f"{outcome.task.name} could not be tested: see {outcome.task.log}")
        shutil.rmtree(outcome.task.log.with_suffix(".tmp"), ignore_errors=True)
        killer = killer_of(outcome)
        state = "killed" if killer else "survived"
        seconds = round(outcome.seconds, 1)
        results.note(tasks[outcome.task], tests, state, killer=killer, seconds=seconds)


def known_task(known: Known, output: Path) -> Task:
    """Plant the bug and run its test. Exits if the text that it changes is gone."""
    source = (ROOT / known.path).read_text()
    if source.count(known.old) != 1:
        sys.exit(
            f"mutation_parts/known.py, {known.name!r}: its old text is {source.count(known.old)} "
            f"times in {known.path}, expected once: {known.old!r}"
        )
    log = output / f"known-{known.name.replace(' ', '-').replace('/', '-')}.log"
    changed = (known.path, source.replace(known.old, known.new))
    return Task(known.name, named_tests([known.test], log), KNOWN_SECONDS, log, changed)


def try_known(output: Path, copies: list[Path]) -> int:
    """Plant the known bugs. Prints those that their test lets pass, and returns their number."""
    log = output / "known.log"
    tests = list(dict.fromkeys(known.test for known in KNOWN))
    unchanged = Task(UNCHANGED, named_tests(tests, log), KNOWN_SECONDS, log)
    missed = 0
    for outcome in run_tasks([unchanged, *(known_task(each, output) for each in KNOWN)], copies):
        expected = 0 if outcome.task.name == UNCHANGED else 1
        if outcome.code != expected:
            missed += 1
            print(f"{outcome.task.name}: pytest ended with {outcome.code}, not {expected}")
            print(outcome.task.log.read_text(errors="replace")[-3000:], flush=True)
    print(f"{len(KNOWN)} known mutants, {missed} missed")
    return missed


def main() -> int:
    folders = sorted(each.name for each in (ROOT / "grpo_replay").iterdir() if each.is_dir())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS), choices=folders)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--any-folder", action="store_true", help="try the tests of all folders")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutation")
    parser.add_argument("--known", action="store_true", help="plant the bugs of known.py instead")
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    lock = (output / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another mutation check works in {output}: name another --output")
    os.nice(10)
    load_libraries()
    copies = make_copies(ROOT, output, options.jobs)
    if options.known:
        return int(try_known(output, copies) > 0)
    results = Results(output / "results.jsonl", ROOT)
    mutants = all_mutants(options.folders)
    chosen = random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    by_tests: dict[str, list[Mutant]] = {}
    for mutant in chosen:
        tests = "tests" if options.any_folder else f"tests/{mutant.folder}"
        by_tests.setdefault(tests, []).append(mutant)
    survivors = []
    for tests, own in by_tests.items():
        try_mutants(own, tests, output, copies, results)
        survivors += [each for each in own if results.outcome(each, tests) != "killed"]
    for mutant in survivors:
        print(f"survived: {mutant}")
    share = 1 - len(survivors) / max(len(chosen), 1)
    killed = len(chosen) - len(survivors)
    print(f"{killed} of {len(chosen)} mutants killed ({share:.1%}); see {results.path}")
    return int(share < LEAST_KILLED)


if __name__ == "__main__":
    sys.exit(main())
