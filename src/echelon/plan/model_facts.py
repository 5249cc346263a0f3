"""Reads from a model what a plan needs: its parameters, their units, and what the optimizer keeps for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.engines.quantized_weights import unshardable_parameters, wrapped_tensors
from echelon.plan.facts import ModelFacts, ParameterFacts, TensorFacts
from echelon.plan.fake_run import tensors_in
from echelon.plan.parallel_facts import add_parallel_facts


def model_facts(
    model: nn.Module,
    units: Iterable[str],
    fakes: Mapping[int, nn.Parameter],
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
) -> ModelFacts:
    """Return the facts of ``model`` as it was loaded.

    Args:
        units: names of the modules that ``fully_shard`` shards as one.
        fakes: the parameters that ``optimizer`` holds, or those whose states stand for them, by the id of those of ``model``.
        groups: of the optimizer, with parameters of ``model`` or those in ``fakes``.
    """
    chosen = {*units}
    ordered = [name for name, _module in model.named_modules() if name in chosen]
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    numbers = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    # Tables that several parameters share, such as those of bitsandbytes, are those of the first one.
    holders = Counter(id(one) for state in optimizer.state.values() for one in {*tensors_in(state)})
    counted: set[int] = set()
    whole = {id(p) for p in unshardable_parameters(model, None).values()}
    found = []
    for key, parameter in parameters.items():
        fake = fakes.get(key, parameter)
        first, *others = names[key]
        kept = list({id(one): one for one in tensors_in(optimizer.state.get(fake, {}))}.values())
        state = [one for one in kept if holders[id(one)] == 1 or id(one) not in counted]
        counted.update(map(id, kept))
        found.append(
            ParameterFacts(
                name=first,
                tensor=_tensor_facts(parameter),
                is_trainable=parameter.requires_grad,
                unit=max((one for one in ordered if first.startswith(f"{one}.")), key=len, default=""),
                state=tuple(map(_tensor_facts, state)),
                other_names=tuple(others),
                group=numbers.get(key, numbers.get(id(fake))),
                is_shardable=key not in whole,
            )
        )
    facts = ModelFacts(
        parameters=tuple(found),
        buffers=tuple(map(_tensor_facts, model.buffers())),
        units=tuple(ordered),
        class_name=type(model).__name__,
    )
    return add_parallel_facts(model, facts)


def _tensor_facts(tensor: torch.Tensor) -> TensorFacts:
    inner = wrapped_tensors(tensor)
    plain = tensor.numel() * tensor.element_size()
    stored = sum(_num_bytes(one) for one in (inner.values() or [tensor]))
    return TensorFacts(
        tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), None if stored == plain else stored
    )


def _num_bytes(tensor: torch.Tensor) -> int:
    scales: Any = getattr(tensor, "quant_state", None)  # of bitsandbytes
    beside = (
        0
        if scales is None
        else sum(one.numel() * one.element_size() for one in scales.as_dict().values() if isinstance(one, torch.Tensor))
    )
    return tensor.numel() * tensor.element_size() + beside
