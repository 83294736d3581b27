"""The recipe: every setting of a run, validated, in data order.

`load_recipe` returns a `Recipe` from a YAML file (or the name of a shipped one) and `--set`
overrides. Precedence: defaults < file < `--set`. A replay preset decides unit, priority,
composition and on/off; it overrides what earlier layers said about them, and the same or a later
layer may override it again. Importing this module loads neither torch nor transformers.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grpo_replay.errors import RecipeError

PAPER_SYSTEM_PROMPT = "You are a helpful assistant."
PAPER_USER_TEMPLATE = (
    "Problem: {problem}\n\n"
    "Please reason step by step, and put your final answer within \\boxed{{}}."
)

REPLAY_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"enabled": False},
    "ours": {
        "enabled": True,
        "unit": "rollout",
        "priority": "abs_advantage",
        "composition": "fresh_anchored",
    },
    "uniform": {
        "enabled": True,
        "unit": "query",
        "priority": "uniform",
        "composition": "pool",
    },
    "group_std": {
        "enabled": True,
        "unit": "query",
        "priority": "group_std",
        "composition": "pool",
    },
    "fifo": {
        "enabled": True,
        "unit": "rollout",
        "priority": "uniform",
        "composition": "buffer_only",
        "max_age_steps": None,
        "warmup_steps": 0,
    },
}
"""What each preset decides (paper A, section 5; `fifo`: paper B)."""

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class ModelSection(Section):
    path: str = "builtin:tiny"
    """Hugging Face id, local folder, `builtin:tiny`, or (with `random_init`) a published
    configuration that ships with the package: `builtin:qwen3-0.6b`, `-1.7b`, `-4b`."""
    revision: str | None = None
    """Git revision on the hub."""
    tokenizer: str | None = None
    """Tokenizer id, folder, or `builtin:bytes`; the model's own if null."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision of the policy; bfloat16 keeps fp32 master weights in the optimizer."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of the trainer (transformers' name)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass (TRL: gradient_checkpointing)."""
    random_init: bool = False
    """Initialise from the configuration alone, seeded by `run.seed`; no weights are read."""
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Configuration values to replace, for example `{num_hidden_layers: 2}`; only with
    `random_init`."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run."""


class PromptsSection(Section):
    source: str = "builtin:tiny"
    """Hugging Face dataset id, local JSONL/Parquet file, or `builtin:tiny`."""
    config_name: str | None = None
    """Dataset configuration on the hub."""
    revision: str | None = None
    """Git revision on the hub."""
    split: str = "train"
    """Split of a hub dataset."""
    problem_field: str = "problem"
    """Column with the problem statement."""
    answer_field: str = "answer"
    """Column with the reference answer."""
    id_field: str | None = None
    """Column with a unique id; the row number if null."""
    template: Literal["chat", "plain"] = "chat"
    """`chat` renders the tokenizer's chat template, `plain` formats `user_template` alone."""
    system_prompt: str | None = PAPER_SYSTEM_PROMPT
    """System message of the chat template; null for none. Ignored by `plain`."""
    user_template: str = PAPER_USER_TEMPLATE
    """Python format string with `{problem}`."""
    max_prompt_length: Positive = 1024
    """Longest prompt in tokens; longer ones are left out and counted (TRL: max_prompt_length)."""
    shuffle: bool = True
    """Visit the prompts in a new random order every epoch, seeded by `run.seed`."""
    limit: Positive | None = None
    """Use only the first so many rows."""


class VllmSection(Section):
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.6
    """Share of GPU memory vLLM may take (TRL: vllm_gpu_memory_utilization). Unused on CPU."""
    tensor_parallel_size: Positive = 1
    """GPUs per vLLM engine; must divide the number of ranks on a node."""
    max_model_len: Positive | None = None
    """Longest prompt plus completion in tokens; derived from the prompt and completion limits
    if null."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs."""
    enable_prefix_caching: bool = True
    """Share the prompt's KV cache within a group; reset at every weight sync."""
    sleep_mode: bool = True
    """Free the sampler's GPU memory while training. Unused on CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the sampler; `auto` is the policy's."""


