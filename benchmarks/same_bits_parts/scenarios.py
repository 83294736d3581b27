"""What is run with each commit. A scenario writes into a folder of its own; what it leaves there is
compared. Only the commands, recipes and files that users have are used, and TRL's public imports.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from same_bits_parts.compare import first_difference
from same_bits_parts.inputs import base_recipe, with_marks

SCENARIO_SECONDS = 900
ALONE = ("setpriv", "--pdeathsig", "KILL", "taskset", "-c")
"""Ends with this process, however that ends, and runs on the core that follows."""
TRAIN = ("-m", "grpo_replay", "train")
REQUESTS = ": requests"
SERVER = Path(__file__).with_name("server.py")


class ScenarioError(Exception):
    """A scenario that did not run to its end."""


@dataclass(frozen=True)
class Side:
    """One commit: how to run it, where what it writes goes, and what both commits read. `first` is
    the folder of the commit whose runs the reading commands of both are given."""

    python: str
    tree: Path
    core: int
    inputs: Path
    out: Path
    first: Path

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
        return kept | {
            "PYTHONPATH": str(self.tree), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "100", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip

    def start(self, words: list[str], folder: Path, **environment: str) -> subprocess.Popen[bytes]:
        """A process of this commit on its core, its output in files of `folder`/log."""
        log = folder / "log"
        log.mkdir(parents=True, exist_ok=True)
        with (log / "errors").open("wb") as errors, (log / "printed").open("wb") as output:
            return subprocess.Popen(
                [*ALONE, str(self.core), *words], cwd=log, stdout=output, stderr=errors,
                env=self.environment() | environment, start_new_session=True,
            )  # fmt: skip

    def run(self, words: list[str], folder: Path) -> str:
        """What it printed. Raises ScenarioError with the last line of its errors."""
        process = self.start(words, folder)
        try:
            code = process.wait(SCENARIO_SECONDS)
        except subprocess.TimeoutExpired:
            problem = last_line(folder)
            raise ScenarioError(f"no end within {SCENARIO_SECONDS} s: {problem}") from None
        finally:
            end(process)
        if code != 0:
            raise ScenarioError(f"exit code {code}: {last_line(folder)}")
        return (folder / "log" / "printed").read_text()

    def command(self, folder: Path, *words: object) -> str:
        """What `grpo-replay WORDS` printed."""
        return self.run([self.python, "-m", "grpo_replay", *map(str, words)], folder)


def last_line(folder: Path) -> str:
    text = (folder / "log" / "errors").read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of a process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def shipped(name: str, *overrides: str) -> Callable[[Side, Path], None]:
    """A shipped recipe with fixed overrides."""

    def run(side: Side, folder: Path) -> None:
        sets = [word for each in overrides for word in ("--set", each)]
        side.command(folder, "train", name, "--output-dir", folder / "run", *sets)

    return run


def trained(
    *words: str,
    servers: int = 0,
    ahead: int | None = None,
    evaluates: bool = False,
    **sections: Any,
) -> Callable[[Side, Path], None]:
    """A run of the base recipe with other values in some sections, from so many scripted servers;
    with `ahead` an asynchronous one of two groups a step, whose rollouts straddle updates."""

    def run(side: Side, folder: Path) -> None:
        recipe = base_recipe(side.inputs, evaluates)
        for name, values in sections.items():
            recipe[name] = recipe.get(name, {}) | values
        recipe["model"]["path"] = str(side.inputs / recipe["model"]["path"])
        if not servers:
            train(side, folder, recipe, *words)
            return
        script = None
        if ahead is not None:
            marks = folder / "log" / "marks"
            problems = str(with_marks(side.inputs / "problems.jsonl", marks))
            recipe["prompts"]["source"] = problems
            recipe["run"] |= {"mode": "async", "steps": 6}
            recipe["loss"] = {"behavior_logprobs": "sampler"}
            recipe["sampling"] |= {"collection": {"max_ahead_steps": ahead}, "prompts_per_step": 2}
            script = {"groups_per_step": 2, "group_size": 4, "ahead": ahead, "steps": 6,
                      "marks": str(marks), "problems": problems}  # fmt: skip
        with scripted_servers(side, folder, servers, script) as urls:
            section = {"urls": urls, "max_in_flight": 8 * (1 + (ahead or 0)) // servers}
            recipe["sampling"] |= {"backend": "vllm_server", "servers": section}
            train(side, folder, recipe)

    return run


def train(side: Side, folder: Path, recipe: dict[str, Any], *words: str) -> None:
    """Train in `folder`/run."""
    (folder / "given.yaml").write_text(yaml.safe_dump(recipe))
    given = [*TRAIN, str(folder / "given.yaml"), "--output-dir", str(folder / "run")]
    side.run([side.python, *given, *words], folder)


def killed(side: Side, folder: Path) -> None:
    """SIGKILL after the third step, and a resume: equal to the run that nobody killed."""
    recipe, run = side.out / "base" / "given.yaml", folder / "run"
    given = [side.python, *TRAIN, str(recipe), "--output-dir", str(run)]
    process, deadline = side.start(given, folder), time.time() + SCENARIO_SECONDS
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        if process.poll() is not None or time.time() > deadline:
            end(process)
            raise ScenarioError(f"ended before its third step: {last_line(folder)}")
        time.sleep(0.02)
    end(process)
    side.run([*given, "--resume"], folder)
    refuse_difference(side.out / "base" / "run", run)


def repeated(side: Side, folder: Path) -> None:
    """An asynchronous run again, from its journal and without servers: the same weights."""
    source = side.out / "async" / "run"
    recipe = yaml.safe_load((source.parent / "given.yaml").read_text()) | {"eval": {}}
    recipe["sampling"]["collection"]["replay_journal"] = str(source)
    train(side, folder, recipe)
    for part in ("rollouts", "draws", "checkpoints"):
        refuse_difference(source / part, folder / "run" / part)


def refuse_difference(first: Path, again: Path) -> None:
    if where := first_difference(first, again):
        raise ScenarioError(f"it is another run than the first: {where}")


def trl(side: Side, folder: Path) -> None:
    """TRL's trainer with replay."""
    given = [side.inputs / "trl_run.py", side.inputs / "qwen3", side.inputs / "problems.jsonl"]
    side.run([side.python, *map(str, given), str(folder / "run")], folder)


