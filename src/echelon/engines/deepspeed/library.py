"""Imports the DeepSpeed library for this run's device and process group, and logs which kernels it compiles."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils import cpp_extension

from echelon.base.errors import ConfigError, UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_
from echelon.base.optional import require
from echelon.config.library_variables import deepspeed_on
from echelon.config.variables import library_variable
from echelon.distributed.small_messages import gather_counts
from echelon.world.world import World

_logger = get_logger(__name__)

_SHARED_MEMORY_KERNEL = "deepspeed_shm_comm"


def import_deepspeed(world: World) -> Any:
    """Return the module ``deepspeed``, initialized for the current process group and the device in ``world``.

    The first call for a process group is collective.

    Raises:
        MissingExtraError: DeepSpeed is not installed.
        UsageError: DeepSpeed already uses another device type in this process.
    """
    # For a CPU run (cpu=True) on a machine with an accelerator, this must be set before the library detects devices.
    with deepspeed_on(world.device.type), warnings.catch_warnings():
        # ZeRO imports a part of torch that uses the deprecated torch.jit.script.
        warnings.simplefilter("ignore", DeprecationWarning)
        deepspeed: Any = require("deepspeed", extra="deepspeed", purpose="engine='deepspeed'")
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        device = deepspeed.get_accelerator().device_name()
    if device != world.device.type:
        raise UsageError(
            f"DeepSpeed uses {device!r} in this process, but the Accelerator uses {world.device.type!r}",
            do=f"create the Accelerator before importing deepspeed, or set DS_ACCELERATOR={world.device.type}",
        )
    if not dist.is_initialized():  # DeepSpeed requires a group even for one process
        backend = "gloo" if world.device.type == "cpu" else None
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    _reset_ended_group()
    is_first = import_module("deepspeed.comm.comm").cdb is None
    with _without_kernel(deepspeed, _SHARED_MEMORY_KERNEL):
        deepspeed.init_distributed(verbose=False)
    _replace_deprecated_names()
    if is_first:
        _restore_linear()
        _synchronize_counters()
    return deepspeed


def _reset_ended_group() -> None:
    """Reset the library's state if its process group was destroyed; otherwise it would use closed sockets."""
    groups: Any = import_module("deepspeed.utils.groups")
    if groups._WORLD_GROUP is not None:
        if groups._WORLD_GROUP in dist.distributed_c10d._world.pg_map:
            return
        groups._release_process_group_references()
    # Without a group of its own, the library has no engine: the model of the last one may have been refused, in a group that has ended.
    library: Any = import_module("deepspeed.comm.comm")
    library.cdb = None


def _restore_linear() -> None:
    """Undo the library's replacement of ``torch.nn.functional.linear``, which is for ZeRO stage 3 and stays in the process.

    It computes the gradients of a weight and a bias in the other order. Stage 2 adds up gradients in the order in which ranks
    compute them (0.19.8), but a rank whose process has not used stage 3 has torch's function.
    """
    saved = getattr(import_module("deepspeed.runtime.zero.partition_parameters").Init, "linear_bk", None)
    if saved is not None and nn.functional.linear is import_module("deepspeed.runtime.zero.linear").zero3_linear_wrap:
        nn.functional.linear = saved


def _synchronize_counters() -> None:
    """Synchronize the counters that number modules and parameters with ZeRO stage 3. Collective: call on every rank.

    The library counts per process and compares the numbers between ranks (0.19.8), but ranks may start with different counts.
    """
    parameters: Any = import_module("deepspeed.runtime.zero.partition_parameters").Init
    offload: Any = import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    (num_modules,) = offload._register_deepspeed_module.__defaults__  # the counter is a mutable default argument
    of_parameters, of_modules = gather_counts(parameters.param_id, num_modules[0])
    parameters.param_id, num_modules[0] = max(of_parameters), max(of_modules)


@contextmanager
def _without_kernel(deepspeed: Any, name: str) -> Iterator[None]:
    """Mark the kernel ``name`` as unavailable inside the block.

    On the CPU, initialization compiles a kernel for all-reduce through shared memory, which takes a minute. Only
    tensor-parallel inference (``inference_all_reduce``) uses this kernel; without it, all-reduce uses the process group.
    """
    compatible: dict[str, bool] = deepspeed.ops.__compatible_ops__
    before = compatible.get(name, False)
    compatible[name] = False
    try:
        yield
    finally:
        compatible[name] = before


def _replace_deprecated_names() -> None:
    """Replace two collectives whose old names cause a FutureWarning in torch 2.13."""
    backend: Any = import_module("deepspeed.comm.comm").cdb
    for old, new in (
        ("all_gather_function", "all_gather_single"),
        ("reduce_scatter_function", "reduce_scatter_single"),
    ):
        if hasattr(dist, new):
            setattr(backend, old, getattr(dist, new))


def announce_kernels(config: Mapping[str, Any], *, optimizer: str | None) -> None:
    """Log which kernels DeepSpeed is about to compile for ``config``.

    ``optimizer`` is the type of optimizer that DeepSpeed creates, or None if it creates none.
    """
    root = Path(library_variable("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    missing = [name for name in _kernels(config, optimizer) if not any(root.glob(f"**/{name}/{name}.so"))]
    if missing:
        _logger.warning(
            N_(
                "DeepSpeed is compiling %s, which takes several minutes. The result is cached in %s, so this happens once per machine"
            ),
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


def host_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the DeepSpeed CPU optimizer that corresponds to ``optimizer``, with the same groups.

    Raises:
        ConfigError: DeepSpeed has no corresponding optimizer.

    Source: accelerate.utils.deepspeed.map_pytorch_optim_to_deepspeed (1.15), which uses Adam for unknown optimizers.
    """
    require("deepspeed", extra="deepspeed", purpose="an optimizer on the CPU")
    name = type(optimizer).__name__
    adams = {"AdamW": True, "Adam": False}
    kept = {key: value for key, value in optimizer.defaults.items() if key in ("lr", "weight_decay")}
    found: Any
    if name in adams:
        module = import_module("deepspeed.ops.adam")
        found = module.DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=adams[name], **kept)
    elif name in ("Adagrad", "Lion"):
        module = import_module(f"deepspeed.ops.{name.lower()}")
        found = getattr(module, f"DeepSpeedCPU{name}")(optimizer.param_groups, **kept)
    else:
        raise ConfigError(
            f"zero_optimization.offload_optimizer keeps the optimizer state on the CPU, but DeepSpeed has no CPU version of {name}",
            do=f"use AdamW, Adam or Adagrad, or set zero_force_ds_cpu_optimizer=false in DeepSpeed's config to use torch's slower "
            f"{name} on the CPU",
        )
    return found  # type: ignore[no-any-return]
