"""Opens a run in stages: each has a `check`, which finds what would end the run, and an `open`.

A start runs all checks, then opens all stages. A dry run runs the same checks and opens nothing. A
check changes nothing on disk, so a refused start leaves no files behind.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from typing import Any, NamedTuple

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import rank_environment
from grpo_replay.distributed.failures import run_collectively, run_on_main
from grpo_replay.engine.compiled import refuse_stage_3
from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.engine.model_trials import refuse_crossing
from grpo_replay.engine.models import (
    DTYPES,
    base_digest,
    check_attention,
    check_vocabulary,
    drop_unwritable_settings,
    load_config,
    load_policy,
    load_tokenizer,
    notices_of_weights,
    refuse_other_base,
    resolve_model_path,
)
from grpo_replay.engine.passed_settings import check_passed_settings
from grpo_replay.engine.processes import memory_of_gpu
from grpo_replay.engine.weights import MISSING_PEFT, parameter_counts
from grpo_replay.errors import GrpoReplayError, RecipeError
from grpo_replay.evaluation.benchmarks import EvaluationPlan, plan_evaluation, read_from_hub
from grpo_replay.named_functions import has_module
from grpo_replay.prompts.prompt_set import PromptSet, load_prompts
from grpo_replay.recipe import ModelSection, Recipe
from grpo_replay.recipe.layers import is_on_hub
from grpo_replay.recipe.open_lists import ADVANTAGES, LOSSES
from grpo_replay.recipe.recipe import PACKING_ATTENTION, GpuSizes
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.priorities import load_priority
from grpo_replay.replay.snapshot import restore_snapshot
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.completion_text import CompletionText
from grpo_replay.sampling.sampler_protocol import (
    Sampler,
    SamplerOpening,
    check_room,
    model_length,
    name_stop_tokens,
    open_sampler,
    sampler_class,
)
from grpo_replay.stop import StopToken
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.storage.tracking import missing_trackers
from grpo_replay.training import Notice
from grpo_replay.training.disk_room import checkpoint_size, notices_of_room
from grpo_replay.training.open_source import open_source
from grpo_replay.training.resuming import (
    StartingPoint,
    find_start,
    go_back,
    refuse_edited_rewards,
    refuse_other_prompts,
    take_directory,
)
from grpo_replay.training.reward_watch import (
    notices_of_rewards,
    notices_of_verifier,
    reward_digests,
)
from grpo_replay.training.rollout_source import Parts, RolloutSource
from grpo_replay.training.silent_settings import notices_of_beginning, notices_of_tags

ATTENTION_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
}
"""The package that implements an attention, if transformers does not."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machines of a run: its number of ranks, the ranks of one node, and the bytes of memory of
    a GPU (None on a CPU).

    A plan (`is_plan`) downloads no data sets. A plan for machines `elsewhere` does not look at the
    packages, folders and servers of this machine.
    """

    ranks: int
    ranks_here: int
    gpu_bytes: int | None
    is_plan: bool = False
    elsewhere: bool = False

    @property
    def on_cuda(self) -> bool:
        return self.gpu_bytes is not None


def _do_nothing() -> None:
    pass


class Stage(NamedTuple):
    """A part of a run. Both functions are collective; `check` changes nothing."""

    name: str
    check: Callable[[], None] = _do_nothing
    open: Callable[[], None] = _do_nothing


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run that is ready for its next step. `notices` are messages for the user, on rank 0."""

    parts: Parts
    state: RunState
    source: RolloutSource
    evaluation: EvaluationPlan | None
    notices: list[Notice]