class ServersSection(Section):
    urls: list[str] = Field(default_factory=list)
    """Running vLLM servers, such as `http://10.0.0.5:8000`."""
    launch: Annotated[int, Field(ge=0)] = 0
    """Start this many servers on the local machine and stop them with the run."""
    host: str = "127.0.0.1"
    """Address that launched servers bind to. The control routes are unauthenticated."""
    base_port: Annotated[int, Field(ge=1, le=65535)] = 8300
    """First port of launched servers; each takes the next."""
    start_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait for a server to become healthy."""
    request_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait for one completion."""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """Further tries of a failed request, on another server if there is one."""
    max_in_flight: Positive = 256
    """Requests outstanding at one server."""
    on_failure: Literal["stop", "drop"] = "stop"
    """When a server is lost: stop the run, or go on with the others."""
    weight_transfer: Literal["folder", "nccl"] = "folder"
    """How weights travel: a safetensors folder that trainer and servers share, or NCCL."""
    sync_folder: str | None = None
    """Shared folder for weights; a folder in shared memory on this machine if null."""


class SamplingSection(Section):
    backend: Literal["hf", "vllm", "vllm_server"] = "hf"
    """`hf`: transformers; `vllm`: in-process on every rank; `vllm_server`: over HTTP."""
    prompts_per_step: Positive = 32
    """Prompts sampled per training step, over all ranks."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt, G (TRL: num_generations)."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature, applied on both sides of the ratio. Training samples from the full
    distribution: there is no top-p or top-k here."""
    max_completion_length: Positive = 8192
    """Longest completion in tokens (TRL: max_completion_length)."""
    max_batch_rollouts: Positive = 1024
    """Rows that the `hf` backend decodes at once."""
    logprob_gap_limit: Annotated[float, Field(gt=0.0)] | None = None
    """Largest tolerated mean |sampler - trainer| log-prob of a sync in nats; above it the run
    stops. If null, 0.01 where both sides compute in fp32 and 0.1 elsewhere. Seen: fp32 1e-6, bf16
    1e-2, a stale output head 0.2."""
    sync_bucket_mib: Positive = 512
    """Weights gathered at once during a sync."""
    vllm: VllmSection = Field(default_factory=VllmSection)
    """Settings of in-process vLLM (and of servers that we launch)."""
    servers: ServersSection = Field(default_factory=ServersSection)
    """Settings of `vllm_server`."""


class RewardSection(Section):
    function: str = "minerva"
    """`math_verify`, `minerva`, or `module:function` called as
    `f(completion: str, answer: str, row: dict) -> float`."""
    correct: float = 1.0
    """Reward of a correct answer."""
    incorrect: float = -1.0
    """Reward of any other answer."""
    workers: Positive = 2
    """Verifier processes per rank."""
    time_limit_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Longest time for one verdict; then its worker is killed."""
    memory_limit_mib: Positive = 2048
    """Largest growth of a worker's memory."""


class AdvantageSection(Section):
    std: Literal["population", "sample"] = "population"
    """Divide by G or by G - 1 in σ_g. The paper's closed forms need `population`; verl and TRL
    use `sample`."""
    epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """ε_σ, added to σ_g."""


class ReplaySection(Section):
    preset: Literal["grpo", "uniform", "group_std", "ours", "fifo"] = "ours"
    """Decides `enabled`, `unit`, `priority` and `composition`; `fifo` also age and warm-up."""
    enabled: bool = True
    """Whether anything is stored or drawn."""
    unit: Literal["rollout", "query"] = "rollout"
    """What is drawn: single rollouts, or all stored rollouts of a prompt's group together."""
    priority: Literal["abs_advantage", "uniform", "group_std"] = "abs_advantage"
    """p before the exponent. `abs_advantage` exists for the rollout unit only."""
    priority_exponent: Annotated[float, Field(ge=0)] = 0.5
    """α of P ∝ p^α."""
    priority_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """ε added to |A| or σ_g."""
    composition: Literal["fresh_anchored", "pool", "buffer_only"] = "fresh_anchored"
    """All fresh survivors plus a draw; everything drawn from fresh and stored; or everything
    drawn from the buffer after insertion (paper B)."""
    ratio: Annotated[float, Field(ge=0)] = 0.5
    """r: replayed per fresh rollout. For `buffer_only`: drawn per generated rollout, B/R."""
    max_age_steps: Positive | None = 10
    """τ_max in training steps; null for no limit."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """First steps that fill the buffer without drawing."""
    capacity_rollouts: Positive = 30_000
    """Most rollouts stored, first in first out."""
    with_replacement: bool = False
    """Draw with replacement."""
    positive_fraction: Fraction = 0.0
    """δ of the positive-bias buffer (paper B): keep the freshest (1-δ)·N plus the freshest δ·N
    correct ones outside them."""


class BatchSection(Section):
    updates_per_step: Positive = 2
    """Optimizer updates per training step; the composed batch is split evenly."""
    mini_batch_rollouts: Positive | None = None
    """If set, ceil(n / size) even parts instead of `updates_per_step`."""
    max_tokens_per_microbatch: Positive = 16_384
    """Budget of prompt plus completion tokens, padding included, of one forward pass."""


class LossSection(Section):
    kind: Literal["clipped", "asymre"] = "clipped"
    """`clipped`: the GRPO surrogate; `asymre`: asymmetric REINFORCE (paper B)."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip: ratio ≥ 1 - ε_low (TRL: epsilon)."""
    epsilon_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper clip: ratio ≤ 1 + ε_high (TRL: epsilon_high)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 10.0
    """c: for A < 0 the surrogate is bounded below by c·A; null for none."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term to the frozen initial policy (TRL: beta)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over all trainable tokens of the mini-batch; mean of per-rollout means; or Dr. GRPO's
    sum over rollouts · `max_completion_length`."""
    behavior_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Whose log-probs at birth are π_b: recomputed once by the trainer, or the sampler's."""
    asymre_delta: float = -0.1
    """δV of AsymRE, in units of the reward."""


