"""Plant small bugs and see whether the default tests of their folder fail.

    python benchmarks/mutation_check.py                                # 80 mutants, seed 0
    python benchmarks/mutation_check.py --folders replay --count 200 --seed 3
    python benchmarks/mutation_check.py --all --quick 5 --results all.jsonl    # 5 s of tests each
    python benchmarks/mutation_check.py --again --results all.jsonl            # those not killed
    python benchmarks/mutation_check.py --known                        # the list in known.py

A mutant is one change of a comparison, operator, constant, condition, return, slice or call
(`mutation_parts/mutants.py`). A random sample of those of the folders is tested, each against the
tests in the default suite of its own folder that run the changed line, the quickest first, until
one fails. Which tests these are is traced once for each test file and kept in `--output`; in a
source that changed since, each test that ran a line of it counts. Prints the
survivors and the share killed; a time limit that ends a mutant counts as killed. Mutants that
change no behaviour are named with a reason in `mutation_parts/equivalent.py` and left out. The
exit code is 1 if less than 95 % were killed. `--known` plants the bugs of `mutation_parts/known.py`
instead: the one test that each names must fail, and pass without it.

Outcomes are appended to `--results`. A mutant that has one there is not tested again while the
package and the tests of its folder are the same, so a check that was cut off goes on where it was.
With `--quick`, a mutant that its quickest tests let live is undecided.
"""

import argparse
import fcntl
import math
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutation_parts.covering import (
    FileCover,
    chosen_tests,
    is_recorded,
    mutant_task,
    named_tests,
    read_covers,
    record_task,
)
from mutation_parts.equivalent import EQUIVALENT
from mutation_parts.hosting import Trial, host_task
from mutation_parts.known import KNOWN, Known
from mutation_parts.mutants import Mutant, mutants_of
from mutation_parts.results import Results
from mutation_parts.running import FAILED, Outcome, Task, load_libraries, make_copies, run_tasks

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("training", "replay", "collection")
LEAST_KILLED = 0.95
SPARE_SECONDS = 90.0
"""Added to three times the tests' own time, as the time limit of a mutant."""
QUICK_SPARE_SECONDS = 30.0
KNOWN_SECONDS = 600.0
UNCHANGED = "no mutant at all"


def test_files(folder: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests" / folder).rglob("test_*.py"))


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


def record(folders: Sequence[str], output: Path, copies: list[Path]) -> None:
    """Trace the test files that were not traced yet, or not as they are now."""
    files = [each for folder in folders for each in test_files(folder)]
    files = [each for each in files if not is_recorded(ROOT, each, output)]
    for outcome in run_tasks([record_task(each, output) for each in files], copies):
        print(f"traced {outcome.task.name} in {outcome.seconds:.0f} s", flush=True)
        if outcome.code != 0:
            sys.exit(f"{outcome.task.name} ended with {outcome.code}: see {outcome.task.log}")


def killer_of(outcome: Outcome) -> str:
    """The test that failed, and how."""
    if outcome.code is None:
        return "time limit"
    log = outcome.task.log.read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) .*", log, re.MULTILINE)
    return failed[0] if failed else f"exit code {outcome.code}"


def trials_of(
    mutants: Sequence[Mutant], options: argparse.Namespace, output: Path
) -> Iterator[Trial]:
    covers: dict[str, list[FileCover]] = {}
    quick = options.quick
    spare = SPARE_SECONDS if quick is None else QUICK_SPARE_SECONDS
    for mutant in mutants:
        if options.tests:
            yield Trial(mutant, options.tests, KNOWN_SECONDS, False)
            continue
        if mutant.folder not in covers:
            covers[mutant.folder] = read_covers(ROOT, output, test_files(mutant.folder))
        most = math.inf if quick is None else quick
        tests, seconds, complete = chosen_tests(mutant, covers[mutant.folder], most)
        yield Trial(mutant, tests, spare + 3 * seconds, complete)


def try_mutants(
    mutants: Sequence[Mutant],
    options: argparse.Namespace,
    output: Path,
    copies: list[Path],
    results: Results,
) -> None:
    """Test the mutants that are not settled, and note each outcome."""
    waiting = [each for each in mutants if not results.is_settled(each, options.quick)]

    def note(mutant: Mutant, outcome: str, **facts: object) -> None:
        results.note(mutant, outcome, quick=options.quick, **facts)

    in_functions: dict[str, list[Trial]] = {}
    alone: dict[str, Trial] = {}
    for trial in trials_of(waiting, options, output):
        if not trial.tests:
            note(trial.mutant, "survived", killer="no default test of its folder runs it")
        elif trial.mutant.in_function:
            in_functions.setdefault(trial.mutant.folder, []).append(trial)
        else:
            alone[str(trial.mutant)] = trial
    tasks = [
        host_task(f"{folder}{number}", trials[number :: len(copies)], output, note)
        for folder, trials in in_functions.items()
        for number in range(min(len(copies), len(trials)))
    ]
    for number, trial in enumerate(alone.values()):
        log = output / f"mutant{number}.log"
        tasks.append(mutant_task(trial.mutant, trial.tests, trial.limit_seconds, log))
    for outcome in run_tasks(tasks, copies):
        if outcome.code == FAILED:
            sys.exit(f"{outcome.task.name} could not be tested: see {outcome.task.log}")
        if trial := alone.get(outcome.task.name):
            shutil.rmtree(outcome.task.log.with_suffix(".tmp"), ignore_errors=True)
            killer = killer_of(outcome) if outcome.code not in (0, 5) else ""
            state = "killed" if killer else "survived" if trial.complete else "undecided"
            note(trial.mutant, state, killer=killer, seconds=round(outcome.seconds, 1))


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


def chosen_mutants(options: argparse.Namespace, results: Results) -> list[Mutant]:
    """All mutants, a sample of them, or those that the results say were not killed."""
    mutants = all_mutants(options.folders)
    if options.files:
        mutants = [m for m in mutants if any(part in m.path for part in options.files)]
    if options.again:
        return [m for m in mutants if results.outcome(m) in ("survived", "undecided")]
    if options.all:
        return mutants
    return random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS), choices=FOLDERS)
    parser.add_argument("--files", nargs="+", help="only files with one of these in their path")
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="all mutants, in place of a sample")
    parser.add_argument("--again", action="store_true", help="those of --results not killed")
    parser.add_argument("--quick", type=float, help="try at most so many seconds of tests each")
    parser.add_argument("--tests", nargs="+", help="try these test files alone, without tracing")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutation")
    parser.add_argument("--results", type=Path, help="file of outcomes; a new one by default")
    parser.add_argument("--known", action="store_true", help="plant the bugs of known.py instead")
    options = parser.parse_args()
    if options.again and options.results is None:
        parser.error("--again needs --results")
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
    path = options.results or output / f"results-{time.strftime('%H%M%S')}.jsonl"
    results = Results(path.resolve(), ROOT)
    mutants = chosen_mutants(options, results)
    if not options.tests:
        record(sorted({each.folder for each in mutants}), output, copies)
    try_mutants(mutants, options, output, copies, results)
    results = Results(results.path, ROOT)  # with what other processes noted
    for mutant in mutants:
        if (outcome := results.outcome(mutant)) != "killed":
            print(f"{outcome}: {mutant}")
    counts = Counter(results.outcome(each) for each in mutants)
    share = counts["killed"] / max(len(mutants), 1)
    print(f"{counts['killed']} of {len(mutants)} mutants killed ({share:.1%}); see {path}")
    return int(share < LEAST_KILLED)


if __name__ == "__main__":
    sys.exit(main())
