"""Sets environment variables that determine whether transformers loads a model only on rank zero."""

from __future__ import annotations

from echelon.base import environ
from echelon.compat.variables import parse_flag_from_env

__all__ = [
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "is_echelons_own",
    "configure_transformers",
]

_SHARDED = "ACCELERATE_USE_FSDP"
_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
# Names of the variables that configure_transformers wrote, which echelon does not read as settings of the user.
_OWN = "ECHELON_WROTE_FOR_TRANSFORMERS"


def enable_fsdp_ram_efficient_loading() -> None:
    """Set the variables that enable sharding and make transformers load models only on each machine's first rank."""
    environ.write({_SHARDED: environ.get(_SHARDED) or "True", _EFFICIENT: "True", _OWN: None})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load models on every rank."""
    environ.write({_EFFICIENT: "False", _OWN: None})


def configure_transformers() -> None:
    """Set transformers' variables if code sets ``cpu_ram_efficient_loading=True``; other Accelerators ignore them."""
    missing = [name for name in (_SHARDED, _EFFICIENT) if not parse_flag_from_env(name)]
    if missing:
        own = [*(environ.get(_OWN) or "").split(), *missing]
        environ.write({**dict.fromkeys(missing, "true"), _OWN: " ".join(dict.fromkeys(own))})


def is_echelons_own(name: str) -> bool:
    """Return whether ``configure_transformers`` has set the variable ``name``."""
    return name in (environ.get(_OWN) or "").split()
