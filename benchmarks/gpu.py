"""One command for a machine with a GPU: does everything work there, and how fast is it?

    python benchmarks/gpu.py --output DIR                every part, in order
    python benchmarks/gpu.py --output DIR --part 2 9     only these; DIR keeps the others' results
    python benchmarks/gpu.py --output DIR --toy          the same code on a CPU, at toy sizes
    python benchmarks/gpu.py --list                      the parts, and what each one needs

Needs this repository, torch >= 2.11 and what grpo-replay depends on; nothing is downloaded. Models
have the published shapes and random weights, and the byte tokenizer. Every part runs in a process
of its own, for at most eight minutes, and leaves DIR/part_NN.json as it goes: a crash, an
out-of-memory error or a hang of one part loses nothing of the others. What a part needs and does
not find, it says and skips. DIR/report.json and DIR/report.md hold all parts in DIR.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_parts.catalogue import PARTS, find_part  # noqa: E402
from gpu_parts.report import write_report  # noqa: E402
from gpu_parts.runner import PART_SECONDS, Settings, run_inside, run_part  # noqa: E402


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--part", type=int, nargs="+", metavar="N", help="only these parts")
    parser.add_argument("--toy", action="store_true", help="on a CPU, at toy sizes")
    parser.add_argument(
        "--peak-tflops", type=float, help="dense bf16 peak of the GPU, if the table lacks it"
    )
    parser.add_argument(
        "--part-seconds", type=float, default=PART_SECONDS, help="longest time for one part"
    )
    parser.add_argument("--list", action="store_true", help="list the parts and stop")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if not options.list and options.output is None:
        parser.error("--output DIR is missing: where the results go")
    known = {part.number for part in PARTS}
    if unknown := sorted(set(options.part or ()) - known):
        parser.error(f"--part {unknown[0]}: there are parts 1 to {max(known)}; see --list")
    return options


def main() -> int:
    """0 if no part failed; skipped parts do not count."""
    options = parse_options()
    if options.list:
        for part in PARTS:
            print(f"{part.number:>2}  {part.title}  [{', '.join(part.needs) or 'torch'}]")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    settings = Settings(options.output, options.toy, options.peak_tflops, options.part_seconds)
    if options.inside is not None:
        return run_inside(find_part(options.inside), settings, options.work)
    failed = 0
    for part in PARTS:
        if options.part and part.number not in options.part:
            continue
        print(f"part {part.number:>2} of {len(PARTS)}: {part.title} … ", end="", flush=True)
        result = run_part(part, settings)
        failed += result["status"] == "failed"
        reason = f": {result['reason']}" if result["reason"] else ""
        print(f"{result['status']} in {result['seconds']:.0f} s{reason}", flush=True)
        write_report(options.output)
    print(f"{options.output / 'report.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
