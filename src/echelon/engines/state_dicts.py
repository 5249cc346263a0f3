"""State dicts with plain parameter names, which lack the prefix that ``torch.compile`` adds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

_COMPILED = "_orig_mod."


def plain_name(name: str) -> str:
    """Return ``name`` without the prefixes that ``torch.compile`` adds."""
    return name.replace(_COMPILED, "")


def plain_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of ``module`` with their plain names."""
    return [(plain_name(name), parameter) for name, parameter in module.named_parameters()]


def plain_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``module`` with plain names."""
    state = module.state_dict()
    if not any(_COMPILED in name for name in state):
        return state
    plain = OrderedDict((plain_name(name), value) for name, value in state.items())
    metadata = getattr(state, "_metadata", {})  # format versions, by module
    plain._metadata = {plain_name(f"{name}.")[:-1]: value for name, value in metadata.items()}  # type: ignore[attr-defined]
    return plain


def load_plain_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load the result of ``plain_state_dict``, no matter which parts of ``module`` are compiled."""
    own = {plain_name(name): name for name in module.state_dict()}
    is_plain = all(name == plain for plain, name in own.items())
    renamed = state if is_plain else {own.get(name, name): value for name, value in state.items()}
    module.load_state_dict(renamed, strict=strict)


def collect_named_state(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the states of ``module`` and ``optimizers`` by plain parameter name."""
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


def load_named_state(module: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
    """Load the result of ``collect_named_state``."""
    load_plain_state_dict(module, state["model"])
    parameters = dict(plain_parameters(module))
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        # Optimizer.load_state_dict numbers parameters in the order of the groups, and moves the state to their device.
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