class OptimizerSection(Section):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """AdamW step size, constant (TRL: learning_rate)."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment (TRL: adam_beta1)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment (TRL: adam_beta2)."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's ε (TRL: adam_epsilon)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay (TRL: weight_decay)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Clip of the global L2 gradient norm (TRL: max_grad_norm)."""


class EngineSection(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy trains."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """DeepSpeed ZeRO stage."""
    num_processes: Positive = 1
    """Ranks on this node; `--num-processes` overrides it."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory (ZeRO 1-3, CUDA)."""
    offload_parameters: bool = False
    """Keep parameters in host memory (ZeRO 3, CUDA)."""
    logprob_chunk_tokens: Positive = 1024
    """Completion tokens whose logits exist at once; bounds the output head's memory."""
    threads_per_process: Positive | None = None
    """torch's CPU threads; cores / ranks if null."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Longest wait in a collective before the run fails."""


class RunSection(Section):
    steps: Positive = 200
    """Training steps."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Of everything random."""
    mode: Literal["sync", "async"] = "sync"
    """`sync`: generate, update, push weights. `async` is not available yet."""
    sync_every_steps: Positive = 1
    """Training steps between weight pushes to the sampler."""


class CheckpointSection(Section):
    every_steps: Positive = 50
    """Training steps between checkpoints; the last step always makes one."""
    keep: Annotated[int, Field(ge=2)] = 3
    """Newest checkpoints kept (TRL: save_total_limit)."""
    restore_buffer: bool = True
    """On resume, restore the replay buffer; false starts it empty."""


class EvalSection(Section):
    benchmarks: list[str] = Field(default_factory=list)
    """Benchmarks or groups by name: `tiny`, `paper`, `math500`, …; empty for none."""
    every_steps: Positive | None = None
    """Training steps between evaluations; null for none in between."""
    at_start: bool = True
    """Evaluate the base model before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    samples: Positive | None = None
    """k, completions per problem; each benchmark's own if null."""
    temperature: Annotated[float, Field(ge=0)] = 0.6
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Nucleus sampling mass."""
    max_completion_length: Positive | None = None
    """Longest completion in tokens; that of training if null."""
    greedy: bool = False
    """Evaluate greedily as well (one completion per problem), reported beside the headline."""
    data_folder: str | None = None
    """Local folder with one `<benchmark>.jsonl` or `.parquet` each, read instead of the hub."""
    problem_field: str = "problem"
    """Column with the problem, in benchmarks given as a path (`my.jsonl`, `my.parquet`)."""
    answer_field: str = "answer"
    """Column with the reference answer, likewise."""
    id_field: str | None = None
    """Column with a unique id, likewise; the row number if null."""
    max_problems: Positive | None = None
    """Use only the first so many problems of each benchmark, for a quick look."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Of the first wave of eight samples; the second has the next, and so on."""
    reward: Literal["math_verify", "minerva"] = "math_verify"
    """Verifier."""
    bootstrap_samples: Positive = 2000
    """Resamples behind the confidence intervals."""


class TrackingSection(Section):
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=lambda: ["tensorboard"]
    )
    """Trackers beside metrics.jsonl, which is always written (TRL: report_to)."""
    project: str = "grpo-replay"
    """Project name at W&B and trackio."""
    run_name: str | None = None
    """Run name; the output directory's if null."""
    log_rollouts: bool = True
    """Write rollouts/ and draws/."""


