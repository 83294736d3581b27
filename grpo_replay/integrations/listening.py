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
    """Which forward pass a loss was made of, and what it depends on: let the host compute it with
    `old_BT`, the log-probs of birth with a gradient, in place of its own, and hear the method that
    makes log-probs and entropies [B, T]."""

    def __init__(self, old_BT: torch.Tensor) -> None:
        self.old_BT = old_BT.detach().float().requires_grad_()
        self.made: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """Its log-probs and entropies [B, T]; None if they are of no or of several passes."""
        self.clipped_BT: torch.Tensor | None = None
        """Where the ratio has no gradient although the advantage is not 0."""
        self._found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def hear(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if result[0].requires_grad and result[0].shape == self.old_BT.shape:
            self._found.append(result[:2])
        return result

    def trace(self, loss: torch.Tensor, advantages: torch.Tensor) -> None:
        """Set `made` and `clipped_BT`, with the advantages [B] or [B, T] of the loss. Costs the
        backward pass of the loss, not the model's. A loss whose ratio has no gradient at all, as
        cispo's, clips nothing."""
        wanted = [self.old_BT, *(logprobs for logprobs, _ in self._found)]
        found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        of_old_BT, *of_pass = found
        used = [i for i, gradient in enumerate(of_pass) if gradient is not None]
        if len(used) == 1:
            self.made = self._found[used[0]]
            idle_BT = torch.zeros_like(of_pass[used[0]]) if of_old_BT is None else of_old_BT == 0
            idle_BT = idle_BT.bool()
            counts = advantages != 0
            self.clipped_BT = idle_BT & (counts[:, None] if counts.dim() == 1 else counts)
