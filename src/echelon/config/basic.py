"""A first config file: the few settings that a machine suggests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from echelon.base import environ
from echelon.base.device import num_devices
from echelon.base.errors import ConfigError
from echelon.config.schema import Precision

__all__ = ["default_config_file", "write_basic_config"]


def default_config_file() -> Path:
    """Return where ``write_basic_config`` writes when it is told nothing else."""
    home = environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "echelon" / "default_config.json"


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | bool:
    """Write a config file with one process for each accelerator, and say how to start with it.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        save_location: the file; None: ``default_config_file()``.

    Returns:
        The path; False when a file is there already, which stays.

    Raises:
        ConfigError: no such precision.

    Source: accelerate.utils.write_basic_config. Its settings that follow from these three are left out.
    """
    path = default_config_file() if save_location is None else Path(save_location)
    if path.exists():
        print(f"{path} is there already and stays as it is; give another save_location for a new one")
        return False
    precision = mixed_precision.lower()
    if precision not in get_args(Precision):
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} is none", do=f"give one of {', '.join(get_args(Precision))}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {"mixed_precision": precision, "num_processes": max(1, num_devices()), "debug": False}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}; start with: echelon launch --config_file {path} SCRIPT")
    return path
