"""The engine interface, which covers everything that depends on how a model is distributed across ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.base.errors import UsageError
from echelon.engines.bitwise.tree_sum import ShardedUpdate
from echelon.world.world import World

if TYPE_CHECKING:
    from echelon.engines.pipeline_parallel.pipeline import PipelineStages  # slow to import


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The result of ``Engine.prepare``, in the order of its arguments."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LocalGradient:
    """Where a backward pass delivers this rank's gradient of one parameter."""

    leaf: torch.Tensor | None
    """Leaf of the autograd graph; None before the first forward pass, or if the ranks have no whole gradient."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are reduced across ranks; None: the gradient's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensor:
    """A tensor of a sharded model's state dict."""

    dtype: torch.dtype
    shape: torch.Size
    is_sharded: bool
    """Whether ranks hold shards of it. Of other tensors, the values of the first rank count; ranks may have different ones."""
    gather: Callable[[int], torch.Tensor | None]
    """Returns the full tensor on the CPU of the given rank, which holds a part of it, and None on other ranks. Collective: call on
    every rank that holds the same part of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedState:
    """The state dict of a sharded model, whose tensors are gathered one at a time."""

    names: Sequence[str]
    """All names in the state dict of the whole model, in its order."""
    aliases: Mapping[str, str]
    """Further names of tied weights, each with the first one."""
    tensors: Mapping[str, ShardedTensor]
    """The tensors of which this rank holds shards, by their first names."""
    part: int = 0
    """Which part of the model this rank holds: ranks with the same number have the same tensors."""


class Engine(ABC):
    """Distributes models and optimizers across ranks. Callers may depend on ``capabilities``, but never on the class.

    An engine gets its world, loss scaler and options when it is created. It does not depend on launching, data loading,
    configuration, storage or logging. To wrap another engine, derive from ``DelegatingEngine``.
    """

    @classmethod
    @abstractmethod
    def from_options(cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]) -> Engine:
        """Create the engine for ``world``. The engine passes ``options`` to torch's wrapper if it uses one."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Properties of this engine that callers may depend on."""

    @abstractmethod
    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Distribute ``models`` across ranks, and connect ``optimizers`` and ``schedulers`` to the results.

        Collective: call on every rank, with the same objects in the same order.
        """

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes through ``model`` accumulate gradients without communication."""

    @abstractmethod
    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the backward pass reduces gradients even if its forward passes ran in ``no_sync``.

        The backward pass in this context is collective.
        """

    @abstractmethod
    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context in which ranks may have different numbers of batches."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """Backpropagate ``loss``, scaled if the engine uses loss scaling. ``options`` are passed to autograd.

        Collective if the pass reduces gradients.
        """

    @abstractmethod
    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        """Run ``backward`` on a rank without items, so that all ``parameters`` it reaches get zero gradients.

        Multiplying the loss by zero would not work, because the mean of zero items is NaN.

        Collective under the same conditions as ``backward``.
        """

    @abstractmethod
    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """Perform an optimizer step; return False if the loss scaler skipped the step.

        Unless ``unsynced`` is True, unreduced gradients are reduced first (the step guard).

        Collective if the step guard reduces gradients.
        """

    @property
    def is_shadow_step(self) -> bool:
        """Whether the engine itself performs the current optimizer step: True if this rank has no batches left (see ``join``)."""
        return False

    def replaced_parameters(self) -> Sequence[torch.Tensor]:
        """Return the original parameters that ``prepare`` replaced and that are still referenced."""
        return ()

    def reduce_gradients(self, optimizer: Optimizer) -> bool:
        """Reduce the optimizer's unreduced gradients; return whether there were any.

        The step guard calls this before an unprepared optimizer steps. For prepared optimizers, ``step`` reduces the gradients.

        Collective if there are unreduced gradients.

        Raises:
            UsageError: the optimizer step would be incorrect.
        """
        return False

    @abstractmethod
    def update_loss_scale(self) -> None:
        """Update the loss scale now instead of in the next backward pass. Call this before reading the state."""

    @abstractmethod
    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the optimizer's gradients."""

    @abstractmethod
    def drop_update(self) -> None:
        """Forget the update in progress: unreduced gradients, and which gradients were unscaled. Those of optimizers are cleared."""

    @abstractmethod
    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        """Divide the optimizer's gradients by the loss scale, once per step.

        Collective if the step guard reduces gradients; with ``unsynced``, it never does.
        """

    @abstractmethod
    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        """Clip the gradients so that their total norm is at most ``max_norm``; return the norm before clipping.

        If ``unsynced`` is True (within an accumulation window), the norm covers only this rank's local gradients.

        Collective if parameters are sharded or the step guard reduces gradients.
        """

    @abstractmethod
    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        """Clamp every gradient to ``[-clip_value, clip_value]``.

        Collective if the step guard reduces gradients.
        """

    @abstractmethod
    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        """Multiply the model's reduced gradients by ``factor``, once per update."""

    @abstractmethod
    def reduced(self, model: nn.Module) -> bool:
        """Return whether all of the model's gradients are reduced."""

    def build_sharded_update(
        self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]], *, num_chunks: int = 1
    ) -> ShardedUpdate:
        """Stop reducing gradients, and return an object that sums the gradients of all batch shards in a fixed order.

        Only engines with ``Capabilities.sums_shards`` support this.

        Args:
            num_shards: number of batch shards per update, across all ranks.
            parameters: function that returns the parameters that receive gradients.
            num_chunks: number of canonical chunks of layers that tensor parallelism may split; 1 without.
        """
        raise UsageError(
            f"the {self.capabilities.name} engine cannot sum the gradients of batch shards in a fixed order",
            where="parity='bitwise'",
            do="use engine='ddp' or parity='exact'",
        )

    def use_pipeline(self, stages: PipelineStages) -> None:
        """Take ``stages.model`` as one rank's part of a model; call this before ``prepare``.

        Raises:
            UsageError: the engine does not support pipelines.
        """
        raise UsageError(
            f"the {self.capabilities.name} engine does not support pipeline parallelism",
            where="prepare_pipeline()",
            do="use Accelerator(parallelism_config=ParallelismConfig(pp_size=...)), which selects the fsdp2 engine",
        )

    def run_pipeline(self, stages: PipelineStages, run: Callable[[], None]) -> None:
        """Call ``run``, which computes all micro-batches, and then reduce their gradients once, unless inside ``no_sync``.

        Without gradients (``torch.no_grad``), this only runs forward passes.

        Collective: call on every rank.
        """
        raise UsageError(f"the {self.capabilities.name} engine does not support pipeline parallelism")

    @abstractmethod
    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        """Return the model's full state dict by plain parameter name, or, if it is sharded, None on ranks other than zero.

        Collective if parameters are sharded.
        """

    def sharded_state(self, model: nn.Module) -> ShardedState | None:
        """Return the model's state dict with tensors that are still sharded; None if it cannot be gathered one tensor at a time."""
        return None

    @abstractmethod
    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return the optimizer's full state dict in torch's format, or, if it is sharded, None on ranks other than zero.

        Collective if the state is sharded.
        """

    @abstractmethod
    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what any engine's ``full_optimizer_state`` returned on rank zero. Every rank passes the full state.

        Collective if the state is sharded.
        """

    def parameter_groups(self, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        """Return the parameters in each group of ``optimizer``, in the order in which its full state numbers them."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def local_gradients(self, parameters: Sequence[torch.Tensor]) -> list[LocalGradient]:
        """Return where the gradient of each parameter can be observed on this rank before it is reduced."""
        return [LocalGradient(parameter) for parameter in parameters]

    def share_random_states(self) -> bool:
        """Give ranks that hold parts of the same layers one RNG state, after each rank has loaded its own; return whether there are any.

        Collective: call on every rank.
        """
        return False

    def stepping_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer whose ``step`` updates this rank's parameters or shards."""
        return optimizer

    def free_gathered_weights(self) -> bool:
        """Free the whole weights that a forward pass has gathered, before the caller changes the shards; return whether it may have."""
        return False

    def keeps_buffers_equal(self, model: nn.Module) -> bool:
        """Return whether the ranks have equal buffers whenever the user's module inside ``model`` begins a training forward."""
        return False

    def full_shape(self, parameter: torch.Tensor) -> torch.Size:
        """Return the unsharded shape of a prepared model's parameter."""
        return parameter.shape

    @abstractmethod
    def release(self) -> None:
        """Drop all references to models and optimizers, so that their memory can be freed."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module inside ``model``."""
