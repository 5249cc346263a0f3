"""The precision that ``speed="max"`` chooses, and what trains low-precision weights where echelon stands in for accelerate."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from echelon.base.capabilities import Capabilities
from echelon.base.device import has_bf16
from echelon.base.logging import get_logger
from echelon.config.library_variables import replaced_libraries
from echelon.config.origin import Origin, SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import current, from_code

_logger = get_logger(__name__)


def is_fastest(speed: str | None) -> bool:
    """Return whether the run uses ``speed="max"``; pass None if the code does not set it."""
    return current(from_code("TrainingArguments", {"speed": speed})).value.speed == "max"


def rounds_stochastically(master_weights: str | None) -> bool:
    """Return whether ``master_weights="stochastic"`` holds, given in code or, with None, elsewhere."""
    given = from_code("TrainingArguments", {"master_weights": master_weights})
    return current(given).value.master_weights == "stochastic"


def choose_precision(config: Resolved[RunConfig]) -> Resolved[RunConfig]:
    """Return ``config`` with bf16 autocast if ``speed="max"``, no precision was set, and the device computes bf16 natively."""
    if config.value.speed != "max" or config.origins["mixed_precision"].source is not SettingSource.DEFAULT:
        return config
    if not has_bf16(cpu=config.value.cpu):
        _logger.info("speed='max': no bf16 autocast, because this device does not compute bf16 natively")
        return config
    origin = Origin(SettingSource.DERIVED, "speed='max'")
    origins = MappingProxyType({**config.origins, "mixed_precision": origin})
    return replace(config, value=replace(config.value, mixed_precision="bf16"), origins=origins)


def choose_master_weights(config: Resolved[RunConfig], facts: Capabilities) -> Resolved[RunConfig]:
    """Return ``config`` with ``master_weights="keep"`` if echelon stands in for accelerate and nothing else was asked for.

    A program that is written for accelerate expects the numbers of accelerate, which casts such weights only when it shards them.

    Source: accelerate.Accelerator.prepare_model and accelerate.utils.fsdp_utils.fsdp2_prepare_model (1.15).
    """
    libraries = replaced_libraries()
    is_asked = config.origins["master_weights"].source is not SettingSource.DEFAULT
    if libraries is None or is_asked or facts.shards_parameters or not facts.exposes_state:
        return config
    origin = Origin(SettingSource.DERIVED, "as accelerate (ECHELON_AS)")
    origins = MappingProxyType({**config.origins, "master_weights": origin})
    return replace(config, value=replace(config.value, master_weights="keep"), origins=origins)
