"""The replay presets: the values that each sets in the section `replay`."""

from collections.abc import Mapping
from typing import Any

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
