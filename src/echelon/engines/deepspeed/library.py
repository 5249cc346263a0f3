"""The DeepSpeed library itself: imported for this device and this process group, and its kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils import cpp_extension

from echelon.base import environ
from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.base.optional import require
from echelon.distributed.small_messages import gather_counts
from echelon.world.world import World

__all__ = ["announce_kernels", "import_deepspeed"]

_logger = get_logger(__name__)

_SHARED_MEMORY_KERNEL = "deepspeed_shm_comm"


def import_deepspeed(world: World) -> Any:
    """Return the module ``deepspeed``, talking over the present process group, on the device of ``world``.

    Collective: the first time for a process group.

    Raises:
        MissingExtraError: it is not installed.
        UsageError: this process has used it for another kind of device.
    """
    on_cpu = world.device.type == "cpu"
    # Beside an accelerator, a run on the CPU (cpu=True) must say so before the library looks around.
    with environ.patch({"DS_ACCELERATOR": "cpu"} if on_cpu else {}), warnings.catch_warnings():
        # What ZeRO imports later brings a part of torch that uses the deprecated torch.jit.script.
        warnings.simplefilter("ignore", DeprecationWarning)
        deepspeed: Any = require("deepspeed", extra="deepspeed", purpose="engine='deepspeed'")
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        device = deepspeed.get_accelerator().device_name()
    if device != world.device.type:
        raise UsageError(
            f"DeepSpeed runs on {device!r} in this process, and the Accelerator on {world.device.type!r}",
            do="choose the device before anything imports deepspeed, or set DS_ACCELERATOR",
        )
    if not dist.is_initialized():  # one process: it needs a group all the same
        backend = "gloo" if on_cpu else None
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    _forget_other_groups()
    is_first = import_module("deepspeed.comm.comm").cdb is None
    with _without_kernel(deepspeed, _SHARED_MEMORY_KERNEL):
        deepspeed.init_distributed(verbose=False)
    _use_present_names()
    if is_first:
        _agree_on_numbers()
    return deepspeed


def _forget_other_groups() -> None:
    """Drop what the library keeps of a process group that has ended since: it would send through closed sockets."""
    groups: Any = import_module("deepspeed.utils.groups")
    if groups._WORLD_GROUP is not None and groups._WORLD_GROUP not in dist.distributed_c10d._world.pg_map:
        groups._release_process_group_references()
        library: Any = import_module("deepspeed.comm.comm")
        library.cdb = None


def _agree_on_numbers() -> None:
    """Number modules and parameters of ZeRO 3 alike on all ranks: some may have been in another group before. Collective.

    The library counts them in each process, and compares the numbers between the ranks (0.19.8).
    """
    parameters: Any = import_module("deepspeed.runtime.zero.partition_parameters").Init
    offload: Any = import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    (num_modules,) = offload._register_deepspeed_module.__defaults__  # a list of one: the default is the counter
    of_parameters, of_modules = gather_counts(parameters.param_id, num_modules[0])
    parameters.param_id, num_modules[0] = max(of_parameters), max(of_modules)


@contextmanager
def _without_kernel(deepspeed: Any, name: str) -> Iterator[None]:
    """Let the library do without the kernel ``name`` in the block.

    On the CPU it compiles one for all-reduce through shared memory, for a minute, as soon as it is opened. Only tensor
    parallel inference uses it (``inference_all_reduce``), and that goes through the process group where it is missing.
    """
    compatible: dict[str, bool] = deepspeed.ops.__compatible_ops__
    before = compatible.get(name, False)
    compatible[name] = False
    try:
        yield
    finally:
        compatible[name] = before


def _use_present_names() -> None:
    """Give the library the names of torch 2.13 for two collectives; each call by the old ones is a FutureWarning."""
    backend: Any = import_module("deepspeed.comm.comm").cdb
    for old, new in (
        ("all_gather_function", "all_gather_single"),
        ("reduce_scatter_function", "reduce_scatter_single"),
    ):
        if hasattr(dist, new):
            setattr(backend, old, getattr(dist, new))


def announce_kernels(config: Mapping[str, Any], *, optimizer: str | None) -> None:
    """Say which kernels DeepSpeed is about to compile for ``config``, and that it takes minutes, once.

    ``optimizer``: the kind of the one that DeepSpeed makes; None: it makes none.
    """
    root = Path(environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    missing = [name for name in _kernels(config, optimizer) if not any(root.glob(f"**/{name}/{name}.so"))]
    if missing:
        _logger.warning(
            "DeepSpeed compiles %s now, which takes minutes; the result is kept in %s, so it is done once for this machine",
            ", ".join(missing),
            root,
        )


def _kernels(config: Mapping[str, Any], optimizer: str | None) -> list[str]:
    zero = config.get("zero_optimization", {})
    offload = (zero.get("offload_optimizer") or {}).get("device", "none")
    found = []
    if optimizer is not None and not config.get("optimizer", {}).get("params", {}).get("torch_adam"):
        family = {"adamw": "adam"}.get(optimizer.lower(), optimizer.lower())
        if offload != "none" and family in ("adam", "adagrad", "lion"):
            found.append(f"cpu_{family}")
        elif offload == "none" and family in ("adam", "lion", "lamb"):
            found.append(f"fused_{family}")
    if "nvme" in (offload, (zero.get("offload_param") or {}).get("device")):
        found.append("async_io")
    return found
