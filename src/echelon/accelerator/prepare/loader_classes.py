"""Accelerate's loader classes, for scripts that construct or subclass them; ``prepare`` does not need them.

The loaders that ``prepare`` returns are also instances of these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.prepare.data_loaders import rng_type_names
from echelon.base.errors import UsageError
from echelon.data.active_loaders import LoaderOptions
from echelon.data.global_batch_slices import LastStep
from echelon.data.loader import DispatchedLoader, PreparedLoader
from echelon.data.pass_position import BatchPosition
from echelon.data.rebuild_loader import stateful_loader
from echelon.data.rng.host_rng import synchronize_rng_states
from echelon.data.sharding.batch_source import BatchSource, DispatchSource, GivenSource
from echelon.world.world import World


class _OfPreparedLoaders(type):
    """Metaclass that makes prepared loaders instances of a class that lists their type, but not of its subclasses."""

    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            return True
        own = vars(cls)
        return isinstance(instance, own.get("includes", ())) and not isinstance(instance, own.get("excludes", ()))


class DataLoaderShard(PreparedLoader, metaclass=_OfPreparedLoaders):
    """A DataLoader that reads the given data unchanged, one batch ahead, and moves batches to ``device``.

    It does not shard the data: pass this rank's batch sampler (``BatchSamplerShard``) or dataset
    (``IterableDatasetShard``).

    Args:
        dataset: as in ``DataLoader``.
        device: device to move batches to. None: do not move them.
        rng_types: RNG states that every rank copies from rank zero at the start of each pass.
        synchronized_generator: the generator for the RNG type ``generator``.
        skip_batches: number of batches to skip at the start of each pass.
        use_stateful_dataloader: use torchdata's StatefulDataLoader.
        _drop_last: drop an incomplete last step.
        _non_blocking: copy to the device asynchronously.
        torch_device_mesh: has no effect, because this class does not shard the data.
        iteration: epoch of the first pass.
        kwargs: keyword arguments of ``DataLoader``.

    Collective: start each pass on every rank if ``rng_types`` is given.
    """

    includes: ClassVar[tuple[type, ...]] = (PreparedLoader,)
    excludes: ClassVar[tuple[type, ...]] = (DispatchedLoader,)

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        loader = _build(dataset, use_stateful_dataloader, _drop_last, kwargs)
        options = LoaderOptions(
            non_blocking=_non_blocking,
            use_stateful_dataloader=use_stateful_dataloader,
            rng_types=rng_type_names(rng_types),
        )
        source = GivenSource(loader, options=options)
        place = None if device is None else torch.device(device)
        _begin(self, source, loader, options, device=place, skip_batches=skip_batches, iteration=iteration)
        self.use_stateful_dataloader = use_stateful_dataloader
        self._generator = synchronized_generator

    @property
    def synchronized_generator(self) -> torch.Generator | None:
        """The generator that is synchronized, or None."""
        return self._generator

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples in one step, across all ranks."""
        assert isinstance(self.source, GivenSource)
        return self.source.samples_per_step

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset."""
        dataset: Any = self.original.dataset
        return int(dataset.total_length) if hasattr(dataset, "total_length") else len(dataset)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        _require_inexact(self)
        if "generator" in self.rng_types and World.current().world_size > 1:
            synchronize_rng_states(["generator"], self._generator)
        yield from super().__iter__()


class DataLoaderDispatcher(DispatchedLoader, metaclass=_OfPreparedLoaders):
    """A DataLoader that reads data only on rank zero, and sends each rank its part of every batch.

    Args:
        dataset: as in ``DataLoader``; the other ranks do not read it.
        split_batches: split each batch across ranks. False: concatenate one batch per rank.
        skip_batches: number of steps to skip at the start of each pass.
        use_stateful_dataloader: use torchdata's StatefulDataLoader.
        _drop_last: drop an incomplete last step. False: pad it with the first samples of the pass.
        _non_blocking: copy to the device asynchronously.
        slice_fn: returns a rank's part of a batch; called as ``slice_fn(batch, slice, process_index=,
            num_processes=)``.
        torch_device_mesh: device mesh; must not have axes on which ranks share batches.
        iteration: epoch of the first pass.
        kwargs: keyword arguments of ``DataLoader``.

    Collective: construct and run each step on every rank.
    """

    includes: ClassVar[tuple[type, ...]] = (DispatchedLoader,)

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if torch_device_mesh is not None and "tp" in (torch_device_mesh.mesh_dim_names or ()):
            raise UsageError(
                "DataLoaderDispatcher() does not support a mesh with a 'tp' axis",
                do="pass the mesh to prepare_data_loader(torch_device_mesh=), which gives all ranks on that axis the "
                "same batches",
            )
        loader = _build(dataset, use_stateful_dataloader, _drop_last, kwargs)
        world = World.current()
        options = LoaderOptions(
            split_batches=split_batches,
            dispatch_batches=True,
            non_blocking=_non_blocking,
            use_stateful_dataloader=use_stateful_dataloader,
        )
        source: BatchSource
        if world.world_size == 1 and slice_fn is None:
            source = GivenSource(loader, options=options)
        else:
            source = DispatchSource(loader, world=world, options=options, slice_fn=slice_fn, device=world.device)
        _begin(self, source, loader, options, device=None, skip_batches=skip_batches, iteration=iteration)
        self.use_stateful_dataloader = use_stateful_dataloader
        self.slice_fn = slice_fn

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        _require_inexact(self)
        yield from super().__iter__()


class DataLoaderStateMixin(metaclass=_OfPreparedLoaders):
    """Mixin for custom loaders. It tells the Accelerator which loader is being iterated over and whether the current
    batch is the last.

    A subclass must set ``gradient_state = GradientState()``, call ``begin()`` and ``end()`` around a pass, and set
    ``end_of_dataloader`` before it yields the last batch. ``remainder`` is the number of samples in that batch, across
    all ranks, that are not repeated.
    """

    includes: ClassVar[tuple[type, ...]] = (PreparedLoader,)
    end_of_dataloader = False
    remainder = -1
    # What the Accelerator reads on the loader of the innermost loop.
    ends_early = False
    source: ClassVar[None] = None
    is_exact = False
    gradient_state: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.end_of_dataloader, cls.remainder = False, -1

    def reset(self) -> None:
        """Forget the last pass."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Make this the innermost loader, and compute ``remainder`` if the lengths are known."""
        self.reset()
        foreign: Any = self
        drop_last = getattr(self, "_drop_last", None)  # the name that scripts set
        if drop_last is not None and not drop_last:
            with suppress(AttributeError, TypeError, NotImplementedError):  # a length is unknown
                length = getattr(foreign.dataset, "total_dataset_length", None)
                self.remainder = (len(foreign.dataset) if length is None else length) % foreign.total_batch_size
        self.gradient_state.reading.loaders.append(self)

    def end(self) -> None:
        """End the pass."""
        reading = self.gradient_state.reading
        reading.loaders = [loader for loader in reading.loaders if loader is not self]

    def step_to_trim(self) -> LastStep | None:
        """Return each rank's number of non-repeated samples in the last step; None if no sample is repeated."""
        world_size = World.current().world_size
        foreign: Any = self
        total = getattr(foreign, "total_batch_size", None)
        if not self.end_of_dataloader or self.remainder <= 0 or not total:
            return None
        size = total // world_size
        return LastStep([size] * world_size, [min(max(self.remainder - r * size, 0), size) for r in range(world_size)])

    def require_every_rank(self, operation: str) -> None:
        """Do nothing, because the other ranks' batches are not known here."""

    def record_now(self, *, num_unused: int = 0) -> None:
        """Return None, because checkpoints do not store this loader's position."""

    def rng_state(self, *, num_unused: int = 0) -> None:
        """Return None, like ``record_now``."""


