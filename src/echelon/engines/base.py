"""The engine contract: everything that depends on how the model is distributed over the ranks, and nothing else."""

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
    """Distributes models and optimizers over the ranks. Callers may depend on ``capabilities`` only, never on the class.

    An engine gets its world, loss scaler and options at construction. It knows nothing of launching, data, configuration,
    storage or logging. To wrap another engine, derive from ``DelegatingEngine``.
    """

    @classmethod
    @abstractmethod
    def from_options(cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]) -> Engine:
        """Create the engine of ``world``; ``options`` go to torch's wrapper where there is one."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The facts about this engine that callers may depend on."""

    @property
    @abstractmethod
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of the device mesh along which batches are split; empty: one rank reads everything."""

    @abstractmethod
    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Distribute ``models`` over the ranks, and connect ``optimizers`` and ``schedulers`` to them.

        Collective: every rank, with the same objects in the same order.
        """

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of ``model`` only accumulate gradients, without communication."""

    @abstractmethod
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass synchronizes although its forward passes ran in ``no_sync``.

        Collective: the backward pass in it.
        """

    @abstractmethod
    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of batches at different steps."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """Backpropagate ``loss``, scaled for fp16 where the engine does that; ``options`` go to autograd.

        Collective: on a synchronizing pass.
        """

    @abstractmethod
    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        """Run ``backward`` with zero gradients for those of ``parameters`` that it reaches (a rank without items).

        Multiplying the loss by zero would not work: the mean over no items is NaN.

        Collective: as ``backward``.
        """

    @abstractmethod
    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """Take one optimizer step; return False if loss scaling skipped it.

        Unless ``unsynced``, gradients that were not synchronized are reduced first (the step guard).

        Collective: if the step guard has to reduce.
        """

    @property
    def is_shadow_step(self) -> bool:
        """Whether the running optimizer step is the engine's own, on a rank that has run out of batches (see ``join``)."""
        return False

    def replaced_parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters that ``prepare`` replaced by others and that are still alive."""
        return ()

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        """Reduce the gradients of ``optimizer`` that were not synchronized; return whether there were any.

        The step guard calls this before the step of an optimizer that was not prepared. ``step`` does it itself.

        Collective: if there are any.

        Raises:
            UsageError: such a step cannot be correct.
        """
        return False

    @abstractmethod
    def update_loss_scale(self) -> None:
        """Update the loss scale after the last steps, as the next backward pass would; call it before reading state."""

    @abstractmethod
    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the gradients of ``optimizer``."""

    @abstractmethod
    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        """Undo loss scaling on the gradients of ``optimizer``; further calls in the same step do nothing.

        Collective: if the step guard has to reduce, unless ``unsynced``.
        """

    @abstractmethod
    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``; return the norm before.

        With ``unsynced`` (within an accumulation window), the gradients are each rank's own.

        Collective: if parameters are sharded, or the step guard has to reduce.
        """

    @abstractmethod
    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        """Clamp every gradient to ``[-clip_value, clip_value]``.

        Collective: if the step guard has to reduce.
        """

    @abstractmethod
    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        """Multiply the reduced gradients of ``model`` by ``factor``: the only division of an update."""

    @abstractmethod
    def reduced(self, model: nn.Module) -> bool:
        """Return whether all gradients of ``model`` are synchronized."""

    def build_sharded_update(self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]]) -> ShardedUpdate:
        """Stop reducing gradients, and return what sums those of ``num_shards`` batch shards in a fixed order.

        Only for engines with ``Capabilities.sums_shards``.

        Args:
            num_shards: per update, over all ranks.
            parameters: returns the parameters that get gradients.
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
        """Load what ``sharded_state`` returned, on the same number of ranks.

        Collective: if parameters are sharded.
        """

    @abstractmethod
    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        """Return the full state dict of ``model`` by plain parameter names; if it is sharded, on rank zero only, else None.

        Collective: if parameters are sharded.
        """

    @abstractmethod
    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return the full state dict of ``optimizer`` in torch's numbering; if it is sharded, on rank zero only, else None.

        Collective: if the state is sharded.
        """

    @abstractmethod
    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what ``full_optimizer_state`` of any engine returned on rank zero; every rank passes the full state.

        Collective: if the state is sharded.
        """

    def parameter_groups(self, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        """Return the model's parameters in each group of ``optimizer``, in the numbering of its full state."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def full_shape(self, parameter: torch.Tensor) -> torch.Size:
        """Return the unsharded shape of a parameter of a prepared model."""
        return parameter.shape

    @abstractmethod
    def release(self) -> None:
        """Drop every model and optimizer, so that their memory can be freed."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module inside ``model``."""
