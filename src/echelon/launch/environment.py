"""The environment variables that the launcher sets for its ranks."""

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
    """Return the variables that bind gloo and NCCL to loopback, unless the user chose an interface."""
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
    """Return the variables that are the same for all ranks on this machine.

    Args:
        resolved: settings to pass to the ranks as JSON.
        num_processes: number of processes on this machine.
        num_threads: OMP_NUM_THREADS for each process; None keeps the user's value or, if unset, divides the cores
            equally.
        has_accelerator: whether this machine has an accelerator.
        interface: variables that bind the ranks to the network they share with other machines; None on a single
            machine.
    """
    own = loopback_variables() if interface is None else interface
    variables = {**own, CONFIG_VARIABLE: encode(resolved), **_for_accelerate(resolved)}
    if num_processes > 1 and not has_accelerator:
        # Without this variable and without accelerators, accelerate runs every process as a separate run.
        variables["ACCELERATE_USE_CPU"] = "true"
    if num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(num_threads)
    elif num_processes > 1 and environ.get("OMP_NUM_THREADS") is None:
        # Ranks that each use all cores slow each other down; one thread each, as in torchrun, leaves most cores idle.
        variables["OMP_NUM_THREADS"] = variables[CHOSEN_THREADS] = str(threads_of_each(num_processes))
    return variables


def _for_accelerate(resolved: Resolved[RunConfig]) -> Mapping[str, str]:
    """Return the variables that accelerate's launcher sets, which echelon's plugins also read."""
    used = section_in_use(resolved)
    # Defaults are omitted, because a rank would treat them as choices of the user.
    variables = {
        key.variable: str(value).lower() if value is None or isinstance(value, bool) else str(value)
        for key in KEYS
        if key.variable is not None
        and resolved.origins[key.field].source is not SettingSource.DEFAULT
        # If a higher layer sets None, the user's own variable must not win.
        and ((value := getattr(resolved.value, key.field)) is not None or environ.get(key.variable) is not None)
        and (key.section not in SHARDING or key.section == used or key.shared)
    }
    if used is not None:
        # Set both variables, because a lower layer may have set the other one.
        variables.update({name: str(kind == resolved.value.sharded_by).lower() for name, kind in USE.items()})
    if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in variables:
        # With this variable, accelerate rejects settings that the JSON file also contains.
        fields = [
            key.field
            for key in KEYS
            if key.section == used or key.field == "mixed_precision"
            if resolved.origins[key.field].source is SettingSource.FILE
        ]
        variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields)
    return variables
