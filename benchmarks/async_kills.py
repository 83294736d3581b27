"""Kill an asynchronous run at random moments, resume it, and compare it with its own journal.

    python benchmarks/async_kills.py --kills 20 [--recipe tiny-async] [--steps 40] [--output DIR]

Starts the recipe's run with a vLLM server of its own, which outlives the kills. Each attempt gets
SIGKILL after a random time; the next one resumes. After the last kill the run is left to finish,
then repeated from its journal without servers. Prints one line per kill, whether the weights are
equal bit for bit, whether the ledger balances at every step, and what was lost.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from grpo_replay.collection.ledger import CATEGORIES
from grpo_replay.recipe import load_recipe
from grpo_replay.sampling.server.process import launch_servers, wait_until_healthy
from grpo_replay.sampling.server.routes import VllmServer
from grpo_replay.sampling.server.sampler import _is_healthy
from grpo_replay.sampling.vllm_settings import engine_arguments


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--recipe", default="tiny-async")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-seconds", type=float, default=25.0, help="earliest kill")
    parser.add_argument("--last-seconds", type=float, default=60.0, help="latest kill")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp(prefix="async-kills-"))
    overrides = [
        f"run.steps={options.steps}", "eval.benchmarks=[]", "checkpoint.every_steps=5",
        *options.set,
    ]  # fmt: skip
    recipe = load_recipe(options.recipe, overrides)
    arguments = engine_arguments(recipe, recipe.model, on_gpu=False)
    (server,) = launch_servers(recipe, arguments, on_gpu=False, log_folder=folder / "server")
    try:
        client = VllmServer(server.url, "campaign")
        wait_until_healthy([server], [lambda: _is_healthy(client)], 600)
        overrides += ["sampling.servers.launch=0", f"sampling.servers.urls=[{server.url}]"]
        campaign(options, folder / "run", overrides)
    finally:
        server.stop()
    return compare(options.recipe, folder, overrides)


def campaign(options: argparse.Namespace, run: Path, overrides: list[str]) -> None:
    """Kill `kills` attempts, then let one finish."""
    chance = random.Random(options.seed)
    for kill in range(options.kills):
        attempt = start(options.recipe, run, overrides)
        seconds = chance.uniform(options.first_seconds, options.last_seconds)
        time.sleep(seconds)
        over = attempt.poll() is not None
        attempt.send_signal(signal.SIGKILL)
        attempt.wait()
        print(f"kill {kill + 1}: after {seconds:.1f} s, at step {steps_of(run)}", flush=True)
        if over:
            print(f"the run had ended with code {attempt.returncode}: give it more --steps")
            break
    code = start(options.recipe, run, overrides).wait()
    print(f"finished with exit code {code}, step {steps_of(run)}", flush=True)


def start(recipe: str, run: Path, overrides: list[str]) -> subprocess.Popen:
    words = [sys.executable, "-m", "grpo_replay", "train", recipe, "--output-dir", str(run)]
    if (run / "recipe.yaml").exists():
        words.append("--resume")
    for override in overrides:
        words += ["--set", override]
    run.parent.mkdir(parents=True, exist_ok=True)
    with (run.parent / "attempts.log").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log)


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def compare(recipe: str, folder: Path, overrides: list[str]) -> int:
    """Repeat the run from its journal; 0 if weights and ledger are right."""
    run, again = folder / "run", folder / "again"
    replay = [*overrides, f"sampling.collection.replay_journal={run}"]
    if start(recipe, again, replay).wait() != 0:
        print(f"the journal could not be repeated: see {folder / 'attempts.log'}")
        return 1
    one, other = (
        load_file(each / "checkpoints/latest/model/model.safetensors") for each in (run, again)
    )
    equal = one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wrong = [line["step"] for line in lines if not balances(line)]
    print(f"{len(lines)} steps; weights equal bit for bit: {equal}; unbalanced steps: {wrong}")
    print({name: lines[-1][f"ledger/{name}_rollouts"] for name in ("generated", *CATEGORIES)})
    return 0 if equal and not wrong else 1


def balances(line: dict) -> bool:
    return all(
        line[f"ledger/generated_{unit}"]
        == sum(line[f"ledger/{name}_{unit}"] for name in (*CATEGORIES, "in_flight"))
        for unit in ("rollouts", "tokens")
    )


if __name__ == "__main__":
    sys.exit(main())
