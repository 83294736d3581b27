"""Interception of a trainer's private methods, whichever class overrides them, and a record of what
they return. No call is added."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def intercepted(trainer: Any, **interceptors: Callable[..., Any]) -> Iterator[None]:
    """Makes `trainer.NAME(…)` call `interceptor(method, …)`; `method` is the trainer's."""
    own = {name: vars(trainer)[name] for name in interceptors if name in vars(trainer)}
    for name, interceptor in interceptors.items():
        setattr(trainer, name, _bound(interceptor, getattr(trainer, name)))
    try:
        yield
    finally:
        for name in interceptors:
            delattr(trainer, name)
        vars(trainer).update(own)


def _bound(interceptor: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: interceptor(method, *args, **kwargs)


def evaluating(
    method: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Call `method(model, …)` with every module of the model in evaluation mode: log-probs of birth
    are those of the policy without dropout."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        return method(model, *args, **kwargs)
    finally:
        for module in training:
            module.training = True


class ForwardPasses:
    """Finds the forward pass that a host's loss was computed from, and the tokens that it clipped.

    Let the host compute its loss with `old_BT`, the log-probs of birth with a gradient, in place of
    its own, intercept its method that returns log-probs and entropies [B, T] by `record`, and call
    `trace` with the loss."""

    def __init__(self, old_BT: torch.Tensor) -> None:
        """`old_BT` are the log-probs of birth; here they become a leaf that collects a gradient."""
        self.old_BT = old_BT.detach().float().requires_grad_()
        self.outputs: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """The log-probs and entropies [B, T] of that pass; None if there was no or more than
        one."""
        self.clipped_BT: torch.Tensor | None = None
        """Bool [B, T]: the ratio has no gradient although the advantage is not 0."""
        self._recorded: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def record(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the method, and keep what it returns if it has a gradient and the loss's rows."""
        result = method(*args, **kwargs)
        if result[0].requires_grad and result[0].shape == self.old_BT.shape:
            self._recorded.append(result[:2])
        return result

    def trace(self, loss: torch.Tensor, advantages: torch.Tensor) -> None:
        """Set `outputs`, those of the one forward pass that the loss depends on, and `clipped_BT`,
        where a token with an advantage ([B] or [B, T]) gets no gradient; none in a loss without a
        ratio (cispo). Sets nothing if it depends on several. Costs the loss's backward pass, not
        the model's."""
        inputs = [self.old_BT, *(logprobs for logprobs, _ in self._recorded)]
        gradients = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        old_gradient_BT, *pass_gradients = gradients
        used = [i for i, gradient in enumerate(pass_gradients) if gradient is not None]
        if len(used) != 1:
            return
        self.outputs = self._recorded[used[0]]
        if old_gradient_BT is None:
            self.clipped_BT = torch.zeros_like(self.old_BT).bool()
            return
        has_advantage = advantages != 0
        if has_advantage.dim() == 1:
            has_advantage = has_advantage[:, None]
        self.clipped_BT = (old_gradient_BT == 0) & has_advantage
