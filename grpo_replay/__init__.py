"""GRPO post-training with rollout replay: the functions of the commands (`grpo_replay.api`), the
replay buffer for other trainers, and `grade`. Names are imported when they are used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from grpo_replay.version import __version__ as __version__

if TYPE_CHECKING:
    from grpo_replay.api import evaluate, inspect, load_recipe, report, train
    from grpo_replay.recipe import Recipe, ReplayConfig
    from grpo_replay.replay import ReplayBuffer
    from grpo_replay.rewards.grading import grade
    from grpo_replay.types import Entry, Rollout

__all__ = [
    "Entry",
    "Recipe",
    "ReplayBuffer",
    "ReplayConfig",
    "Rollout",
    "evaluate",
    "grade",
    "inspect",
    "load_recipe",
    "report",
    "train",
]

_MODULES = {
    **{"ReplayBuffer": "replay", "Recipe": "recipe", "ReplayConfig": "recipe"},
    **{"Entry": "types", "Rollout": "types"},
    **{name: "api" for name in __all__ if name.islower()},
    "grade": "rewards.grading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
