"""`grpo-replay train --dry-run`: print the estimate as tables or as one JSON document."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from grpo_replay.lab.dry_run.dry_run_report import DEFAULT_OUTPUT, Known, dry_run
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import estimate_from_run, measured_speed
from grpo_replay.recipe import Recipe
from grpo_replay.terminal.console import open_console

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


def run(
    recipe: Recipe,
    as_json: bool = False,
    gpu_memory_gib: float | None = None,
    output_dir: str | None = None,
    from_run: str | None = None,
    generated_tokens_per_second: float | None = None,
    trained_tokens_per_second: float | None = None,
) -> None:
    """Print the memory, disk, tokens and time that the recipe needs."""
    place = Path(output_dir) if output_dir else DEFAULT_OUTPUT
    known = Known(generated_tokens_per_second, trained_tokens_per_second)
    if from_run is not None:
        known = replace(known, **_measured(from_run))
    report = dry_run(recipe, gpu_memory_gib, place, known).to_json()
    if as_json:
        print(json.dumps(report, indent=1))
        return
    console = open_console(markup=True, soft_wrap=True)
    for line in _headline(report):
        console.print(line)
    if report["memory"] is not None:
        console.print(_memory_table(report["memory"], report["hardware"]["device"]))
    console.print(_step_table(report))
    for title, style in (("problems", "red"), ("unchecked", "yellow"), ("assumptions", "dim")):
        for sentence in report[title]:
            console.print(f"[{style}]{title.rstrip('s')}[/]: {escape(sentence)}")
    console.print(_verdict(report))


def _measured(run: str) -> dict[str, Any]:
    """What a finished run tells: fields of `Known`."""
    source = open_source(run)
    estimates = estimate_from_run(source)
    names = ("survival", "mu", "completion_tokens", "prompt_tokens")
    found = {name: getattr(estimates, name) for name in names}
    measured = {name: value for name, value in found.items() if value is not None}
    return {"measured": measured, "speed": measured_speed(source)}


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
    size = hardware["memory_gib_per_process"]
    what = "GPU" if hardware["device"] == "cuda" else "CPU process"
    number = hardware["processes"]
    many, each = ("", "") if number == 1 else ("s" if what == "GPU" else "es", " each")
    assumed = " (assumed)" if hardware["assumed"] else ""
    yield f"{number} {what}{many} of {size:.1f} GiB{each}{assumed}"


def _memory_table(memory: Mapping[str, Any], device: str) -> Table:
    table = Table(title="Memory per process, GiB", title_justify="left")
    table.add_column("")
    table.add_column("GiB", justify="right")
    for key, label in _MEMORY_ROWS:
        if memory[key] > 0:
            shown = label if device == "cuda" else label.replace(", CUDA context", "")
            table.add_row(shown, _two_digits(memory[key]))
    table.add_section()
    for name, value in memory["phases_gib"].items():
        mark = " ← peak" if name == memory["peak_phase"] else ""
        table.add_row(f"{name.replace('_', ' ')}{mark}", f"{value:.2f}")
    return table


def _two_digits(gib: float) -> str:
    return f"{gib:.2f}" if gib >= 0.005 else "< 0.01"


def _step_table(report: Mapping[str, Any]) -> Table:
    step, replay, storage = report["step"], report["replay"], report["storage"]
    table = Table(title="One step", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for label, value in (
        ("rollouts generated", f"{step['generated_rollouts']:,}"),
        ("tokens generated, expected / most", _pair(step, "generated_tokens")),
        ("rollouts surviving / replayed / trained, expected",
         f"{step['surviving_rollouts_expected']:,} / {step['replayed_rollouts_expected']:,} / "
         f"{step['trained_rollouts_expected']:,}"),
        ("tokens trained, expected", f"{step['trained_tokens_expected']:,}"),
        ("replay begins in step", replay["first_replay_step"] or "never"),
        ("rollouts stored, expected / most", _pair(replay, "stored_rollouts")),
        ("buffer in host memory, GiB, expected / most", _pair(storage, "buffer_memory_gib")),
        ("disk per step, MiB, expected / most", _pair(storage, "disk_per_step_mib")),
        ("one checkpoint / all kept, GiB",
         f"{storage['checkpoint_gib']} / {storage['checkpoints_gib_most']}"),
    ):  # fmt: skip
        table.add_row(label, str(value))
    for label, value in _time_rows(report["time"]):
        table.add_row(label, value)
    for key, label in (
        ("offloaded_host_gib_per_rank", "offloaded to host memory, GiB per rank"),
        ("sampler_host_gib_per_rank", "sleeping sampler in host memory, GiB per rank"),
    ):
        if storage[key]:
            table.add_row(label, str(storage[key]))
    for label, value in _sampler_rows(report):
        table.add_row(label, value)
    return table


def _time_rows(time: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if time["hours"] is None:
        return
    parts = ("generation", "training", "other")
    seconds = " / ".join(f"{time[f'{part}_seconds_per_step']:g}" for part in parts)
    yield "seconds: generation / training / other, expected", seconds
    gpu_hours = "" if time["gpu_hours"] is None else f" / {time['gpu_hours']:,g}"
    what = "hours" if time["gpu_hours"] is None else "hours / GPU-hours"
    yield f"{what} for all {time['steps']:,} steps, expected", f"{time['hours']:,g}{gpu_hours}"


def _sampler_rows(report: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    sampler, network = report["sampler"], report["network"]
    if sampler is not None and sampler["kv_cache_tokens"] is not None:
        yield "vLLM's KV cache, tokens per engine", f"{sampler['kv_cache_tokens']:,}"
        yield "longest rollouts at once, per engine", f"{sampler['longest_rollouts_at_once']:,}"
    if network is not None and report["hardware"]["processes"] > 1:
        yield (
            "each rank receives, GiB per micro-batch / per update",
            f"{network['per_microbatch_gib']} / {network['per_update_gib']}",
        )


def _pair(section: Mapping[str, Any], name: str) -> str:
    return f"{section[f'{name}_expected']:,} / {section[f'{name}_most']:,}"


def _verdict(report: Mapping[str, Any]) -> str:
    memory, change = report["memory"], report["first_change"]
    if report["fits"] is None or memory is None:
        return "[bold yellow]cannot say whether it fits[/]: see what is unchecked"
    size = f"{memory['peak_gib']:.1f} of {memory['capacity_gib']:.1f} GiB"
    peak = f"{size} at the peak ({memory['peak_phase'].replace('_', ' ')})"
    if report["fits"]:
        return f"[bold green]fits[/]: {peak}"
    text = f"[bold red]does not fit[/]: {peak}"
    if report["sampler"]["longest_rollouts_at_once"] == 0:
        text += "; vLLM's share has no room for one longest rollout"
    if change is None:
        return text
    outcome = "then it fits" if change["fits"] else "not enough alone"
    return f"{text}; first: --set {escape(change['set'])} ({change['peak_gib']:.1f} GiB, {outcome})"
