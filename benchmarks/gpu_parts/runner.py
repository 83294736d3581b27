"""Running a part in a process of its own: time limit, exit status, what it left."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_parts.catalogue import Part
from gpu_parts.record import Context, Record, Skipped, write_json
from gpu_parts.sizes import FULL, TOY

PART_SECONDS = 480.0
_BENCHMARKS = Path(__file__).resolve().parents[1]
_TRACEBACK_LINES = 40


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asked for."""

    output: Path
    toy: bool = False
    peak_tflops: float | None = None
    part_seconds: float = PART_SECONDS

    @property
    def size_name(self) -> str:
        return (TOY if self.toy else FULL).name


def result_path(output: Path, number: int) -> Path:
    return output / f"part_{number:02d}.json"


def run_part(part: Part, settings: Settings, command: Sequence[str] | None = None) -> dict:
    """The part's result, written to part_NN.json. `command` replaces the part's own process."""
    path = result_path(settings.output, part.number)
    Record(path, part.number, part.title, settings.size_name)
    logs = settings.output / "logs"
    logs.mkdir(exist_ok=True)
    out, err = (logs / f"part_{part.number:02d}.{end}" for end in ("stdout", "stderr"))
    work = Path(tempfile.mkdtemp(prefix=f"grpo-replay-part-{part.number:02d}-"))
    started = time.monotonic()
    try:
        with out.open("w") as stdout, err.open("w") as stderr:
            code = _wait(command or _command(part, settings, work), settings, work, stdout, stderr)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    result = json.loads(path.read_text())
    result["seconds"] = round(time.monotonic() - started, 1)
    result["stdout_lines"] = len(out.read_text(errors="replace").splitlines())
    _judge(result, code, settings.part_seconds, err)
    write_json(path, result)
    return result


def _command(part: Part, settings: Settings, work: Path) -> list[str]:
    words = [sys.executable, str(_BENCHMARKS / "gpu.py"), "--inside", str(part.number)]
    words += ["--output", str(settings.output.resolve()), "--work", str(work)]
    if settings.toy:
        words.append("--toy")
    if settings.peak_tflops:
        words += ["--peak-tflops", str(settings.peak_tflops)]
    return words


def child_environment(toy: bool) -> dict[str, str]:
    """This process's environment, with the repository importable and no network asked for."""
    places = [str(_BENCHMARKS), str(_BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    if toy:  # also where there is a GPU
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return environment


def _wait(
    command: Sequence[str], settings: Settings, work: Path, stdout: Any, stderr: Any
) -> int | None:
    """The exit code, or None past the time limit; then everything it started is killed."""
    process = subprocess.Popen(
        command, stdout=stdout, stderr=stderr, cwd=work, start_new_session=True,
        env=child_environment(settings.toy),
    )  # fmt: skip
    try:
        return process.wait(settings.part_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_group(process)


def kill_group(process: "subprocess.Popen[Any]") -> None:
    """Ends the process and whatever it started: vLLM and verifiers have processes of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _judge(result: dict[str, Any], code: int | None, limit: float, stderr: Path) -> None:
    """Completes the status from how the process ended; a part that died is a failed one."""
    if code == 0 and result["status"] != "running":
        return
    ended = f"no end after {limit:.0f} s" if code is None else f"the process ended with {code}"
    if result["status"] == "running":
        result["reason"] = ended
    elif result["status"] != "failed":
        result["reason"] = f"{ended}, after its last result"
    result["status"] = "failed"
    if "traceback" not in result:
        lines = stderr.read_text(errors="replace").splitlines()
        result["traceback"] = "\n".join(lines[-_TRACEBACK_LINES:])


def run_inside(part: Part, settings: Settings, work: Path) -> int:
    """The part itself, in this process; the exit code is 0 if its result is written."""
    size = TOY if settings.toy else FULL
    path = result_path(settings.output, part.number)
    record = Record(path, part.number, part.title, size.name)
    try:
        _refuse_missing(part, size.device)
        part.load()(Context(size, record, work, settings.peak_tflops))
    except Skipped as skipped:
        record.finish("skipped", str(skipped))
    except BaseException as error:
        lines = traceback.format_exc().splitlines()[-_TRACEBACK_LINES:]
        first = str(error).strip().splitlines()[:1]
        record.finish("failed", ": ".join([type(error).__name__, *first]), "\n".join(lines))
        traceback.print_exc()
    else:
        broken = [check["claim"] for check in record.result["checks"] if not check["holds"]]
        record.finish(
            "failed" if broken else "ok", "; ".join(f"not so: {b}" for b in broken) or None
        )
    return 0


def _refuse_missing(part: Part, device: str) -> None:
    """Raises Skipped if a module that the part needs, or the GPU, is not here."""
    if missing := missing_modules(part.needs):
        raise Skipped(f"not installed: {', '.join(missing)}")
    if device == "cuda" and not part.anywhere:
        import torch

        if not torch.cuda.is_available():
            raise Skipped("no CUDA device (torch.cuda.is_available() is False); --toy needs none")
        if (found := torch.cuda.device_count()) < part.gpus:
            raise Skipped(f"needs {part.gpus} GPUs, and there is {found}")


def missing_modules(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]
