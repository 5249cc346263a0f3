"""The environment that the launcher gives to its ranks, on top of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from echelon.base import environ
from echelon.base.cores import threads_of_each
from echelon.config.derive import SHARDING, section_in_use
from echelon.config.key_table import KEYS, USE
from echelon.config.origin import SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import CHOSEN_THREADS, CONFIG_VARIABLE, encode

__all__ = ["loopback_variables", "rank_variables"]

_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def loopback_variables() -> dict[str, str]:
    """Return what keeps gloo's and NCCL's own sockets on this machine, unless the user chose an interface."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: environ.get(name) or _LOOPBACK_INTERFACE for name in names}


def rank_variables(
    resolved: Resolved[RunConfig],
    *,
    num_processes: int,
    num_threads: int | None,
    has_accelerator: bool,
    interface: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables of every rank of a run on this machine.

    Args:
        resolved: the configuration, handed on as one JSON.
        num_processes: on this machine.
        num_threads: of the CPU for each process; None: the user's OMP_NUM_THREADS, else, when there are several
            processes, so many that they share the cores.
        has_accelerator: whether this machine has one.
        interface: what keeps the ranks' own sockets on the way to other machines; None: there are none.
    """
    own = loopback_variables() if interface is None else interface
    variables = {**own, CONFIG_VARIABLE: encode(resolved), **_for_accelerate(resolved)}
    if num_processes > 1 and not has_accelerator:
        # accelerate runs every process alone on a machine without accelerators unless it is told this.
        variables["ACCELERATE_USE_CPU"] = "true"
    if num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(num_threads)
    elif num_processes > 1 and environ.get("OMP_NUM_THREADS") is None:
        # Each rank taking all cores makes all of them slow; torchrun's one thread leaves most of a large machine idle.
        variables["OMP_NUM_THREADS"] = variables[CHOSEN_THREADS] = str(threads_of_each(num_processes))
    return variables


def _for_accelerate(resolved: Resolved[RunConfig]) -> Mapping[str, str]:
    """Return what accelerate's launcher would tell its ranks; the plugins of echelon read it, too."""
    used = section_in_use(resolved)
    # Defaults are left out: in a rank that reads them they would look like a choice of the user's.
    variables = {
        key.variable: str(value).lower() if value is None or isinstance(value, bool) else str(value)
        for key in KEYS
        if key.variable is not None
        and resolved.origins[key.field].source is not SettingSource.DEFAULT
        # What the user's own variable says must not come through where a stronger layer says nothing.
        and ((value := getattr(resolved.value, key.field)) is not None or environ.get(key.variable) is not None)
        and (key.section not in SHARDING or key.section == used or key.shared)
    }
    if used is not None:
        # Also the loser's: a weaker layer may have set it.
        variables.update({name: str(kind == resolved.value.sharded_by).lower() for name, kind in USE.items()})
    if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in variables:
        # By this accelerate refuses settings that the json has, too.
        fields = [
            key.field
            for key in KEYS
            if key.section == used or key.field == "mixed_precision"
            if resolved.origins[key.field].source is SettingSource.FILE
        ]
        variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields)
    return variables
