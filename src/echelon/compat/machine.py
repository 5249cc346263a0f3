"""Accelerate's functions that query this machine: ports, GPUs, NVIDIA driver and kernel."""

from __future__ import annotations

import platform
import re
import shutil
import socket
import subprocess
from typing import Any

from echelon.base.messages.translation import gettext as _
from echelon.base.versions import at_least
from echelon.base.warnings import warn
from echelon.compat.probes import (
    is_hpu_available,
    is_mlu_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_xpu_available,
)


def get_current_device_type() -> tuple[str, str]:
    """Return the accelerator type and its ``DistributedType`` name; ``("cuda", "MULTI_GPU")`` if there is no accelerator."""
    probes = (
        ("mlu", is_mlu_available),
        ("sdaa", is_sdaa_available),
        ("musa", is_musa_available),
        ("npu", is_npu_available),
        ("hpu", is_hpu_available),
        ("xpu", is_xpu_available),
        ("neuron", is_neuron_available),
    )
    return next(((kind, f"MULTI_{kind.upper()}") for kind, there in probes if there()), ("cuda", "MULTI_GPU"))


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a program listens on ``port`` (default: 29500) on this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("127.0.0.1", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """Return a port that is currently free on the loopback interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def convert_bytes(size: float) -> str:
    """Return a human-readable size with a base of 1024, such as ``1.5 KB``."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge ``source`` recursively into ``destination``, and return ``destination``."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or of the class of any other object."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names and the number of NVIDIA GPUs.

    Raises:
        FileNotFoundError: nvidia-smi is not installed.
        CalledProcessError: nvidia-smi failed.
    """
    names = [line.partition(",")[2].strip() for line in _nvidia_smi("count,name")]
    return names, len(names)


def get_driver_version() -> str:
    """Return the NVIDIA driver version.

    Raises:
        FileNotFoundError: nvidia-smi is not installed.
        CalledProcessError: nvidia-smi failed.
    """
    return _nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return False if the GPUs cannot communicate directly (several RTX 40 GPUs with a driver before 550.40.07)."""
    try:
        names, count = get_gpu_info()
        if count > 1 and any("RTX 40" in name for name in names):
            return at_least(get_driver_version(), "550.40.07")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return True  # no NVIDIA GPU
    return True


def check_cuda_fp8_capability() -> bool:
    """Return whether the first NVIDIA GPU supports fp8 (compute capability 8.9 or higher)."""
    try:
        capability = _nvidia_smi("compute_cap")[0]
    except (FileNotFoundError, subprocess.CalledProcessError):
        return False
    return tuple(int(part) for part in capability.split(".")) >= (8, 9)


def check_os_kernel() -> None:
    """Warn if the Linux kernel is older than 5.5, because collectives may hang."""
    info = platform.uname()
    match = re.match(r"\d+\.\d+(\.\d+)?", info.release)
    if info.system == "Linux" and match and not at_least(match[0], "5.5.0"):
        warn(
            _(
                "the Linux kernel is {found}, but collectives may hang on kernels before 5.5.0; if they do, upgrade "
                "the kernel",
                found=match[0],
            )
        )


def _nvidia_smi(query: str) -> list[str]:
    command = shutil.which("nvidia-smi") or "nvidia-smi"
    output = subprocess.run(
        [command, f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    return output.stdout.strip().splitlines()
