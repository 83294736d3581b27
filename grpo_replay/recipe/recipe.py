"""The complete recipe: all sections in data order, values derived from several sections, and the
check for contradictions.

The sections are defined in `input_sections`, `grpo_sections` and `run_sections`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import Field, field_validator, model_validator

from grpo_replay.recipe.base import Section
from grpo_replay.recipe.grpo_sections import (
    AdvantageSection,
    BatchSection,
    LossSection,
    OptimizerSection,
    ReplaySection,
    RewardSection,
)
from grpo_replay.recipe.input_sections import (
    GYM,
    ModelSection,
    PromptsSection,
    SamplingSection,
)
from grpo_replay.recipe.open_lists import GYM_VERIFIER
from grpo_replay.recipe.run_sections import (
    CheckpointSection,
    EngineSection,
    EvalSection,
    RunSection,
    TrackingSection,
)

CHUNK_LOGITS_BYTES = {False: 160 * 2**20, True: 640 * 2**20}
"""Bytes of fp32 logits of a chunk of the output head by default, on a CPU (False) and a GPU (True).
On a GPU chunks are larger, because each reads and writes the gradient of the whole weight."""
CHUNK_TOKENS = (64, 1024)
"""Minimum tokens of a chunk, of which it is a multiple, and maximum tokens."""

PACKING_ATTENTION = ("flash_attention_2", "flash_attention_3")
"""Attentions whose cost depends on the rows of a pack. Others compute all pairs of its tokens."""


_FORBIDDEN_IN_NAME = re.compile(r"[/\\\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Slashes, control characters, and characters that change the direction of writing."""


class GpuSizes(NamedTuple):
    """The memory of a GPU in bytes, and the parameters of the model: all, and those that train."""

    bytes: int
    parameters: int
    trained: int


