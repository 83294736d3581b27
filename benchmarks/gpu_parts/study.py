"""Part f: runs of `grpo-replay train`, some at a time on one card.

A study is a sweep file. Its runs get SmolLM2 as it lies here, ports of their own for their servers,
and a share of the card for each. A run that time ends saves a checkpoint and is resumed by the next
call. What is to be read afterwards (recipe, metrics, evaluations, what it said) is in study.tar.gz.
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from gpu_parts.models import has_smollm2, model_folder
from gpu_parts.record import Context

FIRST_PORT = 8400
STOP_SECONDS = 20.0
"""For the runs to save their checkpoints and end."""
READ_AFTERWARDS = (
    "recipe.yaml", "metrics.jsonl", "summary.json", "environment.json", "output.log"
)  # fmt: skip


def run(context: Context) -> None:
    cells = {cell["name"]: cell for cell in cells_of(context)}
    folder = context.work / "study"
    folder.mkdir(exist_ok=True)
    waiting = [name for name in cells if not (folder / name / "done").exists()]
    running: dict[str, subprocess.Popen[bytes]] = {}
    while (waiting or running) and context.seconds_left() > STOP_SECONDS:
        while waiting and len(running) < context.cells:
            name = waiting.pop(0)
            running[name] = begin(context, cells[name], folder / name)
        time.sleep(0.5)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            note_end(context, folder / name, running.pop(name).returncode)
    for process in running.values():
        process.send_signal(signal.SIGTERM)
    for name, process in running.items():
        try:
            process.wait(max(1.0, context.seconds_left() - 4))
        except subprocess.TimeoutExpired:
            process.kill()
        note_end(context, folder / name, None)
    pack(context, folder)
    context.record.check("a run made steps", any(map(metrics_of, folder.iterdir())))
    if left := [*running, *waiting]:
        context.record.finish("cut", f"not at their end: {', '.join(left)}")


def cells_of(context: Context) -> list[dict[str, Any]]:
    """Those of --study, or two arms of the recipe smollm2 (`tiny` without the model)."""
    if context.study is not None:
        return cells_of_sweep(context, context.study)
    settings = [
        f"model.path={context.work / 'smollm2'}",
        f"model.dtype={context.size.dtype}",
        "run.steps=30",
    ]
    recipe = "smollm2"
    if not has_smollm2(context):
        recipe, settings = "tiny", ["run.steps=4", "replay.warmup_steps=1", "eval.samples=1"]
    return [
        {"name": preset, "recipe": recipe, "set": [*settings, f"replay.preset={preset}"]}
        for preset in ("grpo", "ours")
    ]


def cells_of_sweep(context: Context, file: Path) -> list[dict[str, Any]]:
    from grpo_replay.lab.sweep.cells import expand
    from grpo_replay.lab.sweep.sweep_file import read_sweep_file

    cells = []
    sweep = read_sweep_file(file)
    if context.seeds:
        sweep = sweep.model_copy(update={"seeds": context.seeds})
    for place, cell in enumerate(expand(sweep, file, context.work)):
        if cell.awaits_tuning:
            continue  # `grpo-replay sweep` chooses, of the tuning runs
        here = [
            f"sampling.servers.address=127.0.0.1:{FIRST_PORT + place}",
            "sampling.vllm.gpu_memory_utilization=0.08",
            "sampling.vllm.kv_cache_memory_bytes=2000000000",  # else each one measures the others
        ]
        if cell.recipe == "smollm2":
            here.append(f"model.path={model_folder(context, 'smollm2')}")
        settings = [*cell.all_overrides(), *here]
        cells.append({"name": cell.name.replace("/", "-"), "recipe": cell.recipe, "set": settings})
    return cells


def begin(context: Context, cell: dict[str, Any], folder: Path) -> "subprocess.Popen[bytes]":
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "gpu_parts.on_one_card", "train", cell["recipe"]]
    for setting in cell["set"]:
        words += ["--set", setting]
    words += ["--output-dir", str(folder / "run")]
    if list(folder.glob("run/checkpoints/step_*")):
        words.append("--resume")
    threads = max(1, (os.cpu_count() or 1) // context.cells)
    with (folder / "output.log").open("ab") as log:
        own = os.environ | {"OMP_NUM_THREADS": str(threads)}
        return subprocess.Popen(words, stdout=log, stderr=log, env=own)


def note_end(context: Context, folder: Path, code: int | None) -> None:
    """One more row: how far the run came. `code` is None if it was asked to stop."""
    if code == 0:
        (folder / "done").touch()
    rows = metrics_of(folder)
    last = rows[-1] if rows else {}
    evaluated = {key: value for row in rows for key, value in row.items() if key[:5] == "eval/"}
    context.record.row("runs", {
        "run": folder.name, "ended with": "asked to stop" if code is None else code,
        "steps": last.get("step"), "seconds of a step": last.get("step_time"),
        "reward": last.get("reward"), **evaluated,
    })  # fmt: skip
    if code:
        said = (folder / "output.log").read_text(errors="replace").splitlines()[-3:]
        context.record.check(f"{folder.name} ends without an error", False, " / ".join(said))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def pack(context: Context, folder: Path) -> None:
    with tarfile.open(context.output / "study.tar.gz", "w:gz") as archive:
        for file in sorted(folder.rglob("*")):
            if file.name in READ_AFTERWARDS or file.parent.name == "eval":
                archive.add(file, file.relative_to(folder))
