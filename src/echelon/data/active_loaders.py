"""Tracks which prepared loaders are being read, and notifies observers of their passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from echelon.data.exact.exact_batches import ExactOptions, PassPlan
from echelon.data.exact.global_batch_slices import Contribution
from echelon.distributed.checks.ungathered_metrics import UngatheredMetricsCheck

__all__ = ["PassTracker", "PassDriver", "LoaderOptions", "PassFacts", "ActiveLoaders"]

Loader = TypeVar("Loader", bound=DataLoader[Any])
"""``PreparedLoader``; a type variable to avoid an import cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options for reading and sharding loaders."""

    split_batches: bool = False
    """The loader's batch size is the global one; each batch is split between the ranks."""
    dispatch_batches: bool | None = None
    """Only rank zero reads, and sends batches to the others; None: for iterable datasets with device placement."""
    even_batches: bool = True
    """Fill the last step with the first samples, so that every rank makes the same number of steps."""
    use_seedable_sampler: bool = False
    """Derive the shuffled order from (seed, epoch) instead of the loader's generator."""
    data_seed: int | None = None
    """Seed of the seedable sampler; None: the run's seed."""
    non_blocking: bool = False
    """Copy batches to the device asynchronously (with pinned memory)."""
    already_sharded: bool | None = None
    """True: the loader already yields each rank's shard; False: shard it in any case; None: detect it."""
    use_stateful_dataloader: bool = False
    """Read with torchdata's StatefulDataLoader, whose state can be saved during a pass."""
    exact: ExactOptions | None = None
    """Options of the exact modes, in which batches are global and the sharding options above are ignored."""
    rng_types: tuple[str, ...] = ()
    """RNG states that are synchronized from rank zero at the start of a pass; ``generator`` always is."""


class PassDriver(ABC, Generic[Loader]):
    """Forms updates from the batches of loaders, in the exact modes."""

    @abstractmethod
    def plan_pass(self, starting: Loader | None = None) -> PassPlan:
        """Return the plan of a pass that would start now; ``starting``: the loader whose pass starts."""

    @abstractmethod
    def end_pass(self, loader: Loader, *, is_over: bool) -> None:
        """Handle the end of a pass of ``loader``; ``is_over``: it was read completely."""

    @abstractmethod
    def begin_pass(self, loader: Loader, plan: PassPlan) -> None:
        """Handle the start of a pass. Collective: if the ranks must agree on it."""

    @abstractmethod
    def begin_micro_step(self, loader: Loader, contribution: Contribution) -> None:
        """Handle a micro-batch of a training pass before it is yielded."""

    @property
    @abstractmethod
    def awaits_loss(self) -> bool:
        """Whether the backward pass of a micro-step other than the first is pending."""

    @abstractmethod
    def note_cleared(self) -> None:
        """Record that a prepared optimizer has cleared its gradients."""

    @property
    @abstractmethod
    def drives(self) -> bool:
        """Whether a loader determines where the update ends."""

    @property
    @abstractmethod
    def micro_step(self) -> int:
        """Number of the current micro-step in its update, starting at 1."""

    @property
    @abstractmethod
    def num_items(self) -> float | None:
        """Number of items of this rank in the current micro-step; None before its first loss."""

    @property
    @abstractmethod
    def place(self) -> tuple[int, int]:
        """Index and number of terms for adding the current micro-step to a sum that must not depend on the ranks."""

    @abstractmethod
    def evaluating_again(self, who: str) -> AbstractContextManager[None]:
        """Return a context in which additional losses of the current micro-step are not counted.

        Args:
            who: name of the caller that evaluates the loss again.
        """


class PassTracker(ABC, Generic[Loader]):
    """Records the progress of the passes of a run."""

    @abstractmethod
    def begin_pass(self, loader: Loader) -> PassFacts:
        """Handle the start of a pass, and return its facts."""

    @abstractmethod
    def begin_batch(self, loader: Loader) -> None:
        """Handle a batch before it is yielded and before the next one is read."""

    @abstractmethod
    def end_batch(self, loader: Loader) -> None:
        """Handle the end of the loop body for the current batch."""

    @abstractmethod
    def unfinished_update(self, loader: Loader) -> dict[str, Any] | None:
        """Return the ``record`` of the position at which the unfinished update started; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFacts:
    """Facts about a pass of a run."""

    epoch: int
    """Epoch of the run."""
    trains: bool
    """Whether it is a training pass, not an evaluation."""
    outlives_epochs: bool = False
    """Whether passes of this loader have continued from one epoch into the next."""

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> PassFacts:
        """Return the facts from the ``record`` of a pass."""
        return PassFacts(epoch=record["epoch"], trains=record["trains"], outlives_epochs=record["outlives_epochs"])


class ActiveLoaders(Generic[Loader]):
    """The prepared loaders that are being read, innermost last."""

    __slots__ = ("driver", "joined", "loaders", "metrics", "owner", "tracker")

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        """The ``GradientState`` that owns this object; None without an Accelerator."""
        self.loaders: list[Loader] = []
        self.metrics = UngatheredMetricsCheck("Use accelerator.reduce(total), or gather_for_metrics(...) in the loop")
        self.driver: PassDriver[Loader] | None = None
        self.tracker: PassTracker[Loader] | None = None
        self.joined = False
        """Whether ``join_uneven_inputs`` is active: ranks without more data then join the collectives of the others."""

    def make_innermost(self, loader: Loader) -> None:
        """Make ``loader``, which is about to yield a batch, the innermost one."""
        loaders = self.loaders
        if loaders[-1] is not loader:  # several iterators are open at once
            loaders.remove(loader)
            loaders.append(loader)

    def __getstate__(self) -> dict[str, Any]:
        return {"owner": self.owner}  # a copy has no active loaders and no driver

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["owner"])  # type: ignore[misc]

    @property
    def innermost(self) -> Loader | None:
        """The loader that yielded the latest batch; in nested loops, that of the innermost loop."""
        return self.loaders[-1] if self.loaders else None