class Recipe(Section):
    """All settings of a run, valid together."""

    name: str = "unnamed"
    """Name of the recipe. The stem of its file unless set."""
    model: ModelSection = Field(default_factory=ModelSection)
    prompts: PromptsSection = Field(default_factory=PromptsSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    advantage: AdvantageSection = Field(default_factory=AdvantageSection)
    replay: ReplaySection = Field(default_factory=ReplaySection)
    batch: BatchSection = Field(default_factory=BatchSection)
    loss: LossSection = Field(default_factory=LossSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    run: RunSection = Field(default_factory=RunSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if name in ("", ".", "..") or len(name) > 100 or _FORBIDDEN_IN_NAME.search(name):
            raise ValueError(
                "it becomes part of a run directory's name: 1 to 100 characters without slashes "
                "and control characters"
            )
        return name

    @model_validator(mode="before")
    @classmethod
    def _use_gym_verifier(cls, values: Any) -> Any:
        """Score problems of reasoning-gym by their families, unless a verifier is named."""
        if not isinstance(values, Mapping):
            return values
        values = _with_gym_verifier(values, ("prompts", "source"), ("reward", "function"))
        return _with_gym_verifier(values, ("eval", "benchmarks"), ("eval", "reward"))

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "Recipe":
        if problems := find_contradictions(self):
            raise ValueError("; ".join(problems))
        return self

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts generated per training step: prompts times G."""
        return self.sampling.rollouts_per_step

    @property
    def longest_rollout(self) -> int:
        """Maximum prompt length plus maximum completion length, in training."""
        return self.prompts.max_prompt_length + self.sampling.max_completion_length

    @property
    def longest_sequence(self) -> int:
        """Maximum prompt length plus maximum completion length, in training or evaluation."""
        evaluated = self.eval.max_completion_length or 0
        completion = max(self.sampling.max_completion_length, evaluated)
        return self.prompts.max_prompt_length + completion

    @property
    def pushes_adapters(self) -> bool:
        """Whether weight updates of the sampler contain only LoRA's adapters."""
        return self.sampling.takes_adapters(self.model)

    def saves_model(self, step: int) -> bool:
        """Whether the checkpoint of `step` has model/, with all weights."""
        merges = step == self.run.steps or self.checkpoint.merged == "all"
        return self.model.lora.r is None or merges

    @property
    def replays(self) -> bool:
        """True if this recipe draws from the buffer."""
        return self.replay.replays

    @property
    def draws_per_step(self) -> int:
        """Number of draws of a training step. A `buffer_only` step draws once per optimizer update,
        and ages are in updates. Other steps draw at most once, and ages are in steps."""
        if not (self.replays and self.replay.stores_first):
            return 1
        return max(1, self.batch.updates_of(self.replay.ratio * self.rollouts_per_step))

    def zero_stage(self, ranks: int, gpu: GpuSizes | None = None) -> int:
        """The ZeRO stage on `ranks`: `engine.zero_stage`, with `auto` resolved: on several
        GPUs 2 if weights, gradients and optimizer take at most half of one, else 3. `gpu` is None
        on a CPU, and if the model's size is not known."""
        engine = self.engine
        if engine.zero_stage != "auto":
            return engine.zero_stage
        if engine.offload_parameters:
            return 3
        if ranks == 1:
            return 2 if engine.offload_optimizer or self.model.dtype == "bfloat16" else 0
        if gpu is None:
            return 3
        # as in lab/dry_run/memory.py
        size = 2 if self.model.dtype == "bfloat16" else 4
        needed = size * gpu.parameters + (2 * size + 16) * gpu.trained // ranks
        return 2 if needed <= gpu.bytes / 2 else 3

    def compiles(self, stage: int, on_cuda: bool) -> bool:
        """Whether to compile the policy: `model.compile`, with `auto` resolved."""
        chosen = self.model.compile
        return on_cuda and stage < 3 if chosen == "auto" else chosen

    def logprob_chunk_tokens(self, vocabulary: int, on_cuda: bool = False) -> int:
        """Completion tokens in a chunk of the output head: `engine.logprob_chunk_tokens`, or a
        default by memory that depends on the size of the `vocabulary`."""
        if self.engine.logprob_chunk_tokens is not None:
            return self.engine.logprob_chunk_tokens
        minimum, maximum = CHUNK_TOKENS
        tokens = CHUNK_LOGITS_BYTES[on_cuda] // (4 * vocabulary)
        return min(max(tokens // minimum * minimum, minimum), maximum)

    def packs(self, on_cuda: bool) -> bool:
        """Whether to pack rows: `batch.packing`, or its default for the attention. The engine also
        checks that the model keeps packed rows apart."""
        if self.batch.packing is not None:
            return self.batch.packing
        return on_cuda and self.model.attn_implementation in PACKING_ATTENTION

    @property
    def logprob_gap_limit(self) -> float:
        """`sampling.logprob_gap_limit` in nats, or its default for this recipe's precisions."""
        if self.sampling.logprob_gap_limit is not None:
            return self.sampling.logprob_gap_limit
        exact = self.model.dtype == "float32" and self.sampling.vllm.dtype != "bfloat16"
        return 0.01 if exact else 0.1

    @property
    def sampled_dtype(self) -> str:
        """Precision of the sampler."""
        if self.sampling.facts.reads_vllm_settings and self.sampling.vllm.dtype != "auto":
            return self.sampling.vllm.dtype
        return self.model.dtype


def _with_gym_verifier(
    values: Mapping[str, Any], problems_key: tuple[str, str], verifier_key: tuple[str, str]
) -> Mapping[str, Any]:
    """Set the verifier of reasoning-gym at `verifier_key` (section and key) if it is not set, and
    all sources at `problems_key` are problems of reasoning-gym."""
    section, key = verifier_key
    verifier_section = values.get(section, {})
    problems_section = values.get(problems_key[0], {})
    if not (isinstance(verifier_section, Mapping) and isinstance(problems_section, Mapping)):
        return values
    named = problems_section.get(problems_key[1])
    items = named if isinstance(named, list) else [named]
    sources = [item.get("source") if isinstance(item, Mapping) else item for item in items]
    is_gym = bool(sources) and all(str(source).startswith(GYM) for source in sources)
    if key in verifier_section or not is_gym:
        return values
    return {**values, section: {**verifier_section, key: GYM_VERIFIER}}


def find_contradictions(recipe: Recipe) -> list[str]:
    """One message per contradiction, with what to set instead; empty if there are none."""
    return [
        *replay_contradictions(recipe.replay),
        *_replay_size_contradictions(recipe),
        *_reward_contradictions(recipe),
        *_algorithm_contradictions(recipe),
        *_loss_contradictions(recipe),
        *_schedule_contradictions(recipe),
        *_engine_contradictions(recipe),
        *_lora_contradictions(recipe),
    ]


def replay_contradictions(replay: ReplaySection) -> Iterable[str]:
    """Contradictions within the replay section, which apply to the buffer in any trainer."""
    if replay.shadow and not replay.replays:
        yield (
            f"replay.shadow with replay.preset '{replay.preset}', replay.ratio {replay.ratio:g}: "
            "nothing would be drawn; choose another preset than grpo and a ratio above 0"
        )
    if replay.shadow and not replay.drop_zero_variance:
        yield (
            "replay.shadow with replay.drop_zero_variance false: a run in shadow trains as preset "
            "grpo does, which drops groups of equal rewards; set replay.drop_zero_variance true"
        )
    if not replay.enabled:
        return
    if replay.composition == "buffer_only" and replay.warmup_steps > 0:
        yield (
            f"replay.warmup_steps {replay.warmup_steps} with replay.composition 'buffer_only', "
            "which draws from the first step on: set replay.warmup_steps 0"
        )
    if replay.composition == "buffer_only" and replay.ratio == 0:
        yield (
            "replay.ratio 0 with replay.composition 'buffer_only' would train on nothing: set "
            "replay.ratio above 0"
        )
    yield from _draw_contradictions(replay)


def _draw_contradictions(replay: ReplaySection) -> Iterable[str]:
    if replay.priority == "abs_advantage" and replay.unit == "query":
        yield (
            "replay.priority 'abs_advantage' with replay.unit 'query': |advantage| belongs to a "
            "rollout, and its mean over a group carries the same information as group_std; "
            "use replay.priority group_std or uniform, or replay.unit rollout"
        )
    if replay.unused_first and replay.with_replacement:
        yield (
            "replay.unused_first with replay.with_replacement: a rollout that was just drawn "
            "counts as used and cannot be drawn again before the others; set "
            "replay.with_replacement false"
        )
    if replay.max_uses is not None and replay.with_replacement:
        yield (
            f"replay.max_uses {replay.max_uses} with replay.with_replacement: one draw could take "
            "a rollout more often; set replay.with_replacement false, or replay.max_uses null"
        )
    if replay.positive_fraction > 0 and replay.unit == "query":
        yield (
            "replay.positive_fraction with replay.unit 'query': the positive-bias buffer keeps "
            "single rollouts; use replay.unit rollout"
        )


def _replay_size_contradictions(recipe: Recipe) -> Iterable[str]:
    replay = recipe.replay
    if not replay.enabled:
        return
    if replay.capacity_rollouts < recipe.rollouts_per_step:
        yield (
            f"replay.capacity_rollouts {replay.capacity_rollouts} is less than the rollouts of "
            f"one step, {recipe.rollouts_per_step} (sampling.prompts_per_step · group_size): "
            "rollouts of the current step would be evicted; raise it"
        )
    if replay.ratio > 0 and replay.warmup_steps >= recipe.run.steps:
        yield (
            f"replay.warmup_steps {replay.warmup_steps} is not less than run.steps "
            f"{recipe.run.steps}: the run would never replay; lower the warm-up, or use "
            "replay.preset grpo"
        )


def _reward_contradictions(recipe: Recipe) -> Iterable[str]:
    reward, longest = recipe.reward, recipe.sampling.max_completion_length
    if reward.correct <= reward.incorrect:
        yield (
            f"reward.correct {reward.correct} must be greater than reward.incorrect "
            f"{reward.incorrect}"
        )
    names = reward.score_names
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"reward.function: two scores are called {name!r} ({', '.join(names)}): give "
            "each function a name of its own, {function: …, name: …}"
        )
    if reward.overlong_buffer_tokens is not None and reward.overlong_buffer_tokens > longest:
        yield (
            f"reward.overlong_buffer_tokens {reward.overlong_buffer_tokens} is more than "
            f"sampling.max_completion_length {longest}: lower it"
        )
    if reward.mask_truncated and recipe.replay.enabled and recipe.replay.unit == "query":
        yield (
            "reward.mask_truncated with replay.unit 'query': a query is stored and drawn with all "
            "its rollouts; use replay.unit rollout, or reward.overlong_buffer_tokens"
        )


def _algorithm_contradictions(recipe: Recipe) -> Iterable[str]:
    if not recipe.loss.facts.has_kl and recipe.loss.beta > 0:
        yield f"loss.beta with loss.kind '{recipe.loss.kind}', which has no KL term: set it to 0"
    if recipe.batch.epochs > 1 and recipe.replay.trains_on_draws:
        yield (
            f"batch.epochs {recipe.batch.epochs} with replay.preset '{recipe.replay.preset}': the "
            "passes are over the fresh batch alone; set replay.preset grpo, or batch.epochs 1"
        )
    if recipe.run.mode == "async":
        yield from _asynchronous_contradictions(recipe)
        return
    if recipe.run.sync_every_steps > 1:
        yield from _lag_contradictions(recipe)
    if recipe.sampling.collection.replay_journal is not None:
        yield (
            f"sampling.collection.replay_journal with run.mode '{recipe.run.mode}': only an "
            "asynchronous run has a journal; set run.mode async"
        )


def _loss_contradictions(recipe: Recipe) -> Iterable[str]:
    loss, ratio = recipe.loss, recipe.loss.facts.ratio
    if ratio == "rollout" and loss.aggregation != "sequence_mean":
        yield (
            f"loss.kind '{loss.kind}' with loss.aggregation '{loss.aggregation}': a ratio per "
            "rollout needs a mean over rollouts; set loss.aggregation sequence_mean"
        )
    if loss.sampler_ratio is None:
        return
    if ratio is None:
        yield (
            f"loss.sampler_ratio with loss.kind '{loss.kind}', which has no importance weights: "
            "set it to null"
        )
    elif loss.behavior_logprobs == "sampler":
        yield (
            "loss.sampler_ratio with loss.behavior_logprobs 'sampler': the ratio of the loss is "
            "that to the sampler already, and would count twice; set loss.sampler_ratio null, or "
            "loss.behavior_logprobs trainer"
        )
    if ratio == "rollout" and loss.sampler_ratio.level == "token":
        yield (
            f"loss.sampler_ratio with loss.kind '{loss.kind}', whose ratio is one per rollout: set "
            "loss.sampler_ratio.level sequence, or loss.kind clipped"
        )


def _schedule_contradictions(recipe: Recipe) -> Iterable[str]:
    """A warm-up as long as the run, and refills that could have no effect."""
    optimizer, steps = recipe.optimizer, recipe.run.steps
    if optimizer.warmup_steps >= steps:
        yield (
            f"optimizer.warmup_steps {optimizer.warmup_steps} is not less than run.steps {steps}: "
            "the run would end in its warm-up; lower it"
        )
    if recipe.sampling.max_refills > 0 and not recipe.replay.drop_zero_variance:
        yield (
            f"sampling.max_refills {recipe.sampling.max_refills} with replay.drop_zero_variance "
            "false: no group is dropped, so nothing is refilled; set sampling.max_refills 0"
        )
    elif (
        recipe.sampling.max_refills > 0
        and recipe.replay.trains_on_draws
        and recipe.replay.stores_first
    ):
        yield (
            f"sampling.max_refills {recipe.sampling.max_refills} with replay.composition "
            "'buffer_only': its batch is drawn from the buffer and keeps its size when fresh "
            "groups are dropped; set sampling.max_refills 0"
        )


def _lora_contradictions(recipe: Recipe) -> Iterable[str]:
    lora = recipe.model.lora
    if lora.r is None:
        for name, value in lora.model_dump(exclude_defaults=True).items():
            yield f"model.lora.{name} {value} without model.lora.r: set the rank, for example r: 16"


def _asynchronous_contradictions(recipe: Recipe) -> Iterable[str]:
    if recipe.loss.behavior_logprobs != "sampler":
        yield (
            "run.mode 'async' with loss.behavior_logprobs 'trainer': the trainer is not the policy "
            "that sampled, and log-probs of the current policy would switch the clip off; set "
            "loss.behavior_logprobs sampler"
        )
    if not recipe.sampling.facts.on_servers:
        yield (
            f"run.mode 'async' with sampling.backend {recipe.sampling.backend!r}: sampling goes on "
            "while the trainer works, which needs servers; set sampling.backend vllm_server"
        )
    if recipe.replays and recipe.replay.composition == "pool":
        yield (
            "run.mode 'async' with replay.composition 'pool' is not available: use fresh_anchored "
            "or buffer_only, or replay.preset grpo for the use-once queue"
        )
    if recipe.reward.mask_truncated:
        yield (
            "run.mode 'async' with reward.mask_truncated is not available: set it to false, or "
            "use reward.overlong_buffer_tokens"
        )
    if recipe.sampling.max_refills > 0:
        yield (
            f"run.mode 'async' with sampling.max_refills {recipe.sampling.max_refills}: steps take "
            "groups as they arrive, so there is nothing to refill; set it to 0"
        )
    yield from _arrival_contradictions(recipe)


def _arrival_contradictions(recipe: Recipe) -> Iterable[str]:
    collection, replay = recipe.sampling.collection, recipe.replay
    every, limit = recipe.run.sync_every_steps, replay.max_age_steps
    if limit is not None and limit < every - 1:
        yield (
            f"run.mode 'async' with run.sync_every_steps {every} and replay.max_age_steps {limit}: "
            f"servers hold policies of up to {every - 1} steps ago, and what these sample is too "
            f"old; set replay.max_age_steps to {every - 1} or more, or sync more often"
        )
    if collection.order == "newest_first" and recipe.replays:
        yield (
            "sampling.collection.order 'newest_first' with replay: it is the queue of runs without "
            "a buffer (paper B); set replay.preset grpo, or oldest_first"
        )
    if collection.replay_journal is not None and recipe.eval.benchmarks:
        yield (
            "sampling.collection.replay_journal with eval.benchmarks: a replayed run has no "
            "sampler; set eval.benchmarks []"
        )


def _lag_contradictions(recipe: Recipe) -> Iterable[str]:
    every = recipe.run.sync_every_steps
    if recipe.loss.behavior_logprobs != "sampler":
        yield (
            f"run.sync_every_steps {every} with loss.behavior_logprobs 'trainer': between pushes "
            "the trainer is not the policy that sampled; set loss.behavior_logprobs sampler"
        )
    due = recipe.eval.every_steps or []
    if recipe.eval.benchmarks and any(n % every for n in ([due] if isinstance(due, int) else due)):
        yield (
            f"eval.every_steps {recipe.eval.every_steps} is not a multiple of "
            f"run.sync_every_steps {every}: the sampler runs the evaluation, and between pushes "
            "it holds an older policy; choose a multiple"
        )


def _engine_contradictions(recipe: Recipe) -> Iterable[str]:
    engine, servers = recipe.engine, recipe.sampling.servers
    longest = recipe.longest_rollout
    if recipe.batch.max_tokens_per_microbatch < longest:
        yield (
            f"batch.max_tokens_per_microbatch {recipe.batch.max_tokens_per_microbatch} is less "
            f"than the longest possible rollout, {longest} tokens (prompts.max_prompt_length + "
            "sampling.max_completion_length): raise it or lower those"
        )
    if engine.offload_parameters and engine.zero_stage not in ("auto", 3):
        yield f"engine.offload everything needs engine.zero_stage 3, not {engine.zero_stage}"
    if engine.offload_optimizer and engine.zero_stage == 0:
        yield "engine.offload optimizer needs engine.zero_stage 1, 2 or 3, not 0"
    if recipe.sampling.facts.on_servers and bool(servers.urls) == bool(servers.launch):
        yield (
            f"sampling.backend {recipe.sampling.backend!r} needs either sampling.servers.urls or "
            "sampling.servers.launch"
        )
