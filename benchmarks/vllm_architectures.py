"""Which of the types of docs/scaling.md vLLM samples in process with right log-probs.

    python benchmarks/vllm_architectures.py [TYPE ...] [--seconds 90] [--json docs/models_vllm.json]

Each type in a process of its own: a random model in float32, with heads of 32, which vLLM's
attention on a CPU has. The gap is the largest difference in nats between the log-probs of the
sampled tokens and those of transformers, before and after new weights. The file keeps the types
that were not asked for. `pytest -m slow tests/sampling/test_every_architecture.py` makes the table
from it. Exits with 1 if a log-prob is wrong or an error is not one of the package's.
"""

import argparse
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")

LARGEST_GAP = 1e-4  # nats, as in the tests
SHAPES = {"cohere": {"head_dim": 32}}
VOCABULARY = 260
"""transformers gives some types a tokenizer of their own, of a token or two more than the file."""
BUGS = ("wrong", "traceback")
Result = dict[str, str | float]


def main() -> None:
    from architectures import ARCHITECTURES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: all of the table")
    parser.add_argument("--seconds", type=float, default=90, help="time limit of one type")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "models_vllm.json")
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    for kind in options.types or ARCHITECTURES:
        results[kind] = in_a_process(kind, options.seconds)
        ordered = {each: results[each] for each in ARCHITECTURES if each in results}
        options.json.write_text(json.dumps(ordered, indent=1) + "\n")
        print(f"{kind:20} {results[kind]}", flush=True)
    sys.exit(any(each["outcome"] in BUGS for each in results.values()))


def in_a_process(kind: str, seconds: float) -> Result:
    """What `measure` finds in a process that ends with it; "no end" past the time limit."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["vllm.v1.engine.llm_engine", "tiny_policy", "transformers"])
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=send_measured, args=(theirs, kind))
    process.start()
    theirs.close()
    try:
        if ours.poll(seconds):
            return ours.recv()
        return {"outcome": "no end", "error": f"after {seconds:.0f} s"}
    except EOFError:
        process.join()
        return {"outcome": "traceback", "error": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def send_measured(link: Connection, kind: str) -> None:
    try:
        link.send(measure(kind))
    except Exception as error:
        link.send({"outcome": "traceback", "error": f"{type(error).__name__}: {error}"})
        raise


def measure(kind: str) -> Result:
    """ "yes" or "wrong" with the gap in nats, or "refused" with the error's class and text."""
    from architectures import random_model
    from tiny_policy import Policy, changed, push, tiny_recipe

    from grpo_replay.distributed.comm import Comm
    from grpo_replay.engine.models import byte_tokenizer
    from grpo_replay.errors import GrpoReplayError
    from grpo_replay.sampling.sampler_protocol import SamplerOpening
    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    with TemporaryDirectory() as folder:
        model = random_model(kind, vocab_size=VOCABULARY, **SHAPES.get(kind, {}))
        policy = Policy(Path(folder), model)
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        try:
            sampler = VllmLocalSampler.open(
                SamplerOpening.from_recipe(tiny_recipe(policy.folder), folder, Comm())
            )
            before = token_gaps(sampler, model)
            moved = changed(policy, 1)
            push(sampler, moved)
            after = token_gaps(sampler, moved)
            sampler.close()
        except GrpoReplayError as error:
            return {
                "outcome": "refused",
                "error": f"{type(error).__name__}: {error}".replace(folder, kind),
            }
    largest = float(max(before.max(), after.max()))
    if largest < LARGEST_GAP:
        return {"outcome": "yes", "gap": largest}
    return {
        "outcome": "wrong", "gap": largest,
        "mean_before": float(before.mean()), "mean_after": float(after.mean()),
    }  # fmt: skip


def token_gaps(sampler: Any, model: Any) -> Any:
    """Over twelve completions, whose prompts and tokens are longer than the windows."""
    from tiny_policy import gaps, make_requests

    requests = make_requests(count=12)
    return gaps(model, requests, list(sampler.generate(requests)))


if __name__ == "__main__":
    main()
