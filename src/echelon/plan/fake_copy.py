"""Copies a model and its optimizer without their memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.engines.optimizer_copy import attribute_with_parameters, copy_optimizer
from echelon.engines.quantized_weights import wrapped_tensors
from echelon.plan.fake_run import fake_like
from echelon.plan.repeated_blocks import NotPeriodicError, RepeatedBlocks
from echelon.precision.policy import LOW_PRECISION

# As in accelerator/master_weights.py: their kernels do not take float32 inputs with low-precision weights.
_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def fake_model(
    model: nn.Module, mode: FakeTensorMode, *, masters: bool, repeated: Sequence[RepeatedBlocks] = ()
) -> tuple[nn.Module, dict[int, nn.Parameter], Mapping[int, Any]]:
    """Return a copy of ``model`` with fake parameters and buffers, and its parameters and all its objects by the id of the original ones.

    Args:
        masters: whether trained low-precision parameters, and what must follow them, are float32.
        repeated: lists of blocks, of which the copy has only those that are traced.

    Raises:
        NotPeriodicError: the model reaches blocks by other ways than the list.
        UsageError: the model cannot be copied.
    """
    left_out = [one.blocks[number] for one in repeated for number in one.left_out]
    kept = {module for one in repeated for block in one.traced for module in block.modules()}
    skipped = {module for block in left_out for module in block.modules()} - kept
    modules = [module for module in model.modules() if module not in skipped]
    to_float32 = {id(one) for one in cast_to_masters(model)} if masters else set[int]()
    memo: dict[int, Any] = {}
    fakes: dict[int, nn.Parameter] = {}
    for parameter in {p: None for module in modules for p in module.parameters(recurse=False)}:
        if isinstance(parameter, FakeTensor) or not wrapped_tensors(parameter):
            dtype = torch.float32 if id(parameter) in to_float32 else parameter.dtype
            fakes[id(parameter)] = memo[id(parameter)] = fake_parameter(parameter, mode, dtype)
    for buffer in {b: None for module in modules for b in module.buffers(recurse=False)}:
        memo[id(buffer)] = fake_like(buffer, mode, dtype=torch.float32 if id(buffer) in to_float32 else None)
    for module in modules:
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict) and any(map(_is_ours, hooks.values())):
                # They belong to the run that prepared the model.
                memo[id(hooks)] = type(hooks)((key, hook) for key, hook in hooks.items() if not _is_ours(hook))
    short = [(one, nn.ModuleList()) for one in repeated]
    memo |= {id(one.modules): blocks for one, blocks in short}
    try:
        copied = copy.deepcopy(model, memo)
        for one, blocks in short:
            blocks.extend(copy.deepcopy(block, memo) for block in one.traced)
    except Exception as error:  # of the model's own classes
        raise UsageError(
            _("{name} cannot be copied for a plan: {reason}", name=type(model).__name__, reason=error),
            do=_(
                "keep tensors that depend on weights out of the attributes of modules, and give modules with handles a __deepcopy__"
            ),
        ) from error
    if any(id(block) in memo for block in left_out):
        raise NotPeriodicError
    return copied, fakes, memo


def compiles_its_step(optimizer: Optimizer) -> bool:
    """Return whether ``step`` calls torch.compile, which cannot run fake tensors, and whose kernels have no temporaries."""
    return type(optimizer).__module__.startswith("torchao.")


def _is_ours(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", None)).startswith("echelon.")


def fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Parameter:
    """Return a fake copy of ``parameter``, with its attributes."""
    fake = fake_like(parameter, mode, dtype=dtype)
    with mode:
        nn.Parameter(fake)  # the next one has no weak reference of the mode (see FakeRun)
        new = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():  # such as the scales of 4-bit weights
        if name not in vars(new):  # a fake tensor's own attributes stay
            setattr(new, name, value)
    return new


def cast_to_masters(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers that ``master_weights="float32"`` makes float32 (see ``MasterWeights.cast``)."""
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype in LOW_PRECISION]
    if not trained:
        return
    cast = {id(p) for p in trained}
    yield from trained
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        is_norm = isinstance(module, _NORMS)
        if is_norm:
            yield from (p for p in own if not p.requires_grad and p.dtype in LOW_PRECISION)
        if is_norm or any(id(p) in cast for p in own):
            yield from (b for b in module.buffers(recurse=False) if b.dtype in LOW_PRECISION)


def fake_optimizer(
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    fakes: dict[int, nn.Parameter],
    model: nn.Module,
    *,
    device: str,
) -> Optimizer:
    """Return a copy of ``optimizer`` without state for the parameters of ``model``, as it would step them on ``device``.

    Raises:
        UsageError: a copy would not step as the optimizer does.
    """
    if isinstance(optimizer, Optimizer):
        attribute = attribute_with_parameters(optimizer)
        if attribute is not None:
            raise UsageError(
                _(
                    "{name} cannot be copied for a plan: its attribute {attribute!r} refers to parameters or to an optimizer",
                    name=type(optimizer).__name__,
                    attribute=attribute,
                ),
                do=_("plan with the optimizer inside it"),
            )
        groups = [
            {**group, "params": [fakes[id(p)] for p in group["params"] if id(p) in fakes]}
            for group in optimizer.param_groups
        ]
        copied = copy_optimizer(optimizer, groups)
        for name, value in vars(copied).items():
            # Such as bitsandbytes' tables of codes, which its first step fills.
            if type(value) is dict and name != "state":
                setattr(copied, name, dict(value))
    else:
        copied = optimizer(p for p in model.parameters() if p.requires_grad)
    for group in copied.param_groups if device == "cuda" else ():
        # What torch chooses on CUDA if nothing is said (torch.optim.optimizer: foreach before the single-tensor loop).
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    return copied
