"""Tracks which prepared loaders are being iterated over, and notifies observers about their passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from echelon.base.messages.translation import gettext_noop as N_
from echelon.data.exact.exact_batches import ExactOptions
from echelon.data.global_batch_slices import Contribution, PassPlan
from echelon.distributed.checks.ungathered_metrics import UngatheredMetricsCheck

Loader = TypeVar("Loader", bound=DataLoader[Any])
"""Stands for ``PreparedLoader``; a type variable avoids an import cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options for iterating over loaders and sharding them."""

    split_batches: bool = False
    """Whether the loader's batch size is the global batch size, so that each batch is split across ranks."""
    dispatch_batches: bool | None = None
    """Whether only rank zero reads data and sends batches to the other ranks. If None, this applies to iterable datasets with
    device placement."""
    even_batches: bool = True
    """Whether to pad the last step with samples from the start of the pass, so that all ranks run the same number of steps."""
    use_seedable_sampler: bool = False
    """Whether to derive the shuffled order from (seed, epoch) instead of from the loader's generator."""
    data_seed: int | None = None
    """Seed for the seedable sampler. If None, the run's seed is used."""
    non_blocking: bool = False
    """Whether to copy batches to the device asynchronously, which requires pinned memory. On CUDA, batches that the loader pins
    (``pin_memory=True``) always are."""
    already_sharded: bool | None = None
    """Whether the loader already yields each rank's shard. If None, this is detected."""
    use_stateful_dataloader: bool = False
    """Whether to read with torchdata's StatefulDataLoader, whose state can be saved during a pass."""
    by_sample: bool = False
    """Whether to read samples one by one even if whole batches could be read."""
    exact: ExactOptions | None = None
    """Options for the exact modes, in which batches are global and the sharding options above are ignored."""
    rng_types: tuple[str, ...] = ()
    """RNG states that are synchronized from rank zero when a pass starts. ``generator`` is always synchronized."""


class PassDriver(ABC, Generic[Loader]):
    """Groups the loaders' batches into updates, in the exact modes."""

    @abstractmethod
    def plan_pass(self, starting: Loader | None = None) -> PassPlan:
        """Return the plan for a pass that starts now. ``starting`` is the loader whose pass starts."""

    @abstractmethod
    def end_pass(self, loader: Loader, *, is_over: bool) -> None:
        """Handle the end of a pass over ``loader``. ``is_over`` means that the pass reached the end of the data."""

    @abstractmethod
    def begin_pass(self, loader: Loader, plan: PassPlan) -> None:
        """Handle the start of a pass. Collective: call on every rank if the ranks must agree on the pass."""

    @abstractmethod
    def begin_micro_step(self, loader: Loader, contribution: Contribution) -> None:
        """Handle a training micro-batch before it is yielded."""

    @property
    @abstractmethod
    def awaits_loss(self) -> bool:
        """Whether the backward pass of a micro-step other than the first is pending."""

    @abstractmethod
    def note_zero_grad(self, optimizer: Optimizer, *, clears: bool) -> None:
        """Record that ``zero_grad()`` of a prepared optimizer was called, given the wrapped one, before it ``clears`` the
        gradients; within an update it may have no effect.
        """

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
        """Number of items on this rank in the current micro-step, or None before its first loss."""

    @property
    @abstractmethod
    def place(self) -> tuple[int, int]:
        """Index of the current micro-step's term, and number of terms, in a sum that must not depend on the number of ranks."""

    @abstractmethod
    def evaluating_again(self, who: str) -> AbstractContextManager[None]:
        """Return a context in which additional losses in the current micro-step are not counted.

        Args:
            who: name of the caller that evaluates the loss again.
        """


class PassTracker(ABC, Generic[Loader]):
    """Records the progress of a run's passes."""

    @abstractmethod
    def begin_pass(self, loader: Loader) -> PassFacts:
        """Handle the start of a pass and return facts about it."""

    @abstractmethod
    def begin_batch(self, loader: Loader, batch: Any) -> None:
        """Called for each batch before it is moved to the device and yielded, and before the next batch is read."""

    @abstractmethod
    def end_batch(self, loader: Loader) -> None:
        """Called after the loop body has processed the current batch."""

    @abstractmethod
    def end_pass(self, loader: Loader) -> None:
        """Called when a loop has come to the end of a pass.

        Raises:
            UsageError: the pass ends in the middle of an update that cannot be completed.
        """

    @abstractmethod
    def unfinished_update(self, loader: Loader) -> dict[str, Any] | None:
        """Return the ``record`` of the position where the unfinished update started, or None if no update is unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFacts:
    """Facts about one pass in a run."""

    epoch: int
    """Epoch of the run."""
    trains: bool
    """Whether this is a training pass rather than an evaluation pass."""
    outlives_epochs: bool = False
    """Whether passes of this loader have continued from one epoch into the next."""

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> PassFacts:
        """Return the facts stored in a pass's ``record``."""
        return PassFacts(epoch=record["epoch"], trains=record["trains"], outlives_epochs=record["outlives_epochs"])


class ActiveLoaders(Generic[Loader]):
    """The prepared loaders that are currently being iterated over, with the innermost last."""

    __slots__ = ("driver", "joined", "last_trained", "loaders", "metrics", "owner", "tracker")

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        """The ``GradientState`` that owns this object, or None if no Accelerator is used."""
        self.loaders: list[Loader] = []
        self.last_trained: Loader | None = None
        """The loader that has yielded the latest batch of a training pass; its last batches may be trained after the pass."""
        self.metrics = UngatheredMetricsCheck(
            N_("use accelerator.reduce(total) after the loop, or gather_for_metrics(...) inside it")
        )
        self.driver: PassDriver[Loader] | None = None
        self.tracker: PassTracker[Loader] | None = None
        self.joined = False
        """Whether ``join_uneven_inputs`` is active, so that ranks that run out of data join the other ranks' collectives."""

    def make_innermost(self, loader: Loader) -> None:
        """Make ``loader``, which is about to yield a batch, the innermost one."""
        if not self.loaders or self.loaders[-1] is not loader:  # several iterators are open at once
            self.remove(loader)
            self.loaders.append(loader)

    def remove(self, loader: Loader) -> None:
        """Note that a loop over ``loader`` has ended."""
        if loader in self.loaders:  # not after ``forget_loops``
            self.loaders.remove(loader)

    def forget_loops(self) -> None:
        """Forget loops that have been left, but whose iterators still exist (a traceback refers to them)."""
        for loader in reversed(self.loaders):
            self.remove(loader)
            if self.driver is not None:
                self.driver.end_pass(loader, is_over=False)
        self.last_trained = None

    def __getstate__(self) -> dict[str, Any]:
        return {"owner": self.owner}  # a copy has no active loaders and no driver

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["owner"])  # type: ignore[misc]

    @property
    def trained(self) -> Loader | None:
        """The innermost loader or, outside of all loops, the one whose last batches a loop may have fetched to train them now."""
        return self.loaders[-1] if self.loaders else self.last_trained

    @property
    def innermost(self) -> Loader | None:
        """The loader that yielded the latest batch; in nested loops, the innermost loop's loader."""
        return self.loaders[-1] if self.loaders else None
