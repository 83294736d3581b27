"""Grades with the scorers of reasoning-gym (https://github.com/open-thought/reasoning-gym). Each of
its families of problems has its own scorer, which may give partial scores."""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from grpo_replay.rewards.answer_text import last_boxes

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(completion: str, row: Mapping[str, Any]) -> float:
    """Score the last box of a completion, or its last `<answer>` if it has no box, from 0 to 1 by
    the problem's family. 0 without either, or if the scorer raises. Raises KeyError for other
    rows."""
    if not {"family", "settings", "entry"} <= set(row):
        raise KeyError("the row is not a problem of reasoning_gym: name another reward.function")
    boxes, tagged = last_boxes(completion), _TAGGED.findall(completion)
    if not boxes and not tagged:
        return 0.0
    answer = boxes[0] if boxes else tagged[-1].strip()
    return points(row["family"], row["settings"], answer, row["entry"])


def points(family: str, settings: str, answer: str, entry: Mapping[str, Any]) -> float:
    """Score an answer by its family; 0 if the scorer raises or returns no finite number. `entry` is
    a problem that the family generated with `settings`, in JSON."""
    try:
        value = float(open_family(family, settings).score_answer(answer, entry))
    except Exception:  # scorers may raise anything on unexpected answers
        return 0.0
    return value if math.isfinite(value) else 0.0


@cache
def open_family(family: str, settings: str, **generation: int) -> Any:
    """Returns the problems of a family, by index; `generation` has the seed and size. Raises what
    the family raises for wrong settings, and ValueError for an unknown family."""
    import reasoning_gym

    return reasoning_gym.create_dataset(family, **json.loads(settings), **generation)
