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
from same_bits_parts.inputs import base_recipe, held_out

SCENARIO_SECONDS = 300
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

    def start(self, words: list[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """A process of this commit on its core, its output in a file."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors, log.with_suffix(".out").open("wb") as output:
            return subprocess.Popen(
                ["taskset", "-c", str(self.core), *words], cwd=log.parent, stdout=output,
                stderr=errors, env=self.environment() | environment, start_new_session=True,
            )  # fmt: skip

    def run(self, words: list[str], log: Path, **environment: str) -> str:
        """What it printed. Raises ScenarioError with the last line of its errors."""
        process = self.start(words, log, **environment)
        try:
            code = process.wait(SCENARIO_SECONDS)
        except subprocess.TimeoutExpired:
            raise ScenarioError(f"no end within {SCENARIO_SECONDS} s: {last_line(log)}") from None
        finally:
            end(process)
        if code != 0:
            raise ScenarioError(f"exit code {code}: {last_line(log)}")
        return log.with_suffix(".out").read_text()

    def command(self, log: Path, *words: object) -> str:
        """What `grpo-replay WORDS` printed."""
        return self.run([self.python, "-m", "grpo_replay", *map(str, words)], log)

    def train(self, folder: Path, recipe: dict[str, Any], *words: str, **environment: str) -> Path:
        """The run of a recipe, in `folder`/run."""
        path = write_recipe(folder, recipe)
        command = [self.python, "-m", "grpo_replay", "train", str(path), "--output-dir"]
        self.run(
            [*command, str(folder / "run"), *words], folder / "log" / "train.log", **environment
        )
        return folder / "run"


def write_recipe(folder: Path, recipe: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of a process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def changed(recipe: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe with other values in some sections."""
    return recipe | {name: recipe.get(name, {}) | values for name, values in sections.items()}


def shipped(name: str, *overrides: str) -> Callable[[Side, Path], None]:
    """A shipped recipe with fixed overrides."""

    def run(side: Side, folder: Path) -> None:
        words = [word for each in overrides for word in ("--set", each)]
        log = folder / "log" / "train.log"
        side.command(log, "train", name, "--output-dir", folder / "run", *words)

    return run


def trained(*words: str, **sections: dict[str, Any]) -> Callable[[Side, Path], None]:
    """A run of the base recipe with other values."""

    def run(side: Side, folder: Path) -> None:
        side.train(folder, changed(base_recipe(side.inputs), **sections), *words)

    return run


def options(side: Side, folder: Path) -> None:
    """Many options of the loss, the reward and the schedule at once, and an evaluation."""
    recipe = changed(
        base_recipe(side.inputs),
        advantage={"std": "sample"},
        eval=held_out(side.inputs, greedy=True),
        loss={"kind": "gspo", "beta": 0.05, "aggregation": "sequence_mean"},
        optimizer={"schedule": "cosine", "warmup_steps": 2},
        reward={"overlong_buffer_tokens": 3},
        sampling={"max_refills": 1},
    )
    recipe["loss"]["sampler_ratio_cap"] = 2.0
    side.train(folder, recipe)


def shared_prompts(side: Side, folder: Path) -> None:
    """Llama, with prompts that are much longer than the completions."""
    recipe = base_recipe(side.inputs) | {"model": {"path": str(side.inputs / "llama")}}
    template = {"user_template": "1+1=2;2+3=5;4+4=8;7+2=9;6+3=9;5+1=6;3+3=6;{problem}="}
    sampling = {"max_completion_length": 6, "group_size": 6}
    batch = {"max_tokens_per_microbatch": 400}
    side.train(folder, changed(recipe, prompts=template, sampling=sampling, batch=batch))


def killed(side: Side, folder: Path) -> None:
    """SIGKILL after the third step, and a resume: equal to the run that nobody killed."""
    recipe = base_recipe(side.inputs)
    path, log = write_recipe(folder, recipe), folder / "log" / "killed.log"
    words = [side.python, "-m", "grpo_replay", "train", str(path), "--output-dir"]
    process, deadline = (
        side.start([*words, str(folder / "run")], log),
        time.time() + SCENARIO_SECONDS,
    )
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        if process.poll() is not None or time.time() > deadline:
            end(process)
            raise ScenarioError(f"ended before its third step: {last_line(log)}")
        time.sleep(0.02)
    end(process)
    side.train(folder, recipe, "--resume")
    _refuse_difference(side.out / "base" / "run", folder / "run", "resumed")


def _refuse_difference(whole: Path, other: Path, what: str) -> None:
    if where := first_difference(whole, other):
        raise ScenarioError(f"the {what} run is another than the first: {where}")


def trl(preset: str) -> Callable[[Side, Path], None]:
    def run(side: Side, folder: Path) -> None:
        given = [side.inputs / "trl_run.py", side.inputs / "qwen3", side.inputs / "problems.jsonl"]
        words = [side.python, *map(str, given), str(folder / "run"), preset]
        side.run(words, folder / "log" / "trl.log")

    return run


@contextmanager
def servers(side: Side, folder: Path, count: int, script: Any = None) -> Iterator[list[str]]:
    """Their URLs. They run with this side's interpreter, but nothing of its commit."""
    settings = {
        "model": str(side.inputs / "qwen3"), "servers": count, "script": script,
        "record": str(folder / "requests.json"),
    }  # fmt: skip
    log = folder / "log" / "server.log"
    process = side.start([side.python, str(SERVER), json.dumps(settings)], log, PYTHONPATH="")
    try:
        output, deadline = log.with_suffix(".out"), time.time() + 120
        while not output.read_text().endswith("\n"):
            if process.poll() is not None or time.time() > deadline:
                raise ScenarioError(f"the scripted server did not start: {last_line(log)}")
            time.sleep(0.05)
        yield output.read_text().split()
        process.terminate()
        process.wait(30)
    finally:
        end(process)


def from_servers(count: int, **sections: dict[str, Any]) -> Callable[[Side, Path], None]:
    """A synchronous run, with an evaluation, whose completions come from servers."""

    def run(side: Side, folder: Path) -> None:
        with servers(side, folder, count) as urls:
            sampling = {"backend": "vllm_server", "servers": {"urls": urls, "max_in_flight": 8}}
            recipe = changed(
                base_recipe(side.inputs), sampling=sampling, eval=held_out(side.inputs)
            )
            side.train(folder, changed(recipe, **sections))

    return run


def asynchronous(
    count: int, ahead: int, **sections: dict[str, Any]
) -> Callable[[Side, Path], None]:
    """An asynchronous run of two groups a step, whose rollouts straddle updates by the script."""

    def run(side: Side, folder: Path) -> None:
        marks = folder / "log" / "marks"
        marks.mkdir(parents=True)
        problems = (side.inputs / "problems.jsonl").read_text().splitlines()
        script = {
            "groups_per_step": 2, "group_size": 4, "ahead": ahead, "steps": 6, "marks": str(marks),
            "ids": {f"{row['problem']}=": row["id"] for row in map(json.loads, problems)},
        }  # fmt: skip
        with servers(side, folder, count, script) as urls:
            recipe = changed(
                base_recipe(side.inputs), run={"mode": "async", "steps": 6},
                eval=held_out(side.inputs), loss={"behavior_logprobs": "sampler"},
                sampling={
                    "backend": "vllm_server", "prompts_per_step": 2,
                    "servers": {"urls": urls, "max_in_flight": 4 * (ahead + 1) * 2 // count},
                    "collection": {"max_ahead_steps": ahead},
                },
            )  # fmt: skip
            side.train(folder, changed(recipe, **sections), SAME_BITS_MARKS=str(marks))

    return run


def repeated(side: Side, folder: Path) -> None:
    """An asynchronous run again, from its journal and without servers: the same weights."""
    source = side.out / "async" / "run"
    recipe = yaml.safe_load((source.parent / "given.yaml").read_text())
    recipe["sampling"]["collection"]["replay_journal"] = str(source)
    run = side.train(folder, recipe | {"eval": {}})
    for part in ("rollouts", "draws", "checkpoints"):
        _refuse_difference(source / part, run / part, "repeated")


def reading(*words: str, output: bool = False) -> Callable[[Side, Path], None]:
    """A command that reads the first commit's runs. `{first}` in a word is their folder."""

    def run(side: Side, folder: Path) -> None:
        folder.mkdir(parents=True)
        given = [word.format(first=side.first, folder=folder) for word in words]
        text = side.command(folder / "log" / "command.log", *given)
        is_json = "--json" in words
        text = text.replace(str(folder), "FOLDER")
        (folder / f"printed.{'json' if is_json else 'txt'}").write_text(text)
        for path in folder.rglob("*.html"):
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
EVALUATION = "{first}/tiny/run/eval/step_000004.json"

SCENARIOS: dict[str, Scenario] = {
    "tiny": Scenario(shipped("tiny", *TINY)),
    "fifo-tiny": Scenario(shipped("fifo-tiny", *FIFO)),
    "base": Scenario(trained()),
    "killed": Scenario(killed, needs=("base",)),
    "group-std": Scenario(trained(replay={"preset": "group_std"}, advantage={"std": "none"})),
    "options": Scenario(options),
    "lora": Scenario(trained(model={"lora": {"r": 4}})),
    "packed": Scenario(trained(batch={"packing": True})),
    "shared-prompts": Scenario(shared_prompts),
    "zero3": Scenario(trained("--num-processes", "2", engine={"zero_stage": 3})),
    "trl-ours": Scenario(trl("ours")),
    "server": Scenario(from_servers(1)),
    "two-servers": Scenario(from_servers(
        2, run={"sync_every_steps": 2}, loss={"behavior_logprobs": "sampler"},
    )),
    "async": Scenario(asynchronous(1, 1)),
    "async-two-servers": Scenario(asynchronous(2, 2, replay={"max_age_steps": 2})),
    "async-repeated": Scenario(repeated, needs=("async",)),
    "eval": Scenario(reading(
        "eval", "--ckpt", "{first}/tiny/run", "--output", "{folder}/report.json", "--k", "2",
    ), needs=("tiny",), reads=True),
    "report": Scenario(reading(
        "report", "{first}/base/run", "{first}/options/run", "{first}/tiny/run",
        "--output", "{folder}/report",
    ), needs=("base", "options", "tiny"), reads=True),
    "inspect-buffer": Scenario(
        reading("inspect-buffer", "{first}/tiny/run", "--json"), needs=("tiny",), reads=True
    ),
    "verify": Scenario(
        reading("inspect-buffer", "{first}/tiny/run", "--verify"), needs=("tiny",), reads=True
    ),
    "aes": Scenario(
        reading("aes", EVALUATION, "--reference", "0.5,9", "--json"), needs=("tiny",), reads=True
    ),
    "plan": Scenario(
        reading("plan", "--from-run", "{first}/tiny/run", "--json"), needs=("tiny",), reads=True
    ),
}  # fmt: skip
