"""Sets environment variables that determine whether transformers loads a model only on rank zero."""

from __future__ import annotations

from echelon.base import environ
from echelon.compat.variables import parse_flag_from_env
from echelon.config.sources import WROTE_VARIABLE

__all__ = [
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "configure_transformers",
]

_SHARDED = "ACCELERATE_USE_FSDP"
_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def enable_fsdp_ram_efficient_loading() -> None:
    """Set the variables that enable sharding and make transformers load models only on each machine's first rank."""
    environ.write({_SHARDED: environ.get(_SHARDED) or "True", _EFFICIENT: "True", WROTE_VARIABLE: None})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load models on every rank."""
    environ.write({_EFFICIENT: "False", WROTE_VARIABLE: None})


def configure_transformers() -> None:
    """Set transformers' variables if code sets ``cpu_ram_efficient_loading=True``; other Accelerators ignore them."""
    missing = [name for name in (_SHARDED, _EFFICIENT) if not parse_flag_from_env(name)]
    if missing:
        own = [*(environ.get(WROTE_VARIABLE) or "").split(), *missing]
        environ.write({**dict.fromkeys(missing, "true"), WROTE_VARIABLE: " ".join(dict.fromkeys(own))})
