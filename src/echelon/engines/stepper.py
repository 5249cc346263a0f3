"""What the engines that keep models whole share: stepping with an optional loss scaler, clipping, and plain state dicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = [
    "Stepper",
    "clip_gradients",
    "load_plain_state_dict",
    "load_state",
    "multiply_gradients",
    "plain_name",
    "plain_parameters",
    "plain_state_dict",
    "state_of",
    "zeros_for",
]


class Stepper:
    """Optimizer steps under an optional ``torch.amp.GradScaler``; knows whether a step was really taken."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def step(self, optimizer: Optimizer, closure: Any = None) -> bool:
        """Step ``optimizer``; False when its gradients were infinite and the scaler left it out."""
        if self.scaler is None:
            optimizer.step(closure) if closure is not None else optimizer.step()
            return True
        if id(optimizer) in self._stepped:
            self.settle()
        # GradScaler refuses a closure with its own clear message.
        self.scaler.step(optimizer, closure) if closure is not None else self.scaler.step(optimizer)
        self._stepped.add(id(optimizer))
        # Not by a step hook: a fused optimizer is called in any case and skips inside its kernel. The scaler itself
        # reads these numbers on the host, so this waits for nothing new (torch 2.7 to 2.13).
        found = self.scaler._found_inf_per_device(optimizer)
        return not any(value.item() for value in found.values())

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


@contextmanager
def zeros_for(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let backward passes in the block bring zeros to those of ``parameters`` that they reach."""
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def multiply_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply every gradient by ``factor``, in place and in few kernels."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``; return the norm before, 0-d.

    Source: torch.nn.utils.clip_grad_norm_, the same numbers bit for bit; half of its time on small models goes into
    sorting tensors by device and dtype, which one device and dtype need not.
    """
    owners = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in owners if p.grad is not None]
    kinds = {(g.device, g.dtype, type(g)) for g in gradients}
    if norm_type != 2.0 or len(kinds) != 1 or next(iter(kinds))[2] is not torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(owners, max_norm, norm_type=norm_type)
    with torch.no_grad():
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm  # type: ignore[no-any-return]


def plain_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``module`` by the names without ``torch.compile``, which puts its own between them."""
    state = module.state_dict()
    if not any(_COMPILED in name for name in state):
        return state
    plain = OrderedDict((plain_name(name), value) for name, value in state.items())
    metadata = getattr(state, "_metadata", {})  # the versions of the modules' formats, by module
    plain._metadata = {plain_name(f"{name}.")[:-1]: value for name, value in metadata.items()}  # type: ignore[attr-defined]
    return plain


def load_plain_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load what ``plain_state_dict`` returned, whichever parts of ``module`` are compiled now; not ``strict``: a part of it."""
    own = {plain_name(name): name for name in module.state_dict()}
    is_plain = all(name == plain for plain, name in own.items())
    renamed = state if is_plain else {own.get(name, name): value for name, value in state.items()}
    module.load_state_dict(renamed, strict=strict)


def plain_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of ``module`` by the names of ``plain_state_dict``."""
    return [(plain_name(name), parameter) for name, parameter in module.named_parameters()]


_COMPILED = "_orig_mod."


def plain_name(name: str) -> str:
    """Return ``name`` without what ``torch.compile`` puts into it."""
    return name.replace(_COMPILED, "")


def state_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the state of ``module`` and of ``optimizers``, the latter by parameter name."""
    names = {id(p): name for name, p in plain_parameters(module)}
    return {
        "model": plain_state_dict(module),
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
    load_plain_state_dict(module, state["model"])
    parameters = dict(plain_parameters(module))
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
