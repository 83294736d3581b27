"""Kill an asynchronous run at random moments, resume it, and compare it with its own journal.

    python benchmarks/async_kills.py --kills 20 [--recipe tiny-async] [--steps 80] [--output DIR]

The vLLM server outlives the kills. Every attempt gets SIGKILL at a random moment: one in four while
it starts, the others in a step between the next one and the eighth after its checkpoint, so also
while it repeats the journal. Prints and writes (kills.jsonl) one line per kill: when, what it left
behind, and whether the journal of before is the beginning of that of after. The last attempt
finishes and is repeated from its journal without a server. A kill is survived if the first
checkpoint after it is equal bit for bit in both.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from async_parts.forks import Forked
from async_parts.run_process import RunProcess, family, living, repeat_from_journal
from async_parts.servers import servers, wait_for

START_SHARE = 0.25
MOST_STEPS = 8
GONE_SECONDS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--recipe", default="tiny-async")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-seconds", type=float, default=15.0, help="a start takes so long")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp(prefix="async-kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    with servers(options.recipe, folder, 1) as (server,):
        overrides = [
            f"run.steps={options.steps}", "eval.benchmarks=[]", "checkpoint.every_steps=3",
            "checkpoint.keep=1000", "sampling.servers.launch=0",
            f"sampling.servers.urls=[{server.url}]", *options.set,
        ]  # fmt: skip
        run = RunProcess(options.recipe, folder / "run", overrides)
        kills = campaign(options, run, folder / "kills.jsonl")
        before = run.records()
        code = run.start().wait()
        print(f"finished with exit code {code}, step {run.steps()}", flush=True)
    if code != 0 or run.records()[: len(before)] != before:
        print(f"the last attempt failed, or changed the journal: see {run.log}")
        return 1
    return judge(run, kills)


def campaign(options: argparse.Namespace, run: RunProcess, results: Path) -> list[dict[str, Any]]:
    """Kill `kills` attempts."""
    chance, kills = random.Random(options.seed), []
    for number in range(1, options.kills + 1):
        before = run.records()
        attempt, started = run.start(), time.time()
        moment = wait_for_moment(chance, run, attempt, options.start_seconds)
        if attempt.poll() is not None:
            print(f"the run ended with code {attempt.returncode}: see {run.log}; more --steps?")
            break
        kills.append({"kill": number, "moment": moment, "seconds": time.time() - started})
        kills[-1] |= kill(attempt) | {
            "step": run.steps(),
            "checkpoint": max(run.checkpoints(), default=0),
            "keeps_the_journal": run.records()[: len(before)] == before,
        }
        print(json.dumps(kills[-1]), flush=True)
        with results.open("a") as file:
            file.write(json.dumps(kills[-1]) + "\n")
    return kills


def wait_for_moment(
    chance: random.Random, run: RunProcess, attempt: Forked, start_seconds: float
) -> str:
    """Wait for a random moment of an attempt; what it was."""
    if chance.random() < START_SHARE:
        time.sleep(chance.uniform(0.5, start_seconds))
        return "start"
    goal = max(run.checkpoints(), default=0) + chance.randint(1, MOST_STEPS)
    started = time.time()
    wait_for(lambda: run.steps_since(started) >= goal or attempt.poll() is not None, 300)
    time.sleep(chance.uniform(0, 1))
    return f"step {goal}"


def kill(attempt: Forked) -> dict[str, Any]:
    """SIGKILL to the trainer alone; how long what it had started outlived it."""
    members = family(attempt)
    attempt.kill()
    attempt.wait()
    gone = wait_for(lambda: not living(members), GONE_SECONDS)
    return {"processes": len(members), "gone_after": gone, "left": len(living(members))}


def judge(run: RunProcess, kills: list[dict[str, Any]]) -> int:
    """Repeat the run from its journal; 0 if every kill was survived and nothing else is wrong."""
    comparison = repeat_from_journal(run)
    equal = comparison.equal_checkpoints
    survived = 0
    for each in kills:
        following = min((step for step in equal if step > each["step"]), default=None)
        intact = each["keeps_the_journal"] and not each["left"]
        survived += following is not None and equal[following] and intact
    last = run.metrics()[-1]
    problems = comparison.problems()
    print(f"{survived} of {len(kills)} kills survived; {len(equal)} checkpoints compared")
    print({name: value for name, value in last.items() if name.startswith("ledger/")})
    print("problems:", problems or "none")
    return 0 if survived == len(kills) and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
