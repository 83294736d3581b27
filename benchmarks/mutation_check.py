"""Plant small bugs and see whether the default tests of their folder fail.

    python benchmarks/mutation_check.py                                # 80 mutants, seed 0
    python benchmarks/mutation_check.py --folders replay --count 200 --seed 3
    python benchmarks/mutation_check.py --again build/mutation/results.jsonl   # only its survivors
    python benchmarks/mutation_check.py --known                        # the list in known.py

A mutant is one change of a comparison, operator, constant, condition, return, slice or call
(`mutation_parts/mutants.py`). A random sample of those of the folders is tested, each against the
tests in the default suite of its own folder that run the changed line (found once by tracing, kept
in `--output` while the sources are the same), the quickest file first, until one fails. Prints the
survivors and the share killed; a time limit that ends a mutant counts as killed. Mutants that
change no behaviour are named with a reason in `mutation_parts/equivalent.py` and left out. The
exit code is 1 if less than 95 % were killed. `--known` plants the bugs of `mutation_parts/known.py`
instead: the one test that each names must fail, and pass without it.
"""

import argparse
import fcntl
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mutation_parts.covering import (
    FileCover,
    is_recorded,
    mutant_task,
    named_tests,
    read_covers,
    record_task,
    tests_of,
)
from mutation_parts.equivalent import EQUIVALENT
from mutation_parts.known import KNOWN, Known
from mutation_parts.mutants import Mutant, mutants_of
from mutation_parts.running import FAILED, Outcome, Task, load_libraries, make_copies, run_tasks

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("training", "replay", "collection")
LEAST_KILLED = 0.95
SPARE_SECONDS = 90.0
"""Added to three times the tests' own time, as the time limit of a mutant."""
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


def try_mutants(
    mutants: Sequence[Mutant], output: Path, copies: list[Path], results: Path
) -> Counter[str]:
    """Test the mutants, append each outcome to `results`, and count them."""
    folders = {each.path.split("/")[1] for each in mutants}
    covers: dict[str, list[FileCover]] = {f: read_covers(output, test_files(f)) for f in folders}
    tasks: list[Task] = []
    by_name = {str(each): each for each in mutants}
    counts: Counter[str] = Counter()

    def note(mutant: Mutant, outcome: str, **facts: object) -> None:
        counts[outcome] += 1
        line = {"path": mutant.path, "old": mutant.old, "new": mutant.new, "outcome": outcome}
        with results.open("a") as file:
            file.write(json.dumps({**line, "line": mutant.lines[0], **facts}) + "\n")
        if outcome != "killed":
            print(f"{outcome}: {mutant}", flush=True)

    for number, mutant in enumerate(mutants):
        tests, seconds = tests_of(mutant, covers[mutant.path.split("/")[1]])
        if tests:
            log = output / f"mutant{number}.log"
            tasks.append(mutant_task(mutant, tests, SPARE_SECONDS + 3 * seconds, log))
        else:
            note(mutant, "survived", killer="no default test of its folder runs it")
    for outcome in run_tasks(tasks, copies):
        if outcome.code == FAILED:
            sys.exit(f"{outcome.task.name} could not be tested: see {outcome.task.log}")
        state = "survived" if outcome.code in (0, 5) else "killed"
        killer = killer_of(outcome) if state == "killed" else ""
        note(by_name[outcome.task.name], state, killer=killer, seconds=round(outcome.seconds, 1))
    return counts


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


def chosen_mutants(options: argparse.Namespace) -> list[Mutant]:
    """The sample, or the survivors of an earlier one."""
    mutants = all_mutants(options.folders)
    if options.again is None:
        return random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    lines = [json.loads(line) for line in options.again.read_text().splitlines()]
    survivors = {(e["path"], e["old"], e["new"]) for e in lines if e["outcome"] == "survived"}
    return [each for each in mutants if (each.path, each.old, each.new) in survivors]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS), choices=FOLDERS)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutation")
    parser.add_argument("--again", type=Path, help="results of which to test the survivors")
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
    mutants = chosen_mutants(options)
    record(sorted({each.path.split("/")[1] for each in mutants}), output, copies)
    results = output / f"results-{time.strftime('%H%M%S')}.jsonl"
    counts = try_mutants(mutants, output, copies, results)
    share = counts["killed"] / max(len(mutants), 1)
    print(f"{counts['killed']} of {len(mutants)} mutants killed ({share:.1%}); see {results}")
    return int(share < LEAST_KILLED)


if __name__ == "__main__":
    sys.exit(main())
