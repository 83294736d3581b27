"""Listening to a trainer's private methods: the outermost override is called, wherever it stands in
the order of classes, and nothing is heard that was not computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def heard(trainer: Any, **listeners: Callable[..., Any]) -> Iterator[None]:
    """Within, `trainer.NAME(…)` is `listener(method, …)`, for each name of a method."""
    own = {name: vars(trainer)[name] for name in listeners if name in vars(trainer)}
    for name, listener in listeners.items():
        setattr(trainer, name, _bound(listener, getattr(trainer, name)))
    try:
        yield
    finally:
        for name in listeners:
            delattr(trainer, name)
        vars(trainer).update(own)


def _bound(listener: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: listener(method, *args, **kwargs)


def evaluating(
    method: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """What `method(model, …)` returns with every module of the model in evaluation mode: log-probs
    of birth are those of the policy, without dropout."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        return method(model, *args, **kwargs)
    finally:
        for module in training:
            module.training = True


class Forwards:
    """The log-probs and entropies that were computed for a loss; `made` are those that it was made
    of, None if they are of no or of several forward passes, or not of a completion's shape."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.made: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.gradient_BT: torch.Tensor | None = None
        self._found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def hear(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if result[0].requires_grad and result[0].shape == self.shape:
            self._found.append(result[:2])
        return result

    def trace(self, loss: torch.Tensor, tokens: torch.Tensor) -> bool:
        """Find `made` and the loss's gradient there. True if the loss depends on `tokens`. Costs
        the loss's own backward pass, not the model's."""
        inputs = [tokens, *(logprobs for logprobs, _ in self._found)]
        of_tokens, *gradients = torch.autograd.grad(
            loss, inputs, retain_graph=True, allow_unused=True
        )
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if len(used) == 1:
            self.made, self.gradient_BT = self._found[used[0]], gradients[used[0]]
        return of_tokens is not None