class DataLoaderAdapter(metaclass=_OfPreparedLoaders):
    """Builds and wraps a DataLoader, and forwards attribute access to it.

    Args:
        dataset: as in ``DataLoader``.
        use_stateful_dataloader: build torchdata's StatefulDataLoader.
        batch_sampler: as in ``DataLoader``.
        kwargs: keyword arguments of ``DataLoader``.
    """

    includes: ClassVar[tuple[type, ...]] = (PreparedLoader,)

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        self.base_dataloader = _build(
            dataset, use_stateful_dataloader, False, {"batch_sampler": batch_sampler, **kwargs}
        )

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)  # not yet set, during unpickling
        return getattr(self.base_dataloader, name)

    @property
    def __class__(self) -> Any:
        """The DataLoader's class, so that ``isinstance(adapter, DataLoader)`` is True."""
        return type(self.base_dataloader)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise UsageError("the __class__ of a DataLoaderAdapter cannot be changed", do="build another one")

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.base_dataloader)

    def state_dict(self) -> dict[str, Any]:
        """Return a stateful DataLoader's position."""
        state: dict[str, Any] = self.base_dataloader.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make a stateful DataLoader's next pass continue at a position."""
        self.base_dataloader.load_state_dict(state_dict)  # type: ignore[attr-defined]

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing, because positions count the batches that were yielded."""


def _build(dataset: Any, stateful: bool, drop_last: bool, kwargs: dict[str, Any]) -> DataLoader[Any]:
    loader: DataLoader[Any] = (stateful_loader() if stateful else DataLoader)(dataset, **kwargs)
    if drop_last:
        # With a batch sampler, DataLoader does not accept drop_last.
        loader.__dict__["drop_last"] = True
    return loader


def _begin(
    made: PreparedLoader,
    source: BatchSource,
    loader: DataLoader[Any],
    options: LoaderOptions,
    *,
    device: torch.device | None,
    skip_batches: int,
    iteration: int,
) -> None:
    world = World.current()
    position = BatchPosition(source, loader, world=world, is_stateful=options.use_stateful_dataloader)
    position.iteration = iteration
    active = GradientState().reading
    PreparedLoader.__init__(
        made, position, loader, world=world, options=options, active=active, device=device, skip_batches=skip_batches
    )


def _require_inexact(loader: PreparedLoader) -> None:
    if loader.active.driver is not None:
        raise UsageError(
            f"a {type(loader).__name__} constructed by the script cannot be used in the exact modes, which split each "
            "batch themselves",
            do="pass the DataLoader to accelerator.prepare(), or set parity='off'",
        )
