"""The tiny task as a plugin of ms-swift, in a folder of its own, which ms-swift puts first on the
import path: a template, a reward, and a game of two turns.

TINY_SWIFT_KILL=N kills the process when the rewards of generation batch N are asked for.
"""

import atexit
import gc
import os
import signal

import torch.distributed as dist
from swift.rewards import ORM, orms
from swift.rollout import MultiTurnScheduler, multi_turns
from swift.template import TemplateMeta, register_template


@atexit.register
def leave_group():
    """ms-swift leaves its process group open, whose threads now and then abort an interpreter that
    exits (exit code -6)."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # the wrapped model holds the group too, in a circle


class Tiny(ORM):
    calls = 0

    def __call__(self, completions, answer, **_):
        Tiny.calls += 1
        if Tiny.calls == int(os.environ.get("TINY_SWIFT_KILL", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        boxes = [text.rpartition("\\boxed{")[2].partition("}")[0] for text in completions]
        return [1.0 if box == gold else -1.0 for box, gold in zip(boxes, answer, strict=True)]


class Length(ORM):
    """A reward that hardly ever is the same throughout a group."""

    def __call__(self, completions, **_):
        return [-len(text) / 8 for text in completions]


class Sometimes(Length):
    """None for completions that end on an odd digit."""

    def __call__(self, completions, **_):
        scores = super().__call__(completions)
        odd = [text.rstrip("}")[-1:] in "13579" for text in completions]
        return [None if no else score for no, score in zip(odd, scores, strict=True)]


class Again(MultiTurnScheduler):
    """Whatever the first answer is, the same sum is asked for once more."""

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "+1"})
        return {"infer_request": infer_request}

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn >= 2


orms |= {"tiny": Tiny, "length": Length, "sometimes": Sometimes}
multi_turns["again"] = Again
register_template(
    TemplateMeta("tiny", [], ["{{QUERY}}="], [["eos_token_id"]], suffix=[["eos_token_id"]]),
    exist_ok=True,
)
