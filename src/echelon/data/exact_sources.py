"""Where the micro-batches of one rank come from in the exact modes, for data with an index, streams and dispatch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon.base.errors import UsageError
from echelon.base.protocols import SupportsSetEpoch, SupportsStateDict
from echelon.data.dispatch import SliceFn, dispatch
from echelon.data.exact import ExactBatches, ExactOptions, PassPlan, make_order
from echelon.data.keyed import keyed
from echelon.data.lengths import length_of
from echelon.data.order import Order
from echelon.data.rebuild import like
from echelon.data.slices import Contribution, LastStep, contributions
from echelon.data.sources import Source, Steps, batches_of, with_batches
from echelon.data.stream import ShowUsersDataset, open_like_rank_zero
from echelon.data.wire import gather_counts
from echelon.world.world import World

__all__ = ["ExactDispatchSource", "ExactSource", "ExactStreamSource", "IndexedExactSource"]


class ExactSource(Source):
    """A source whose steps are (micro-batch, Contribution), and whose passes begin at any position."""

    order: Order | None = None

    @abstractmethod
    def begin(self, plan: PassPlan, *, epoch: int, position: int, resumed: dict[str, Any] | None) -> None:
        """Say what the next pass is.

        Args:
            plan: what it is for.
            epoch: its number.
            position: the sample at which it begins.
            resumed: what ``state`` gave when the pass was saved; None: a fresh pass.

        Raises:
            UsageError: the data cannot begin there.
        """

    @abstractmethod
    def state(self) -> dict[str, Any] | None:
        """Return what a resumed pass needs beside epoch and position."""

    @abstractmethod
    def num_planned(self, plan: PassPlan) -> int:
        """Return the micro-steps of a whole pass.

        Raises:
            TypeError: nobody knows.
        """

    def at_end(self) -> LastStep | None:
        return None

    def set_even(self, even: bool) -> None:
        pass  # nothing is ever repeated

    def num_steps(self) -> int:
        return self.num_planned(PassPlan())


class IndexedExactSource(ExactSource):
    """A loader over a dataset with an index: each rank reads its pieces of every global batch, from any position on."""

    def __init__(self, loader: DataLoader[Any], *, world: World, options: ExactOptions) -> None:
        batches = batches_of(loader)
        if batches is None:
            raise UsageError(
                "a loader without batches (batch_size=None) has no global batch that could be cut",
                where="parity='exact'",
                do="give the DataLoader a batch_size or a batch_sampler",
            )
        order = make_order(batches, loader.dataset, options, alone=world.world_size == 1)
        self.batches = ExactBatches(
            order,
            rank=world.rank,
            world_size=world.world_size,
            options=options,
            batch_size=getattr(batches, "batch_size", None),
        )
        dataset = keyed(loader.dataset)
        self.inner = with_batches(loader, self.batches, dataset=dataset)
        if dataset is not loader.dataset and loader.num_workers:
            self.inner.worker_init_fn = ShowUsersDataset(loader.worker_init_fn)
        self._is_resumed = False

    def begin(self, plan: PassPlan, *, epoch: int, position: int, resumed: dict[str, Any] | None) -> None:
        batches = self.batches
        batches.epoch, batches.start, batches.plan = epoch, position, plan
        if resumed is not None:
            batches.order.pin(resumed["order"])
        self._is_resumed = resumed is not None

    def state(self) -> dict[str, Any] | None:
        return {"order": self.batches.order.state()}

    def steps(self, skip: int) -> Steps:
        if skip:
            self.batches.start += self._position_after(skip)
        before = torch.get_rng_state()
        batches = iter(self.inner)
        if self._is_resumed:  # the pass drew the seed of its workers when it began, before it was saved
            torch.set_rng_state(before)
        for batch in batches:
            yield batch, self.batches.ahead.popleft()

    def _position_after(self, num_steps: int) -> int:
        size = self.batches.batch_size
        num_micro = self.batches.num_micro(size, self.batches.plan) if size is not None else 1
        if size is None or num_steps % num_micro:
            raise _half_an_update(num_steps)
        return num_steps // num_micro * size

    def num_planned(self, plan: PassPlan) -> int:
        return self.batches.num_steps(plan)


class _Pieces(IterableDataset[Any]):
    """The pieces of one rank of a stream that every rank reads: a list of (samples, Contribution) for each update."""

    def __init__(
        self, dataset: Any, cut: Callable[[int], Iterator[Contribution]], *, batch_size: int, drop_last: bool
    ) -> None:
        self.dataset = dataset
        self.cut = cut
        self.batch_size = batch_size
        self.drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        """Tell the user's dataset, if it wants to know."""
        if isinstance(self.dataset, SupportsSetEpoch):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[list[tuple[list[Any], Contribution]], Any]]:
        samples = iter(self.dataset)
        while update := list(islice(samples, self.batch_size)):
            if len(update) < self.batch_size and self.drop_last:
                return
            # After these samples and before the next: the loader reads ahead.
            state = self.dataset.state_dict() if isinstance(self.dataset, SupportsStateDict) else None
            cut = self.cut(len(update))
            yield [(update[one.samples.start : one.samples.stop], one) for one in cut], state


