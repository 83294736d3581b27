"""A whole run: parts opened, resumed if asked, stepped, evaluated, checkpointed, summed up."""

import logging
import platform
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_replay.buffer import ReplayBuffer
from grpo_replay.buffer.snapshot import restore_snapshot
from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import run_collectively
from grpo_replay.distributed.hang_watch import STORE_SECONDS, HangWatch
from grpo_replay.distributed.interruption import Interruption
from grpo_replay.distributed.long_work import run_on_main
from grpo_replay.distributed.processes import initialize_processes
from grpo_replay.distributed.rendezvous import has_joined, own_connection
from grpo_replay.dry_run.memory import checkpoint_bytes
from grpo_replay.engine.attention_kernel import float32_warning
from grpo_replay.engine.deepspeed_config import notices_of_precision
from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.engine.models import (
    load_config,
    load_policy,
    load_tokenizer,
    resolve_model_path,
)
from grpo_replay.errors import CheckpointError
from grpo_replay.evaluation.comparison import are_comparable
from grpo_replay.evaluation.curve import plot_curve
from grpo_replay.evaluation.evaluate import EvaluationPlan, evaluate, plan_evaluation
from grpo_replay.evaluation.regrading import add_gradings
from grpo_replay.evaluation.report import EvaluationReport, read_report
from grpo_replay.prompts.prompt_set import load_prompts
from grpo_replay.recipe import BUILTIN_VERIFIERS, Recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.opening import open_sampler
from grpo_replay.sampling.protocol import Sampler
from grpo_replay.storage.atomic import write_json_whole
from grpo_replay.storage.checkpoint import (
    RunState,
    find_checkpoint,
    point_latest,
    read_state,
)
from grpo_replay.storage.run_directory import RunDirectory, environment_facts
from grpo_replay.storage.tracking import Tracker, open_trackers
from grpo_replay.training.checkpoint_writer import notices_of_room, write_checkpoint
from grpo_replay.training.model_card import model_card
from grpo_replay.training.stop_grace import grace_seconds, notice_of_grace
from grpo_replay.training.summary import summarise_run
from grpo_replay.training.trainer import Parts, Trainer
from grpo_replay.training.weight_sync import PushedWeights, read_pushed_weights, sync_weights

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Who watches a run. On ranks other than 0 nobody does: theirs shows nothing."""

    def on_start(self, recipe: Recipe, run_dir: Path, state: RunState, notices: list[str]) -> None:
        """Everything is loaded; `notices` are sentences the user should read."""
        ...

    def on_evaluation(self, step: int, report: EvaluationReport) -> None: ...

    def on_step(self, metrics: Mapping[str, Any]) -> None: ...

    def on_notice(self, text: str) -> None:
        """A sentence the user should read."""
        ...

    def on_status(self, text: str) -> None:
        """Something that takes a while begins."""
        ...


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `summary` is what summary.json holds; None if it was interrupted."""

    run_dir: Path
    step: int
    interrupted: bool
    summary: dict[str, Any] | None


def run_training(recipe: Recipe, run_path: Path, resume: bool, observer: Observer) -> RunResult:
    """Train as the recipe says, in `run_path`. Called on every rank."""
    comm, device = initialize_processes(recipe)
    # Ranks that a launcher started apart would name a directory after different times.
    run_dir = RunDirectory(Path(comm.broadcast_json(str(run_path))))
    with ExitStack() as stack, _watch(recipe, comm):
        session = Session(recipe, comm, device, run_dir, observer, stack)
        with comm.position.stage("opening"):
            session.open(resume)
        interruption = Interruption()
        with interruption.caught():
            return session.run(interruption)


def _watch(recipe: Recipe, comm: Comm) -> AbstractContextManager[object]:
    """While this lasts, a rank that stays in one place for long is reported by all."""
    if comm.world_size == 1 or not has_joined():
        return nullcontext()
    return HangWatch(comm, own_connection(STORE_SECONDS), recipe.hang_report_seconds)


