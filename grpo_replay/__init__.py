"""GRPO post-training with rollout replay. `grpo_replay.api` has the functions of the commands; the
names here are the replay buffer for other trainers, and are imported when they are used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_replay.recipe import ReplayConfig
    from grpo_replay.replay import ReplayBuffer
    from grpo_replay.types import Rollout

__version__ = "0.1.0"
__all__ = ["ReplayBuffer", "ReplayConfig", "Rollout"]

_PLACES = {"ReplayBuffer": "replay", "ReplayConfig": "recipe", "Rollout": "types"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
