"""Variables for programs and libraries that read accelerate's, transformers' or DeepSpeed's variables; echelon sets them only here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from echelon.base import environ
from echelon.compat.variables import parse_flag_from_env
from echelon.config.derive import SHARDING, section_in_use
from echelon.config.key_table import KEYS, USE
from echelon.config.origin import SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.sources import WROTE_VARIABLE

_SHARDED = "ACCELERATE_USE_FSDP"
_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def for_accelerate(resolved: Resolved[RunConfig]) -> Mapping[str, str]:
    """Return the variables that accelerate's launcher sets, which programs and libraries written for it read."""
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


def enable_fsdp_ram_efficient_loading() -> None:
    """Set the variables that enable sharding and make transformers load models only on each machine's first rank."""
    environ.write({_SHARDED: environ.get(_SHARDED) or "True", _EFFICIENT: "True", WROTE_VARIABLE: None})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load models on every rank."""
    environ.write({_EFFICIENT: "False", WROTE_VARIABLE: None})


def replaced_libraries() -> str | None:
    """Return the libraries that echelon replaces (``ECHELON_AS``), separated by commas: in this rank, or, for the launcher, in ranks
    for which no flag says so.
    """
    return environ.get("ECHELON_AS")


def configure_transformers() -> None:
    """Set transformers' variables if code sets ``cpu_ram_efficient_loading=True``; other Accelerators ignore them."""
    missing = [name for name in (_SHARDED, _EFFICIENT) if not parse_flag_from_env(name)]
    if missing:
        own = [*(environ.get(WROTE_VARIABLE) or "").split(), *missing]
        environ.write({**dict.fromkeys(missing, "true"), WROTE_VARIABLE: " ".join(dict.fromkeys(own))})


def deepspeed_knows_rank(local_rank: int) -> AbstractContextManager[None]:
    """Return a context in which LOCAL_RANK is set, which DeepSpeed needs also in a program that no launcher started."""
    return environ.patch({"LOCAL_RANK": environ.get("LOCAL_RANK") or str(local_rank)})


def deepspeed_on(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which DeepSpeed chooses the CPU if ``device_type`` is ``cpu``, and otherwise detects the device."""
    return environ.patch({"DS_ACCELERATOR": "cpu"} if device_type == "cpu" else {})
