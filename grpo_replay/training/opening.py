"""Opening a run: a list of stages, each with a `check` of what would end it and an `open`.

A start runs every check, then opens every stage; the dry run runs the same checks and opens
nothing. No check changes anything on disk, so a start that is refused leaves nothing.
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
from grpo_replay.recipe.recipe import PACKING_ATTENTION
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
    refuse_other_prompts,
    take_directory,
)
from grpo_replay.training.reward_watch import (
    notices_of_rewards,
    notices_of_verifier,
    refuse_edited_rewards,
    reward_digests,
)
from grpo_replay.training.rollout_source import Parts, RolloutSource
from grpo_replay.training.silent_settings import notices_of_beginning, notices_of_tags

ATTENTION_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
}
"""The package of an attention that transformers does not bring."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run runs: the number of its ranks, of those on one node, and the memory of a GPU (on
    a CPU None).

    A plan fetches no data set. If it is for machines `elsewhere`, what this one lacks, and its
    folders and servers, say nothing about the run.
    """

    ranks: int
    ranks_here: int
    gpu_bytes: int | None
    is_plan: bool = False
    elsewhere: bool = False

    @property
    def on_cuda(self) -> bool:
        return self.gpu_bytes is not None


def _nothing() -> None:
    pass


class Stage(NamedTuple):
    """A part of a run. Both functions are collective; `check` only looks."""

    name: str
    check: Callable[[], None] = _nothing
    open: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run that is ready to step. `notices` are messages for the user, on rank 0."""

    parts: Parts
    state: RunState
    source: RolloutSource
    evaluation: EvaluationPlan | None
    notices: list[Notice]