@contextmanager
def scripted_servers(side: Side, folder: Path, count: int, script: Any) -> Iterator[list[str]]:
    """Their URLs. They run with this side's interpreter, but nothing of its commit. What they were
    asked is a row of its own, in a folder beside this one."""
    record = folder.with_name(folder.name + REQUESTS) / "requests.json"
    record.parent.mkdir()
    settings = {"model": str(side.inputs / "qwen3"), "servers": count, "script": script,
                "record": str(record)}  # fmt: skip
    words = [side.python, str(SERVER), json.dumps(settings)]
    process = side.start(words, record.parent, PYTHONPATH="")
    output, deadline = record.parent / "log" / "printed", time.time() + 120
    try:
        while not output.read_text().endswith("\n"):
            if process.poll() is not None or time.time() > deadline:
                problem = last_line(record.parent)
                raise ScenarioError(f"the scripted server did not start: {problem}")
            time.sleep(0.05)
        yield output.read_text().split()
    finally:
        process.terminate()  # it then writes its record, also of a run that failed
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        end(process)


def reading(*words: str) -> Callable[[Side, Path], None]:
    """A command that reads the first commit's runs. `{first}` in a word is their folder."""

    def run(side: Side, folder: Path) -> None:
        given = [word.format(first=side.first, folder=folder) for word in words]
        printed = side.command(folder, *given)
        (folder / f"printed.{'json' if '--json' in words else 'txt'}").write_text(printed)
        for path in folder.rglob("*"):
            if path.suffix in (".html", ".json", ".md", ".txt"):
                path.write_text(path.read_text().replace(str(folder), "FOLDER"))

    return run


