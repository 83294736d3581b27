"""Opening a run: its directory, its components, and its last checkpoint if it is resumed.

`RunOpener.open` reads from top to bottom: directory, rewards, prompts, engine, sampler, source,
buffer. What a run needs to know about its own recipe is checked here, before the first step.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import run_collectively, run_on_main
from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine, notices_of_precision
from grpo_replay.engine.models import (
    base_digest,
    drop_unwritable_settings,
    float32_warning,
    load_config,
    load_policy,
    load_tokenizer,
    refuse_other_shapes,
    resolve_model_path,
)
from grpo_replay.engine.passed_settings import check_passed_settings
from grpo_replay.errors import ModelError
from grpo_replay.evaluation.benchmarks import EvaluationPlan, plan_that_fits
from grpo_replay.prompts.prompt_set import PromptSet, load_prompts
from grpo_replay.recipe import Recipe
from grpo_replay.recipe.layers import short_path
from grpo_replay.recipe.open_lists import ADVANTAGES, LOSSES
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.priorities import load_priority
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.rewards.trial import notices_of_workers
from grpo_replay.sampling.sampler_protocol import (
    Sampler,
    check_room,
    name_stop_tokens,
    open_sampler,
    sampler_class,
)
from grpo_replay.stop import StopToken
from grpo_replay.storage.checkpoint import RunState, checkpoint_bytes
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training import Observer
from grpo_replay.training.resuming import (
    StartingPoint,
    go_back,
    notices_of_room,
    restore_buffer,
    take_directory,
)
from grpo_replay.training.reward_watch import (
    notices_of_change,
    notices_of_rewards,
    notices_of_verifier,
    reward_facts,
)
from grpo_replay.training.rollout_source import Parts, RolloutSource
from grpo_replay.training.sources import open_source


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run that is ready to step. `checkpoint_bytes` is the expected size of a checkpoint;
    `notices` are messages for the user, on rank 0."""

    parts: Parts
    state: RunState
    source: RolloutSource
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
        stop: StopToken | None = None,
    ) -> None:
        self.recipe, self.comm, self.device, self.scorer = recipe, comm, device, scorer
        self.stop = stop or StopToken()
        self.run_dir, self.observer, self.stack = run_dir, observer, stack
        self.stage = recipe.zero_stage(comm.world_size)
        self.notices: list[str] = []
        self.checkpoint_bytes = 0

    def open(self, resume: bool) -> OpenedRun:
        """Prepare the directory, load the components, and restore the last checkpoint if the run
        is resumed. What comes after the checkpoint is removed only then. Collective."""
        recipe, comm = self.recipe, self.comm
        self._load_named_functions()
        check_passed_settings(recipe, self.stage, self.device.type == "cuda")
        start = take_directory(recipe, self.run_dir, comm, resume, self.stack)
        self.notices += start.notices
        tokenizer = load_tokenizer(recipe.model)
        scorer = self._open_scorer(start)
        prompts = self._load_prompts(tokenizer)
        self._remember_prompts(prompts, start.state)
        evaluation = self._plan_evaluation(tokenizer)
        self._try_rewards(scorer, prompts, evaluation)
        engine = self._open_engine(start, tokenizer)
        self._note_limits()
        sampler = self._open_sampler(start, engine, tokenizer)
        buffer = ReplayBuffer(recipe.replay, recipe.sampling.group_size)
        parts = Parts(
            recipe, comm, engine, sampler, scorer, prompts, tokenizer, buffer, self.run_dir,
            self.stop,
        )  # fmt: skip
        source = open_source(parts, start.state, start.checkpoint, self.stack)
        self._restore_buffer(start, buffer)
        if resume:
            self.notices += run_on_main(comm, lambda: go_back(recipe, self.run_dir, start)) or []
        start.state.world_size, start.state.zero_stage = comm.world_size, self.stage
        return OpenedRun(
            parts, start.state, source, evaluation, self.checkpoint_bytes, self.notices
        )

    def _load_named_functions(self) -> None:
        """A function of the user's that is not there is refused before anything is created."""
        load_priority(self.recipe.replay.priority)
        ADVANTAGES.load(self.recipe.advantage.estimator)
        LOSSES.load(self.recipe.loss.kind)
        sampler_class(self.recipe.sampling)

    def _open_scorer(self, start: StartingPoint) -> RewardScorer:
        """The scorer, which the state remembers. Notices if it is another than at the
        checkpoint."""
        recipe, state = self.recipe, start.state
        scorer = self.scorer or self.stack.enter_context(RewardScorer.open(recipe.reward))

        def compare() -> list[str]:
            before, state.reward = state.reward, reward_facts(recipe.reward, scorer.sources())
            if start.checkpoint is None:
                return []
            return notices_of_change(recipe, start.checkpoint, before, state.reward)

        self.notices += run_on_main(self.comm, compare) or []
        return scorer

    def _load_prompts(self, tokenizer: Any) -> PromptSet:
        recipe = self.recipe
        prompts = run_collectively(
            self.comm,
            lambda: load_prompts(
                recipe.prompts, tokenizer, recipe.run.seed, recipe.reward.reads_rows
            ),
        )
        run_collectively(self.comm, lambda: check_room(recipe, prompts.longest_prompt))
        self.notices += prompts.notices
        return prompts

    def _remember_prompts(self, prompts: PromptSet, state: RunState) -> None:
        """In the state. A notice if they are others than at the checkpoint."""
        before, first = state.prompts_at(state.step), state.step + 1
        if before == prompts.sha256:
            return
        state.prompts[str(first)] = prompts.sha256
        if before is not None:
            self.notices.append(
                f"the prompts are others than before step {first}: problems, answers or their "
                "order. Epochs go on in another order, and a stored rollout's prompt_id may be "
                "another problem now"
            )

    def _plan_evaluation(self, tokenizer: Any) -> EvaluationPlan | None:
        if not self.recipe.eval.benchmarks:
            return None
        return run_collectively(self.comm, lambda: plan_that_fits(tokenizer, self.recipe))

    def _try_rewards(
        self, scorer: RewardScorer, prompts: PromptSet, evaluation: EvaluationPlan | None
    ) -> None:
        recipe = self.recipe

        def try_them() -> list[str]:
            held_out = evaluation.problem_texts if evaluation is not None else set()
            notices = prompts.notices_of_use(recipe.sampling.prompts_per_step, held_out)
            notices += notices_of_workers(recipe.reward.workers, recipe.engine.num_processes)
            notices += notices_of_rewards(recipe.reward, scorer, prompts)
            if evaluation is not None:
                notices += notices_of_verifier(recipe.eval.reward, recipe.reward, evaluation)
            return list(dict.fromkeys(notices))  # the same function may grade both

        self.notices += run_on_main(self.comm, try_them) or []

    def _open_engine(self, start: StartingPoint, tokenizer: Any) -> DeepSpeedEngine:
        recipe = self.recipe
        if start.checkpoint is not None:
            refuse_other_shapes(recipe.model, start.checkpoint / "model")
        model = load_policy(recipe.model, recipe.run.seed, recipe.sampling.fp32_head)
        self.notices += drop_unwritable_settings(model)
        self._remember_base(base_digest(model), start.state)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        engine = DeepSpeedEngine(recipe, model, tokenizer, self.comm, self.device)
        self.stack.callback(engine.close)
        self.notices += engine.notices
        self.checkpoint_bytes = checkpoint_bytes(
            parameters, model.dtype.itemsize, self.stage, engine.adapter_parameters
        )
        if engine.adapter_parameters:
            self.notices.append(
                f"LoRA: {engine.adapter_parameters:,} parameters of adapters train, the "
                f"{parameters:,} of {recipe.model.path} are frozen"
            )
        if start.checkpoint is not None:
            self._say_if_resharded(start.state)
            engine.load(start.checkpoint / "engine")
        return engine

    def _remember_base(self, digest: str, state: RunState) -> None:
        """In the state. Raises ModelError for another than the run began with: adapters are trained
        on it, the KL term refers to it, and the card of a checkpoint names it."""
        if state.base not in ("", digest):
            raise ModelError(
                f"model.path {short_path(self.recipe.model.path)!r} is another model than the one "
                "that the run began with: set model.path to that one, wherever it lies, or start a "
                "new run"
            )
        state.base = digest

    def _say_if_resharded(self, state: RunState) -> None:
        ranks, stage = state.world_size, state.zero_stage
        if (ranks, stage) != (self.comm.world_size, self.stage):
            self.observer.on_status(
                f"restoring the engine state of {ranks} ranks at ZeRO {stage} on "
                f"{self.comm.world_size} at ZeRO {self.stage}"
            )

    def _note_limits(self) -> None:
        """Notices about attention memory, room on disk and the precision of gradients."""
        recipe, checkpoints = self.recipe, self.run_dir.checkpoints
        longest = recipe.longest_rollout
        config, on_cuda = load_config(recipe.model), self.device.type == "cuda"
        if warning := float32_warning(recipe.model, config, longest, on_cuda):
            self.notices.append(warning)

        def room() -> list[str]:
            if not self.comm.is_main:
                return []
            return notices_of_room(checkpoints, recipe.checkpoint.keep, self.checkpoint_bytes)

        self.notices += run_collectively(self.comm, room)
        self.notices += notices_of_precision(recipe.model.dtype, self.stage)

    def _open_sampler(
        self, start: StartingPoint, engine: DeepSpeedEngine, tokenizer: Any
    ) -> Sampler:
        path = self._model_path(engine, resumed=start.checkpoint is not None)
        sampler = open_sampler(self.recipe, path, self.comm, self.run_dir.path / "log")
        self.stack.callback(sampler.close)
        self.notices.append(_describe_stop_tokens(sampler, tokenizer))
        return sampler

    def _model_path(self, engine: DeepSpeedEngine, resumed: bool) -> str:
        """The model that the sampler opens: the recipe's, or for a random initialisation the folder
        to which it was saved when the run began."""
        if not self.recipe.model.random_init:
            return resolve_model_path(self.recipe.model.path)
        if not sampler_class(self.recipe.sampling).reads_files:
            return self.recipe.model.path
        folder = self.run_dir.path / "initial_model"
        if not (resumed and folder.is_dir()):
            engine.save_model(folder)
        return str(folder)

    def _restore_buffer(self, start: StartingPoint, buffer: ReplayBuffer) -> None:
        checkpoint, step = start.checkpoint, start.state.step
        if checkpoint is None:
            return
        if not self.recipe.checkpoint.restore_buffer:
            self.notices.append(
                "checkpoint.restore_buffer is false: the replay buffer starts empty"
            )
            return
        run_on_main(self.comm, lambda: restore_buffer(checkpoint, step, buffer))


def _describe_stop_tokens(sampler: Sampler, tokenizer: Any) -> str:
    ends = name_stop_tokens(sampler, tokenizer)
    return f"completions end at {ends}; sampling.stop_tokens chooses others"
