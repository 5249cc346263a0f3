"""Float32 master weights for models whose weights were loaded in bf16 or fp16 (``master_weights``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from echelon.base.errors import UsageError
from echelon.base.sharded import is_dtensor
from echelon.engines.state_dicts import plain_name
from echelon.precision.policy import LOW_PRECISION

# Their kernels do not take float32 inputs with low-precision weights (RMSNorm's do).
_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class MasterWeights:
    """The tensors that train in float32, and the dtypes in which they were loaded.

    Pickling yields an empty object, because tensors are identified by id, which a copy does not share.
    """

    def __init__(self) -> None:
        self._loaded = WeakIdKeyDictionary()  # tensor -> its dtype before the cast
        self._elsewhere: dict[str, torch.dtype] = {}  # on other stages of a pipeline, by name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __bool__(self) -> bool:
        return bool(self._loaded or self._elsewhere)

    def cast(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[torch.dtype]:
        """Cast the trained low-precision weights of ``model`` to float32 in place; return their dtypes before.

        The parameters stay the same objects, so optimizers, tied layers and hooks keep them. Their gradients are cast, too, and the
        buffers beside them (the statistics of a batch norm), because torch requires one dtype for both. Frozen norms are cast as well,
        because the layers before them may now return float32.

        Raises:
            UsageError: such a weight shares memory with another tensor, which would not follow it.
        """
        low = [p for p in model.parameters() if p.requires_grad and _is_castable(p)]
        dtypes = [p.dtype for p in low]
        if low:
            norms = [p for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)]
            low += {id(p): p for p in norms if not p.requires_grad and _is_castable(p)}.values()
        for same in _by_memory(model, low, optimizers) if low else ():
            dtype, data = same[0].dtype, same[0].detach().to(torch.float32)
            for parameter in same:
                _assign(parameter, data)
                self._loaded[parameter] = dtype
        for module in model.modules() if low else ():
            if isinstance(module, _NORMS) or any(p in self._loaded for p in module.parameters(recurse=False)):
                for buffer in module.buffers(recurse=False):
                    if buffer.dtype in LOW_PRECISION:
                        self._loaded[buffer] = buffer.dtype
                        buffer.data = buffer.data.to(torch.float32)
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()  # one piece of memory again, which cuDNN needs to be fast
        return dtypes

    def cast_state(self, optimizer: Optimizer) -> None:
        """Cast what ``optimizer`` already keeps in low precision for weights that were cast, as ``load_state_dict`` does."""
        for parameter, entries in optimizer.state.items():
            if parameter in self._loaded:
                entries |= {
                    key: value.to(torch.float32)
                    for key, value in entries.items()
                    if type(value) is torch.Tensor and value.dtype in LOW_PRECISION
                }

    def follow(self, before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Note which parameters of ``model`` have replaced those that it had ``before``."""
        for name, parameter in model.named_parameters():
            old = before.get(name)
            if old is not None and old is not parameter and old in self._loaded:
                self._loaded[parameter] = self._loaded[old]

    def follow_stages(self, model: nn.Module, ranks: int) -> None:
        """Note the dtypes of the weights on other stages of a pipeline. Collective: call on every rank."""
        found: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(found, self._by_name(model))
        for one in found:
            self._elsewhere |= one

    def loaded_dtypes(self, model: nn.Module) -> dict[str, torch.dtype]:
        """Return the dtypes in which the tensors that train in float32 were loaded, by name."""
        return {**self._elsewhere, **self._by_name(model)} if self else {}

    def as_loaded(self, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """Cast the tensors of ``state``, a new state dict of ``model``, to the dtypes in which they were loaded; return it."""
        dtypes = self.loaded_dtypes(model)
        done: dict[tuple[Any, ...], torch.Tensor] = {}  # tied weights stay tied
        for name, value in state.items():
            dtype = dtypes.get(name)
            if dtype is not None and isinstance(value, torch.Tensor):
                key = (id(value),) if is_dtensor(value) else (value.data_ptr(), value.shape, value.stride())
                if key not in done:
                    done[key] = value.to(dtype)
                state[name] = done[key]
        return state

    def _by_name(self, model: nn.Module) -> dict[str, torch.dtype]:
        found: dict[str, torch.dtype] = {}
        held: Iterable[tuple[str, torch.Tensor]] = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in held:
            if tensor in self._loaded:
                found[name] = found[plain_name(name)] = self._loaded[tensor]
        return found


def _is_castable(parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` is of low precision, and a plain tensor or a DTensor (quantized weights are neither)."""
    if nn.parameter.is_lazy(parameter) or parameter.dtype not in LOW_PRECISION:
        return False
    return is_dtensor(parameter) or type(parameter.detach()) is torch.Tensor


def _assign(parameter: nn.Parameter, data: torch.Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if is_dtensor(parameter):
        # Assigning to `.data` would leave the shard inside in the old dtype.
        new = nn.Parameter(data)
        vars(new).update(vars(parameter))
        torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
    else:
        parameter.data = data
    if gradient is not None:
        parameter.grad = gradient.to(torch.float32)


def _by_memory(
    model: nn.Module, low: Sequence[nn.Parameter], optimizers: Iterable[Optimizer]
) -> list[list[nn.Parameter]]:
    """Return ``low`` in groups: parameters that are the same memory are in one group, and stay the same memory.

    Raises:
        UsageError: one of them shares memory with another tensor in any other way.
    """
    owned = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    ids = {id(p) for p in low}
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    everything = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *owned)}
    # A tensor without values, or of several ranks, has no memory to compare.
    plain = [t for t in everything.values() if not is_dtensor(t) and not t.is_meta and t.numel() and _has_memory(t)]
    compared = {id(t) for t in plain}
    groups: list[list[Any]] = [[p] for p in low if id(p) not in compared]
    end, last = -1, None
    for tensor in sorted(plain, key=lambda t: t.data_ptr()):
        start = tensor.data_ptr()
        both = [one for one in (last, tensor) if one is not None and id(one) in ids]
        if last is not None and start < end and both:
            is_same = (start, tensor.shape, tensor.stride()) == (last.data_ptr(), last.shape, last.stride())
            if not is_same or len(both) < 2 or tensor.dtype != last.dtype:
                first, second = (names.get(id(one), "a parameter of the optimizer only") for one in (last, tensor))
                raise UsageError(
                    f"{first} and {second} share memory. A float32 copy of one would separate them, so the model would no longer be "
                    "the one that you built",
                    where="prepare(), master_weights='float32'",
                    do="use one nn.Parameter in both places, call model.float() before you share the memory, or set "
                    "master_weights='keep'",
                )
            groups[-1].append(tensor)
        elif id(tensor) in ids:
            groups.append([tensor])
        stop = start + _num_bytes(tensor)
        if stop >= end:
            end, last = stop, tensor
    return groups


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor.detach()) is torch.Tensor


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last element of ``tensor``."""
    return (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))) * tensor.element_size()