class RunOpener:
    """Checks and opens a run, on every rank. `stack` closes what it opens.

    Checks store what they read (tokenizer, prompts, …) for later stages. It is None if it could not
    be read; then only `problems` goes on. `unchecked` are sentences about what a plan skips.
    `known_model` replaces the recipe's model where only its configuration is read.
    """

    parts: Parts
    engine: DeepSpeedEngine
    sampler: Sampler
    source: RolloutSource

    def __init__(
        self,
        recipe: Recipe,
        comm: Comm,
        device: Any,
        run_dir: RunDirectory,
        stack: ExitStack,
        scorer: RewardScorer | None = None,
        stop: StopToken | None = None,
        resume: bool = False,
        hardware: Hardware | None = None,
        known_model: ModelSection | None = None,
    ) -> None:
        self.recipe, self.comm, self.device, self.scorer = recipe, comm, device, scorer
        self.stop, self.resume = stop or StopToken(), resume
        self.run_dir, self.stack = run_dir, stack
        ranks_here = rank_environment().local_world_size
        self.hardware = hardware or Hardware(comm.world_size, ranks_here, memory_of_gpu(device))
        self.with_known_model = recipe.model_copy(update={"model": known_model or recipe.model})
        self.zero_stage = recipe.zero_stage(self.hardware.ranks, self._gpu_sizes())
        self.notices: list[Notice] = []
        self.unchecked: list[str] = []
        self.start = StartingPoint(None)
        self.tokenizer: Any = None
        self.prompts: PromptSet | None = None
        self.evaluation: EvaluationPlan | None = None
        self._early_records = MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1)

    def _gpu_sizes(self) -> GpuSizes | None:
        """Return rank 0's GPU memory and the sizes of the model, as far as a ZeRO stage depends on
        them. None if the model cannot be read: a check refuses it later. Collective."""
        sizes = None
        is_fixed = self.recipe.engine.zero_stage != "auto" or self.hardware.ranks == 1
        if self.hardware.gpu_bytes is None or is_fixed:
            return None
        with suppress(GrpoReplayError):
            if self.comm.is_main and (counts := parameter_counts(self.with_known_model.model)):
                sizes = GpuSizes(self.hardware.gpu_bytes, sum(counts), counts[1] or counts[0])
        return self.comm.broadcast(sizes)

    @property
    def stages(self) -> list[Stage]:
        """All stages in order. A stage may use what earlier stages have read or opened."""
        return [
            Stage("recipe", self._check_recipe),
            Stage("folder", self._find_start, self._take_folder),
            Stage("tokenizer", self._load_tokenizer),
            Stage("prompts", self._load_prompts),
            Stage("evaluation", self._plan_evaluation),
            Stage("rewards", self._try_rewards),
            Stage("engine", self._check_engine, self._open_engine),
            Stage("sampler", self._check_sampler, self._open_sampler),
            Stage("buffer", self._check_buffer, self._open_buffer),
        ]

    def problems(self) -> Iterator[GrpoReplayError]:
        """Check every stage, and yield the errors that a start would raise. Collective."""
        for stage in self.stages:
            try:
                stage.check()
            except GrpoReplayError as error:
                yield error

    def check(self) -> None:
        """Check every stage, and raise the first error. Collective."""
        root = logging.getLogger()
        root.addHandler(self._early_records)  # the log file does not exist yet
        try:
            for error in self.problems():
                raise error
        finally:
            root.removeHandler(self._early_records)

    def open(self) -> OpenedRun:
        """Check every stage, then open every stage. A resumed run is restored from its checkpoint;
        only then are files of later steps removed. Collective."""
        self.check()
        for stage in self.stages:
            stage.open()
        comm, start = self.comm, self.start
        if self.resume:
            run_on_main(comm, lambda: go_back(self.recipe, self.run_dir, start))
        return OpenedRun(self.parts, start.state, self.source, self.evaluation, self.notices)

    def _add_notices(self, key: str, *texts: str) -> None:
        """Add notices without repeating one: a function may grade both training and evaluations."""
        notices = dict.fromkeys(Notice(key, text) for text in texts)
        self.notices += [notice for notice in notices if notice not in self.notices]

    def _check_recipe(self) -> None:
        run_collectively(self.comm, self._check_names)

    def _check_names(self) -> None:
        """Load the functions that the recipe names, and check packages and library settings."""
        recipe, model = self.recipe, self.recipe.model
        load_priority(recipe.replay.priority)
        ADVANTAGES.load(recipe.advantage.estimator)
        LOSSES.load(recipe.loss.kind)
        if not self.hardware.on_cuda and model.attn_implementation in PACKING_ATTENTION:
            raise RecipeError(
                f"model.attn_implementation {model.attn_implementation} needs a GPU; use sdpa"
            )
        missing = missing_packages(recipe)
        if self.hardware.elsewhere:
            self.unchecked += missing
        elif missing:
            raise RecipeError("; ".join(missing))
        refuse_stage_3(model.compile, self.zero_stage)
        check_passed_settings(recipe, self.zero_stage, self.hardware.on_cuda)

    def _find_start(self) -> None:
        if self.hardware.elsewhere and not self.resume:
            return
        self.start = find_start(self.recipe, self.run_dir, self.comm, self.resume)
        self._add_notices("folder", *self.start.notices)

    def _take_folder(self) -> None:
        notices = take_directory(self.recipe, self.run_dir, self.comm, self.start, self.stack)
        self._add_notices("folder", *notices)
        for record in self._early_records.buffer:
            logging.getLogger().handle(record)

    def _load_tokenizer(self) -> None:
        self.tokenizer = run_collectively(self.comm, lambda: load_tokenizer(self.recipe.model))

    def _load_prompts(self) -> None:
        recipe = self.recipe
        is_skipped = self._skips_in_plan("prompts", _hub_sources(recipe))
        if not is_skipped and self.tokenizer is not None:
            self.prompts = run_collectively(
                self.comm,
                lambda: load_prompts(
                    recipe.prompts, self.tokenizer, recipe.run.seed, recipe.reward.reads_rows
                ),
            )
            self._add_notices("prompts", *self.prompts.notices)
            first_prompt = self.prompts.sample(1)[0].token_ids.tolist()
            self._add_notices("prompts", *notices_of_beginning(first_prompt, self.tokenizer))
            self._store_prompts_digest(self.prompts, self.start.state)
        longest_prompt = 1 if self.prompts is None else self.prompts.longest_prompt
        run_collectively(self.comm, lambda: check_room(self.with_known_model, longest_prompt))

    def _skips_in_plan(self, what: str, hub_sources: list[str]) -> bool:
        """Whether this is a plan that would have to download data sets."""
        if not hub_sources or not self.hardware.is_plan:
            return False
        names = ", ".join(hub_sources)
        self.unchecked.append(f"{what} of {names}: a start reads them from the hub")
        return True

    def _store_prompts_digest(self, prompts: PromptSet, state: RunState) -> None:
        """Store the prompts' digest in the state. Raises DatasetError if it differs from the
        checkpoint's. Collective."""
        run_collectively(
            self.comm,
            lambda: refuse_other_prompts(state.prompts, prompts.sha256, self.run_dir.path),
        )
        state.prompts = prompts.sha256

    def _plan_evaluation(self) -> None:
        recipe = self.with_known_model

        def plan() -> EvaluationPlan | None:
            if self.tokenizer is None or not recipe.eval.benchmarks:
                return None
            hub_benchmarks = read_from_hub(recipe.eval, recipe.prompts)
            if self._skips_in_plan("benchmarks", hub_benchmarks):
                return None
            return plan_evaluation(self.tokenizer, recipe)

        self.evaluation = run_collectively(self.comm, plan)
        if self.prompts is not None:
            held_out = self.evaluation.problem_texts if self.evaluation is not None else set()
            prompts_per_step = recipe.sampling.prompts_per_step
            notices = self.prompts.notices_of_use(prompts_per_step, held_out)
            self._add_notices("prompts", *notices)

    def _try_rewards(self) -> None:
        """Open the scorer on every rank, and try it on rank 0."""
        reward = self.recipe.reward
        if self.scorer is None:
            workers = 1 if self.hardware.is_plan else reward.workers
            section = reward.model_copy(update={"workers": workers})
            self.scorer = self.stack.enter_context(RewardScorer.open(section))
        self._add_notices("rewards", *(run_on_main(self.comm, self._notices_of_rewards) or []))

    def _notices_of_rewards(self) -> list[str]:
        """Store the digests of the reward files, refuse edited ones, and try the functions. Called
        on rank 0."""
        recipe, state, scorer = self.recipe, self.start.state, self.scorer
        assert scorer is not None
        before = state.reward
        state.reward = reward_digests(recipe.reward, scorer.sources())
        refuse_edited_rewards(before, state.reward, self.run_dir.path)
        notices: list[str] = []
        if self.prompts is not None:
            text = CompletionText.from_recipe(recipe, self.tokenizer)
            notices += notices_of_rewards(recipe.reward, scorer, self.prompts, text)
            notices += notices_of_tags(recipe, self.tokenizer)
        if self.evaluation is not None:
            notices += notices_of_verifier(recipe.eval.reward, recipe.reward, self.evaluation)
        return notices

    def _check_engine(self) -> None:
        run_collectively(self.comm, self._check_disk)
        run_collectively(self.comm, self._check_model)

    def _check_model(self) -> None:
        """Check the model as far as possible without its weights."""
        recipe, model = self.recipe, self.with_known_model.model
        config = load_config(model)
        if self.tokenizer is not None:
            check_vocabulary(model, config, self.tokenizer)
        check_attention(model)
        longest = model_length(recipe.sampling, model, recipe.longest_sequence, config)
        refuse_crossing(model, config, longest)
        self._add_notices("engine", *notices_of_weights(recipe.model))

    def _check_disk(self) -> None:
        """Check on rank 0 that the checkpoints will fit on the disk."""
        counts = parameter_counts(self.with_known_model.model)
        if counts is None or not self.comm.is_main or self.hardware.elsewhere:
            return
        recipe = self.recipe
        size = DTYPES[recipe.model.dtype].itemsize
        expected = checkpoint_size(counts[0], size, self.zero_stage, counts[1])
        checkpoints = self.run_dir.checkpoints
        self._add_notices("disk", *notices_of_room(checkpoints, recipe.checkpoint, expected))

    def _open_engine(self) -> None:
        recipe, start = self.recipe, self.start
        model = load_policy(recipe.model, recipe.run.seed, recipe.sampling.fp32_head)
        self._add_notices("engine", *drop_unwritable_settings(model))
        self._store_base_digest(base_digest(model), start.state)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        engine = DeepSpeedEngine(
            recipe, model, self.tokenizer, self.comm, self.device, self.zero_stage
        )
        self.stack.callback(engine.close)
        self._add_notices("engine", *engine.notices)
        if engine.adapter_parameters:
            self._add_notices(
                "engine",
                f"LoRA: {engine.adapter_parameters:,} parameters of adapters train, the "
                f"{parameters:,} of {recipe.model.path} are frozen",
            )
            if not recipe.pushes_adapters and recipe.model.dtype == "bfloat16":
                self._add_notices(
                    "engine",
                    "the sampler gets adapters merged in bfloat16, which rounds small changes "
                    "away; sampling.lora adapter and model.dtype float32 keep them",
                )
        if start.checkpoint is not None:
            engine.load(start.checkpoint / "engine")
        self.engine = engine

    def _store_base_digest(self, digest: str, state: RunState) -> None:
        """Store the digest of the base model in the state. Raises ModelError if the run began with
        another base. Collective."""
        model = self.recipe.model
        run_collectively(self.comm, lambda: refuse_other_base(model, state.base, digest))
        state.base = digest

    def _check_sampler(self) -> None:
        recipe, sampling, hardware = self.recipe, self.recipe.sampling, self.hardware
        sampler_type = run_collectively(self.comm, lambda: sampler_class(sampling))
        if self.tokenizer is None:
            return
        opening = run_collectively(self.comm, lambda: SamplerOpening.from_recipe(
            recipe, recipe.model.path, self.comm
        ))  # fmt: skip
        ends = name_stop_tokens(opening.stop_token_ids, self.tokenizer)
        self._add_notices(
            "sampler", f"completions end at {ends}; sampling.stop_tokens chooses others"
        )
        if hardware.elsewhere and sampling.servers.urls:
            self.unchecked.append("servers of sampling.servers.urls: a start asks them")
        elif hasattr(sampler_type, "check"):
            sampler_type.check(opening, hardware.ranks, hardware.ranks_here, hardware.elsewhere)

    def _open_sampler(self) -> None:
        path = resolve_model_path(self.recipe.model.path)
        log = self.run_dir.path / "log"
        self.sampler = open_sampler(self.recipe, path, self.comm, log)
        self.stack.callback(self.sampler.close)

    def _check_buffer(self) -> None:
        if self.start.checkpoint is not None and not self.recipe.checkpoint.restore_buffer:
            text = "checkpoint.restore_buffer is false: the replay buffer starts empty"
            self._add_notices("buffer", text)

    def _open_buffer(self) -> None:
        """Open the buffer and the source of rollouts, as they were at the checkpoint."""
        recipe, start, prompts, scorer = self.recipe, self.start, self.prompts, self.scorer
        assert prompts is not None and scorer is not None  # or a check would have failed
        buffer = ReplayBuffer(recipe.replay, recipe.sampling.group_size)
        self.parts = Parts(
            recipe, self.comm, self.engine, self.sampler, scorer, prompts, self.tokenizer, buffer,
            self.run_dir, self.stop,
        )  # fmt: skip
        self.source = open_source(self.parts, start.state, start.checkpoint, self.stack)
        if start.checkpoint is not None and recipe.checkpoint.restore_buffer:
            snapshot = start.checkpoint / "buffer.parquet"
            run_on_main(self.comm, lambda: restore_snapshot(snapshot, buffer))


def missing_packages(recipe: Recipe) -> list[str]:
    """One sentence for each package that the recipe needs and that is not installed."""
    sampling, attention = recipe.sampling, recipe.model.attn_implementation
    missing = missing_trackers(recipe.tracking)
    runs_here = sampling.servers_launched or not sampling.facts.on_servers
    if "vllm" in sampling.facts.packages and runs_here and not has_module("vllm"):
        missing.append(
            f"sampling.backend {sampling.backend}: vLLM is not installed here: pip install "
            "'grpo-replay[vllm]', or use sampling.backend hf"
        )
    if recipe.model.lora.r is not None and not has_module("peft"):
        missing.append(MISSING_PEFT)
    package = ATTENTION_PACKAGES.get(attention)
    if package is not None and not has_module(package):
        missing.append(
            f"model.attn_implementation {attention}: {package} is not installed here; use sdpa"
        )
    return missing


def _hub_sources(recipe: Recipe) -> list[str]:
    """The prompt sources that are data sets on the hub."""
    return list(filter(is_on_hub, recipe.prompts.source_names))
