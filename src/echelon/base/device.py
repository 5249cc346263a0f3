"""Each rank's device and ``torch.distributed`` backend, for all device types supported by ``torch.accelerator``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _

if TYPE_CHECKING:
    import torch

# The functions import torch, not this module, so that the launcher starts in milliseconds.

_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)
# Variable, by device type, with which the launcher selects the devices of its ranks.
_VISIBLE_OF = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
# Device types with one device per machine and no collectives, which only one process can use.
_SINGLE_PROCESS = frozenset({"mps"})


def num_devices() -> int:
    """Return the number of visible accelerators."""
    import torch  # noqa: PLC0415 - torch-free layer

    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0


def devices_from(device: torch.device) -> list[int]:
    """Return the indices of all visible accelerators, with ``device`` first; empty for the CPU."""
    if device.type == "cpu":
        return []
    own = device.index or 0
    return [own, *(index for index in range(num_devices()) if index != own)]


def choose_device(*, local_rank: int, local_world_size: int, cpu: bool = False) -> torch.device:
    """Return the device for process ``local_rank`` of the ``local_world_size`` processes on its machine.

    Raises:
        ConfigError: the machine has fewer accelerators than processes.
    """
    import torch  # noqa: PLC0415 - torch-free layer

    count = 0 if cpu else num_devices()
    if count == 0:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, count
    if accelerator.type in _SINGLE_PROCESS and local_world_size > 1:
        return torch.device("cpu")
    if local_rank < count:
        return torch.device(accelerator.type, local_rank)
    if count == 1 and environ.has_visible_devices(_VISIBLE):
        # The scheduler has bound one device to each process (srun --gpus-per-task).
        return torch.device(accelerator.type, 0)
    raise ConfigError(
        _(
            "no device is left for local rank {local_rank}: this machine runs {local_world_size} processes but "
            "has {count} {type} device{s}",
            local_rank=local_rank,
            local_world_size=local_world_size,
            count=count,
            type=accelerator.type,
            s="s" if count != 1 else "",
        ),
        do=_(
            "start at most {count} process{es} on this machine, or pass --cpu or set ECHELON_CPU=1 to run on the CPU",
            count=count,
            es="es" if count != 1 else "",
        ),
    )


def limit_devices(numbers: Sequence[int]) -> dict[str, str]:
    """Return the environment variable and value that make only these accelerators visible; empty if none are given.

    Raises:
        ConfigError: no such variable is known for this type of accelerator.
    """
    import torch  # noqa: PLC0415 - torch-free layer

    accelerator = torch.accelerator.current_accelerator() if num_devices() else None
    if accelerator is None:
        return {}
    if accelerator.type not in _VISIBLE_OF:
        raise ConfigError(
            _("echelon cannot select the visible {type} devices", type=accelerator.type),
            do=_(
                "remove gpu_ids, --include and --exclude, and set the environment variable of the device's driver "
                "instead"
            ),
        )
    return {_VISIBLE_OF[accelerator.type]: ",".join(map(str, numbers))}


def use_device(device: torch.device) -> None:
    """Make ``device`` this process's current device, so that ``.to(accelerator)`` and NCCL use it."""
    import torch  # noqa: PLC0415 - torch-free layer

    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def numa_node_of(device: torch.device) -> int | None:
    """Return the NUMA node of ``device``, or None for the CPU or if the node is unknown."""
    import torch  # noqa: PLC0415 - torch-free layer

    if device.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(device)
    if not hasattr(facts, "pci_domain_id"):  # before torch 2.9
        return None
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    try:
        # -1: the machine has one node.
        return max(0, int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text(encoding="ascii")))
    except OSError:  # Windows, or a container without the file
        return None


