"""The sections of a recipe: keys, types, bounds, defaults, and what each means."""

import string
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

PAPER_SYSTEM_PROMPT = "You are a helpful assistant."
PAPER_USER_TEMPLATE = (
    "Problem: {problem}\n\n"
    "Please reason step by step, and put your final answer within \\boxed{{}}."
)

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

BuiltinVerifier = Literal["math_verify_boxed", "math_verify", "minerva"]
BUILTIN_VERIFIERS: tuple[str, ...] = get_args(BuiltinVerifier)
"""The verifiers that need no code of the user's: of training rewards and of evaluations."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelSection(Section):
    path: str = "builtin:tiny"
    """Hugging Face id, local folder, `builtin:tiny`, or (with `random_init`) a published
    configuration that ships with the package: `builtin:qwen3-0.6b`, `-1.7b`, `-4b`,
    `builtin:qwen2.5-7b`."""
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
    """Split of a hub dataset, or a part of one: `train[:-500]` is all but the last 500 rows."""
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

    @field_validator("user_template")
    @classmethod
    def _has_one_placeholder(cls, template: str) -> str:
        remedy = "the only placeholder is {problem}; other braces are written twice, {{ and }}"
        try:
            fields = {field for _, field, _, _ in string.Formatter().parse(template)} - {None}
            template.format(problem="")
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(f"{error!r}; {remedy}") from None
        if fields != {"problem"}:
            raise ValueError(f"it must contain {{problem}}; {remedy}")
        return template


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
    async_scheduling: bool | None = None
    """Schedule the next token while the GPU computes this one; vLLM's choice if null (on with a
    GPU, always off on a CPU)."""
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
    """Longest time in which a server with requests outstanding generates no token, or does not take
    new weights; then it is lost. How long a completion takes is not limited."""
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
    stop_tokens: Annotated[list[str], Field(min_length=1)] | None = None
    """Tokens that end a completion, by their text, in training and in evaluation:
    `[<|endoftext|>]`. If null, every one that the model's files name (the tokenizer's EOS, those of
    generation_config.json and config.json), and Qwen's `<|endoftext|>` and `<|im_end|>` where the
    tokenizer has them."""
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
    """`minerva` (paper A's in training), `math_verify_boxed` (paper A's in evaluation),
    `math_verify`, or `module:function` called as
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
    """Decides `enabled`, `unit`, `priority` and `composition`, and (all but `grpo`)
    `with_replacement` and `drop_zero_variance`; `fifo` also age and warm-up."""
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
    unused_first: bool = False
    """Draw what was never drawn before anything else (paper B); needs `with_replacement: false`."""
    drop_zero_variance: bool = True
    """Leave groups whose rewards are all equal out of training and buffer, with any preset. If
    false they are trained on and stored with advantage 0 (paper B)."""
    positive_fraction: Fraction = 0.0
    """δ of the positive-bias buffer (paper B): keep the freshest (1-δ)·N plus the freshest δ·N
    correct ones outside them."""

    @property
    def replays(self) -> bool:
        """Whether anything is ever stored or drawn. `grpo` and `ratio: 0` are the same run."""
        return self.enabled and self.ratio > 0


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


class ZeroSection(Section):
    """DeepSpeed's thresholds, in elements (not bytes), under its own names; they change memory and
    speed, never a result."""

    reduce_bucket_size: Positive = 500_000_000
    """Gradients reduced at once (ZeRO 1-3)."""
    allgather_bucket_size: Positive = 500_000_000
    """Updated parameters gathered at once (ZeRO 1-2)."""
    param_persistence_threshold: Annotated[int, Field(ge=0)] = 100_000
    """Parameters of at most this size are never sharded (ZeRO 3)."""
    prefetch_bucket_size: Annotated[int, Field(ge=0)] = 50_000_000
    """Parameters fetched ahead of their use (ZeRO 3)."""
    max_live_parameters: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Parameters gathered at the same time (ZeRO 3)."""
    max_reuse_distance: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Keep a parameter gathered if it is used again within so many (ZeRO 3)."""
    sub_group_size: Positive = 1_000_000_000
    """Parameters per optimizer sub-group (ZeRO 3)."""


class EngineSection(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy trains."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """DeepSpeed ZeRO stage."""
    zero: ZeroSection = Field(default_factory=ZeroSection)
    """DeepSpeed's thresholds."""
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
    hang_report_seconds: Annotated[float, Field(gt=0)] | None = None
    """Time in one place after which every rank logs where it is; `timeout_seconds` / 6 if null."""


class RunSection(Section):
    steps: Positive = 200
    """Training steps."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Of everything random."""
    mode: Literal["sync", "async"] = "sync"
    """`sync`: generate, update, push weights. `async` is not available yet."""
    sync_every_steps: Positive = 1
    """Training steps between weight pushes to the sampler. Above 1 it samples with a policy up to
    so many steps less one old, on purpose (paper B); needs `loss.behavior_logprobs: sampler`."""
    stop_grace_seconds: Annotated[float, Field(gt=0)] | None = None
    """Time between SIGTERM and SIGKILL where the run is, such as N of Slurm's `--signal=TERM@N`. A
    run whose step and checkpoint take longer says so. If null, 30 under Slurm, torchrun and
    DeepSpeed's launcher, and no limit elsewhere."""


class CheckpointSection(Section):
    every_steps: Positive = 50
    """Training steps between checkpoints; the last step always makes one."""
    keep: Annotated[int, Field(ge=2)] = 3
    """Newest checkpoints kept (TRL: save_total_limit)."""
    restore_buffer: bool = True
    """On resume, restore the replay buffer; false starts it empty."""


class EvalSection(Section):
    benchmarks: list[str] = Field(default_factory=list)
    """Benchmarks or groups by name: `tiny`, `paper`, `paper_b`, `math500`, …; empty for none."""
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
    reward: BuiltinVerifier = "math_verify_boxed"
    """Verifier. `math_verify_boxed` grades the last box of the trailing 500 characters (paper A),
    `math_verify` whatever math-verify finds in the whole completion."""
    other_rewards: list[BuiltinVerifier] = Field(default_factory=list)
    """Further verifiers of the same completions, reported beside the first (`--grade-with`)."""
    bootstrap_samples: Annotated[int, Field(ge=100)] = 2000
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


class RecipeSections(Section):
    """All sections, each valid alone, and what follows from several of them."""

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
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest completion, of training or evaluation."""
        evaluated = self.eval.max_completion_length or 0
        completion = max(self.sampling.max_completion_length, evaluated)
        return self.prompts.max_prompt_length + completion

    @property
    def replays(self) -> bool:
        """Whether this recipe ever draws from the buffer."""
        return self.replay.replays

    @property
    def hang_report_seconds(self) -> float:
        """`engine.hang_report_seconds`, or its default."""
        return self.engine.hang_report_seconds or self.engine.timeout_seconds / 6

    @property
    def logprob_gap_limit(self) -> float:
        """`sampling.logprob_gap_limit`, or its default for the precisions of this recipe, nats."""
        if self.sampling.logprob_gap_limit is not None:
            return self.sampling.logprob_gap_limit
        exact = self.model.dtype == "float32" and self.sampling.vllm.dtype != "bfloat16"
        return 0.01 if exact else 0.1

    @property
    def sampled_dtype(self) -> str:
        """The precision that the backend samples in."""
        if self.sampling.backend != "hf" and self.sampling.vllm.dtype != "auto":
            return self.sampling.vllm.dtype
        return self.model.dtype
