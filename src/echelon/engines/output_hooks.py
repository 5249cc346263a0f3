"""Outputs of forward passes in which torch's wrappers find no tensors: given to them as a tuple, and put together again.

DDP looks for the tensors of an output where it searches for unused parameters, or has a static graph; FSDP and DeepSpeed hang
their backward pass on them. They know tuples, lists, dicts and some dataclasses, and take other objects for what holds none:
gradients are then reduced too early, twice, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.base.errors import UsageError
from echelon.distributed.tree import contents, leaves, map_tensors

__all__ = ["SightOfOutputs", "show_outputs_to_hooks", "tensors_of", "with_tensors"]

_SCALARS = (type(None), bool, int, float, complex, str, bytes)


def _is_seen(output: Any) -> bool:
    """Does torch find every tensor of ``output`` that can be found?"""
    if isinstance(output, torch.Tensor):
        return True
    held = contents(output)
    if held is None:
        return True  # nested in something else: a cache, say
    if type(output) in (tuple, list) or (isinstance(output, tuple) and hasattr(output, "_fields")):
        return all(map(_is_seen, held))
    if type(output) is dict:
        return all(map(_is_seen, output.values()))
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves(output))


def _attributes_of(output: Any) -> dict[str, Any]:
    """Return the attributes of an object that is no container; empty for what has none of its own."""
    is_object = contents(output) is None and not isinstance(output, (torch.Tensor, type, nn.Module, *_SCALARS))
    return dict(getattr(output, "__dict__", {})) if is_object else {}


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output: of containers, and of the attributes of an object that is none."""
    held = _attributes_of(output) or output
    return [leaf for leaf in leaves(held) if isinstance(leaf, torch.Tensor)]


def with_tensors(output: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Return ``output`` with ``tensors`` in the place of ``tensors_of(output)``; an object that is no container is changed."""
    given = iter(tensors)
    attributes = _attributes_of(output)
    if not attributes:
        return map_tensors(lambda _: next(given), output)
    for name, value in map_tensors(lambda _: next(given), attributes).items():
        if value is not attributes[name]:
            setattr(output, name, value)
    return output


class _Taken:
    """Forward hooks around somebody else's: what they see is a tuple of tensors."""

    def __init__(self) -> None:
        self._output: Any = _NOTHING

    def take(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Return the tensors of ``output``; None (no change) where torch sees them."""
        self._output = _NOTHING
        if _is_seen(output) and not _attributes_of(output):
            return None
        tensors = tensors_of(output)
        if not tensors:
            return None
        self._output = output
        return tuple(tensors)

    def put_back(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Return what was taken, with the tensors that have become of its own."""
        taken, self._output = self._output, _NOTHING
        if taken is _NOTHING or not isinstance(output, tuple):  # not: the forward pass has failed in between
            return None
        return with_tensors(taken, output)


class show_outputs_to_hooks:
    """A context in which somebody registers forward hooks of ``module``: they see the tensors of any output."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._taken = _Taken()

    def __enter__(self) -> None:
        self._module.register_forward_hook(self._taken.take)

    def __exit__(self, *_: object) -> None:
        self._module.register_forward_hook(self._taken.put_back)


class SightOfOutputs:
    """Lets the wrapper of a module (DDP's, DeepSpeed's) see the tensors of any output, where it looks for them."""

    def __init__(self, wrapper: nn.Module, module: nn.Module, *, where: str) -> None:
        self._where = where  # in the user's terms
        self._module = module
        self._taken = _Taken()
        self._hook: RemovableHandle | None = None
        self.hooks = [
            wrapper.register_forward_pre_hook(self._begin),
            wrapper.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, _wrapper: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # For this pass alone: behind hooks that the script has registered by now, and not where it calls the bare module.
            self._hook = self._module.register_forward_hook(self._take)

    def _take(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        is_opaque = contents(output) is None and not isinstance(output, (torch.Tensor, *_SCALARS))
        if is_opaque and not tensors_of(output):
            kind = type(output)
            raise UsageError(
                f"the forward pass of {type(module).__name__} returned a {kind.__name__}, in which no tensor is found: the "
                "gradients could not be reduced, which hangs on those of the output",
                where=self._where,
                do="return a tensor, a tuple, a dict or a dataclass, or use other options",
            )
        return self._taken.take(module, inputs, output)

    def _end(self, wrapper: nn.Module, inputs: Any, output: Any) -> Any:
        hook, self._hook = self._hook, None
        if hook is None:
            return None
        hook.remove()
        return self._taken.put_back(wrapper, inputs, output)


_NOTHING: Any = object()
