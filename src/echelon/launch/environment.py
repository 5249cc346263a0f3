"""The environment that the launcher gives to its ranks, on top of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from echelon.base import environ
from echelon.config.origin import Source
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import CONFIG_VARIABLE, encode

__all__ = ["loopback_variables", "rank_variables"]

_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

# For scripts that use accelerate itself; field -> its variable.
_ACCELERATE = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "cpu": "ACCELERATE_USE_CPU",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "debug": "ACCELERATE_DEBUG_MODE",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "dynamo_mode": "ACCELERATE_DYNAMO_MODE",
    "dynamo_use_fullgraph": "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "dynamo_use_dynamic": "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "dynamo_use_regional_compilation": "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
}


def loopback_variables() -> dict[str, str]:
    """Return what keeps gloo's and NCCL's own sockets on this machine, unless the user chose an interface."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: environ.get(name) or _LOOPBACK_INTERFACE for name in names}


def rank_variables(
    resolved: Resolved[RunConfig], *, num_processes: int, num_threads: int | None, has_accelerator: bool
) -> dict[str, str]:
    """Return the variables of every rank of a run on one machine.

    Args:
        resolved: the configuration, handed on as one JSON.
        num_processes: on this machine.
        num_threads: of the CPU for each process; None: the user's OMP_NUM_THREADS, else 1 when there are several.
        has_accelerator: whether this machine has one.
    """
    variables = {**loopback_variables(), CONFIG_VARIABLE: encode(resolved), **_for_accelerate(resolved)}
    if num_processes > 1 and not has_accelerator:
        # accelerate runs every process alone on a machine without accelerators unless it is told this.
        variables[_ACCELERATE["cpu"]] = "true"
    if num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(num_threads)
    elif num_processes > 1 and environ.get("OMP_NUM_THREADS") is None:
        variables["OMP_NUM_THREADS"] = "1"  # as torchrun; each rank taking all cores makes all of them slow
    return variables


def _for_accelerate(resolved: Resolved[RunConfig]) -> Mapping[str, str]:
    # Defaults are left out: in a rank that reads them they would look like a choice of the user's.
    return {
        variable: str(value).lower()
        for name, variable in _ACCELERATE.items()
        if resolved.origins[name].source is not Source.DEFAULT and (value := getattr(resolved.value, name)) is not None
    }
