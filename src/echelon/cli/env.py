"""``echelon env``: what a bug report needs, and nothing secret."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import click

from echelon._version import __version__
from echelon.base.device import num_devices

__all__ = ["command"]

_PACKAGES = ("torch", "numpy", "safetensors", "accelerate", "transformers", "deepspeed")


@click.command("env")
def command() -> None:
    """Show versions, platform and devices, for bug reports.

    The values of environment variables are left out: they hold tokens.
    """
    rows = [
        ("echelon", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        *((name, found) for name in _PACKAGES if (found := _version_of(name)) is not None),
        ("platform", platform.platform()),
        *_devices(),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}")


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[tuple[str, str]]:
    import torch  # noqa: PLC0415 - `echelon env --help` does not need it

    count = num_devices()
    accelerators = "none"
    if count:
        device = torch.accelerator.current_accelerator()
        assert device is not None, count
        module = torch.get_device_module(device)
        # Not every backend can tell a name (mps cannot).
        has_names = hasattr(module, "get_device_name")
        names = sorted({str(module.get_device_name(i)) for i in range(count)}) if has_names else []
        accelerators = f"{count} x {device.type}" + (f" ({', '.join(names)})" if names else "")
    backends = [name for name in ("nccl", "gloo", "mpi", "ucc", "xccl") if torch.distributed.is_backend_available(name)]
    return [
        ("accelerators", accelerators),
        ("backends", ", ".join(backends)),
        ("cpu threads", str(torch.get_num_threads())),
    ]
