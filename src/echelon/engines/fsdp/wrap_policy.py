"""Selects a model's sharding units and ignored parameters."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

from torch import nn

from echelon.base.errors import ConfigError, UsageError
from echelon.engines.fsdp.options import ShardingOptions


def modules_to_shard(model: nn.Module, options: ShardingOptions) -> list[nn.Module]:
    """Return the modules inside ``model`` that become units, inner ones first.

    The function, the classes or the size in ``options`` selects the units. The default is the classes in the model's
    ``_no_split_modules`` (from transformers); without them, the model is one unit. A module whose parameters are tied to
    parameters outside it belongs to the surrounding unit, because both must be unsharded at the same time.

    Raises:
        ConfigError: the model has no module of a specified class.
    """
    inner = [module for _, module in model.named_modules() if module is not model]
    if options.wrap_fn is not None:
        chosen = [module for module in inner if options.wrap_fn(module)]
    elif options.wrap_classes:
        chosen = _of_classes(model, inner, options.wrap_classes)
    elif options.min_num_params:
        return _free_of_ties(model, _by_size(model, options.min_num_params))
    else:
        names = tuple(getattr(model, "_no_split_modules", None) or ())
        chosen = [module for module in inner if type(module).__name__ in names]
    return _free_of_ties(model, chosen[::-1])


def _of_classes(model: nn.Module, inner: list[nn.Module], classes: tuple[str | type, ...]) -> list[nn.Module]:
    kinds = tuple(kind for kind in classes if isinstance(kind, type))
    names = {kind for kind in classes if isinstance(kind, str)}
    present = {type(module).__name__ for module in inner}
    if names - present:
        raise ConfigError(
            f"{type(model).__name__} has no module of class {', '.join(sorted(names - present))}",
            where="the classes to wrap",
            do=f"choose from {', '.join(sorted(present))}",
        )
    return [module for module in inner if isinstance(module, kinds) or type(module).__name__ in names]


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return modules with at least ``least`` parameters, not counting the parameters of units inside them."""
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        rest = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(visit, module.children()))
        if module is model or rest < least or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return rest
        chosen.append(module)
        return 0

    visit(model)
    return chosen


def _free_of_ties(model: nn.Module, chosen: list[nn.Module]) -> list[nn.Module]:
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    tied = [modules for modules in owners.values() if len(modules) > 1]
    free = []
    for module in chosen:
        inside = {id(part) for part in module.modules()}
        if all(sum(id(owner) in inside for owner in modules) in (0, len(modules)) for modules in tied):
            free.append(module)
    return free


def ignored_parameters(model: nn.Module, ignored: Any) -> list[nn.Parameter]:
    """Return the parameters that are not sharded, selected by modules, parameters, a name pattern or a function.

    Raises:
        ConfigError: the pattern does not match any name.
    """
    if not ignored:
        return []
    if isinstance(ignored, str):
        pattern = re.compile(ignored)
        found = [p for name, module in model.named_modules() if pattern.fullmatch(name) for p in module.parameters()]
        found += [p for name, p in model.named_parameters() if pattern.fullmatch(name)]
    elif callable(ignored) and not isinstance(ignored, nn.Module):
        found = [p for module in model.modules() if ignored(module) for p in module.parameters()]
    else:
        items: Iterable[Any] = [ignored] if isinstance(ignored, (nn.Module, nn.Parameter)) else ignored
        own = {id(p) for p in model.parameters()}
        parts = [part.parameters() if isinstance(part, nn.Module) else [part] for part in items]
        found = [p for part in parts for p in part if id(p) in own]
    if isinstance(ignored, str) and not found:
        raise ConfigError(
            f"no module or parameter name in {type(model).__name__} matches {ignored!r}",
            where="the ignored modules",
            do="pass a regular expression that matches a full name from named_modules() or named_parameters()",
        )
    return list({id(p): p for p in found}.values())


def reject_sparse(model: nn.Module, unsharded: Container[int]) -> None:
    """Raise UsageError if a layer has sparse gradients, which torch cannot reduce-scatter. (torch's error does not name the layer.)"""
    for name, module in model.named_modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_sparse and module.weight.requires_grad and id(module.weight) not in unsharded:
            raise UsageError(
                f"{name or type(module).__name__} is an embedding with sparse=True, but fully_shard cannot reduce sparse gradients",
                where="prepare(), fsdp2 engine",
                do="create it with sparse=False, or use engine='ddp'",
            )