@dataclass(frozen=True)
class Scenario:
    """`run(side, folder)` writes into a folder that is new. `needs`: scenarios before it; those of
    one that `reads` are the first commit's."""

    run: Callable[[Side, Path], None]
    needs: tuple[str, ...] = ()
    reads: bool = False


TINY = ("run.steps=4", "replay.warmup_steps=1", "replay.max_age_steps=2",
        "checkpoint.every_steps=2", "eval.max_problems=4", "eval.samples=2",
        "tracking.report_to=[]")  # fmt: skip
FIFO = ("run.steps=8", "replay.capacity_rollouts=48", "checkpoint.every_steps=4",
        "eval.benchmarks=[]", "tracking.report_to=[]")  # fmt: skip
BEFORE, AFTER = (f"{{first}}/tiny/run/eval/step_00000{step}.json" for step in (0, 4))

EXAMPLES = "1+1=2;2+3=5;4+4=8;7+2=9;6+3=9;5+1=6;3+3=6;{problem}="
"""A prompt that is much longer than a completion: it is computed once."""

SCENARIOS: dict[str, Scenario] = {
    "tiny": Scenario(shipped("tiny", *TINY)),
    "fifo-tiny": Scenario(shipped("fifo-tiny", *FIFO)),
    "base": Scenario(trained(evaluates=True)),
    "killed": Scenario(killed, needs=("base",)),
    "group-std": Scenario(trained(replay={"preset": "group_std"}, advantage={"std": "none"})),
    "options": Scenario(trained(
        evaluates=True, advantage={"std": "sample"}, reward={"overlong_buffer_tokens": 3},
        loss={"kind": "gspo", "beta": 0.05, "aggregation": "sequence_mean"},
        optimizer={"schedule": "cosine", "warmup_steps": 2}, sampling={"max_refills": 1},
    )),
    "lora": Scenario(trained(model={"lora": {"r": 4}})),
    "packed": Scenario(trained(batch={"packing": True}, loss={"sampler_ratio": {"high": 2.0}})),
    "shared-prompts": Scenario(trained(
        model={"path": "llama"}, prompts={"user_template": EXAMPLES},
        sampling={"max_completion_length": 6}, batch={"max_tokens_per_microbatch": 400},
    )),
    "zero3": Scenario(trained("--num-processes", "2", engine={"zero_stage": 3})),
    "trl": Scenario(trl),
    "server": Scenario(trained(servers=1, evaluates=True)),
    "two-servers": Scenario(trained(
        servers=2, run={"sync_every_steps": 2}, loss={"behavior_logprobs": "sampler"},
    )),
    "async": Scenario(trained(servers=1, ahead=1, evaluates=True)),
    "async-two-servers": Scenario(trained(servers=2, ahead=2, replay={"max_age_steps": 2})),
    "async-repeated": Scenario(repeated, needs=("async",)),
    "eval": Scenario(reading(
        "eval", "--ckpt", "{first}/tiny/run", "--output", "{folder}/report.json", "--k", "2",
    ), needs=("tiny",), reads=True),
    "report": Scenario(reading(
        "report", "{first}/base/run", "{first}/options/run", "--output", "{folder}/report",
    ), needs=("base", "options"), reads=True),
    "inspect-buffer": Scenario(
        reading("inspect-buffer", "{first}/tiny/run", "--json"), needs=("tiny",), reads=True
    ),
    "verify": Scenario(
        reading("inspect-buffer", "{first}/tiny/run", "--verify"), needs=("tiny",), reads=True
    ),
    "aes": Scenario(
        reading("aes", AFTER, "--reference", BEFORE, "--json"), needs=("tiny",), reads=True
    ),
    "plan": Scenario(
        reading("plan", "--from-run", "{first}/tiny/run", "--json"), needs=("tiny",), reads=True
    ),
}  # fmt: skip
