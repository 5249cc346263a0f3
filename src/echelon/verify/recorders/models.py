"""Models as a recording knows them: plain names of their parameters, and shapes of the whole parameters."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from echelon.base.sharded import is_fsdp_module
from echelon.engines.param_groups import fsdp_groups
from echelon.verify.recorders.user_code import lines_of_modules
from echelon.verify.trace import Model

_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_WRAPPER_LIBRARIES = ("torch", "deepspeed", "echelon")


class RecordedModel:
    """A model without its wrappers, and the names of its parameters. A sharded parameter is the shard, as in the optimizer."""

    def __init__(self, root: nn.Module, *, index: int) -> None:
        self.root = root
        self.index = index
        self.roots: list[nn.Module] = []
        """The model, and parts of it that were called on their own."""
        self.parameters: dict[str, nn.Parameter] = {}
        """Each under its first name."""
        self.tied: dict[str, str] = {}
        """Other names of parameters, and their first names."""
        self._names: dict[int, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the parameters again, after some were replaced."""
        self.parameters.clear()
        self.tied.clear()
        self._names.clear()
        self._is_sharded = any(map(is_fsdp_module, self.root.modules()))
        shards = {id(whole): shard for shard, whole in self.unsharded_parameters()}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            parameter = shards.get(id(parameter), parameter)
            first = self._names.setdefault(id(parameter), plain_name(name))
            if first == plain_name(name):
                self.parameters[first] = parameter
            else:
                self.tied[plain_name(name)] = first

    def unsharded_parameters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return the shard of each parameter that ``fully_shard`` has gathered at least once, and the parameter that autograd sees."""
        if not self._is_sharded:
            return []
        records = [record for group in fsdp_groups(self.root) for record in group.fsdp_params]
        pairs = [(record.sharded_param, getattr(record, "_unsharded_param", None)) for record in records]
        return [(shard, whole) for shard, whole in pairs if whole is not None]

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter, or None if it is none of this model's."""
        return self._names.get(id(parameter))

    def is_stale(self) -> bool:
        """Return whether the first parameter was replaced since ``refresh``."""
        first = next(self.root.parameters(), None)
        if first is None or id(first) in self._names:
            return False
        if not self._is_sharded:
            return True
        return id(first) not in {id(whole) for _, whole in self.unsharded_parameters()}

    def contains(self, module: nn.Module) -> bool:
        """Return whether all parameters of ``module`` are parameters of this model."""
        return all(id(parameter) in self._names for parameter in module.parameters())

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name."""
        return {plain_name(name): buffer for name, buffer in self.root.named_buffers()}


def model_event(model: RecordedModel) -> Model:
    """Return the event that describes ``model``."""
    parameters, accelerator = model.parameters, _accelerator()
    classes = {}
    for name, module in model.root.named_modules():
        if isinstance(module, (_BatchNorm, _DropoutNd)) or not any(True for _ in module.children()):
            classes[plain_name(name)] = type(module).__name__
    return Model(
        model=model.index,
        parameters=list(parameters),
        dtypes=[str(one.dtype).removeprefix("torch.") for one in parameters.values()],
        tied=dict(model.tied),
        buffers=list(model.buffers()),
        module_classes=classes,
        lines={plain_name(name): line for name, line in lines_of_modules(model.root).items()},
        training=model.root.training,
        parity="off" if accelerator is None else accelerator.parity,
        engine="" if accelerator is None else accelerator.capabilities.name,
    )


def _accelerator() -> Any:
    """Return the newest Accelerator, or None; echelon's Trainer has one, too."""
    module = sys.modules.get("echelon.accelerator.current")  # else the script uses none
    return None if module is None else next(module.living_accelerators(), None)


def plain_name(name: str) -> str:
    """Return ``name`` without prefixes of wrappers."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name


def without_wrappers(module: nn.Module) -> nn.Module:
    """Return the user's module inside ``DistributedDataParallel``, ``torch.compile`` and the like."""
    while True:
        inner = module._modules.get("_orig_mod")
        if inner is None and type(module).__module__.split(".")[0] in _WRAPPER_LIBRARIES:
            inner = module._modules.get("module") or module._modules.get("_fsdp_wrapped_module")
        if inner is None:
            return module
        module = inner