class _Cut:
    """How an update of any size is cut for this rank; a class, for it travels to loader workers."""

    def __init__(self, world: World, options: ExactOptions) -> None:
        self.rank, self.world_size = world.rank, world.world_size
        self.options = options
        self.plan = PassPlan()

    def __call__(self, num_samples: int) -> Iterator[Contribution]:
        plan, world_size = self.plan, self.world_size
        return contributions(
            range(num_samples),
            rank=self.rank,
            world_size=world_size,
            num_micro=plan.num_micro(num_samples, world_size=world_size, options=self.options),
            by_rank=plan.trains,
        )


class _CollatePieces:
    """The user's ``collate_fn`` on each piece; a class, for it travels to loader workers."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, read: tuple[list[tuple[list[Any], Contribution]], Any]) -> Any:
        pieces, state = read
        return [(self.collate_fn(samples), one) for samples, one in pieces], state


class ExactStreamSource(ExactSource):
    """A loader over an iterable dataset: every rank reads all of it and keeps its pieces of every global batch."""

    def __init__(self, loader: DataLoader[Any], *, world: World, options: ExactOptions) -> None:
        if loader.batch_size is None:
            raise UsageError(
                "a loader without a batch size (batch_size=None) has no global batch that could be cut",
                where="parity='exact'",
                do="give the DataLoader a batch_size, or use DataLoaderConfiguration(dispatch_batches=True)",
            )
        self._cut = _Cut(world, options)
        self._pieces = _Pieces(loader.dataset, self._cut, batch_size=loader.batch_size, drop_last=loader.drop_last)
        self._world = world
        self._start = self._num_to_replay = 0
        self._replays = options.replays
        self._state: Any = None
        self.inner = like(
            loader,
            self._pieces,
            kind=DataLoader,
            batch_size=None,
            collate_fn=_CollatePieces(loader.collate_fn),
            worker_init_fn=ShowUsersDataset(loader.worker_init_fn) if loader.num_workers else None,
        )

    def begin(self, plan: PassPlan, *, epoch: int, position: int, resumed: dict[str, Any] | None) -> None:
        self._cut.plan = plan
        self._start, self._num_to_replay = position, 0
        if not position:
            return
        saved = None if resumed is None else resumed["dataset"]
        if saved is not None and isinstance(self._pieces.dataset, SupportsStateDict) and not self.inner.num_workers:
            self._pieces.dataset.load_state_dict(saved)
        elif self._replays:
            self._num_to_replay = position
        else:
            raise UsageError(
                f"the pass is to go on after {position} samples, and an iterable dataset without state cannot go there",
                where="parity='exact'",
                do="give the dataset state_dict() and load_state_dict() and its loader num_workers=0, or let the first "
                "samples be read again: DataLoaderConfiguration(replay_iterable=True)",
            )

    def state(self) -> dict[str, Any] | None:
        return {"dataset": self._state}

    def steps(self, skip: int) -> Steps:
        return _after(self._read(), skip)

    def _read(self) -> Iterator[tuple[Any, Contribution]]:
        position = self._start - self._num_to_replay
        for pieces, state in open_like_rank_zero(self.inner, self._pieces):
            if position >= self._start:
                for batch, one in pieces:
                    self._state = state
                    yield batch, one.shifted(position)
            position += len(pieces[-1][1].update)

    def num_planned(self, plan: PassPlan) -> int:
        pieces, cut = self._pieces, self._cut
        return plan.num_steps(
            len(pieces.dataset),
            pieces.batch_size,
            drop_last=pieces.drop_last,
            world_size=cut.world_size,
            options=cut.options,
        )


class ExactDispatchSource(ExactSource):
    """A loader that rank zero alone reads: it gives each rank its pieces of every global batch.

    Collective: making one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world: World,
        options: ExactOptions,
        slice_fn: SliceFn | None,
        device: torch.device | None,
        non_blocking: bool,
    ) -> None:
        self.inner = loader
        self._world = world
        self._cut = _Cut(world, options)
        self._slice_fn = slice_fn
        self._device = device
        self._non_blocking = non_blocking
        self._reader: ExactSource | None = None
        self._start = 0
        facts = (-1, -1, 0)
        if world.is_rank_zero:
            whole = replace(options, max_micro_batch_size=None)
            alone = replace(world, rank=0, world_size=1)
            is_iterable = isinstance(loader.dataset, IterableDataset)
            reader = ExactStreamSource if is_iterable else IndexedExactSource
            self._reader = reader(loader, world=alone, options=whole)
            self.inner = self._reader.inner
            size = getattr(batches_of(loader), "batch_size", loader.batch_size)
            facts = (length_of(loader.dataset), -1 if size is None else size, int(loader.drop_last))
        self.total_samples, batch_size, drop_last = (counts[0] for counts in gather_counts(*facts))
        self.batch_size = None if batch_size < 0 else batch_size
        """Of rank zero's loader."""
        self._drop_last = bool(drop_last)

    def begin(self, plan: PassPlan, *, epoch: int, position: int, resumed: dict[str, Any] | None) -> None:
        self._cut.plan = plan
        self._start = position
        if self._reader is not None:
            self._reader.begin(PassPlan(trains=plan.trains), epoch=epoch, position=position, resumed=resumed)

    def state(self) -> dict[str, Any] | None:
        return None if self._reader is None else self._reader.state()

    def steps(self, skip: int) -> Steps:
        return _after(self._read(), skip)

    def _read(self) -> Iterator[tuple[Any, Contribution]]:
        position = self._start
        world, reader = self._world, self._reader
        for batch, one in dispatch(
            None if reader is None else (batch for batch, _ in reader.steps(0)),
            rank=world.rank,
            world_size=world.world_size,
            split=True,
            even=False,
            drop_last=False,
            slice_fn=self._slice_fn,
            device=self._device,
            non_blocking=self._non_blocking,
            pieces=self._cut,
        ):
            assert isinstance(one, Contribution), one
            yield batch, one.shifted(position)
            position += len(one.update) if one.ends_update else 0

    def num_planned(self, plan: PassPlan) -> int:
        if self.total_samples < 0 or self.batch_size is None:
            raise TypeError("rank zero's loader has no length")
        return plan.num_steps(
            self.total_samples,
            self.batch_size,
            drop_last=self._drop_last,
            world_size=self._world.world_size,
            options=self._cut.options,
        )


def _after(steps: Iterator[tuple[Any, Contribution]], skip: int) -> Iterator[tuple[Any, Contribution]]:
    """Read the first ``skip`` steps of data without an index, and throw them away."""
    for number in range(skip):
        step = next(steps, None)
        if step is None:
            return
        if number == skip - 1 and not step[1].ends_update:
            raise _half_an_update(skip)
    yield from steps


def _half_an_update(num_steps: int) -> UsageError:
    return UsageError(
        f"the first {num_steps} micro-steps of a pass are to be skipped, and that is not a whole number of updates",
        where="skip_first_batches, parity='exact'",
        do="skip whole updates, or let save_state() and load_state() find the place",
    )