class RunOpener:
    """Checks and opens a run, on every rank. What it opens is closed with `stack`.

    What a check reads is kept for the stages after it: None if it could not be read, which only
    `problems` goes on after. `unchecked` are sentences about what a plan does not look at.
    `known_model` is the model whose configuration is read, if not the recipe's.
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
        place: Place | None = None,
        known_model: ModelSection | None = None,
    ) -> None:
        self.recipe, self.comm, self.device, self.scorer = recipe, comm, device, scorer
        self.stop, self.resume = stop or StopToken(), resume
        self.run_dir, self.stack = run_dir, stack
        ranks_here = rank_environment().local_world_size
        self.place = place or Place(comm.world_size, ranks_here, memory_of_gpu(device))
        self.sized = recipe.model_copy(update={"model": known_model or recipe.model})
        self.settled = self._with_zero_stage()
        self.zero_stage = self.settled.zero_stage(self.place.ranks)
        self.notices: list[Notice] = []
        self.unchecked: list[str] = []
        self.start = StartingPoint(None)
        self.tokenizer: Any = None
        self.prompts: PromptSet | None = None
        self.evaluation: EvaluationPlan | None = None
        self._held_records = MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1)

    def _with_zero_stage(self) -> Recipe:
        """The recipe with the ZeRO stage that rank 0 finds; as it is for a model that it cannot
        read, which a check refuses."""
        recipe, place, given = self.recipe, self.place, None
        settled = recipe.engine.zero_stage != "auto" or place.ranks == 1
        if place.gpu_bytes is None or settled:
            return recipe
        with suppress(GrpoReplayError):
            if self.comm.is_main and (counts := parameter_counts(self.sized.model)):
                given = place.gpu_bytes, sum(counts), counts[1] or counts[0]
        given = self.comm.broadcast(given)
        return recipe if given is None else recipe.on_gpus(place.ranks, *given)

    @property
    def stages(self) -> list[Stage]:
        """In their order: each may use what those before it have read or opened."""
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
        """Check every stage: what each refuses, as a start would raise it. Collective."""
        for stage in self.stages:
            try:
                stage.check()
            except GrpoReplayError as error:
                yield error

    def check(self) -> None:
        """Check every stage, and raise the first refusal. Collective."""
        root = logging.getLogger()
        root.addHandler(self._held_records)  # there is no log yet
        try:
            for error in self.problems():
                raise error
        finally:
            root.removeHandler(self._held_records)

    def open(self) -> OpenedRun:
        """Check every stage, then open every stage; the last checkpoint is restored if the run is
        resumed. What comes after it is removed only then. Collective."""
        self.check()
        for stage in self.stages:
            stage.open()
        comm, start = self.comm, self.start
        if self.resume:
            run_on_main(comm, lambda: go_back(self.recipe, self.run_dir, start))
        return OpenedRun(self.parts, start.state, self.source, self.evaluation, self.notices)

    def _say(self, key: str, *texts: str) -> None:
        """Each once: the same function may grade training and evaluations."""
        said = (Notice(key, text) for text in texts)
        self.notices += [each for each in dict.fromkeys(said) if each not in self.notices]

    def _check_recipe(self) -> None:
        run_collectively(self.comm, self._check_names)

    def _check_names(self) -> None:
        """What the recipe names is there, and its libraries take their settings."""
        recipe, model = self.recipe, self.recipe.model
        load_priority(recipe.replay.priority)
        ADVANTAGES.load(recipe.advantage.estimator)
        LOSSES.load(recipe.loss.kind)
        if not self.place.on_cuda and model.attn_implementation in PACKING_ATTENTION:
            raise RecipeError(
                f"model.attn_implementation {model.attn_implementation} needs a GPU; use sdpa"
            )
        missing = missing_packages(recipe)
        if self.place.elsewhere:
            self.unchecked += missing
        elif missing:
            raise RecipeError("; ".join(missing))
        refuse_stage_3(model.compile, self.zero_stage)
        check_passed_settings(recipe, self.zero_stage, self.place.on_cuda)

    def _find_start(self) -> None:
        if self.place.elsewhere and not self.resume:
            return
        self.start = find_start(self.recipe, self.run_dir, self.comm, self.resume)
        self._say("folder", *self.start.notices)

    def _take_folder(self) -> None:
        lacks = take_directory(self.recipe, self.run_dir, self.comm, self.start, self.stack)
        self._say("folder", *lacks)
        for record in self._held_records.buffer:
            logging.getLogger().handle(record)

    def _load_tokenizer(self) -> None:
        self.tokenizer = run_collectively(self.comm, lambda: load_tokenizer(self.recipe.model))

    def _load_prompts(self) -> None:
        recipe = self.recipe
        if not self._leaves_to_start("prompts", _on_hub(recipe)) and self.tokenizer is not None:
            self.prompts = run_collectively(
                self.comm,
                lambda: load_prompts(
                    recipe.prompts, self.tokenizer, recipe.run.seed, recipe.reward.reads_rows
                ),
            )
            self._say("prompts", *self.prompts.notices)
            first = self.prompts.sample(1)[0].token_ids.tolist()
            self._say("prompts", *notices_of_beginning(first, self.tokenizer))
            self._remember_prompts(self.prompts, self.start.state)
        longest = 1 if self.prompts is None else self.prompts.longest_prompt
        run_collectively(self.comm, lambda: check_room(self.sized, longest))

    def _leaves_to_start(self, what: str, on_hub: list[str]) -> bool:
        """Whether this is a plan that would have to fetch data sets."""
        if on_hub and self.place.is_plan:
            self.unchecked.append(f"{what} of {', '.join(on_hub)}: a start reads them from the hub")
        return bool(on_hub) and self.place.is_plan

    def _remember_prompts(self, prompts: PromptSet, state: RunState) -> None:
        """In the state. Raises DatasetError for others than at the checkpoint. Collective."""
        run_collectively(self.comm, lambda: refuse_other_prompts(state.prompts, prompts.sha256))
        state.prompts = prompts.sha256

    def _plan_evaluation(self) -> None:
        recipe = self.sized

        def plan() -> EvaluationPlan | None:
            if self.tokenizer is None or not recipe.eval.benchmarks:
                return None
            on_hub = read_from_hub(recipe.eval, recipe.prompts)
            if self._leaves_to_start("benchmarks", on_hub):
                return None
            return plan_evaluation(self.tokenizer, recipe)

        self.evaluation = run_collectively(self.comm, plan)
        if self.prompts is not None:
            held_out = self.evaluation.problem_texts if self.evaluation is not None else set()
            of_step = recipe.sampling.prompts_per_step
            self._say("prompts", *self.prompts.notices_of_use(of_step, held_out))

    def _try_rewards(self) -> None:
        """The scorer is opened on every rank; rank 0 tries it."""
        reward = self.recipe.reward
        if self.scorer is None:
            workers = 1 if self.place.is_plan else reward.workers
            section = reward.model_copy(update={"workers": workers})
            self.scorer = self.stack.enter_context(RewardScorer.open(section))
        self._say("rewards", *(run_on_main(self.comm, self._notices_of_rewards) or []))

    def _notices_of_rewards(self) -> list[str]:
        recipe, state, scorer, notices = self.recipe, self.start.state, self.scorer, list[str]()
        assert scorer is not None
        before, state.reward = state.reward, reward_digests(recipe.reward, scorer.sources())
        refuse_edited_rewards(before, state.reward)
        if self.prompts is not None:
            text = CompletionText.of(recipe, self.tokenizer)
            notices += notices_of_rewards(recipe.reward, scorer, self.prompts, text)
            notices += notices_of_tags(recipe, self.tokenizer)
        if self.evaluation is not None:
            notices += notices_of_verifier(recipe.eval.reward, recipe.reward, self.evaluation)
        return notices

    def _check_engine(self) -> None:
        run_collectively(self.comm, self._check_disk)
        run_collectively(self.comm, self._check_model)

    def _check_model(self) -> None:
        """What can be known of the model without its weights."""
        recipe, model = self.recipe, self.sized.model
        config = load_config(model)
        if self.tokenizer is not None:
            check_vocabulary(model, config, self.tokenizer)
        check_attention(model)
        room = model_length(recipe.sampling, model, recipe.longest_sequence, config)
        refuse_crossing(model, config, room)
        self._say("engine", *notices_of_weights(recipe.model))

    def _check_disk(self) -> None:
        """On rank 0: whether the checkpoints will have room."""
        counts = parameter_counts(self.sized.model)
        if counts is None or not self.comm.is_main or self.place.elsewhere:
            return
        recipe = self.recipe
        size = DTYPES[recipe.model.dtype].itemsize
        expected = checkpoint_size(counts[0], size, self.zero_stage, counts[1])
        checkpoints = self.run_dir.checkpoints
        self._say("disk", *notices_of_room(checkpoints, recipe.checkpoint, expected))

    def _open_engine(self) -> None:
        recipe, start = self.recipe, self.start
        model = load_policy(recipe.model, recipe.run.seed, recipe.sampling.fp32_head)
        self._say("engine", *drop_unwritable_settings(model))
        self._remember_base(base_digest(model), start.state)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        engine = DeepSpeedEngine(self.settled, model, self.tokenizer, self.comm, self.device)
        self.stack.callback(engine.close)
        self._say("engine", *engine.notices)
        if engine.adapter_parameters:
            self._say(
                "engine",
                f"LoRA: {engine.adapter_parameters:,} parameters of adapters train, the "
                f"{parameters:,} of {recipe.model.path} are frozen",
            )
            if not recipe.pushes_adapters and recipe.model.dtype == "bfloat16":
                self._say(
                    "engine",
                    "the sampler gets adapters merged in bfloat16, which rounds small changes "
                    "away; sampling.lora adapter and model.dtype float32 keep them",
                )
        if start.checkpoint is not None:
            engine.load(start.checkpoint / "engine")
        self.engine = engine

    def _remember_base(self, digest: str, state: RunState) -> None:
        """In the state. Raises ModelError for another than the run began with. Collective."""
        model = self.recipe.model
        run_collectively(self.comm, lambda: refuse_other_base(model, state.base, digest))
        state.base = digest

    def _check_sampler(self) -> None:
        recipe, sampling, place = self.recipe, self.recipe.sampling, self.place
        found = run_collectively(self.comm, lambda: sampler_class(sampling))
        if self.tokenizer is None:
            return
        opening = run_collectively(self.comm, lambda: SamplerOpening.of(
            recipe, recipe.model.path, self.comm
        ))  # fmt: skip
        ends = name_stop_tokens(opening.stop_token_ids, self.tokenizer)
        self._say("sampler", f"completions end at {ends}; sampling.stop_tokens chooses others")
        if place.elsewhere and sampling.servers.urls:
            self.unchecked.append("servers of sampling.servers.urls: a start asks them")
        elif hasattr(found, "check"):
            found.check(opening, place.ranks, place.ranks_here, place.elsewhere)

    def _open_sampler(self) -> None:
        path = resolve_model_path(self.recipe.model.path)
        log = self.run_dir.path / "log"
        self.sampler = open_sampler(self.recipe, path, self.comm, log)
        self.stack.callback(self.sampler.close)

    def _check_buffer(self) -> None:
        if self.start.checkpoint is not None and not self.recipe.checkpoint.restore_buffer:
            text = "checkpoint.restore_buffer is false: the replay buffer starts empty"
            self._say("buffer", text)

    def _open_buffer(self) -> None:
        """The buffer, and the source of rollouts, as they were at the checkpoint."""
        recipe, start, prompts, scorer = self.recipe, self.start, self.prompts, self.scorer
        assert prompts is not None and scorer is not None  # else a check has refused the start
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
    """A sentence for each package that the recipe needs and that is not installed."""
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


def _on_hub(recipe: Recipe) -> list[str]:
    """The sources of prompts that are data sets of the hub."""
    return list(filter(is_on_hub, recipe.prompts.source_names))
