"""What a loader is asked and tells while it is read: how to cut it, who drives its passes, who keeps the book of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.data.exact.batch_slices import Contribution
from echelon.data.exact.exact_batches import ExactOptions, PassPlan
from echelon.distributed.checks.ungathered_metrics import UngatheredMetricsCheck

if TYPE_CHECKING:
    from echelon.data.loader import PreparedLoader

__all__ = ["PassTracker", "PassDriver", "LoaderOptions", "PassFacts", "ActiveLoaders"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How loaders are cut for the ranks."""

    split_batches: bool = False
    """The loader's batch size is the global one; each batch is cut for the ranks."""
    dispatch_batches: bool | None = None
    """Rank zero alone reads and gives the others their parts; None: for iterable datasets whose batches are placed."""
    even_batches: bool = True
    """Fill the last round with samples from the beginning, so that every rank makes the same number of steps."""
    use_seedable_sampler: bool = False
    """Shuffle by (seed, epoch) instead of by the loader's generator."""
    data_seed: int | None = None
    """The seed of that order; None: the run's."""
    non_blocking: bool = False
    """Copy batches to the device without waiting (with pinned memory)."""
    already_sharded: bool | None = None
    """The loader gives each rank its own part already (True), or is to be cut in any case (False); None: as it is recognised."""
    use_stateful_dataloader: bool = False
    """Read by torchdata's StatefulDataLoader, so that a pass can be saved and resumed in its middle."""
    exact: ExactOptions | None = None
    """The exact modes: the loader's batches are those of all ranks together, and the choices above about cutting do not count."""
    rng_types: tuple[str, ...] = ()
    """Random states that every rank takes from rank zero at the beginning of a pass; ``generator``, the order's own, agrees
    in any case."""


class PassDriver(ABC):
    """Whoever makes updates of what loaders give, in the exact modes."""

    @abstractmethod
    def plan_pass(self, beginning: PreparedLoader | None = None) -> PassPlan:
        """Say what a pass that begins now would be for; ``beginning``: it does, and is of this loader."""

    @abstractmethod
    def end_pass(self, loader: PreparedLoader, *, is_over: bool) -> None:
        """A pass of ``loader`` has ended: it ``is_over``, or was left."""

    @abstractmethod
    def begin_pass(self, loader: PreparedLoader, plan: PassPlan) -> None:
        """A pass begins. Collective: where ranks agree about it."""

    @abstractmethod
    def begin_micro_step(self, loader: PreparedLoader, contribution: Contribution) -> None:
        """A micro-batch of a pass of updates is about to be given."""

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
        """The number of the micro-step in hand in its update, from 1."""

    @property
    @abstractmethod
    def num_items(self) -> float | None:
        """The items of the micro-step in hand, of this rank; None before its first loss."""

    @property
    @abstractmethod
    def place(self) -> tuple[int, int]:
        """Where the micro-step in hand is added to a sum whose bits may not depend on the ranks, and of how many places."""

    @abstractmethod
    def evaluating_again(self, who: str) -> AbstractContextManager[None]:
        """Return a context whose losses are those of the micro-step in hand at other parameters: they are no part of its loss.

        Args:
            who: asks for them.
        """


class PassTracker(ABC):
    """Whoever notes how far the passes of a run have come."""

    @abstractmethod
    def begin_pass(self, loader: PreparedLoader) -> PassFacts:
        """A pass begins: say what it is."""

    @abstractmethod
    def begin_batch(self, loader: PreparedLoader) -> None:
        """A batch is about to be given, and the next one has not been read."""

    @abstractmethod
    def end_batch(self, loader: PreparedLoader) -> None:
        """The turn of the loop over the batch in hand has come to its end."""

    @abstractmethod
    def begun_update(self, loader: PreparedLoader) -> dict[str, Any] | None:
        """Return ``record`` of the place to which an update goes back that was begun and not ended; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFacts:
    """What a pass is to the run."""

    epoch: int
    """Of the run."""
    trains: bool
    """It is one of updates, not an evaluation."""
    outlives_epochs: bool = False
    """Passes of this loader have gone on from one epoch into the next."""


class ActiveLoaders:
    """Which prepared loaders are being read, innermost last."""

    __slots__ = ("book", "driver", "joined", "loaders", "metrics", "owner")

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        """The counters that this belongs to (a ``GradientState``, which lives above); None outside an Accelerator."""
        self.loaders: list[PreparedLoader] = []
        self.metrics = UngatheredMetricsCheck("Use accelerator.reduce(total), or gather_for_metrics(...) in the loop")
        self.driver: PassDriver | None = None
        self.book: PassTracker | None = None
        self.joined = False
        """Inside ``join_uneven_inputs``: ranks that have run out shadow the others' collectives."""

    def note_giving(self, loader: PreparedLoader) -> None:
        """``loader`` is about to give a batch: it is the innermost one until another one does."""
        loaders = self.loaders
        if loaders[-1] is not loader:  # several iterators are held at once
            loaders.remove(loader)
            loaders.append(loader)

    def __getstate__(self) -> dict[str, Any]:
        return {"owner": self.owner}  # a copy reads nothing yet, and nobody drives it

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["owner"])  # type: ignore[misc]

    @property
    def innermost(self) -> PreparedLoader | None:
        """The loader that gave a batch last: of nested loops that of the innermost one."""
        return self.loaders[-1] if self.loaders else None