def backend_of(device: torch.device) -> str:
    """Return the ``torch.distributed`` backend for ``device``, plus gloo for CPU tensors if ``device`` is an accelerator."""
    import torch.distributed as dist  # noqa: PLC0415 - torch-free layer

    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def has_bf16(*, cpu: bool) -> bool:
    """Return whether this machine's accelerator, or with ``cpu`` its CPU, computes bf16 natively; False if that is unknown."""
    import torch  # noqa: PLC0415 - torch-free layer

    if not cpu and torch.accelerator.is_available():
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def has_fp8(device: torch.device) -> bool:
    """Return whether ``device`` supports fp8 matrix multiplication; True for device types where this is unknown."""
    import torch  # noqa: PLC0415 - torch-free layer

    if device.type != "cuda":
        return device.type not in ("cpu", "mps")
    # NVIDIA: from Ada and Hopper on; AMD: from MI300 on (gfx90a also reports (9, 0)).
    least = (8, 9) if torch.version.hip is None else (9, 4)
    return torch.cuda.get_device_capability(device) >= least


def has_tf32(device: torch.device) -> bool:
    """Return whether ``device`` supports TF32 for float32 matrix multiplication."""
    import torch  # noqa: PLC0415 - torch-free layer

    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def accelerators() -> list[str]:
    """Return one line for each kind of visible accelerator, with its count, name and memory."""
    import torch  # noqa: PLC0415 - torch-free layer

    device = torch.accelerator.current_accelerator() if num_devices() else None
    if device is None:
        return []
    module: Any = torch.get_device_module(device)
    # Some backends report neither name nor memory (mps).
    lines = []
    for i in range(num_devices()):
        name = str(module.get_device_name(i)) if hasattr(module, "get_device_name") else device.type
        facts = module.get_device_properties(i) if hasattr(module, "get_device_properties") else None
        memory = getattr(facts, "total_memory", None)
        lines.append(f"{device.type} {name}" + (f", {memory / 2**30:.0f} GiB" if memory else ""))
    return [f"{lines.count(line)} x {line}" for line in dict.fromkeys(lines)]


def nccl_version() -> str | None:
    """Return the version of NCCL (or RCCL) that torch was built with, or None if it was built without NCCL."""
    import torch  # noqa: PLC0415 - torch-free layer
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_available() or not dist.is_nccl_available():
        return None
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Amount of free memory on an accelerator."""

    num_bytes: int
    is_of_host: bool
    """Whether this is the machine's memory, which the accelerator shares with the CPU."""


def free_memory(index: int) -> DeviceMemory | None:
    """Return an accelerator's free memory, or None if the accelerator is unusable or does not report its memory."""
    import torch  # noqa: PLC0415 - torch-free layer

    accelerator = torch.accelerator.current_accelerator()
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    if not hasattr(module, "mem_get_info"):
        return None
    assert accelerator is not None
    try:
        torch.zeros(1, device=torch.device(accelerator.type, index))  # a device in use by others may refuse
        free = int(module.mem_get_info(index)[0])
    except RuntimeError:  # also torch.OutOfMemoryError
        return None
    shared = bool(getattr(module.get_device_properties(index), "is_integrated", False))
    return DeviceMemory(num_bytes=free, is_of_host=shared)


def total_memory() -> int | None:
    """Return the bytes of the first accelerator's memory, or None if it does not report them."""
    import torch  # noqa: PLC0415 - torch-free layer

    accelerator = torch.accelerator.current_accelerator()
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    if not hasattr(module, "get_device_properties"):
        return None
    memory = getattr(module.get_device_properties(0), "total_memory", None)
    return None if memory is None else int(memory)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of ``device`` is recording a CUDA graph."""
    import torch  # noqa: PLC0415 - torch-free layer

    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def used_memory_mb(device: torch.device) -> float:
    """Return the memory that this process has reserved on ``device``, or for the CPU, its resident memory, in MiB; nan if unknown.

    Does not wait for the device.
    """
    import torch  # noqa: PLC0415 - torch-free layer

    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        if hasattr(module, "memory_reserved"):
            return float(module.memory_reserved(device)) / 2**20
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:  # not Linux
        import psutil  # noqa: PLC0415 - takes milliseconds to import

        return float(psutil.Process().memory_info().rss) / 2**20
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20
