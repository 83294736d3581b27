"""Sweeps and runs without a model, for reports: recipes, metrics, summaries and evaluations.

A run's chance of a right sample rises from `START` to `START + gain` over its steps; seeds and
problems have effects of their own. Every file is written by the code that writes those of a real
run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml

from grpo_replay import __version__
from grpo_replay.evaluation.evaluation_report import SAMPLE_SCHEMA, EvaluationReport
from grpo_replay.evaluation.statistics import summarise_both
from grpo_replay.recipe import Recipe, parse_overrides, recipe_to_yaml, resolve_recipe
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.training.run_evaluation import summarise_run

START = 0.3
BENCHMARKS = ("easy", "hard")


@dataclass(frozen=True)
class Size:
    """How large the runs are."""

    steps: int = 12
    every: int = 4
    problems: int = 10
    samples: int = 4
    benchmarks: Sequence[str] = BENCHMARKS


def write_sweep(
    folder: Path, arms: Mapping[str, tuple[list[str], float]], seeds: Sequence[int],
    size: Size = Size(), leave_out: Sequence[tuple[str, int]] = (),
) -> Path:  # fmt: skip
    """A sweep with arms of {name: (overrides, gain)}; `leave_out` are (arm, seed) not started."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "name": "synthetic", "recipe": "tiny", "set": [], "seeds": list(seeds),
        "arms": {name: overrides for name, (overrides, _) in arms.items()},
    }  # fmt: skip
    (folder / "sweep.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    for name, (overrides, gain) in arms.items():
        for seed in seeds:
            if (name, seed) not in leave_out:
                write_run(folder / name / f"seed-{seed}", overrides, seed, gain, size)
    return folder


def write_run(
    folder: Path, overrides: list[str], seed: int, gain: float, size: Size = Size()
) -> Path:
    """A finished run directory."""
    recipe = report_recipe(overrides, seed, size)
    rng = np.random.default_rng([seed, len(overrides), int(1000 * (1 + gain))])
    (folder / "eval").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    (folder / "environment.json").write_text(json.dumps({"grpo_replay": __version__}))
    luck = np.random.default_rng(seed).normal(0, 0.03)
    reports = {}
    for step in range(0, size.steps + 1, size.every):
        chance = START + luck + gain * step / size.steps
        report = evaluation(
            chance, size, np.random.default_rng([seed, step, int(1e4 * (1 + gain))])
        )
        report.write(folder / "eval" / f"step_{step:06d}.json")
        reports[step] = report
    lines = [metrics_line(recipe, step, rng) for step in range(1, size.steps + 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    summary = summarise_run(recipe, run_state(lines), reports[0], reports[size.steps], lines)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def report_recipe(overrides: list[str], seed: int, size: Size) -> Recipe:
    layer = {
        "name": "synthetic",
        "sampling": {"prompts_per_step": 4, "group_size": 4},
        "replay": {"preset": "grpo", "warmup_steps": 2},
        "run": {"steps": size.steps},
    }
    return resolve_recipe([layer, parse_overrides([*overrides, f"run.seed={seed}"])])


def evaluation(
    chance: float, size: Size, rng: np.random.Generator, settings: Mapping | None = None
) -> EvaluationReport:
    """An evaluation whose problems have chances around `chance`."""
    table = samples_table(chance, size, rng)
    sampled, greedy = summarise_both(table, ())
    found = {
        "benchmarks": {
            name: {"title": name, "problems_sha256": f"digest of {size.problems} of {name}"}
            for name in size.benchmarks
        },
        **{"backend": "hf", "temperature": 1.0, "top_p": 1.0, "max_completion_length": 60},
        **{"stop_tokens": ["<eos>"], "reward": "math_verify"},
        **(settings or {}),
    }
    return EvaluationReport({"name": "synthetic"}, found, {}, sampled, greedy, samples=table)


def samples_table(chance: float, size: Size, rng: np.random.Generator) -> pa.Table:
    parts = []
    for place, name in enumerate(size.benchmarks):
        hardness = np.random.default_rng(place).normal(-0.1 * place, 0.2, size.problems)
        chances = np.clip(chance + hardness, 0.02, 0.98)
        parts.append(_benchmark_rows(name, chances, size.samples, rng))
    return pa.concat_tables(parts)


def _benchmark_rows(
    name: str, chances: np.ndarray, samples: int, rng: np.random.Generator
) -> pa.Table:
    rows = len(chances) * samples
    problem = np.repeat(np.arange(len(chances)), samples)
    correct = rng.random(rows) < chances[problem]
    tokens = rng.integers(5, 20, rows) + 3 * ~correct
    columns = {
        "benchmark": [name] * rows,
        "problem_index": problem,
        "problem_id": [f"{name}-{index}" for index in problem],
        "greedy": np.zeros(rows, bool),
        "sample": np.tile(np.arange(samples), len(chances)),
        "seed": np.zeros(rows, np.int64),
        "answer": ["7"] * rows,
        "score": [None] * len(correct),
        "completion_text": [f"\\boxed{{{7 if right else 8}}}" for right in correct],
        "tokens": tokens,
        "finish_reason": np.where(tokens >= 21, "length", "stop"),
        "verdict": np.where(correct, "correct", "incorrect"),
        "correct": correct,
    }
    arrays = [pa.array(columns[field.name], field.type) for field in SAMPLE_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SAMPLE_SCHEMA)


def metrics_line(recipe: Recipe, step: int, rng: np.random.Generator) -> dict:
    """One line with every metric that a report reads; replayed ones only where a run replays."""
    generated = recipe.rollouts_per_step
    fresh = int(generated * rng.uniform(0.5, 0.9))
    replayed = int(0.5 * fresh) if recipe.replays and step > 2 else 0
    return {
        "step": step,
        "reward": 0.5,
        "completions/mean_length": float(rng.uniform(10, 14)),
        "fresh/rollouts": fresh,
        "fresh/clip_fraction": float(rng.uniform(0, 0.002)),
        "replay/clip_fraction": float(rng.uniform(0.002, 0.01)) if replayed else None,
        "replay/ratio": replayed / fresh,
        "replay/age_mean": float(rng.uniform(1, 5)) if replayed else None,
        "cost/generated_tokens": generated * 12,
        "cost/generated_rollouts": generated,
        "cost/trained_tokens": (fresh + replayed) * 12,
        "cost/trained_rollouts": fresh + replayed,
        "cost/generation_seconds": generated * float(rng.uniform(0.3, 0.5)),
        "cost/training_seconds": (fresh + replayed) * float(rng.uniform(0.1, 0.2)),
        "step_time": float(rng.uniform(1, 2)),
    }


def run_state(lines: Sequence[Mapping]) -> RunState:
    return RunState(
        step=len(lines),
        wall_seconds=sum(line["step_time"] for line in lines) + 5.0,
        generated_tokens=sum(line["cost/generated_tokens"] for line in lines),
        trained_tokens=sum(line["cost/trained_tokens"] for line in lines),
    )