class Recipe(Section):
    """A run, fully described."""

    name: str = "unnamed"
    """Name of the recipe; the file's stem unless it says otherwise."""
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

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts generated per training step: prompts · G."""
        return self.sampling.prompts_per_step * self.sampling.group_size

    @property
    def replays(self) -> bool:
        """Whether this recipe ever draws from the buffer."""
        return self.replay.enabled and self.replay.ratio > 0

    @property
    def logprob_gap_limit(self) -> float:
        """`sampling.logprob_gap_limit`, or its default for the precisions of this recipe, nats."""
        if self.sampling.logprob_gap_limit is not None:
            return self.sampling.logprob_gap_limit
        exact = self.model.dtype == "float32" and self.sampling.vllm.dtype != "bfloat16"
        return 0.01 if exact else 0.1

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "Recipe":
        problems = [*_replay_contradictions(self), *_other_contradictions(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _replay_contradictions(recipe: Recipe) -> Iterable[str]:
    replay = recipe.replay
    if replay.preset == "grpo" and replay.enabled:
        yield (
            "replay.enabled is true with replay.preset 'grpo', which never replays: "
            "choose another preset (ours, uniform, group_std, fifo)"
        )
    if not replay.enabled:
        return
    if replay.priority == "abs_advantage" and replay.unit == "query":
        yield (
            "replay.priority 'abs_advantage' with replay.unit 'query': |advantage| belongs to a "
            "rollout, and its mean over a group says the same as group_std; "
            "use replay.priority group_std or uniform, or replay.unit rollout"
        )
    if replay.capacity_rollouts < recipe.rollouts_per_step:
        yield (
            f"replay.capacity_rollouts {replay.capacity_rollouts} is less than one step's "
            f"rollouts, {recipe.rollouts_per_step} (sampling.prompts_per_step · group_size): "
            "what was just generated would be evicted; raise it"
        )
    if replay.ratio > 0 and replay.warmup_steps >= recipe.run.steps:
        yield (
            f"replay.warmup_steps {replay.warmup_steps} is not less than run.steps "
            f"{recipe.run.steps}: the run would never replay; lower the warm-up, or use "
            "replay.preset grpo"
        )
    if replay.composition == "buffer_only" and replay.warmup_steps > 0:
        yield (
            f"replay.warmup_steps {replay.warmup_steps} with replay.composition 'buffer_only', "
            "which draws from the first step on: set replay.warmup_steps 0"
        )
    if replay.composition == "buffer_only" and replay.ratio == 0:
        yield "replay.ratio 0 with replay.composition 'buffer_only' would train on nothing"
    if replay.positive_fraction > 0 and replay.unit == "query":
        yield (
            "replay.positive_fraction with replay.unit 'query': the positive-bias buffer keeps "
            "single rollouts; use replay.unit rollout"
        )


def _other_contradictions(recipe: Recipe) -> Iterable[str]:
    if recipe.reward.correct <= recipe.reward.incorrect:
        yield (
            f"reward.correct {recipe.reward.correct} must be greater than reward.incorrect "
            f"{recipe.reward.incorrect}"
        )
    if recipe.run.mode == "async":
        yield "run.mode 'async' is not available yet: use sync"
    elif recipe.run.sync_every_steps != 1:
        yield (
            f"run.sync_every_steps {recipe.run.sync_every_steps} with run.mode 'sync', which "
            "pushes the weights after every step: set it to 1"
        )
    if recipe.loss.kind == "asymre" and recipe.loss.beta > 0:
        yield "loss.beta with loss.kind 'asymre': AsymRE has no KL term; set loss.beta 0"
    if recipe.model.config_overrides and not recipe.model.random_init:
        yield "model.config_overrides needs model.random_init: true (weights fix the shapes)"
    if "{problem}" not in recipe.prompts.user_template:
        yield "prompts.user_template must contain {problem}"
    longest = recipe.prompts.max_prompt_length + recipe.sampling.max_completion_length
    if recipe.batch.max_tokens_per_microbatch < longest:
        yield (
            f"batch.max_tokens_per_microbatch {recipe.batch.max_tokens_per_microbatch} is less "
            f"than one longest rollout, {longest} tokens (prompts.max_prompt_length + "
            "sampling.max_completion_length): raise it or lower those"
        )
    if recipe.engine.offload_parameters and recipe.engine.zero_stage != 3:
        yield (
            f"engine.offload_parameters needs engine.zero_stage 3, not {recipe.engine.zero_stage}"
        )
    if recipe.engine.offload_optimizer and recipe.engine.zero_stage == 0:
        yield "engine.offload_optimizer needs engine.zero_stage 1, 2 or 3, not 0"
    servers = recipe.sampling.servers
    if recipe.sampling.backend == "vllm_server" and bool(servers.urls) == bool(servers.launch):
        yield (
            "sampling.backend 'vllm_server' needs either sampling.servers.urls or "
            "sampling.servers.launch"
        )


def shipped_recipes_folder() -> Path:
    """The folder of the recipes that ship with the package (wheel or checkout)."""
    here = Path(__file__).resolve().parent
    inside = here / "recipes"
    return inside if inside.is_dir() else here.parent / "recipes"


def find_recipe(name_or_path: str) -> Path:
    """The recipe file for a path or the name of a shipped recipe.

    Raises RecipeError, listing the shipped names, if there is none.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(shipped_recipes_folder().glob("*.yaml"))}
    if name_or_path in shipped:
        return shipped[name_or_path]
    hint = _did_you_mean(name_or_path, shipped)
    raise RecipeError(
        f"no recipe {name_or_path!r}: neither a file nor a shipped recipe{hint}; "
        f"shipped: {', '.join(shipped)}"
    )


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The validated recipe from a file and `key=value` overrides. Raises RecipeError."""
    path = find_recipe(name_or_path)
    layer = read_recipe_layer(path)
    layer.setdefault("name", path.stem)
    return resolve_recipe([layer, parse_overrides(overrides)], source=str(path))


def read_recipe_layer(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises RecipeError naming file and line."""
    try:
        layer = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{place}: not valid YAML: {getattr(error, 'problem', error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    if layer is None:
        return {}
    if not isinstance(layer, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, found a {_kind(layer)}")
    return layer


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The nested mapping of `--set section.key=value` words; values are YAML."""
    layer: dict[str, Any] = {}
    for word in overrides:
        key, separator, text = word.partition("=")
        if not separator or not key.strip():
            raise RecipeError(f"--set {word!r}: expected key=value, such as replay.ratio=0.25")
        try:
            value = _yaml_value(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"--set {word!r}: {text!r} is not valid YAML") from error
        node = layer
        *parents, leaf = key.strip().split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise RecipeError(f"--set {word!r}: {parent} was already set to a value")
        node[leaf] = value
    return layer


def _yaml_value(text: str) -> Any:
    # YAML 1.1 reads 1e-4 as a string because it has no dot.
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text.strip()):
        return float(text)
    return yaml.safe_load(text)


def resolve_recipe(layers: Sequence[Mapping[str, Any]], source: str = "recipe") -> Recipe:
    """The recipe of layers from lowest to highest precedence. Raises RecipeError."""
    merged: dict[str, Any] = {}
    for layer in layers:
        _check_keys(layer, Recipe, (), source)
        replay = layer.get("replay")
        preset = replay.get("preset") if isinstance(replay, Mapping) else None
        if isinstance(preset, str) and preset in REPLAY_PRESETS:
            _deep_update(merged, {"replay": dict(REPLAY_PRESETS[preset])})
        _deep_update(merged, layer)
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        raise RecipeError(_explain(error, source)) from error


def recipe_to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML; loading it gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _deep_update(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _deep_update(target[key], value)
        else:
            target[key] = _copied(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, list) else value


def _check_keys(
    layer: Mapping[str, Any], section: type[BaseModel], at: tuple[str, ...], source: str
) -> None:
    fields = section.model_fields
    for key, value in layer.items():
        place = ".".join((*at, str(key)))
        if key not in fields:
            hint = _did_you_mean(str(key), fields)
            where = f"section {'.'.join(at)}" if at else "the recipe"
            raise RecipeError(
                f"{source}: unknown key {place!r}{hint}; {where} has: {', '.join(fields)}"
            )
        inner = fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            if not isinstance(value, Mapping):
                raise RecipeError(
                    f"{source}: {place} is a section with keys of its own, found {value!r}"
                )
            _check_keys(value, inner, (*at, str(key)), source)


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"]) or "contradiction"
        message = item["msg"].removeprefix("Value error, ")
        found = f", found {item['input']!r}" if item["loc"] else ""
        lines.append(f"{source}: {place}: {message}{found}")
    return "\n".join(lines)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _kind(value: Any) -> str:
    return {list: "list", str: "text"}.get(type(value), type(value).__name__)
