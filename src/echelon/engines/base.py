"""The engine interface, which covers everything that depends on how a model is distributed over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.base.errors import UsageError
from echelon.engines.bitwise.tree_sum import ShardedUpdate
from echelon.world.world import World

__all__ = ["Engine", "Prepared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The result of ``Engine.prepare``, in the order of its arguments."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]


class Engine(ABC):
    """Distributes models and optimizers over the ranks. Callers may depend on ``capabilities``, but never on the class.

    An engine receives its world, loss scaler and options at construction. It does not depend on launching, data loading,
    configuration, storage or logging. To wrap another engine, derive from ``DelegatingEngine``.
    """

    @classmethod
    @abstractmethod
    def from_options(cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]) -> Engine:
        """Create the engine for ``world``. ``options`` are passed to torch's wrapper, if the engine uses one."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Properties of this engine that callers may depend on."""

    @property
    @abstractmethod
    def batch_axes(self) -> tuple[str, ...]:
        """Axes of the device mesh along which batches are split; empty if a single rank reads all batches."""

    @abstractmethod
    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Distribute ``models`` over the ranks, and connect ``optimizers`` and ``schedulers`` to the results.

        Collective: every rank, with the same objects in the same order.
        """

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of ``model`` only accumulate gradients, without communication."""

    @abstractmethod
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the backward pass synchronizes even if its forward passes ran in ``no_sync``.

        Collective: the backward pass in this context.
        """

    @abstractmethod
    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of batches after different numbers of steps."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """Backpropagate ``loss``, after loss scaling if the engine uses it. ``options`` are passed to autograd.

        Collective: if the pass synchronizes gradients.
        """

    @abstractmethod
    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        """Run ``backward`` on a rank without items: the gradients of all ``parameters`` that it reaches are zero.

        Multiplying the loss by zero would not work, because the mean over no items is NaN.

        Collective: like ``backward``.
        """

    @abstractmethod
    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """Perform an optimizer step; return False if the loss scaler skipped it.

        Unless ``unsynced``, gradients that were not synchronized are reduced first (the step guard).

        Collective: if the step guard has to reduce.
        """

    @property
    def is_shadow_step(self) -> bool:
        """Whether the engine itself performs the current optimizer step, on a rank without batches (see ``join``)."""
        return False

    def replaced_parameters(self) -> Sequence[torch.Tensor]:
        """Return the original parameters that ``prepare`` has replaced and that still exist."""
        return ()

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        """Reduce the gradients of ``optimizer`` that were not synchronized; return whether there were any.

        The step guard calls this before an unprepared optimizer steps. For prepared optimizers, ``step`` reduces the gradients.

        Collective: if there are unsynchronized gradients.

        Raises:
            UsageError: the step would be incorrect.
        """
        return False

    @abstractmethod
    def update_loss_scale(self) -> None:
        """Update the loss scale now rather than in the next backward pass. Call it before reading the state."""

    @abstractmethod
    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the gradients of ``optimizer``."""

    @abstractmethod
    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, once per step.

        Collective: if the step guard has to reduce, unless ``unsynced``.
        """

    @abstractmethod
    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        """Clip the gradients to a norm of at most ``max_norm`` over the whole model; return the norm before clipping.

        With ``unsynced`` (within an accumulation window), the norm is that of this rank's local gradients.

        Collective: if parameters are sharded, or the step guard has to reduce.
        """

    @abstractmethod
    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        """Clamp every gradient to ``[-clip_value, clip_value]``.

        Collective: if the step guard has to reduce.
        """

    @abstractmethod
    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        """Multiply the reduced gradients of ``model`` by ``factor``, once per update."""

    @abstractmethod
    def reduced(self, model: nn.Module) -> bool:
        """Return whether all gradients of ``model`` are synchronized."""

    def build_sharded_update(self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]]) -> ShardedUpdate:
        """Stop reducing gradients, and return an object that sums the gradients of all batch shards in a fixed order.

        Only for engines with ``Capabilities.sums_shards``.

        Args:
            num_shards: number of batch shards per update, over all ranks.
            parameters: returns the parameters that receive gradients.
        """
        raise UsageError(
            f"the engine {self.capabilities.name} cannot sum the gradients of batch shards in a fixed order",
            where="parity='bitwise'",
            do="use engine='ddp', or parity='exact'",
        )

    @abstractmethod
    def sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Return this rank's shard of the state of ``model`` and ``optimizers``, by plain parameter names."""

    @abstractmethod
    def load_sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """Load the result of ``sharded_state`` on the same number of ranks.

        Collective: if parameters are sharded.
        """

    @abstractmethod
    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        """Return the full state dict of ``model`` by plain parameter names; None on ranks other than zero if it is sharded.

        Collective: if parameters are sharded.
        """

    @abstractmethod
    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return the full state dict of ``optimizer`` with torch's numbers; None on ranks other than zero if it is sharded.

        Collective: if the state is sharded.
        """

    @abstractmethod
    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the result that ``full_optimizer_state`` of any engine gave on rank zero. Every rank passes the full state.

        Collective: if the state is sharded.
        """

    def parameter_groups(self, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        """Return the model's parameters in each group of ``optimizer``, in the order of the numbers in its full state."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def full_shape(self, parameter: torch.Tensor) -> torch.Size:
        """Return the unsharded shape of a parameter of a prepared model."""
        return parameter.shape

    @abstractmethod
    def release(self) -> None:
        """Drop all references to models and optimizers, so that their memory can be freed."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module inside ``model``."""
