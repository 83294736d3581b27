"""Where the time of a training step goes: arithmetic, attention, head, optimizer, Python.

    python benchmarks/step_profile.py                       # 10 and 70 million parameters
    python benchmarks/step_profile.py --sizes 70m --ranks 2

Real runs with replay on a CPU: a random Qwen3 in fp32, one thread, sampled with transformers. The
last steps run under torch.profiler. Self time of operators is sorted by what they work on: `head`
are the matrix products with an argument as wide as the vocabulary, and `logits` the other operators
with one, outside of the optimizer (both are not told apart for `tiny`); `matmul` are the other
matrix products; `attention` is scaled_dot_product_attention; `optimizer` everything within
DeepSpeed's step; `operators` all other ones (norms, rotary embedding, activation, copies); `Python`
what is in no operator, waiting included. The profiler makes small operators look larger.
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stage_clock import ALL_STAGES, clocked_run, random_model, request_of_rank, train_clocked

from grpo_replay.training import Observer

HEADS = {"head_dim": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},  # the tiny recipe's own model
    "10m": {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16_384, **HEADS},
    "70m": {"num_hidden_layers": 10, "hidden_size": 640, "intermediate_size": 1920,
            "num_attention_heads": 10, "num_key_value_heads": 5, "vocab_size": 32_768, **HEADS},
}  # fmt: skip
NO_EVALUATION = ["eval.benchmarks=[]", "tracking.report_to=[]", "replay.warmup_steps=1"]
NOT_PROFILED, PROFILED = 2, 2
KINDS = ("matmul", "attention", "head", "logits", "optimizer", "operators", "Python")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_linear")


def train_profiled() -> int:
    """On one rank: the clocked run, its last steps under the profiler on rank 0."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    vocabulary = request_of_rank()["vocabulary"]
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    class Watch(Observer):
        def on_step(self, metrics: Mapping[str, Any]) -> None:
            if metrics["step"] == NOT_PROFILED:
                profiler.start()
            if metrics["step"] == NOT_PROFILED + PROFILED:
                profiler.stop()
                write_shares(profiler.events(), vocabulary, request_of_rank()["shares"])

    mark_ranges(torch.profiler.record_function)
    return train_clocked(Watch())


def mark_ranges(record: Any) -> None:
    """Ranges around the stages of a step and the optimizer's step."""
    import deepspeed

    from grpo_replay.training.rollout_source import Stopwatch

    stage, step = Stopwatch.stage, deepspeed.DeepSpeedEngine.step

    @contextmanager
    def marked_stage(self: Stopwatch, name: str) -> Iterator[None]:
        with record(f"stage:{name}"), stage(self, name):
            yield

    def marked_step(self: Any, *arguments: Any, **named: Any) -> Any:
        with record("optimizer"):
            return step(self, *arguments, **named)

    Stopwatch.stage, deepspeed.DeepSpeedEngine.step = marked_stage, marked_step


def write_shares(events: Any, vocabulary: int | None, file: str) -> None:
    """Self milliseconds by stage and kind."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        names = list(ancestors(event))
        stage = next((name for name in names if name.startswith("stage:")), None)
        if stage is not None:
            kind = kind_of(event, names, vocabulary)
            found[stage.removeprefix("stage:")][kind] += event.self_cpu_time_total / 1e3 / PROFILED
    Path(file).write_text(json.dumps(found))


def ancestors(event: Any) -> Iterator[str]:
    while event is not None:
        yield event.name
        event = event.cpu_parent


def kind_of(event: Any, names: list[str], vocabulary: int | None) -> str:
    if "optimizer" in names:
        return "optimizer"
    if not event.name.startswith("aten::"):
        return "Python"
    if any(vocabulary in shape for shape in event.input_shapes if isinstance(shape, list)):
        return "head" if event.name in PRODUCTS else "logits"
    if any("scaled_dot_product" in name for name in names):
        return "attention"
    return "matmul" if event.name in PRODUCTS else "operators"


def profile_of(size: str, options: argparse.Namespace) -> None:
    shape = SHAPES[size]
    overrides = [
        *(random_model(shape) if shape else NO_EVALUATION),
        f"sampling.max_completion_length={options.tokens}", "sampling.group_size=8",
        f"sampling.prompts_per_step={options.rollouts // 8}",
        f"run.steps={NOT_PROFILED + PROFILED}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shares.json"
        steps = clocked_run(
            overrides, options.ranks, "step_profile:train_profiled",
            vocabulary=shape.get("vocab_size"), shares=str(file),
        )  # fmt: skip
        shares = json.loads(file.read_text())
    show(size, steps[NOT_PROFILED:], shares)


def show(size: str, steps: list[dict[str, Any]], shares: dict[str, dict[str, float]]) -> None:
    wall = {name: statistics.mean(step[f"cost/{name}_seconds"] for step in steps)
            for name in ALL_STAGES}  # fmt: skip
    cpu = {name: statistics.mean(step[f"cpu/{name}"] for step in steps) for name in ALL_STAGES}
    tokens = statistics.mean(step["cost/trained_tokens"] for step in steps)
    padding = statistics.mean(step["padding_share"] for step in steps)
    print(f"{size}: {sum(wall.values()):.2f} s a step, {tokens:.0f} tokens trained on, padding "
          f"{100 * padding:.0f} %")  # fmt: skip
    print(f"| stage | wall s | CPU s | {' | '.join(KINDS)} |")
    for name in ALL_STAGES:
        kinds = shares.get(name, {})
        total = sum(kinds.values()) or 1.0
        each = " | ".join(f"{100 * kinds.get(kind, 0.0) / total:.1f} %" for kind in KINDS)
        print(f"| {name} | {wall[name]:.3f} | {cpu[name]:.3f} | {each} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["10m", "70m"])
    parser.add_argument("--rollouts", type=int, default=16, help="a step")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    for size in options.sizes:
        profile_of(size, options)


if __name__ == "__main__":
    main()
