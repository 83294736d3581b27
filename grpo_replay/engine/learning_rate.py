"""The learning rate of a training step: warm-up, then constant, linear or cosine.

A function of recipe and step alone: a resumed run needs no state, and follows a recipe that was
changed at the resume.
"""

import math

from grpo_replay.recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of all updates of training step `step`, counted from 1.

    With W warm-up steps of N, it is `learning_rate` times step/W up to step W. From step W + 1 on,
    the progress p = (step - 1 - W)/(N - W) rises from 0 to just below 1, and with the final
    fraction f the factor is `linear` 1 - (1 - f)·p, `cosine` f + (1 - f)·(1 + cos πp)/2
    (Loshchilov and Hutter, arXiv 1608.03983, without restarts). The last step still trains, also
    at f = 0.
    """
    settings, steps = recipe.optimizer, recipe.run.steps
    highest, warmup = settings.learning_rate, settings.warmup_steps
    if step <= warmup:
        return highest * (step / warmup)
    if settings.schedule == "constant":
        return highest
    progress = (step - 1 - warmup) / (steps - warmup)
    remaining = 1.0 - progress
    if settings.schedule == "cosine":
        remaining = (1.0 + math.cos(math.pi * progress)) / 2
    return highest * (settings.final_fraction + (1.0 - settings.final_fraction) * remaining)
