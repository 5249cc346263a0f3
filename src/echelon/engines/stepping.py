"""What single and ddp share: stepping with an optional loss scaler, clipping, and plain state dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Stepper", "load_state", "multiply_gradients", "state_of"]


class Stepper:
    """Optimizer steps under an optional ``torch.amp.GradScaler``; knows whether a step was really taken."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        self._taken: set[int] = set()
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def watch(self, optimizer: Optimizer) -> None:
        """Note each real step of ``optimizer``: a scaler skips some and does not say so. Once per optimizer."""
        if self.scaler is not None:
            optimizer.register_step_post_hook(lambda owner, _args, _kwargs: self._taken.add(id(owner)))

    def step(self, optimizer: Optimizer, closure: Any = None) -> bool:
        """Step ``optimizer``; False when its gradients were infinite and the scaler left it out."""
        if self.scaler is None:
            optimizer.step(closure) if closure is not None else optimizer.step()
            return True
        if id(optimizer) in self._stepped:
            self.settle()
        self._taken.discard(id(optimizer))
        # GradScaler refuses a closure with its own clear message.
        self.scaler.step(optimizer, closure) if closure is not None else self.scaler.step(optimizer)
        self._stepped.add(id(optimizer))
        return id(optimizer) in self._taken

    def settle(self) -> None:
        """Let the scaler choose its next scale, once after the steps of all optimizers.

        A second optimizer must still be unscaled by the scale of its own backward, so this waits for the next one.
        Source: torch.amp.GradScaler.update ("once, after all optimizers used this iteration have been stepped").
        """
        if self.scaler is not None and self._stepped:
            self.scaler.update()
            self._stepped.clear()
            self._unscaled.clear()

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the loss scale once per step, as ``GradScaler.unscale_``, which refuses a second time."""
        if self.scaler is not None and id(optimizer) not in self._unscaled:
            if id(optimizer) in self._stepped:
                self.settle()
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to backpropagate."""
        if self.scaler is None:
            return loss
        self.settle()
        return self.scaler.scale(loss)


def multiply_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply every gradient by ``factor``, in place and in few kernels."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def state_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the state of ``module`` and of ``optimizers``, the latter by parameter name."""
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        "model": module.state_dict(),
        "optimizers": [
            {
                "state": {names[id(p)]: dict(o.state[p]) for g in o.param_groups for p in g["params"] if p in o.state},
                "param_groups": [
                    {**{k: v for k, v in g.items() if k != "params"}, "params": [names[id(p)] for p in g["params"]]}
                    for g in o.param_groups
                ],
            }
            for o in optimizers
        ],
    }


def load_state(module: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
    """Load what ``state_of`` returned."""
    module.load_state_dict(state["model"])
    parameters = dict(module.named_parameters())
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        # Optimizer.load_state_dict numbers parameters in the order of the groups, and casts the state to their device.
        order = [name for group in saved["param_groups"] for name in group["params"]]
        number = {name: i for i, name in enumerate(order)}
        assert [id(parameters[n]) for n in order] == [id(p) for g in optimizer.param_groups for p in g["params"]], order
        optimizer.load_state_dict(
            {
                "state": {number[name]: values for name, values in saved["state"].items()},
                "param_groups": [
                    {**group, "params": [number[name] for name in group["params"]]} for group in saved["param_groups"]
                ],
            }
        )
