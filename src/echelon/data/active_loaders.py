"""Which prepared loaders are being read, and who is notified of their passes."""

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
"""``PreparedLoader``: a type variable, because that class is defined in terms of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How loaders are sharded."""

    split_batches: bool = False
    """The loader's batch size is the global one; each batch is split between the ranks."""
    dispatch_batches: bool | None = None
    """Rank zero alone reads and sends the others their parts; None: for iterable datasets whose batches are moved to a device."""
    even_batches: bool = True
    """Fill the last step with samples from the beginning, so that every rank makes the same number of steps."""
    use_seedable_sampler: bool = False
    """Shuffle by (seed, epoch) instead of by the loader's generator."""
    data_seed: int | None = None
    """The seed of that order; None: the run's."""
    non_blocking: bool = False
    """Copy batches to the device asynchronously (with pinned memory)."""
    already_sharded: bool | None = None
    """The loader gives each rank its own shard (True), or is sharded here in any case (False); None: detected."""
    use_stateful_dataloader: bool = False
    """Read by torchdata's StatefulDataLoader, so that a pass can be saved and resumed in its middle."""
    exact: ExactOptions | None = None
    """The exact modes: batches are global, and the options above about sharding are ignored."""
    rng_types: tuple[str, ...] = ()
    """RNG states that every rank takes from rank zero at the beginning of a pass; ``generator``, the order's own, always is."""


class PassDriver(ABC, Generic[Loader]):
    """Makes updates of the batches of loaders, in the exact modes."""

    @abstractmethod
    def plan_pass(self, starting: Loader | None = None) -> PassPlan:
        """Return the plan of a pass that would start now; ``starting``: the loader whose pass starts."""

    @abstractmethod
    def end_pass(self, loader: Loader, *, is_over: bool) -> None:
        """A pass of ``loader`` was read to its end (``is_over``), or was left."""

    @abstractmethod
    def begin_pass(self, loader: Loader, plan: PassPlan) -> None:
        """A pass starts. Collective: where ranks agree about it."""

    @abstractmethod
    def begin_micro_step(self, loader: Loader, contribution: Contribution) -> None:
        """A micro-batch of a training pass is about to be yielded."""

    @property
    @abstractmethod
    def awaits_loss(self) -> bool:
        """Is this a later micro-step of an update, and its backward pass still to come?"""

    @abstractmethod
    def note_cleared(self) -> None:
        """A prepared optimizer has cleared gradients, at its time."""

    @property
    @abstractmethod
    def drives(self) -> bool:
        """Does a loader decide where the update ends?"""

    @property
    @abstractmethod
    def micro_step(self) -> int:
        """The number of the current micro-step in its update, from 1."""

    @property
    @abstractmethod
    def num_items(self) -> float | None:
        """The items of the current micro-step, of this rank; None before its first loss."""

    @property
    @abstractmethod
    def place(self) -> tuple[int, int]:
        """Where the current micro-step is added in a sum whose bits may not depend on the ranks, and the number of places."""

    @abstractmethod
    def evaluating_again(self, who: str) -> AbstractContextManager[None]:
        """Return a context in which losses of the current micro-step at other parameters are not counted.

        Args:
            who: asks for them.
        """


class PassTracker(ABC, Generic[Loader]):
    """Records how far the passes of a run have come."""

    @abstractmethod
    def begin_pass(self, loader: Loader) -> PassFacts:
        """A pass starts: return what it is to the run."""

    @abstractmethod
    def begin_batch(self, loader: Loader) -> None:
        """A batch is about to be yielded, and the next one has not been read."""

    @abstractmethod
    def end_batch(self, loader: Loader) -> None:
        """The loop body has finished with the current batch."""

    @abstractmethod
    def begun_update(self, loader: Loader) -> dict[str, Any] | None:
        """Return ``record`` of the position at which the unfinished update started; None: no update is unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFacts:
    """What a pass is to the run."""

    epoch: int
    """Of the run."""
    trains: bool
    """It is a training pass, not an evaluation."""
    outlives_epochs: bool = False
    """Passes of this loader have continued from one epoch into the next."""

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> PassFacts:
        """Return the facts in the ``record`` of a pass."""
        return PassFacts(epoch=record["epoch"], trains=record["trains"], outlives_epochs=record["outlives_epochs"])


class ActiveLoaders(Generic[Loader]):
    """Which prepared loaders are being read, innermost last."""

    __slots__ = ("driver", "joined", "loaders", "metrics", "owner", "tracker")

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        """The counters that this belongs to (a ``GradientState``, which lives above); None outside an Accelerator."""
        self.loaders: list[Loader] = []
        self.metrics = UngatheredMetricsCheck("Use accelerator.reduce(total), or gather_for_metrics(...) in the loop")
        self.driver: PassDriver[Loader] | None = None
        self.tracker: PassTracker[Loader] | None = None
        self.joined = False
        """Inside ``join_uneven_inputs``: ranks that have run out of data shadow the others' collectives."""

    def make_innermost(self, loader: Loader) -> None:
        """``loader`` is about to yield a batch: it is the innermost one until another one does."""
        loaders = self.loaders
        if loaders[-1] is not loader:  # several iterators are held at once
            loaders.remove(loader)
            loaders.append(loader)

    def __getstate__(self) -> dict[str, Any]:
        return {"owner": self.owner}  # a copy reads nothing yet, and has no driver

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["owner"])  # type: ignore[misc]

    @property
    def innermost(self) -> Loader | None:
        """The loader that yielded a batch last: of nested loops that of the innermost one."""
        return self.loaders[-1] if self.loaders else None
