"""Forward hooks that flatten any output to a tuple for torch's wrappers, and restore it afterwards.

DDP searches the output for tensors if it looks for unused parameters or has a static graph; FSDP and DeepSpeed attach backward
hooks to the tensors. They search tuples, lists, dicts and some dataclasses, but miss tensors in other objects, and then reduce
gradients too early, twice, or never.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.base.errors import UsageError
from echelon.distributed.tree import contents, leaves, map_tensors
from echelon.distributed.uncompiled import uncompiled

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_NOTHING: Any = object()


def _is_searched(output: Any) -> bool:
    """Return whether torch finds every tensor in the containers in ``output``."""
    if isinstance(output, torch.Tensor):
        return True
    held = contents(output)
    if held is None:
        return True  # nested in another object, such as a cache
    if type(output) in (tuple, list) or (isinstance(output, tuple) and hasattr(output, "_fields")):
        return all(map(_is_searched, held))
    if type(output) is dict:
        return all(map(_is_searched, output.values()))
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves(output))


def _attributes_of(output: Any) -> dict[str, Any]:
    """Return an object's attributes, or an empty dict for containers and plain values."""
    is_object = contents(output) is None and not isinstance(output, (torch.Tensor, type, nn.Module, *_SCALARS))
    return dict(getattr(output, "__dict__", {})) if is_object else {}


def output_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors in an output's containers, or in its attributes if it is not a container."""
    held = _attributes_of(output) or output
    return [leaf for leaf in leaves(held) if isinstance(leaf, torch.Tensor)]


def replace_output_tensors(output: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Return ``output`` with its ``output_tensors`` replaced. An output that is not a container is modified in place."""
    given = iter(tensors)
    attributes = _attributes_of(output)
    if not attributes:
        return map_tensors(lambda _: next(given), output)
    for name, value in map_tensors(lambda _: next(given), attributes).items():
        if value is not attributes[name]:
            setattr(output, name, value)
    return output


class _FlattenHooks:
    """A pair of forward hooks; hooks that are registered between them receive a tuple of tensors."""

    def __init__(self) -> None:
        self._output: Any = _NOTHING

    def flatten(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Return the tensors in ``output``, or None (no change) if torch finds them itself."""
        self._output = _NOTHING
        if _is_searched(output) and not _attributes_of(output):
            return None
        tensors = output_tensors(output)
        if not tensors:
            return None
        self._output = output
        return tuple(tensors)

    def restore(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Return the original output with its tensors replaced by those that the hooks in between returned."""
        original, self._output = self._output, _NOTHING
        if original is _NOTHING or not isinstance(output, tuple):  # not a tuple if the forward pass failed
            return None
        return replace_output_tensors(original, output)


class flatten_outputs_for_hooks:
    """Context in which newly registered forward hooks on ``module`` receive the tensors of any type of output."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hooks = _FlattenHooks()

    def __enter__(self) -> None:
        self._module.register_forward_hook(self._hooks.flatten)

    def __exit__(self, *_: object) -> None:
        self._module.register_forward_hook(self._hooks.restore)


class OutputFlattener:
    """Flattens a module's outputs for its wrapper (DDP or DeepSpeed), and restores them after the wrapper's forward pass."""

    def __init__(self, wrapper: nn.Module, module: nn.Module, *, where: str) -> None:
        self._where = where
        self._module = module
        self._flattening = _FlattenHooks()
        self._hook: RemovableHandle | None = None
        self.hooks = [
            wrapper.register_forward_pre_hook(self._begin),
            wrapper.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, _wrapper: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Registered per pass, so that it runs after the user's hooks and not when the user calls the bare module.
            self._hook = self._module.register_forward_hook(self._flatten_output)

    @uncompiled  # around the part of a compiled wrapper that torch does not compile, too
    def _flatten_output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        is_opaque = contents(output) is None and not isinstance(output, (torch.Tensor, *_SCALARS))
        if is_opaque and not output_tensors(output):
            raise UsageError(
                f"expected {type(module).__name__}'s forward pass to return tensors, whose hooks reduce the gradients, but "
                f"echelon found none in the {type(output).__name__} that it returned",
                where=self._where,
                do="return a tensor, a tuple, a dict or a dataclass, or remove these options",
            )
        return self._flattening.flatten(module, inputs, output)

    def _end(self, wrapper: nn.Module, inputs: Any, output: Any) -> Any:
        hook, self._hook = self._hook, None
        if hook is None:
            return None
        hook.remove()
        return self._restore_output(wrapper, inputs, output)

    @uncompiled
    def _restore_output(self, wrapper: nn.Module, inputs: Any, output: Any) -> Any:
        return self._flattening.restore(wrapper, inputs, output)


# ---- outputs of ranks without items ----------------------------------------------------------------------------------


class ZeroOutputGradients:
    """Removes nan from the gradients of watched models' outputs during certain backward passes, in which the loss has the weight 0.

    If ranks exchange activations (context, sequence or expert parallelism), the gradients of a rank's parameters also come from the other
    ranks' losses. On a rank without items they must not become zero, whereas those of its own loss, which may be nan (0 / 0), must.
    """

    def __init__(self) -> None:
        self._is_on = False

    def watch(self, model: nn.Module) -> Any:
        """Watch the outputs of ``model`` from its next forward pass; return the hook's handle."""
        return model.register_forward_hook(self._after_forward)

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in output_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._gradient)  # type: ignore[no-untyped-call]

    @uncompiled
    def _gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        # Of this rank's own loss, only nan is left (its weight is 0); of the others' losses, what they computed from this tensor.
        return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0) if self._is_on else None

    @contextmanager
    def zeros(self) -> Iterator[None]:
        """Return a context in which the loss of backward passes has the weight 0."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
