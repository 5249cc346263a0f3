"""A first config file: the few settings that a machine suggests."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from echelon.base.device import num_devices
from echelon.base.errors import ConfigError
from echelon.config.schema import Precision
from echelon.config.search_paths import own_file
from echelon.config.write import write

__all__ = ["default_config_file", "write_basic_config"]

default_config_file = str(own_file())
"""Where ``write_basic_config`` writes when it is told nothing else, as found when this was imported."""


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | bool:
    """Write a config file with one process for each accelerator, and say how to start with it.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        save_location: the file, whose suffix says what kind: .toml, or .yaml or .json in accelerate's names; None: echelon's
            own place, where the launcher finds it.

    Returns:
        The path; False when a file is there already, which stays.

    Raises:
        ConfigError: no such precision, or no such kind of file.

    Source: accelerate.utils.write_basic_config.
    """
    path = own_file() if save_location is None else Path(save_location)
    if path.exists():
        print(f"{path} is there already and stays as it is; give another save_location for a new one")
        return False
    precision = mixed_precision.lower()
    if precision not in get_args(Precision):
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} is none", do=f"give one of {', '.join(get_args(Precision))}"
        )
    count = num_devices()
    values = {"mixed_precision": precision, "num_processes": max(1, count), "cpu": count == 0}
    write(path, values)
    how = "" if save_location is None else f" --config_file {path}"
    print(f"wrote {path}; start with: echelon launch{how} SCRIPT")
    return path
