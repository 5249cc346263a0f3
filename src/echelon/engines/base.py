"""The engine seam: everything that depends on how the model is spread over the ranks, and nothing else."""

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
    """What ``Engine.prepare`` gives back, in the order in which it was given."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]


class Engine(ABC):
    """How models and optimizers live on the ranks. Every member is required; what callers may know is ``capabilities``.

    An engine gets its world, precision and own options at construction. It knows nothing of launching, of data, of
    configuration, of storage or of logs.
    """

    @classmethod
    @abstractmethod
    def from_options(cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]) -> Engine:
        """Make the engine of ``world``; ``options`` are those of torch's wrapper where there is one."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The facts that the levels above may act on."""

    @property
    @abstractmethod
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of the device mesh along which batches are split."""

    @abstractmethod
    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Spread ``models`` over the ranks and tie ``optimizers`` and ``schedulers`` to them.

        Collective: every rank, with the same objects in the same order.
        """

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of ``model`` stay local: gradients are only accumulated."""

    @abstractmethod
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass is synchronised although its forward passes ran in ``no_sync``.

        Collective: the backward pass in it.
        """

    @abstractmethod
    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of batches at different steps."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """Backpropagate ``loss`` (scaled for fp16 where the engine does that); ``options`` go to autograd.

        Collective: on a synchronising pass.
        """

    @abstractmethod
    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        """Run ``backward`` so that those of ``parameters`` that it reaches get zeros (a rank without items).

        The loss times zero would not do: a mean over no items is NaN, and so is its product with zero.

        Collective: as ``backward``.
        """

    @abstractmethod
    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """Take one optimizer step; return False when loss scaling skipped it.

        Gradients that the other ranks have not seen are reduced first (the step guard), unless ``unsynced``.

        Collective: where the step guard has to reduce.
        """

    @property
    def steps_by_itself(self) -> bool:
        """Does the engine step an optimizer now without being asked, on a rank that has run out of batches?"""
        return False

    def replaced_parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters in whose place ``prepare`` has put others, as far as they live."""
        return ()

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        """Reduce what the other ranks have not seen of the gradients of ``optimizer``, which is going to step by itself.

        The step guard calls it for an optimizer that was not prepared; ``step`` does the same by itself.

        Returns:
            Was there something to reduce?

        Collective: where there was.

        Raises:
            UsageError: such a step cannot be right.
        """
        return False

    @abstractmethod
    def settle(self) -> None:
        """Finish what the last steps left for the next backward pass (the choice of the loss scale): before state is read."""

    @abstractmethod
    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the gradients of ``optimizer``."""

    @abstractmethod
    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        """Undo loss scaling on the gradients of ``optimizer``; a second time in one step is harmless.

        Collective: where the step guard has to reduce, unless ``unsynced``.
        """

    @abstractmethod
    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``; return that norm.

        In the middle of an accumulation window (``unsynced``) the gradients are still each rank's own.

        Collective: where parameters are sharded, or the step guard has to reduce.
        """

    @abstractmethod
    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        """Clamp every gradient to ``[-clip_value, clip_value]``.

        Collective: where the step guard has to reduce.
        """

    @abstractmethod
    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        """Multiply the reduced gradients of ``model`` by ``factor``: the one division of an update."""

    @abstractmethod
    def reduced(self, model: nn.Module) -> bool:
        """Tell whether the other ranks have seen all gradients of ``model``."""

    def open_shards(self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]]) -> ShardedUpdate:
        """Leave gradients alone from now on: what is returned sums those of ``num_shards`` shards in a fixed order.

        Not of every engine: ``Capabilities.sums_shards``.

        Args:
            num_shards: of an update, on all ranks together.
            parameters: returns those that get gradients.
        """
        raise UsageError(
            f"the engine {self.capabilities.name} cannot sum the gradients of shards in a fixed order",
            where="parity='bitwise'",
            do="use engine='ddp', or parity='exact'",
        )

    @abstractmethod
    def sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Return this rank's part of the state of ``model`` and ``optimizers``, by plain parameter names."""

    @abstractmethod
    def load_sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """Load what ``sharded_state`` returned.

        Collective: where parameters are sharded.
        """

    @abstractmethod
    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        """Return the whole state dict of ``model`` by plain parameter names; where it is sharded, None on ranks but zero.

        Collective: where parameters are sharded.
        """

    @abstractmethod
    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return the whole state dict of ``optimizer`` as torch numbers it; where it is sharded, None on ranks but zero.

        Collective: where the state is sharded.
        """

    @abstractmethod
    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what ``full_optimizer_state`` returned on rank zero, of any engine; every rank gives the whole state.

        Collective: where the state is sharded.
        """

    def parameter_groups(self, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        """Return the model's own parameters in each group of ``optimizer``, in the order of the numbers of its whole state."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def shape_of(self, parameter: torch.Tensor) -> torch.Size:
        """Return the whole shape of a parameter of a prepared model, which its own part of it need not show."""
        return parameter.shape

    @abstractmethod
    def release(self) -> None:
        """Forget every model and optimizer, so that their memory can be freed."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module inside ``model``."""
