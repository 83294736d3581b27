"""How long `grpo-replay report` takes on a sweep of 40 runs, all forms written.

    python benchmarks/report_speed.py [--seeds 8] [--folder DIR]

Writes a sweep of five arms without a model (150 steps, evaluated every 25 on five benchmarks of 200
problems × 4 samples, the size of `train tiny`), then reports it in a process of its own: seconds
and CPU seconds, imports included. Target: under 10 CPU seconds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARMS = {
    "grpo": (["replay.preset=grpo"], 0.10),
    "uniform": (["replay.preset=uniform"], 0.09),
    "group_std": (["replay.preset=group_std"], 0.11),
    "ours": (["replay.preset=ours"], 0.14),
    "ours-age-1": (["replay.preset=ours", "replay.max_age_steps=1"], 0.12),
}
PROGRAM = """
import json, sys, time
start, busy = time.perf_counter(), time.process_time()
from grpo_replay.cli.options import ReportOptions
from grpo_replay.cli.report_command import run
run(ReportOptions((sys.argv[1],), output=sys.argv[2]))
seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
print(json.dumps(seconds), file=sys.stderr)
"""


def write_sweep(folder: Path, seeds: int) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from small_runs import experiments

    benchmarks = ("tiny_add", "tiny_sub", "tiny_mul", "tiny_order", "tiny_pair")
    size = experiments.Size(steps=150, every=25, problems=200, samples=4, benchmarks=benchmarks)
    experiments.write_sweep(folder, ARMS, range(1, seeds + 1), size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if absent")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sweep, output = Path(folder) / "sweep", Path(folder) / "report"
        write_sweep(sweep, options.seeds)
        words = [sys.executable, "-c", PROGRAM, str(sweep), str(output)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        seen = json.loads(done.stderr.splitlines()[-1])
        page = (output / "report.html").stat().st_size / 2**20
    print("| runs | report, s | CPU, s | page, MiB |")
    print("|---|---|---|---|")
    runs = options.seeds * len(ARMS)
    print(f"| {runs} | {seen['seconds']:.1f} | {seen['cpu_seconds']:.1f} | {page:.2f} |")


if __name__ == "__main__":
    main()
