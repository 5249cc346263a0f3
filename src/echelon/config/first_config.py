"""Writes an initial config file with settings that suit this machine."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from echelon.base.device import num_devices
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import translate
from echelon.config.schema import Precision
from echelon.config.search_paths import own_file
from echelon.config.write import write

__all__ = ["default_config_file", "write_basic_config"]

default_config_file = str(own_file())
"""Default path of ``write_basic_config``, determined when this module is imported."""


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | bool:
    """Write a config file with one process per accelerator, and print how to launch with it.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        save_location: path of the file. Its suffix selects the format: .toml, or .yaml or .json with accelerate's names. If
            None, the file is written to the path where the launcher looks for it.

    Returns:
        The path, or False if the file already exists, in which case it is left unchanged.

    Raises:
        ConfigError: the precision or the file format is unknown.

    Source: accelerate.utils.write_basic_config.
    """
    path = own_file() if save_location is None else Path(save_location)
    if path.exists():
        print(translate(f"{path} already exists and was not changed; pass another save_location to write a new file"))
        return False
    precision = mixed_precision.lower()
    if precision not in get_args(Precision):
        raise ConfigError(
            f"unknown mixed_precision={mixed_precision!r}", do=f"pass one of {', '.join(get_args(Precision))}"
        )
    count = num_devices()
    values = {"mixed_precision": precision, "num_processes": max(1, count), "cpu": count == 0}
    write(path, values)
    how = "" if save_location is None else f" --config_file {path}"
    print(translate(f"wrote {path}; launch with: echelon launch{how} SCRIPT"))
    return path
