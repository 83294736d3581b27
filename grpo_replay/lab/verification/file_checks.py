"""Checks of every file of a run: what it lists, its checkpoints, evaluations, journal and summary.

Bytes are compared with the SHA-256 that the run wrote (files.json, and manifest.json of each
checkpoint), a block at a time; what can be recomputed is recomputed. `check_files` also names what
nothing here or in the other checks has read.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_replay.errors import DataError
from grpo_replay.evaluation.evaluation_report import EvaluationReport, read_report, samples_path
from grpo_replay.lab.verification.run_files import Check, RunFiles, Tally
from grpo_replay.storage.checkpoint import (
    LATEST,
    MANIFEST,
    RunState,
    checkpoint_name,
    list_checkpoints,
    read_state,
    step_of,
    verify_checkpoint,
)
from grpo_replay.storage.sealed_files import SEAL, read_seal, sealed_problem


def check_files(run: RunFiles) -> tuple[list[Check], list[str]]:
    """The checks, and what was not checked, one sentence each."""
    checks = FileChecks(run)
    checks.check()
    return [tally.result() for tally in checks.tallies if tally.checked], checks.unchecked()


class FileChecks:
    def __init__(self, run: RunFiles) -> None:
        self.run, self.folder = run, run.folder
        self.seal = Tally("written files", f"each has the size and SHA-256 of {SEAL}")
        self.checkpoints = Tally(
            "checkpoints", "every file as its manifest says; counters, latest; files can be opened"
        )
        self.evaluations = Tally("evaluations", "each with its rows, which have its accuracies")
        self.summary = Tally("summary", "totals and accuracies follow from the other files")
        self.journal = Tally("journal", "every record whole; it has the steps of metrics.jsonl")
        self.tallies = (
            self.seal, self.checkpoints, self.evaluations, self.summary, self.journal
        )  # fmt: skip
        self.read = {SEAL, *_read_by_others(run)}  # paths in the run that a check has read
        self.notes: list[str] = []
        self.reports: dict[int, EvaluationReport] = {}

    def check(self) -> None:
        self._check_seal()
        self._check_checkpoints()
        self._check_evaluations()
        self._check_summary()
        recipe = self.run.recipe
        if recipe.run.is_async and recipe.sampling.collection.replay_journal is None:
            self._expect_readable(self.journal, self.folder / "journal", self._check_journal)

    def _expect_readable(self, tally: Tally, path: Path, read: Callable[[Path], Any]) -> Any:
        """What `read` returns; a failure, and None, if it raises."""
        try:
            found = read(path)
        except (DataError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            if self.run.has_left(path):
                return None
            tally.expect(False, f"{error}" if isinstance(error, DataError) else f"{path}: {error}")
            return None
        tally.expect(True, "")
        return found

    def _check_seal(self) -> None:
        if not (self.folder / SEAL).exists():
            self.notes.append(
                f"there is no {SEAL} (a run of an earlier version, or somebody removed it): bytes "
                "of rollouts/, draws/, eval/ and the recipe were not compared with digests, and a "
                "manifest that was changed with its files is not found"
            )
            return
        listed = self._expect_readable(self.seal, self.folder, read_seal) or {}
        found = self.run.checkpoints()
        present = {path.name for path in found}
        last = max((step_of(path) or 0 for path in found), default=0)
        steps = (step for step in self.run.rows_of_step if step <= last)
        due = {"recipe.yaml", *(f"rollouts/{checkpoint_name(step)}.parquet" for step in steps)}
        unlisted = sorted(due - listed.keys())[:1]
        self.seal.expect(not unlisted, f"{SEAL} does not list {unlisted}: it was cut short")
        for name, facts in listed.items():
            parts = Path(name).parts
            if parts[0] == "checkpoints" and parts[1] not in present and present:
                if not self.run.is_running:
                    self.notes.append(f"the checkpoint {parts[1]} is not there any more")
                continue
            problem = sealed_problem(self.folder / name, facts)
            self.seal.expect(problem is None, f"{name} {problem}")
            self.read.add(name)
        metrics = listed.get("metrics.jsonl")
        if metrics is None or metrics["bytes"] < (self.folder / "metrics.jsonl").stat().st_size:
            self.notes.append(f"what was written after the last checkpoint is not in {SEAL}")

    def _check_checkpoints(self) -> None:
        if not (self.folder / "checkpoints").is_dir():
            self.notes.append("there is no checkpoints/")
            return
        steps = [step_of(path) or 0 for path in list_checkpoints(self.folder / "checkpoints")]
        every, last = self.run.recipe.checkpoint.every_steps, self.run.steps[-1]
        finished = (self.folder / "summary.json").exists()
        due = last if finished else (last - 1) // every * every
        self.checkpoints.expect(
            due == 0 or bool(steps and steps[-1] >= due),
            f"checkpoints/ has no checkpoint of step {due}, which was due; it has {steps}",
        )
        found = self.run.checkpoints()
        for path in found:
            self._expect_readable(self.checkpoints, path, verify_checkpoint)
            self._check_content(path, step_of(path) or 0)
        if self.run.is_running:
            self.notes.append(f"the run is still running: what it wrote after step {last}")
        else:
            self._check_latest(found)

    def _check_content(self, checkpoint: Path, step: int) -> None:
        """What can be known of the files without their manifest."""
        for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
            self.read.add(str(path.relative_to(self.folder)))
            if path.suffix == ".json":
                self._expect_readable(self.checkpoints, path, _read_json)
            elif path.suffix == ".safetensors":
                self._expect_readable(self.checkpoints, path, _read_safetensors_header)
        state = self._expect_readable(self.checkpoints, checkpoint, read_state)
        if state is not None:
            self._check_counters(checkpoint, state, step)

    def _check_counters(self, checkpoint: Path, state: RunState, step: int) -> None:
        """state.json against the sums over the steps before it."""
        lines = [line for line in self.run.metrics if int(line["step"]) <= step]
        expected: dict[str, Any] = {
            "step": step,
            "trained_tokens": _sum(lines, "cost/trained_tokens"),
            "replayed_rollouts": _sum(lines, "replay/rollouts"),
            "processed_tokens": lines[-1].get("num_tokens") if lines else 0,
        }
        recipe = self.run.recipe_at(step)
        if not recipe.run.is_async:
            ids = self.run.ids_until(step)
            expected["generated_tokens"] = _sum(lines, "cost/generated_tokens")
            expected |= {"next_rollout_id": ids[0] + 1, "next_group_id": ids[1] + 1}
            expected["policy_version"] = step
        for name, value in expected.items():
            found = getattr(state, name)
            self.checkpoints.expect(
                value is None or found == value,
                f"{checkpoint.name}/state.json: {name} {found!r}, recomputed {value}",
            )

    def _check_latest(self, found: Sequence[Path]) -> None:
        if not found:
            return
        latest = self.folder / "checkpoints" / LATEST
        self.read.add(f"checkpoints/{LATEST}")
        newest, named = (
            self._expect_readable(self.checkpoints, path / MANIFEST, _read_json)
            for path in (found[-1], latest)
        )
        self.checkpoints.expect(
            named == newest, f"checkpoints/{LATEST} is not the newest, {found[-1].name}"
        )
        if latest.is_dir() and not latest.is_symlink():
            self._expect_readable(self.checkpoints, latest, verify_checkpoint)
            self._check_content(latest, step_of(found[-1]) or 0)

    def _check_evaluations(self) -> None:
        folder = self.folder / "eval"
        for path in sorted(folder.glob("step_*.json")):
            step, rows = step_of(path.with_suffix("")), samples_path(path)
            if step is None:
                continue  # not ours
            self.read |= {f"eval/{path.name}", f"eval/{rows.name}"}
            self.evaluations.expect(rows.exists(), f"eval/{rows.name}, its rows, is missing")
            report = self._expect_readable(self.evaluations, path, _read_report)
            if report is not None:
                self.reports[step] = report
                self._check_evaluation_of_step(step, report)
        for rows in sorted(folder.glob("step_*.parquet")):
            self.evaluations.expect(
                step_of(rows.with_suffix("")) is None or rows.with_suffix(".json").exists(),
                f"eval/{rows.stem}.json is missing",
            )
        for step in self._steps_evaluated():
            self.evaluations.expect(
                (folder / f"step_{step:06d}.json").exists(),
                f"eval/step_{step:06d}.json is missing: the run evaluated step {step}",
            )

    def _steps_evaluated(self) -> Iterator[int]:
        settings = self.run.recipes.first.eval
        if settings.benchmarks and settings.at_start:
            yield 0
        for line in self.run.metrics:
            if any(name.startswith("eval/") for name in line):
                yield int(line["step"])

    def _check_evaluation_of_step(self, step: int, report: EvaluationReport) -> None:
        self.evaluations.expect(
            report.model.get("step") == step,
            f"eval/step_{step:06d}.json is of step {report.model.get('step')}",
        )
        line = next((line for line in self.run.metrics if line["step"] == step), None)
        for name, value in report.accuracies().items() if line else ():
            found = line.get(f"eval/{name}") if line else None
            self.evaluations.expect(
                found in (value, None) or report.verifier != self.run.recipe.eval.reward,
                f"step {step}: eval/{name} {found} in metrics.jsonl, {value} in its evaluation",
            )

    def _check_summary(self) -> None:
        path = self.folder / "summary.json"
        if not path.exists():
            return
        self.read.add("summary.json")
        summary = self._expect_readable(self.summary, path, _read_object)
        if summary is None:
            return
        last = self.run.steps[-1]
        base, final = self.reports.get(0), self.reports.get(last)
        expected = {
            "recipe": self.run.recipe.name,
            "preset": self.run.recipe.replay.preset,
            "steps": last,
            "trained_tokens": _sum(self.run.metrics, "cost/trained_tokens"),
            "replayed_rollouts": _sum(self.run.metrics, "replay/rollouts"),
            "base": base and base.accuracies(),
            "final": final and final.accuracies(),
            "base_stderr": base and base.standard_errors(),
            "final_stderr": final and final.standard_errors(),
            "checkpoint": f"checkpoints/{checkpoint_name(last)}",
        }
        for name, value in expected.items():
            self.summary.expect(
                summary.get(name) == value,
                f"summary.json: {name} {summary.get(name)!r:.80}, recomputed {value!r:.80}",
            )

    def _check_journal(self, folder: Path) -> None:
        try:
            from grpo_replay.collection.journal import read_journal
            from grpo_replay.collection.messages import Step
        except ImportError:
            self.notes.append("records of journal/: msgspec is missing; install grpo-replay[train]")
            return
        steps = sum(isinstance(record, Step) for record in read_journal(folder))
        self.read |= {f"journal/{path.name}" for path in folder.glob("segment_*.journal")}
        last = self.run.steps[-1]
        self.journal.expect(
            steps >= last, f"journal/ has {steps} steps, metrics.jsonl {last}: a part is missing"
        )

    def unchecked(self) -> list[str]:
        """What was not read, and what was read but cannot be recomputed."""
        left: dict[str, list[str]] = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder)
            if path.is_dir() or str(name) in self.read:
                continue
            if name.parts[:2] != ("checkpoints", LATEST):
                left.setdefault(name.parts[0], []).append(str(name))
        files = [f"{k} ({len(v)} files)" if len(v) > 1 else v[0] for k, v in left.items()]
        found = [f"not read: {', '.join(sorted(files))}"] if files else []
        weights = "whether the weights are those that the run trained (--with-model samples that)"
        return [*found, *dict.fromkeys(self.notes), f"not recomputed: {weights}, times, gradients"]


def _sum(lines: Sequence[Any], name: str) -> int | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return int(sum(values)) if len(values) == len(lines) else None


def _read_by_others(run: RunFiles) -> Iterator[str]:
    """The files of which `run` was made."""
    yield from ("recipe.yaml", "metrics.jsonl")
    yield from (f"recipes/step_{after:06d}.yaml" for after, _ in run.recipes.changed)
    yield from (f"rollouts/{checkpoint_name(step)}.parquet" for step in run.rows_of_step)
    yield from (f"draws/{checkpoint_name(step)}.parquet" for step in run.draws_of_step)


def _read_report(path: Path) -> EvaluationReport:
    """A report whose rows were checked, without them: those of a long run do not fit in memory."""
    return replace(read_report(path, with_texts=False), samples=None)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _read_object(path: Path) -> dict[str, Any]:
    found = _read_json(path)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _read_safetensors_header(path: Path) -> None:
    """Raises ValueError unless the tensors that the header lists fill the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("no header of safetensors")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    if 8 + length + max(ends, default=0) != path.stat().st_size:
        raise ValueError("the tensors of its header do not fill it")
