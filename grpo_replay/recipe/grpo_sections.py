"""The algorithm: reward, advantage, replay, batches and loss."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from grpo_replay.recipe.base import Fraction, Positive, Section

BuiltinVerifier = Literal["math_verify_boxed", "math_verify", "minerva"]
BUILTIN_VERIFIERS: tuple[str, ...] = get_args(BuiltinVerifier)
"""The verifiers that ship with the package, for training rewards and evaluation."""


class RewardSection(Section):
    function: str = "minerva"
    """Reward function: `minerva` (paper A, training), `math_verify_boxed` (paper A, evaluation),
    `math_verify`, or your own as `module:function`, called as
    `f(completion: str, answer: str, row: dict) -> float`."""
    correct: float = 1.0
    """Reward of a correct answer."""
    incorrect: float = -1.0
    """Reward of any other answer."""
    workers: Positive = 2
    """Verifier processes per rank."""
    time_limit_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Maximum time to grade one completion. A worker that takes longer is killed."""
    memory_limit_mib: Positive = 2048
    """Maximum memory growth of a worker process."""


class AdvantageSection(Section):
    std: Literal["population", "sample"] = "population"
    """Standard deviation of a group, σ_g: `population` divides by G, `sample` by G - 1. The paper's
    closed forms need `population`; verl and TRL use `sample`."""
    epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """ε_σ, added to σ_g in the denominator of the advantage."""


class ReplaySection(Section):
    preset: Literal["grpo", "uniform", "group_std", "ours", "fifo"] = "ours"
    """Sets `enabled`, `unit`, `priority` and `composition`, and for all presets but `grpo`
    also `with_replacement` and `drop_zero_variance`. `fifo` also sets `max_age_steps` and
    `warmup_steps`."""
    enabled: bool = True
    """Store rollouts and draw from the buffer."""
    unit: Literal["rollout", "query"] = "rollout"
    """What one draw takes: a single rollout, or all stored rollouts of one prompt's group."""
    priority: Literal["abs_advantage", "uniform", "group_std"] = "abs_advantage"
    """Priority p of a rollout: |A|, 1 or σ_g. `abs_advantage` needs the rollout unit."""
    priority_exponent: Annotated[float, Field(ge=0, le=1000)] = 0.5
    """α of P ∝ p^α. 0 draws uniformly."""
    priority_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """ε, added to |A| or σ_g."""
    composition: Literal["fresh_anchored", "pool", "buffer_only"] = "fresh_anchored"
    """`fresh_anchored`: all fresh survivors plus a draw from the buffer. `pool`: one draw from
    fresh and stored rollouts together. `buffer_only`: fresh rollouts enter the buffer, then the
    whole batch is drawn from it (paper B)."""
    ratio: Annotated[float, Field(ge=0)] = 0.5
    """r, replayed rollouts per fresh survivor. For `buffer_only`, drawn rollouts per generated
    rollout, B/R."""
    max_age_steps: Positive | None = 10
    """τ_max, maximum age of a stored rollout in training steps. No limit if null."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Number of first training steps that fill the buffer without drawing from it."""
    capacity_rollouts: Positive = 30_000
    """Maximum number of stored rollouts. The oldest are evicted first."""
    with_replacement: bool = False
    """Draw with replacement within a step."""
    unused_first: bool = False
    """Draw rollouts that were never drawn before all others (paper B). Needs
    `with_replacement: false`."""
    drop_zero_variance: bool = True
    """Exclude groups whose rewards are all equal from training and from the buffer, with any
    preset. If false, they are trained on and stored with advantage 0 (paper B)."""
    positive_fraction: Fraction = 0.0
    """δ of the positive-bias buffer (paper B): of a capacity of N, keep the newest (1-δ)·N rollouts
    and the newest δ·N correct ones among the older."""

    @property
    def replays(self) -> bool:
        """True if rollouts are stored and drawn. `grpo` and `ratio: 0` are the same run."""
        return self.enabled and self.ratio > 0


class BatchSection(Section):
    updates_per_step: Positive = 2
    """Optimizer updates per training step. The batch is split evenly between them."""
    mini_batch_rollouts: Positive | None = None
    """Maximum rollouts per mini-batch: a batch of n is split into ceil(n / size) even parts, one
    per update. Replaces `updates_per_step` if set."""
    max_tokens_per_microbatch: Positive = 16_384
    """Maximum number of tokens in one forward pass: prompts plus completions, padding included."""


class LossSection(Section):
    kind: Literal["clipped", "asymre"] = "clipped"
    """`clipped`: GRPO's clipped surrogate; `asymre`: asymmetric REINFORCE (paper B)."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """ε_low: the ratio is clipped below at 1 - ε_low (TRL: epsilon)."""
    epsilon_high: Annotated[float, Field(gt=0)] = 0.28
    """ε_high: the ratio is clipped above at 1 + ε_high (TRL: epsilon_high)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 10.0
    """c of the dual clip: for A < 0 the surrogate is bounded below by c·A. No bound if null."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term to the frozen initial policy (TRL: beta)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How token losses of a mini-batch are combined. `token_mean`: mean over all trained tokens.
    `sequence_mean`: mean over rollouts of each rollout's mean. `constant`: sum, divided by rollouts
    times `max_completion_length` (Dr. GRPO)."""
    behavior_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Source of the behaviour log-probs π_b cached with a rollout: `trainer` recomputes them once
    after sampling; `sampler` uses those of the sampler."""
    asymre_delta: float = -0.1
    """δV of AsymRE, in units of the reward."""
