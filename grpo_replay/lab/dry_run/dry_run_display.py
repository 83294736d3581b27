"""`grpo-replay train --dry-run`: print the plan as tables or as one JSON document."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.recipe import Recipe
from grpo_replay.terminal.console import open_console, print_json, printable

_MEMORY_ROWS = (
    ("base_gib", "process, CUDA context"),
    ("parameters_gib", "parameters"),
    ("gradients_gib", "gradients"),
    ("optimizer_gib", "optimizer shard (master weights, moments)"),
    ("reference_gib", "reference copy"),
    ("gathered_gib", "gathered parameters (ZeRO-3)"),
    ("bucket_gib", "gradient bucket"),
    ("activations_gib", "activations kept for the backward pass"),
    ("backward_work_gib", "logits chunk and backward work"),
    ("flat_copy_gib", "flat gradients (ZeRO-0)"),
    ("step_work_gib", "while the optimizer steps"),
    ("sampler_awake_gib", "sampler, while generating"),
    ("sampler_asleep_gib", "sampler, while training"),
)


EXCERPT_CHARACTERS = 300
"""Longest text of a prompt or completion that is shown in full."""


def print_dry_run(
    recipe: Recipe,
    as_json: bool = False,
    gpu_memory_gib: float | None = None,
    output_dir: str | None = None,
    ranks_of_nodes: Sequence[int] | None = None,
    sample: int | None = None,
    resume: bool = False,
) -> int:
    """Print what the recipe needs; returns 0 if nothing was found that would stop the run, else
    the exit code that it would end with."""
    place = Path(output_dir) if output_dir else None
    report = dry_run(recipe, gpu_memory_gib, place, ranks_of_nodes, sample, resume)
    code: int = report["exit_code"]
    if as_json:
        print_json(report)
        return code
    console = open_console(markup=True, soft_wrap=True)
    _print_sentences(console, report, "problems", "red")
    for notice in report["notices"]:
        console.print(f"[yellow]note[/]: {escape(notice['text'])}")
    _print_tables(console, report)
    _print_sentences(console, report, "unchecked", "yellow")
    _print_sentences(console, report, "assumptions", "dim")
    for line in _verdict(report):
        console.print(line)
    return code


def _print_tables(console: Console, report: Mapping[str, Any]) -> None:
    for line in _headline(report):
        console.print(line)
    if report["memory"] is not None:
        console.print(_memory_table(report["memory"], report["hardware"]["device"]))
    console.print(_step_table(report))
    if report["prompt"] is not None:
        console.print(f"[bold]first prompt[/]: {_excerpt(report['prompt'])}")
    if report["first_look"] is not None:
        console.print(_look_table(report["first_look"], report["step"]["seconds"]))
        for line in _example(report["first_look"]["example"]):
            console.print(line)


def _print_sentences(console: Console, report: Mapping[str, Any], kind: str, style: str) -> None:
    for sentence in report[kind]:
        console.print(f"[{style}]{kind.rstrip('s')}[/]: {escape(sentence)}")


def _excerpt(text: str) -> str:
    """The text in one line, escaped as in JSON; of a long one, the end, where the answer is."""
    shown = escape(printable(json.dumps(text[-EXCERPT_CHARACTERS:], ensure_ascii=False)))
    more = len(text) - EXCERPT_CHARACTERS
    return f"{more:,} characters … {shown}" if more > 0 else shown


def _example(example: Mapping[str, Any]) -> Iterable[str]:
    yield f"[bold]a prompt[/]: {_excerpt(example['prompt'])}"
    yield f"[bold]its completion[/]: {_excerpt(example['completion'])}"
    reward = "no reward" if example["reward"] is None else f"reward {example['reward']:+.2f}"
    yield f"[bold]its verdict[/]: {example['verdict']}, {reward}"


def _headline(report: Mapping[str, Any]) -> Iterable[str]:
    model, hardware = report["model"], report["hardware"]
    if model is not None:
        tied = "tied head" if model["tied_head"] else "untied head"
        adapters = model["adapter_parameters"]
        lora = f", LoRA adapters of {adapters:,}" if adapters else ""
        yield (
            f"[bold]{escape(report['recipe'])}[/]: {escape(model['path'])}, "
            f"{model['parameters']:,} parameters ({tied}){lora}, {model['dtype']}"
        )
    size, number = hardware["memory_gib_per_process"], hardware["processes"]
    what = hardware["gpu"] or ("GPU" if hardware["device"] == "cuda" else "CPU process")
    nodes = "" if hardware["nodes"] == 1 else f" on {hardware['nodes']} nodes"
    assumed = " (assumed)" if hardware["assumed"] else ""
    yield f"{number} × {what} of {size:.1f} GiB{nodes}{assumed}"


def _memory_table(memory: Mapping[str, Any], device: str) -> Table:
    table = Table(title="Memory per process, GiB", title_justify="left")
    table.add_column("")
    table.add_column("GiB", justify="right")
    for key, label in _MEMORY_ROWS:
        if memory[key] > 0:
            shown = label if device == "cuda" else label.replace(", CUDA context", "")
            table.add_row(shown, f"{memory[key]:.2f}" if memory[key] >= 0.005 else "< 0.01")
    table.add_section()
    for name, value in memory["phases_gib"].items():
        mark = " ← peak" if name == memory["peak_phase"] else ""
        table.add_row(f"{name.replace('_', ' ')}{mark}", f"{value:.2f}")
    return table


def _look_table(look: Mapping[str, Any], seconds: float | None) -> Table:
    shown = "unknown: nothing was trained on" if seconds is None else f"{seconds:,g}"
    bounds = look["success_interval"]
    spread = "" if bounds is None else " [{:.1%}, {:.1%}] at 95 %".format(*bounds)
    rows = [
        ("correct", f"{look['correct']} of {look['rollouts']}, {look['success']:.1%}{spread}"),
        ("groups with signal", f"{look['signal']} of {look['groups']}"),
        ("tokens of a completion", f"{look['completion_tokens']:.1f}"),
        ("cut off at the limit", f"{look['cut_off']:.1%}"),
        ("seconds a step, about", shown),
    ]
    return _facts(f"First look: {look['groups']} groups of the first step", rows)


def _facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of labels and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _step_table(report: Mapping[str, Any]) -> Table:
    step, replay, storage = report["step"], report["replay"], report["storage"]
    rows = [
        ("rollouts generated", f"{step['generated_rollouts']:,}"),
        ("tokens generated, expected / most", _pair(step, "generated_tokens")),
        ("rollouts surviving / replayed / trained, expected",
         f"{step['surviving_rollouts_expected']:,} / {step['replayed_rollouts_expected']:,} / "
         f"{step['trained_rollouts_expected']:,}"),
        ("tokens trained, expected", f"{step['trained_tokens_expected']:,}"),
        ("replay begins in step", str(replay["first_replay_step"] or "never")),
        ("rollouts stored, expected / most", _pair(replay, "stored_rollouts")),
        ("buffer in host memory, GiB, expected / most", _pair(storage, "buffer_memory_gib")),
        ("disk per step, MiB, expected / most", _pair(storage, "disk_per_step_mib")),
    ]  # fmt: skip
    if storage["checkpoint_gib"] is not None:
        sizes = f"{storage['checkpoint_gib']} / {storage['checkpoints_gib_most']}"
        rows.append(("one checkpoint / all kept, GiB", sizes))
    if report["model"] and report["model"]["adapter_parameters"]:
        rows.append(("weights to the sampler at a push, MiB", f"{storage['push_mib']:,}"))
    if offloaded := storage["offloaded_host_gib_per_rank"]:
        rows.append(("offloaded to host memory, GiB per rank", str(offloaded)))
    return _facts("One step", [*rows, *_sampler_rows(report)])


def _sampler_rows(report: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    sampler = report["sampler"]
    if sampler is not None and sampler["kv_cache_tokens"] is not None:
        yield "vLLM's KV cache, tokens per engine", f"{sampler['kv_cache_tokens']:,}"
        longest = f"sequences of {sampler['model_length_tokens']:,} tokens at once, per engine"
        yield longest, f"{sampler['longest_rollouts_at_once']:,}"


def _pair(section: Mapping[str, Any], name: str) -> str:
    return f"{section[f'{name}_expected']:,} / {section[f'{name}_most']:,}"


def _verdict(report: Mapping[str, Any]) -> Iterable[str]:
    """What would fit, and last the answer, with what stands in the way."""
    memory = report["memory"]
    if memory is not None:
        size = f"{memory['peak_gib']:.1f} of {memory['capacity_gib']:.1f} GiB"
        peak = f"{size} at the peak ({memory['peak_phase'].replace('_', ' ')})"
        if not memory["fits"]:
            tight = report["sampler"]["longest_rollouts_at_once"] == 0
            text = "; vLLM's share has no room for one longest rollout" if tight else ""
            yield f"[red]does not fit[/]: {peak}{text}"
    if report["first_look"] is not None:
        look = report["first_look"]
        good = look["can_learn"] and look["correct"]
        yield f"[bold {'green' if good else 'yellow'}]first look[/]: {look['verdict']}"
    if report["advice"] is not None:
        yield _advice(report["advice"])
    elif memory is not None and not memory["fits"]:
        yield "no override was found with which it fits"
    if report["fits"] is False:
        reasons = [escape(each) for each in report["problems"]]
        if memory is not None and not memory["fits"]:
            reasons.append("not enough memory")
        yield from (f"[bold red]would not start[/]: {each}" for each in reasons)
    elif report["fits"] is None or memory is None:
        yield "[bold yellow]cannot say whether it fits[/]: see what is unchecked"
    elif memory["tight"]:
        left = memory["capacity_gib"] - memory["peak_gib"]
        yield f"[bold yellow]fits, tight[/]: only {left:.1f} GiB are left: {peak}"
    else:
        yield f"[bold green]fits[/]: {peak}"


def _advice(advice: Mapping[str, Any]) -> str:
    words = " ".join(f"--set {escape(each)}" for each in advice["set"])
    return f"[bold]with these it fits[/]: {words} ({advice['peak_gib']:.1f} GiB)"
