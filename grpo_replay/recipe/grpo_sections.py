"""Sections of the algorithm: reward, advantage, replay, loss, updates and learning rate."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from grpo_replay.recipe.base import (
    MAX_COST_RATIO,
    Fraction,
    Passthrough,
    Positive,
    Seconds,
    Section,
    one_of,
)
from grpo_replay.recipe.open_lists import (
    ADVANTAGES,
    BUILTIN_VERIFIERS,
    LOSSES,
    PRIORITIES,
    VERIFIERS,
    LossFacts,
)

_PAPER_A = {"with_replacement": False, "drop_zero_variance": True}
_PAPER_B = {"with_replacement": True, "drop_zero_variance": False}

REPLAY_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "ours": {
        "unit": "rollout",
        "priority": "abs_advantage",
        "composition": "fresh_anchored",
        **_PAPER_A,
    },
    "uniform": {
        "unit": "query",
        "priority": "uniform",
        "composition": "pool",
        **_PAPER_A,
    },
    "group_std": {
        "unit": "query",
        "priority": "group_std",
        "composition": "pool",
        **_PAPER_A,
    },
    "fifo": {
        "unit": "rollout",
        "priority": "uniform",
        "composition": "buffer_only",
        "max_age_steps": None,
        "warmup_steps": 0,
        **_PAPER_B,
    },
}
"""The values that each preset sets (paper A, section 5; `fifo`: paper B). `grpo` sets nothing:
it switches replay off, and is the baseline of any recipe."""

OVERLONG = "overlong"
"""The name of the length penalty among the scores of a rollout."""


class WeightedReward(Section):
    """One of several reward functions."""

    function: str
    weight: float = 1.0
    name: str | None = None


class RewardSection(Section):
    function: str | Annotated[list[WeightedReward], Field(min_length=1)] = "boxed"
    """A verifier or a function of your own (docs/rewards.md). Several: a list of names or of
    `{function: …, weight: 1.0, name: null}`; the reward is their weighted sum, and the first alone
    decides which rollouts count as correct."""
    correct: float = 1.0
    """Score of a correct answer; your own function's score counts as correct from here on."""
    incorrect: float = -1.0
    """Score of any other answer."""
    overlong_buffer_tokens: Positive | None = None
    """L_cache of DAPO's soft overlong punishment: a score that falls from 0 to -1 over the last
    tokens before `sampling.max_completion_length`. Null: none."""
    mask_truncated: bool = False
    """Neither train on nor store truncated completions (DAPO). Their rewards count in their
    group."""
    special_tokens: Literal["drop", "keep"] = "drop"
    """Whether rewards and evaluations see tokens that the tokenizer calls special, such as
    `</think>` or `<answer>`. `keep` shows all but the end token of the model (docs/rewards.md)."""
    max_failed_share: Fraction = 0.5
    """The run stops if rewards are missing on a larger share of a step's completions. 1 never
    stops."""
    workers: Annotated[int, Field(ge=1, le=1024)] = 2
    """Verifier processes per rank."""
    time_limit_seconds: Seconds = 10.0
    """Maximum time to grade one completion; then its worker is killed."""

    @field_validator("function", mode="before")
    @classmethod
    def _expand_bare_names(cls, function: Any) -> Any:
        """Turn names in a list into mappings."""
        if not isinstance(function, list):
            return function
        return [{"function": item} if isinstance(item, str) else item for item in function]

    @field_validator("function")
    @classmethod
    def _are_known(cls, function: str | list[WeightedReward]) -> Any:
        """Refuses an unknown reward function, and weights that are all 0."""
        if isinstance(function, str):
            return VERIFIERS.check(function)
        for weighted in function:
            VERIFIERS.check(weighted.function)
        if not any(weighted.weight for weighted in function):
            raise ValueError("every weight is 0: no reward would differ from another")
        return function

    @property
    def functions(self) -> tuple[WeightedReward, ...]:
        """All reward functions; one without a name has that of its function."""
        functions = self.function
        if isinstance(functions, str):
            functions = [WeightedReward(function=functions)]
        return tuple(
            weighted.model_copy(
                update={"name": weighted.name or weighted.function.rpartition(":")[2]}
            )
            for weighted in functions
        )

    @property
    def main_function(self) -> str:
        """The function that decides which rollouts count as correct."""
        return self.functions[0].function

    @property
    def reads_rows(self) -> bool:
        """True with a function of the user, which may read any column of the prompts."""
        return any(weighted.function not in BUILTIN_VERIFIERS for weighted in self.functions)

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of a rollout's scores, in the order of storage."""
        overlong = () if self.overlong_buffer_tokens is None else (OVERLONG,)
        return (*(weighted.name or "" for weighted in self.functions), *overlong)

    def with_single_function(self, function: str) -> "RewardSection":
        """Return these settings with `function` as the only reward function."""
        only = {"function": function, "overlong_buffer_tokens": None}
        return self.model_copy(update=only)


