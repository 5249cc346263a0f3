"""Prepares loaders and skips their first batches without an Accelerator, under Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from echelon.accelerator.gradient_state import GradientState
from echelon.data.active_loaders import ActiveLoaders, LoaderOptions
from echelon.data.loader import PreparedLoader
from echelon.data.prepare_loader import prepare_loader
from echelon.data.skip_batches import skip_in_plain_loader
from echelon.world.world import World


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader like ``dataloader`` that skips the first ``num_batches`` batches of every pass.

    For map-style datasets, the batch sampler advances without reading samples; for iterable datasets, skipped samples
    are read and discarded.

    Args:
        dataloader: a loader, prepared (``num_batches`` then counts this rank's batches) or not. It is not changed.
        num_batches: number of batches to skip.

    Examples:
        >>> for x, y in skip_first_batches(loader, num_batches=2):
        ...     prediction = model(x)
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    return skip_in_plain_loader(dataloader, num_batches)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    already_sharded: bool | None = None,
    reading: ActiveLoaders[PreparedLoader] | None = None,
) -> PreparedLoader:
    """Shard ``dataloader`` explicitly. The Accelerator built last, if any, tracks when the loader is iterated over.

    Args:
        dataloader: the user's loader.
        device: device of this process; None: the current one.
        num_processes: number of processes. None: size of the process group.
        process_index: rank of this process. None: its rank in the process group.
        split_batches: see ``DataLoaderConfiguration``, which describes the other options, too.
        put_on_device: move batches to the device.
        rng_types: RNG states that every rank copies from rank zero at the start of each pass.
        dispatch_batches: read the data only on rank zero. None: only for iterable datasets with ``put_on_device``.
        even_batches: fill the last step with repeated samples, so that every process runs the same number of steps.
        slice_fn_for_dispatch: function that splits a dispatched batch.
        use_seedable_sampler: shuffle with an order that depends only on (seed, epoch).
        data_seed: seed for ``use_seedable_sampler``.
        non_blocking: copy to the device asynchronously.
        use_stateful_dataloader: use torchdata's StatefulDataLoader.
        torch_device_mesh: device mesh; its axes ``pp``, ``cp``, ``sp`` and ``tp`` do not split batches.
        already_sharded: whether the loader already yields a different shard on each process. None: detect this.
        reading: tracks the loaders being iterated over. None: use the tracker of ``GradientState()``.

    Collective: call on every process in the group.
    """
    world = World.current()
    rank = world.rank if process_index is None else process_index
    world_size = world.world_size if num_processes is None else num_processes
    if torch_device_mesh is not None:
        rank, world_size = _along_batch_axes(torch_device_mesh, rank, world_size)
    world = replace(world, rank=rank, world_size=world_size, device=world.device if device is None else device)
    options = LoaderOptions(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
        already_sharded=already_sharded,
        rng_types=rng_type_names(rng_types),
    )
    return prepare_loader(
        dataloader,
        world=world,
        options=options,
        active=reading or GradientState().reading,
        place=put_on_device,
        slice_fn=slice_fn_for_dispatch,
    )


def rng_type_names(rng_types: Iterable[Any] | None) -> tuple[str, ...]:
    """Return the names of ``rng_types``, which may be members of ``RNGType``."""
    return tuple(str(getattr(kind, "value", kind)) for kind in rng_types or ())


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler that determines the sample order of ``dataloader``."""
    if isinstance(dataloader, PreparedLoader):
        return dataloader.get_sampler()
    batches: Any = dataloader.sampler if hasattr(dataloader.sampler, "batch_size") else dataloader.batch_sampler
    return getattr(batches, "sampler", None)


def _along_batch_axes(mesh: DeviceMesh, rank: int, world_size: int) -> tuple[int, int]:
    """Return rank and size over the axes that split batches; ranks that differ only on other axes read the same data."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape))
    own_rank, own_size, inner = 0, 1, 1
    for axis, size in reversed(sizes.items()):
        if axis not in ("pp", "cp", "sp", "tp"):
            own_rank += rank // inner % size * own_size
            own_size *= size
        inner *= size
    return (own_rank, own_size) if sizes else (rank, world_size)