class Session:
    """One attempt at a run: the parts, the trackers, and what happens between steps."""

    def __init__(
        self,
        recipe: Recipe,
        comm: Comm,
        device: Any,
        run_dir: RunDirectory,
        observer: Observer,
        stack: ExitStack,
    ) -> None:
        self.recipe, self.comm, self.device = recipe, comm, device
        self.run_dir, self.observer, self.stack = run_dir, observer, stack
        self.trackers: list[Tracker] = []
        self.evaluation: EvaluationPlan | None = None
        self.attempt = 0  # counted on rank 0
        self.trainer: Trainer
        self._checkpoint_bytes = 0
        self._longest_step_seconds = 0.0
        self._told_of_grace = False

    def open(self, resume: bool) -> None:
        """Prepare the directory, load everything, and restore the last checkpoint if resuming."""
        recipe, comm = self.recipe, self.comm
        self.stack.callback(self.run_dir.unlock)
        prepared = run_on_main(comm, lambda: self._prepare_directory(resume))
        found, notices = prepared or (None, [])
        checkpoint = self._seen_by_all(found)
        self._open_other_logs()
        state = read_state(checkpoint) if checkpoint else RunState()
        tokenizer = load_tokenizer(recipe.model)
        scorer = self.stack.enter_context(RewardScorer.open(recipe.reward))
        own_reward = recipe.reward.function not in BUILTIN_VERIFIERS
        comm.position.note("prompts")
        prompts = run_collectively(
            comm, lambda: load_prompts(recipe.prompts, tokenizer, recipe.run.seed, own_reward)
        )
        if prompts.skipped_too_long:
            notices.append(
                f"{prompts.skipped_too_long} prompts are longer than prompts.max_prompt_length "
                f"{recipe.prompts.max_prompt_length} and were left out; {len(prompts)} remain"
            )
        longest = recipe.prompts.max_prompt_length + recipe.sampling.max_completion_length
        config = load_config(recipe.model)
        if warning := float32_warning(recipe.model, config, longest, self.device.type == "cuda"):
            notices.append(warning)
        if recipe.eval.benchmarks:
            self.evaluation = run_collectively(comm, lambda: plan_evaluation(tokenizer, recipe))
        comm.position.note("engine")
        engine = self._open_engine(checkpoint, state, tokenizer)
        notices += run_collectively(comm, self._notices_of_room)
        notices += notices_of_precision(recipe)
        comm.position.note("sampler")
        path = self._model_path(engine, resumed=checkpoint is not None)
        sampler = open_sampler(recipe, path, comm, self.run_dir.path / "log")
        self.stack.callback(sampler.close)
        buffer = ReplayBuffer(recipe.replay, recipe.sampling.group_size)
        lags = recipe.run.mode == "sync" and recipe.run.sync_every_steps > 1
        pushed = PushedWeights() if lags and comm.is_main else None
        if checkpoint:
            self._restore_sampler(checkpoint, engine, sampler, pushed, state.policy_version)
            if comm.is_main:
                notices.extend(self._restore_buffer(checkpoint, buffer))
        notices.append(_describe_stop_tokens(sampler, tokenizer))
        state.world_size, state.zero_stage = comm.world_size, recipe.engine.zero_stage
        parts = Parts(
            recipe, comm, engine, sampler, scorer, prompts, tokenizer, buffer, self.run_dir, pushed
        )
        self.trainer = Trainer(parts, state)
        if comm.is_main:
            self.trackers = open_trackers(recipe, self.run_dir.path, state.step + 1)
            for tracker in self.trackers:
                self.stack.callback(tracker.close)
            for notice in notices:
                logger.info(notice)
            self.observer.on_start(recipe, self.run_dir.path, state, notices)

    def _prepare_directory(self, resume: bool) -> tuple[Path | None, list[str]]:
        """Create the directory, or take it back to its last checkpoint, which is read in full;
        returns that and notices. Only rank 0 does."""
        run_dir = self.run_dir
        if not resume:
            run_dir.create(self.recipe)
            self._open_log()
            return None, []
        if not run_dir.exists:
            raise CheckpointError(
                f"--resume: {run_dir.path} holds no run (no recipe.yaml): check --output-dir, or "
                "leave --resume out to start one there"
            )
        run_dir.lock()
        checkpoint = find_checkpoint(run_dir.checkpoints)
        step = read_state(checkpoint).step if checkpoint else 0
        changes = run_dir.reopen(self.recipe, step)
        if checkpoint:
            point_latest(checkpoint)
        self._open_log()
        notices = [f"recipe changed since the run began: {change}" for change in changes]
        if checkpoint is None:
            notices.append("the run had no checkpoint yet: it starts again from its first step")
        return checkpoint, notices

    def _notices_of_room(self) -> list[str]:
        if not self.comm.is_main:
            return []
        keep = self.recipe.checkpoint.keep
        return notices_of_room(self.run_dir.checkpoints, keep, self._checkpoint_bytes)

    def _seen_by_all(self, found: Path | None) -> Path | None:
        """The checkpoint that rank 0 found whole, on every rank, each of which must see it."""
        name = self.comm.broadcast_json(found.name if found else None)
        if name is None:
            return None
        checkpoint = self.run_dir.checkpoints / name

        def look() -> None:
            if not checkpoint.is_dir():
                raise CheckpointError(
                    f"{checkpoint} is not there on {platform.node()}, though rank 0 sees it: "
                    "--output-dir must be on a file system that all nodes share"
                )

        run_collectively(self.comm, look)
        return checkpoint

    def _open_log(self) -> None:
        self.attempt = self.run_dir.next_attempt()
        self.run_dir.open_log(self.attempt)
        self.run_dir.write_environment(self.attempt, environment_facts(self.comm.world_size))

    def _open_other_logs(self) -> None:
        """The logs of the ranks other than 0, next to its own."""
        attempt, rank = self.comm.broadcast_json(self.attempt), self.comm.rank
        run_collectively(
            self.comm, lambda: None if rank == 0 else self.run_dir.open_log(attempt, rank)
        )

    def _open_engine(
        self, checkpoint: Path | None, state: RunState, tokenizer: Any
    ) -> DeepSpeedEngine:
        recipe = self.recipe
        model = load_policy(recipe.model, recipe.run.seed)
        self._checkpoint_bytes = checkpoint_bytes(
            sum(parameter.numel() for parameter in model.parameters()),
            model.dtype.itemsize,
            recipe.engine.zero_stage,
        )
        engine = DeepSpeedEngine(recipe, model, tokenizer, self.comm, self.device)
        self.stack.callback(engine.close)
        if checkpoint is not None:
            then = (state.world_size, state.zero_stage)
            now = (self.comm.world_size, recipe.engine.zero_stage)
            if then != now:
                self.observer.on_status(
                    f"restoring the engine state of {then[0]} ranks at ZeRO {then[1]} on {now[0]} "
                    f"at ZeRO {now[1]}"
                )
            engine.load(checkpoint / "engine")
        return engine

    def _restore_sampler(
        self,
        checkpoint: Path,
        engine: DeepSpeedEngine,
        sampler: Sampler,
        pushed: PushedWeights | None,
        version: int,
    ) -> None:
        """Give the sampler the checkpoint's policy, or what it held if it lagged behind it."""
        lags = self.recipe.run.sync_every_steps > 1
        older = read_pushed_weights(checkpoint) if lags else None
        if older is None:
            bucket_mib = self.recipe.sampling.sync_bucket_mib
            sync_weights(engine, sampler, version, bucket_mib, pushed)
            return
        weights, held = older
        if held > 0:  # it was opened with version 0
            tensors = iter(weights.items())
            sampler.load_weights(pushed.keep(tensors, held) if pushed else tensors, held)

    def _model_path(self, engine: DeepSpeedEngine, resumed: bool) -> str:
        """What the sampler opens: the recipe's model, or for a random initialisation the folder
        to which it was written when the run began."""
        if not self.recipe.model.random_init:
            return resolve_model_path(self.recipe.model.path)
        if self.recipe.sampling.backend == "hf":
            return self.recipe.model.path
        folder = self.run_dir.path / "initial_model"
        if not (resumed and folder.is_dir()):
            engine.save_model(folder)
        return str(folder)

    def _restore_buffer(self, checkpoint: Path, buffer: ReplayBuffer) -> list[str]:
        if not self.recipe.checkpoint.restore_buffer:
            return ["checkpoint.restore_buffer is false: the replay buffer starts empty"]
        restore_snapshot(checkpoint / "buffer.parquet", buffer)
        return []

    def run(self, interruption: Interruption) -> RunResult:
        """Step until the recipe's last step, or until a signal asks to stop."""
        state, recipe = self.trainer.state, self.recipe
        started, seconds_before = time.perf_counter(), state.wall_seconds
        if state.step == 0 and recipe.eval.at_start:
            self._evaluate(0)
        while state.step < recipe.run.steps:
            step_started = time.perf_counter()
            metrics = self.trainer.train_step()
            step, last = state.step, state.step == recipe.run.steps
            stop = any(self.comm.all_gather_json(interruption.requested))
            report = self._evaluate(step) if self._evaluation_is_due(step, last) else None
            state.wall_seconds = seconds_before + time.perf_counter() - started
            step_seconds = time.perf_counter() - step_started
            self._longest_step_seconds = max(self._longest_step_seconds, step_seconds)
            if self.comm.is_main:
                self._record(metrics, report)
            if last or stop or step % recipe.checkpoint.every_steps == 0:
                with self.comm.position.stage("checkpoint"):
                    self._checkpoint()
            if stop and not last:
                return RunResult(self.run_dir.path, step, True, None)
        summary = None
        if self.comm.is_main:
            steps = self.run_dir.read_metrics()
            summary = summarise_run(recipe, state, *self._base_and_last(), steps)
            write_json_whole(self.run_dir.summary_path, summary)
        return RunResult(self.run_dir.path, state.step, False, summary)

    def _evaluation_is_due(self, step: int, last: bool) -> bool:
        every = self.recipe.eval.every_steps
        return (last and self.recipe.eval.at_end) or (every is not None and step % every == 0)

    def _evaluate(self, step: int) -> EvaluationReport | None:
        """Evaluate the current policy into eval/, unless this run did already; on rank 0."""
        if self.evaluation is None:
            return None
        path = self.run_dir.path / "eval" / f"step_{step:06d}.json"
        if self.comm.broadcast_json(path.exists()):
            return read_report(path, with_samples=False) if self.comm.is_main else None
        if self.comm.is_main:
            self.observer.on_status(f"evaluating step {step}")
        parts = self.trainer.parts
        self._catch_up()
        with self.comm.position.stage("evaluation"), self._evaluation_scorer() as scorer:
            report = evaluate(
                parts.sampler,
                parts.tokenizer,
                self.evaluation,
                self.comm,
                scorer,
                model={"run": self.run_dir.path.name, "step": step},
            )
            parts.sampler.sleep()  # with its weights: the next step samples before any push
        if report is None:
            return None
        report = add_gradings(report, self.recipe.eval.other_rewards, self.recipe.reward)
        report.write(path)
        plot_curve(path.parent)
        self.observer.on_evaluation(step, report)
        return report

    def _catch_up(self) -> None:
        """Let a sampler that lags hold the policy that is evaluated. It can lag only after the last
        step (see `recipe.contradictions`), when nothing more is sampled to train on."""
        parts, version = self.trainer.parts, self.trainer.state.policy_version
        if parts.sampler.policy_version != version:
            bucket_mib = self.recipe.sampling.sync_bucket_mib
            sync_weights(parts.engine, parts.sampler, version, bucket_mib)

    def _evaluation_scorer(self) -> AbstractContextManager[RewardScorer]:
        """The run's own scorer if it grades as evaluations do, else one with its limits."""
        reward, function = self.recipe.reward, self.recipe.eval.reward
        if reward.function == function:
            return nullcontext(self.trainer.parts.scorer)
        return RewardScorer.open(reward.model_copy(update={"function": function}))

    def _record(self, metrics: dict[str, Any], report: EvaluationReport | None) -> None:
        if report is not None:
            metrics |= {f"eval/{name}": value for name, value in report.accuracies().items()}
        self.run_dir.append_metrics(metrics)
        for tracker in self.trackers:
            tracker.log(metrics["step"], metrics)
        self.observer.on_step(metrics)
        for notice in self.trainer.notices:
            self._notify(notice)
        self.trainer.notices.clear()

    def _notify(self, notice: str) -> None:
        logger.warning(notice)
        self.observer.on_notice(notice)

    def _checkpoint(self) -> None:
        state = self.trainer.state
        started = time.perf_counter()
        write_checkpoint(
            self.trainer.parts,
            state,
            self._checkpoint_bytes,
            lambda: model_card(self.recipe, state, self._base_and_last()),
        )
        seconds = time.perf_counter() - started
        logger.info("checkpoint of step %d: %.1f s", state.step, seconds)
        grace = grace_seconds(self.recipe.run.stop_grace_seconds)
        notice = notice_of_grace(grace, self._longest_step_seconds, seconds)
        if notice and self.comm.is_main and not self._told_of_grace:
            self._told_of_grace = True
            self._notify(notice)

    def _base_and_last(self) -> tuple[EvaluationReport | None, EvaluationReport | None]:
        """The evaluations of the base model and of the current step, where there are any; not the
        base's if the recipe was changed since, and the two are of other problems or settings."""
        folder = self.run_dir.path / "eval"
        paths = [folder / f"step_{step:06d}.json" for step in (0, self.trainer.state.step)]
        first, last = (
            read_report(path, with_samples=False) if path.exists() else None for path in paths
        )
        if first and last and not are_comparable(first, last):
            return None, last
        return first, last


def _describe_stop_tokens(sampler: Sampler, tokenizer: Any) -> str:
    ids = sampler.stop_token_ids
    texts = tokenizer.convert_ids_to_tokens(list(ids))
    named = " or ".join(f"{text} ({each})" for text, each in zip(texts, ids, strict=True))
    return f"completions end at {named}; sampling.stop_tokens chooses others"
