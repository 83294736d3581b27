"""The scorers of reasoning-gym (https://github.com/open-thought/reasoning-gym): every family of its
problems has one of its own, which may give part of the points."""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from grpo_replay.rewards.answer_text import last_boxes

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(completion: str, row: Mapping[str, Any]) -> float:
    """The points from 0 to 1 that a problem's family gives to the last box of a completion, or to
    its last `<answer>` if it has no box. 0 without either, and where the scorer fails on it."""
    if not {"family", "settings", "entry"} <= set(row):
        raise KeyError("the row is no problem of reasoning_gym: name another reward.function")
    boxes, tagged = last_boxes(completion), _TAGGED.findall(completion)
    given = boxes[0] if boxes else tagged[-1].strip() if tagged else None
    return 0.0 if given is None else points(row["family"], row["settings"], given, row["entry"])


def points(family: str, settings: str, answer: str, entry: Mapping[str, Any]) -> float:
    """The points that a family gives to an answer. `entry` is a problem as the family made it with
    its `settings`, which are JSON."""
    try:
        found = float(open_family(family, settings).score_answer(answer, entry))
    except Exception:  # scorers raise anything on answers that they did not expect
        return 0.0
    return found if math.isfinite(found) else 0.0


@cache
def open_family(family: str, settings: str, **of_items: int) -> Any:
    """A family's problems, by index. Raises what the family raises for settings that it does not
    have, and ValueError for an unknown family."""
    import reasoning_gym

    return reasoning_gym.create_dataset(family, **json.loads(settings), **of_items)