class AdvantageSection(Section):
    estimator: one_of(ADVANTAGES) = "group_relative"  # type: ignore[valid-type]
    """(r - μ_g)/(σ_g + ε_σ), or your own `f(rewards, settings) -> np.ndarray` (docs/api.md)."""
    std: Literal["population", "sample", "none"] = "population"
    """σ_g divides by G (`population`, which the paper's closed forms need) or G - 1 (`sample`, as
    verl and TRL). `none`: A = r - μ_g (Dr. GRPO, with `loss.aggregation: constant`)."""
    epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """ε_σ, added to σ_g."""

    @property
    def divide_by_std(self) -> bool:
        """Whether advantages are divided by σ_g + ε_σ."""
        return self.std != "none"

    @property
    def deviation(self) -> str:
        """The standard deviation that is logged: `population` or `sample`."""
        return "population" if self.std == "none" else self.std


class Machines(Section):
    """Paper B's inference workers W and trainers T, and its μ."""

    workers: Positive
    trainers: Positive
    mu: Annotated[float, Field(gt=0, le=MAX_COST_RATIO)]

    @property
    def ratio(self) -> float:
        """y = μ·T/W: uses of a rollout if neither workers nor trainers wait."""
        return self.mu * self.trainers / self.workers

    @property
    def gamma(self) -> float:
        """γ = (1 + W/T)/(1 + μ): compute of an update relative to one without a buffer."""
        return (1 + self.workers / self.trainers) / (1 + self.mu)


