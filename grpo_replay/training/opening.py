"""Opening a run: its directory, its components, and its last checkpoint if it is resumed."""

import logging
import platform
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import run_collectively
from grpo_replay.distributed.long_work import run_on_main
from grpo_replay.engine.attention_kernel import float32_warning
from grpo_replay.engine.cache_support import check_cache
from grpo_replay.engine.deepspeed_config import notices_of_precision
from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.engine.model_settings import drop_unwritable_settings
from grpo_replay.engine.models import (
    load_config,
    load_policy,
    load_tokenizer,
    resolve_model_path,
)
from grpo_replay.engine.sequence_length import check_training_room
from grpo_replay.errors import CheckpointError
from grpo_replay.evaluation.evaluate import EvaluationPlan
from grpo_replay.evaluation.session import plan_that_fits
from grpo_replay.prompts.prompt_set import PromptSet, load_prompts
from grpo_replay.recipe import BUILTIN_VERIFIERS, Recipe
from grpo_replay.recipe.open_lists import ADVANTAGES, LOSSES
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.priorities import load_priority
from grpo_replay.replay.snapshot import restore_snapshot
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.open_sampler import open_sampler
from grpo_replay.sampling.sampler_protocol import Sampler
from grpo_replay.storage.checkpoint import (
    RunState,
    adopt_latest,
    find_checkpoint,
    point_latest,
    read_state,
)
from grpo_replay.storage.run_directory import RunDirectory, environment_facts, refuse_missing
from grpo_replay.storage.stored_sizes import checkpoint_bytes
from grpo_replay.training.checkpoint_writer import notices_of_room
from grpo_replay.training.journal_rules import refuse_other_rules
from grpo_replay.training.observer import Observer
from grpo_replay.training.reward_change import notices_of_change, reward_facts
from grpo_replay.training.reward_notices import reward_notices
from grpo_replay.training.trainer import Parts
from grpo_replay.training.weight_sync import PushedWeights, read_pushed_weights, sync_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run that is ready to step. `checkpoint_bytes` is the expected size of a checkpoint;
    `notices` are messages for the user, on rank 0."""

    parts: Parts
    state: RunState
    evaluation: EvaluationPlan | None
    checkpoint_bytes: int
    notices: list[str]


class RunOpener:
    """Opens a run on every rank. What it opens is closed with `stack`."""

    def __init__(
        self,
        recipe: Recipe,
        comm: Comm,
        device: Any,
        run_dir: RunDirectory,
        observer: Observer,
        stack: ExitStack,
        scorer: RewardScorer | None = None,
    ) -> None:
        self.recipe, self.comm, self.device, self.scorer = recipe, comm, device, scorer
        self.run_dir, self.observer, self.stack = run_dir, observer, stack
        self.stage = recipe.zero_stage(comm.world_size)
        self.notices: list[str] = []
        self.attempt = 0  # counted on rank 0
        self.checkpoint_bytes = 0

    def open(self, resume: bool) -> OpenedRun:
        """Prepare the directory, load the components, and restore the last checkpoint if the run
        is resumed. What comes after the checkpoint is removed only then. Collective."""
        recipe, comm, position = self.recipe, self.comm, self.comm.position
        load_priority(recipe.replay.priority)
        ADVANTAGES.load(recipe.advantage.estimator)
        LOSSES.load(recipe.loss.kind)
        checkpoint = self._open_directory(resume)
        state = read_state(checkpoint) if checkpoint else RunState()
        tokenizer = load_tokenizer(recipe.model)
        check_cache(recipe)
        scorer = self.scorer or self.stack.enter_context(RewardScorer.open(recipe.reward))
        self.notices += (
            run_on_main(comm, lambda: self._note_reward(checkpoint, state, scorer)) or []
        )
        position.note("prompts")
        prompts = self._load_prompts(tokenizer)
        evaluation = None
        if recipe.eval.benchmarks:
            evaluation = run_collectively(comm, lambda: plan_that_fits(tokenizer, recipe))
        position.note("rewards")
        self.notices += (
            run_on_main(comm, lambda: reward_notices(recipe, scorer, prompts, evaluation)) or []
        )
        position.note("engine")
        engine = self._open_engine(checkpoint, state, tokenizer)
        self._note_limits()
        position.note("sampler")
        path = self._model_path(engine, resumed=checkpoint is not None)
        sampler = open_sampler(recipe, path, comm, self.run_dir.path / "log")
        self.stack.callback(sampler.close)
        self.notices.append(_describe_stop_tokens(sampler, tokenizer))
        buffer = ReplayBuffer(recipe.replay, recipe.sampling.group_size)
        lags = recipe.run.mode == "sync" and recipe.run.sync_every_steps > 1
        pushed = PushedWeights() if lags and comm.is_main else None
        if checkpoint:
            self._restore_sampler(checkpoint, engine, sampler, pushed, state.policy_version)
            run_on_main(comm, lambda: self._restore_buffer(checkpoint, buffer, state.step))
        if resume:
            self.notices += run_on_main(comm, lambda: self._go_back(checkpoint, state.step)) or []
        state.world_size, state.zero_stage = comm.world_size, self.stage
        parts = Parts(
            recipe, comm, engine, sampler, scorer, prompts, tokenizer, buffer, self.run_dir, pushed
        )
        return OpenedRun(parts, state, evaluation, self.checkpoint_bytes, self.notices)

    def _open_directory(self, resume: bool) -> Path | None:
        """Take the run directory. Returns the checkpoint to resume from."""
        self.stack.callback(self.run_dir.unlock)
        prepared = run_on_main(self.comm, lambda: self._prepare_directory(resume))
        found, notices = prepared or (None, [])
        self.notices += notices
        checkpoint = self._seen_by_all(found)
        self._open_other_logs()
        return checkpoint

    def _note_reward(
        self, checkpoint: Path | None, state: RunState, scorer: RewardScorer
    ) -> list[str]:
        """Notices if the reward has changed since the checkpoint; the state gets the present one.
        Called on rank 0 only."""
        before, state.reward = state.reward, reward_facts(self.recipe.reward, scorer.sources())
        if checkpoint is None:
            return []
        return notices_of_change(self.recipe, checkpoint, before, state.reward)

    def _load_prompts(self, tokenizer: Any) -> PromptSet:
        recipe = self.recipe
        functions = {each.function for each in recipe.reward.functions}
        own_reward = not functions <= set(BUILTIN_VERIFIERS)
        prompts = run_collectively(
            self.comm, lambda: load_prompts(recipe.prompts, tokenizer, recipe.run.seed, own_reward)
        )
        run_collectively(self.comm, lambda: check_training_room(recipe, prompts.longest_prompt))
        if prompts.skipped_too_long:
            self.notices.append(
                f"{prompts.skipped_too_long} prompts are longer than prompts.max_prompt_length "
                f"{recipe.prompts.max_prompt_length} and were left out; {len(prompts)} remain"
            )
        self.notices += prompts.notices
        return prompts

    def _note_limits(self) -> None:
        """Notices about attention memory, room on disk and the precision of gradients."""
        recipe = self.recipe
        longest = recipe.prompts.max_prompt_length + recipe.sampling.max_completion_length
        config, on_cuda = load_config(recipe.model), self.device.type == "cuda"
        if warning := float32_warning(recipe.model, config, longest, on_cuda):
            self.notices.append(warning)
        self.notices += run_collectively(self.comm, self._notices_of_room)
        self.notices += notices_of_precision(recipe, self.stage)

    def _prepare_directory(self, resume: bool) -> tuple[Path | None, list[str]]:
        """Create the run directory, or find the last checkpoint and check what it needs. Returns
        that checkpoint and notices. Called on rank 0 only."""
        run_dir, journal = self.run_dir, self.recipe.sampling.collection.replay_journal
        if journal is not None:
            refuse_other_rules(self.recipe, Path(journal))
        if not resume or run_dir.is_unborn:
            run_dir.create(self.recipe)
            self._open_log()
            return None, ["the run had not begun yet: it starts now"] if resume else []
        refuse_missing(run_dir.path)
        refuse_other_rules(self.recipe, run_dir.path)
        run_dir.lock()
        adopt_latest(run_dir.checkpoints)
        checkpoint = find_checkpoint(run_dir.checkpoints)
        damage = run_dir.check(read_state(checkpoint).step if checkpoint else 0)
        self._open_log()
        notices = [damage] if damage else []
        if checkpoint is None:
            notices.append("the run had no checkpoint yet: it starts again from its first step")
        return checkpoint, notices

    def _go_back(self, checkpoint: Path | None, step: int) -> list[str]:
        """Remove what comes after the checkpoint, now that it is restored; returns notices. Called
        on rank 0 only."""
        changes = self.run_dir.go_back(self.recipe, step)
        if checkpoint:
            point_latest(checkpoint)
        return [f"the recipe changes from here on: {change}" for change in changes]

    def _notices_of_room(self) -> list[str]:
        if not self.comm.is_main:
            return []
        keep = self.recipe.checkpoint.keep
        return notices_of_room(self.run_dir.checkpoints, keep, self.checkpoint_bytes)

    def _seen_by_all(self, found: Path | None) -> Path | None:
        """Broadcast the checkpoint that rank 0 verified. Raises CheckpointError on a rank that does
        not see it."""
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
        """Open the logs of ranks other than 0, next to rank 0's."""
        attempt, rank = self.comm.broadcast_json(self.attempt), self.comm.rank
        run_collectively(
            self.comm, lambda: None if rank == 0 else self.run_dir.open_log(attempt, rank)
        )

    def _open_engine(
        self, checkpoint: Path | None, state: RunState, tokenizer: Any
    ) -> DeepSpeedEngine:
        recipe = self.recipe
        model = load_policy(recipe.model, recipe.run.seed)
        self.notices += drop_unwritable_settings(model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        engine = DeepSpeedEngine(recipe, model, tokenizer, self.comm, self.device)
        self.stack.callback(engine.close)
        self.checkpoint_bytes = checkpoint_bytes(
            parameters, model.dtype.itemsize, self.stage, engine.adapter_parameters
        )
        if engine.adapter_parameters:
            self.notices.append(
                f"LoRA: {engine.adapter_parameters:,} parameters of adapters train, the "
                f"{parameters:,} of {recipe.model.path} are frozen"
            )
        if checkpoint is not None:
            then = (state.world_size, state.zero_stage)
            now = (self.comm.world_size, self.stage)
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
        """Give the sampler the weights it had at the checkpoint: the policy, or older ones if it
        lagged."""
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
        """The model that the sampler opens: the recipe's, or for a random initialisation the folder
        to which it was saved when the run began."""
        if not self.recipe.model.random_init:
            return resolve_model_path(self.recipe.model.path)
        if self.recipe.sampling.backend == "hf":
            return self.recipe.model.path
        folder = self.run_dir.path / "initial_model"
        if not (resumed and folder.is_dir()):
            engine.save_model(folder)
        return str(folder)

    def _restore_buffer(self, checkpoint: Path, buffer: ReplayBuffer, step: int) -> None:
        """Called on rank 0 only."""
        if not self.recipe.checkpoint.restore_buffer:
            self.notices.append(
                "checkpoint.restore_buffer is false: the replay buffer starts empty"
            )
            return
        snapshot = checkpoint / "buffer.parquet"
        found = restore_snapshot(snapshot, buffer)
        if found != step:
            raise CheckpointError(
                f"{snapshot} is the buffer after step {found}, in the checkpoint of step {step}: "
                "restore it from a copy, or start with an empty buffer with --set "
                "checkpoint.restore_buffer=false"
            )


def _describe_stop_tokens(sampler: Sampler, tokenizer: Any) -> str:
    ids = sampler.stop_token_ids
    texts = tokenizer.convert_ids_to_tokens(list(ids))
    named = " or ".join(f"{text} ({each})" for text, each in zip(texts, ids, strict=True))
    return f"completions end at {named}; sampling.stop_tokens chooses others"
