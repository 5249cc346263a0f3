"""What transformers reads in the environment when it loads a model: whether rank zero alone is to have the values."""

from __future__ import annotations

from echelon.base import environ
from echelon.compat.variables import parse_flag_from_env

__all__ = [
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "is_echelons_own",
    "tell_transformers",
]

_SHARDED = "ACCELERATE_USE_FSDP"
_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
# Names of those that tell_transformers wrote: for echelon, they are no settings of the user's.
_OWN = "ECHELON_WROTE_FOR_TRANSFORMERS"


def enable_fsdp_ram_efficient_loading() -> None:
    """Set the variables by which models are sharded, and transformers loads them on the first rank of each machine alone."""
    environ.write({_SHARDED: environ.get(_SHARDED) or "True", _EFFICIENT: "True", _OWN: None})


def disable_fsdp_ram_efficient_loading() -> None:
    """Let transformers load models on every rank."""
    environ.write({_EFFICIENT: "False", _OWN: None})


def tell_transformers() -> None:
    """Set what ``cpu_ram_efficient_loading=True`` in code means for transformers; other Accelerators do not read it."""
    missing = [name for name in (_SHARDED, _EFFICIENT) if not parse_flag_from_env(name)]
    if missing:
        own = [*(environ.get(_OWN) or "").split(), *missing]
        environ.write({**dict.fromkeys(missing, "true"), _OWN: " ".join(dict.fromkeys(own))})


def is_echelons_own(name: str) -> bool:
    """Tell whether the variable ``name`` was set by ``tell_transformers``."""
    return name in (environ.get(_OWN) or "").split()