class ReplaySection(Section):
    preset: Literal["grpo", "uniform", "group_std", "ours", "fifo"] = "ours"
    """Sets the keys of the list above. `grpo` neither stores nor draws."""
    unit: Literal["rollout", "query"] = "rollout"
    """What one draw takes: a rollout, or all stored rollouts of a group."""
    priority: one_of(PRIORITIES) = "abs_advantage"  # type: ignore[valid-type]
    """p of a rollout: |A| + ε, 1, σ_g + ε with ε = 1e-6, or your own `f(columns) -> np.ndarray`
    (docs/api.md). `abs_advantage` needs unit rollout."""
    priority_exponent: Annotated[float, Field(ge=0, le=1000)] = 0.5
    """α of P ∝ p^α. 0 draws uniformly."""
    composition: Literal["fresh_anchored", "pool", "buffer_only"] = "fresh_anchored"
    """`fresh_anchored`: all fresh survivors plus a draw. `pool`: one draw from fresh and stored
    together. `buffer_only`: fresh rollouts enter the buffer, then the whole batch is drawn from it
    (paper B)."""
    ratio: Annotated[float, Field(ge=0, le=1000)] = 0.5
    """r, replayed rollouts per fresh survivor; for `buffer_only` drawn per generated rollout, B/R.
    Null: μ·T/W of `machines`."""
    machines: Machines | None = None
    """(W, T) of paper B's asynchronous system that a synchronous FIFO recipe stands for, as
    `{workers: 5, trainers: 3, mu: 6.84}`: `cost/gamma` and `report` charge compute by them."""
    max_age_steps: Positive | None = 10
    """τ_max, maximum age of a stored rollout in training steps. Null: no limit."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """First training steps that fill the buffer without drawing."""
    capacity_rollouts: Positive = 30_000
    """Maximum stored rollouts; those stored first are evicted."""
    with_replacement: bool = False
    """Draw with replacement within a draw (one a step; `buffer_only`: one an update)."""
    unused_first: bool = False
    """Draw rollouts never drawn before all others (paper B). Needs `with_replacement: false`."""
    age_decay_steps: Annotated[float, Field(gt=0)] | None = None
    """τ of P ∝ p^α · exp(-age/τ), age at the draw (FreshPER). Null: no decay."""
    max_uses: Positive | None = None
    """Maximum draws of a rollout; needs `with_replacement: false`. Null: no limit."""
    cooldown_steps: Annotated[int, Field(ge=0)] = 0
    """Steps after a draw in which the rollout is not drawn again."""
    drop_zero_variance: bool = True
    """Neither train on nor store groups whose rewards are all equal. If false, they have advantage
    0 (paper B)."""
    positive_fraction: Fraction = 0.0
    """δ of the positive bias (paper B): of N, keep the newest (1-δ)·N rollouts and the newest δ·N
    correct older ones."""

    shadow: bool = False
    """Train as preset `grpo` does, and let the buffer fill, age and draw beside it. Draws are
    recorded and not trained on; `replay/*` and `buffer/*` say what replay would do."""
    probe_every_steps: Positive = 10
    """With `shadow`: steps between two probes, which score drawn rollouts under the present
    policy."""
    probe_rollouts: Positive = 32
    """With `shadow`: maximum rollouts of a probe, spread over the ages of the draw."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        """Add the values of the preset for missing keys. A resolved recipe has all keys already."""
        preset = values.get("preset") if isinstance(values, Mapping) else None
        if not (isinstance(preset, str) and preset in REPLAY_PRESETS):
            return values
        return {**REPLAY_PRESETS[preset], **values}

    @model_validator(mode="before")
    @classmethod
    def _derive_ratio(cls, values: Any) -> Any:
        """Replaces `ratio: null` by μ·T/W of `machines`."""
        if not (isinstance(values, Mapping) and values.get("ratio", 0) is None):
            return values
        if values.get("machines") is None:
            raise ValueError("ratio: null takes y = μ·T/W of replay.machines; give one of them")
        machines = values["machines"]
        if not isinstance(machines, Machines):
            machines = Machines.model_validate(machines)
        return {**values, "ratio": machines.ratio}

    @property
    def enabled(self) -> bool:
        """False for the preset grpo, which never stores or draws."""
        return self.preset != "grpo"

    @property
    def replays(self) -> bool:
        """True if rollouts are stored and drawn. `grpo` and `ratio: 0` are the same run."""
        return self.enabled and self.ratio > 0

    @property
    def trains_on_draws(self) -> bool:
        """True if drawn rollouts are trained on: false without replay and in shadow."""
        return self.replays and not self.shadow

    def trains_on_all_fresh(self, steps: Any) -> Any:
        """Returns whether a step trains on all its fresh survivors, with or without a draw. Returns
        an array for an array of `steps`."""
        return (not self.trains_on_draws or self.anchors_fresh) | (steps <= self.warmup_steps)

    @property
    def anchors_fresh(self) -> bool:
        """True if a step trains on all its fresh survivors, with the draw on top."""
        return self.composition == "fresh_anchored"

    @property
    def pools_fresh(self) -> bool:
        """True if one draw takes from the fresh and the stored rollouts together."""
        return self.composition == "pool"

    @property
    def stores_first(self) -> bool:
        """Whether fresh rollouts are stored before the draw, and only draws are trained on."""
        return self.composition == "buffer_only"


class BatchSection(Section):
    updates_per_step: Positive = 2
    """Optimizer updates per step, on even parts of the batch."""
    mini_batch_rollouts: Positive | None = None
    """Replaces `updates_per_step`: a batch of n is split into ceil(n / this) even parts, one per
    update."""
    epochs: Positive = 1
    """Passes over the fresh batch, each shuffled anew and with the updates above (PPO's epochs);
    the log-probs of birth stay in the ratio. Above 1 only without replay."""
    max_tokens_per_microbatch: Positive = 16_384
    """Tokens in one forward pass: prompts, completions and padding."""
    packing: bool | None = None
    """Pack rows end to end instead of padding them. If null, on a GPU with flash attention, for
    models that keep the rows apart. With other attentions it costs the square of all tokens in the
    pass."""

    def updates_of(self, rollouts: float) -> int:
        """Counts the optimizer updates of one pass over `rollouts`."""
        if self.mini_batch_rollouts is None:
            return self.updates_per_step
        return math.ceil(rollouts / self.mini_batch_rollouts)


class AdamwOptions(Passthrough):
    """Arguments of `torch.optim.AdamW`."""

    RESERVED: ClassVar[frozenset[str]] = frozenset({"params", "lr"})

    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = Field(default=[0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01

    @model_validator(mode="after")
    def _has_two_moments(self) -> "AdamwOptions":
        if self.extra_settings.get("amsgrad"):
            raise ValueError(
                "amsgrad keeps a third moment, which a run that resumes with other ranks, another "
                "ZeRO stage or dtype cannot read: remove it"
            )
        return self


class OptimizerSection(Section):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """AdamW learning rate: the highest of the schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up the rate falls per step to 0 one step after `run.steps`, or stays."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Step s of these has s / `warmup_steps` of `learning_rate`."""
    adamw: AdamwOptions = Field(default_factory=AdamwOptions)
    """Arguments of torch's AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum global L2 norm of the gradient."""

    def rate_of(self, step: int, steps: int) -> float:
        """Compute the learning rate of all updates of training step `step` of `steps`, from 1.

        With W warm-up steps of N, it is `learning_rate` times step/W up to step W. After that, the
        progress p = (step - 1 - W)/(N - W) rises from 0 to just below 1, and the factor is 1 - p
        for `linear`, (1 + cos πp)/2 for `cosine` (Loshchilov and Hutter, arXiv 1608.03983, without
        restarts). The rate of the last step is above 0.
        """
        if step <= self.warmup_steps:
            return self.learning_rate * (step / self.warmup_steps)
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step - 1 - self.warmup_steps) / (steps - self.warmup_steps)
        remaining = 1.0 - progress
        if self.schedule == "cosine":
            remaining = (1.0 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * remaining


def outside(log_ratios: Any, low: float, high: float | None) -> Any:
    """Mask of ratios outside [low, high], an array or tensor like `log_ratios`."""
    log_low = math.log(low) if low else -math.inf
    log_high = math.inf if high is None else math.log(high)
    return (log_ratios < log_low) | (log_ratios > log_high)


class RatioBounds(Section):
    """Bounds of an importance ratio. If `high` is null there is no upper bound."""

    level: Literal["token", "sequence"] = "token"
    low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    high: Annotated[float, Field(gt=1)] | None = None

    def excludes(self, log_ratios: Any) -> Any:
        """Mask of ratios outside the bounds, an array or tensor like `log_ratios`."""
        return outside(log_ratios, self.low, self.high)


class SamplerRatio(RatioBounds):
    """Bounds of an importance weight, and the action outside."""

    action: Literal["truncate", "mask"] = "truncate"


class LossSection(Section):
    kind: one_of(LOSSES) = "clipped"  # type: ignore[valid-type]
    """`clipped`: GRPO's surrogate, a ratio per token. `gspo`: one per rollout (arXiv 2507.18071);
    needs `aggregation: sequence_mean`; the paper clips at `epsilon: 3e-4`, `epsilon_high: 4e-4`.
    `asymre`: asymmetric REINFORCE (paper B); or your own (docs/api.md)."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - ε."""
    epsilon_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped above at 1 + ε_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 10.0
    """c: for A < 0 the surrogate is bounded below by c·A. Null: no bound."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term to the frozen initial policy."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """`token_mean`: over all trained tokens of a mini-batch. `sequence_mean`: over rollouts of each
    one's mean. `constant`: sum over rollouts times `max_completion_length` (Dr. GRPO)."""
    behavior_logprobs: Literal["trainer", "sampler"] = "trainer"
    """π_b: recomputed by the trainer once, after sampling, or the sampler's."""
    sampler_ratio: SamplerRatio | None = None
    """Importance weights π_b / π_sampler on the loss of a token, as `{high: 2}`: at most 2. Also
    `low`, `level` (`token`; `sequence`: the product over a rollout) and `action` (`truncate`;
    `mask`: weight 0 outside). Not with `behavior_logprobs: sampler`. Null: off."""
    ratio_mask: RatioBounds | None = None
    """Tokens with π_θ / π_b outside `{low: 0.5, high: 5}` give no gradient; with `level: sequence`,
    rollouts by the product. Null: off."""
    max_negative_kl: Annotated[float, Field(gt=0)] | None = None
    """Rollouts with A < 0 and a larger mean of log(π_b / π_θ) give no gradient (DeepSeek-V3.2;
    TRL's `off_policy_mask_threshold`). Null: off."""
    negative_veto: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """`[low, high]`: in a rollout with A < 0, tokens after the first with π_θ / π_b outside give no
    gradient (μ-GRPO). Null: off."""

    @field_validator("negative_veto")
    @classmethod
    def _ordered(cls, veto: list[float] | None) -> list[float] | None:
        if veto is not None:
            RatioBounds(low=veto[0], high=veto[1])
        return veto

    @property
    def masks(self) -> bool:
        """True if some tokens may be excluded by their ratio to the behaviour policy."""
        masks = (self.ratio_mask, self.max_negative_kl, self.negative_veto)
        return any(mask is not None for mask in masks)

    @property
    def facts(self) -> LossFacts:
        """Facts about the loss, known without loading it."""
        return LossFacts.of(self.kind)
