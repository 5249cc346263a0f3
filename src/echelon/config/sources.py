"""The layers: flags, environment variables, code, and the one JSON that the launcher hands to the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from types import MappingProxyType
from typing import Any

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.warnings import warn
from echelon.compat.variables import parse_flag_from_env, refuse_misspelled
from echelon.config.key_table import BY_FIELD, KEYS, OTHER_VARIABLES, USE, own_variable
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import Layer, Resolved, resolve
from echelon.config.schema import RunConfig, coerce, field_types

__all__ = [
    "CHOSEN_THREADS",
    "CONFIG_VARIABLE",
    "current",
    "decode",
    "encode",
    "fingerprint",
    "from_code",
    "from_environment",
    "from_flags",
    "is_debug",
    "refuse_launchers_variables",
    "without_effect",
]

CONFIG_VARIABLE = "ECHELON_CONFIG"

CHOSEN_THREADS = "ECHELON_CHOSEN_THREADS"
"""The OMP_NUM_THREADS that the launcher chose for this machine; ignored where results must not depend on the machine."""

# A misspelled variable with one of the last two prefixes may belong to another program.
_OWN_PREFIX = "ECHELON_"
_PREFIXES = ("ACCELERATE_", _OWN_PREFIX, "FSDP_", "PARALLELISM_CONFIG_")
_FIELDS = MappingProxyType(
    {
        variable: key.field
        for key in KEYS
        for variable in (key.variable, own_variable(key.field))
        if variable is not None
    }
)
_BY_LAUNCHER = frozenset(key.field for key in KEYS if key.section not in (None, "dynamo_config") and not key.shared) | {
    "sharded_by",
    "use_parallelism_config",
}
# Settings that may differ between machines.
_PER_MACHINE = frozenset(
    {"num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "gpu_ids"}
    | {"same_network", "deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"}
    | {"stall_timeout", "slow_timeout", "on_stall"}  # those of the rendezvous host apply
)


def from_flags(values: Mapping[str, tuple[object, str]]) -> Layer:
    """Make a layer from command-line flags: field -> (value, the flag as typed)."""
    return {name: Setting(value, Origin(SettingSource.FLAG, flag)) for name, (value, flag) in values.items()}


def from_code(owner: str, values: Mapping[str, object]) -> Layer:
    """Make a layer from the arguments of ``owner`` in code; None means that the argument was not given."""
    return {
        name: Setting(value, Origin(SettingSource.CODE, f"{owner}({name}=)"))
        for name, value in values.items()
        if value is not None
    }


def from_environment() -> Layer:
    """Make a layer from the ``ECHELON_*`` variables and the equivalent ones of accelerate.

    Raises:
        ConfigError: a variable with one of these prefixes is misspelled, or both kinds of sharding are requested.
    """
    layer: dict[str, Setting] = {}
    use = []
    for variable, text in environ.snapshot().items():
        if not variable.startswith(_PREFIXES) or not text:
            continue
        field = _FIELDS.get(variable)
        if field is not None:
            if field not in layer or variable == own_variable(field):  # echelon's variable takes precedence
                layer[field] = Setting(text, Origin(SettingSource.ENV, variable))
        elif variable in USE:
            use += [variable] if parse_flag_from_env(variable) else []
        elif variable not in OTHER_VARIABLES:
            for prefix in _PREFIXES[:2]:
                refuse_misspelled(prefix, [*_FIELDS, *OTHER_VARIABLES, *USE])
    if use and "sharded_by" not in layer:
        if len(use) > 1:
            raise ConfigError(
                f"{' and '.join(use)} are both true", where=f"env {', '.join(use)}", do="set one of them to false"
            )
        layer["sharded_by"] = Setting(USE[use[0]], Origin(SettingSource.ENV, use[0]))
    return layer


def without_effect() -> str | None:
    """Return a warning about variables that begin with echelon's prefix and are unknown; None: there are none."""
    names = sorted(
        name
        for name, text in environ.snapshot().items()
        if name.startswith(_OWN_PREFIX) and text and name not in _FIELDS and name not in OTHER_VARIABLES
    )
    if not names:
        return None
    return (
        f"{', '.join(names)} in the environment: not known to echelon, and without effect. For a variable of your own, choose a name "
        f"that does not begin with {_OWN_PREFIX}; `echelon config explain` shows the settings in effect"
    )


@cache
def _warn_once(message: str) -> None:
    warn(message)


def encode(resolved: Resolved[RunConfig]) -> str:
    """Write the chosen (not the default) settings and their origins as one JSON text, for ``ECHELON_CONFIG``."""
    values: dict[str, Any] = asdict(resolved.value)
    chosen = {
        name: [values[name], int(origin.source), origin.detail]
        for name, origin in resolved.origins.items()
        if origin.source is not SettingSource.DEFAULT
    }
    return json.dumps(chosen, sort_keys=True)


def decode(text: str) -> Layer:
    """Read what ``encode`` wrote, so that rank 3 still says "flag --mixed-precision".

    Raises:
        ConfigError: the text was not written by ``encode``.
    """
    try:
        return {
            str(name): Setting(value, Origin(SettingSource(source), str(detail)))
            for name, (value, source, detail) in json.loads(text).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{CONFIG_VARIABLE} does not hold a configuration written by echelon launch: {error}",
            where=f"env {CONFIG_VARIABLE}",
            do=f"unset {CONFIG_VARIABLE}; it is made by the launcher, not by hand",
        ) from error


def current(code: Layer | None = None) -> Resolved[RunConfig]:
    """Resolve the configuration of this process: ``code`` over what the launcher resolved over the environment."""
    text = environ.get(CONFIG_VARIABLE)
    handed = decode(text) if text else {}
    # The launcher has resolved the environment, and exports the result under accelerate's names, too. Only a variable with
    # another value (set in the script, for example) counts.
    later = {
        name: setting for name, setting in from_environment().items() if not _says(handed.get(name), name, setting)
    }
    if not text and (message := without_effect()) is not None:  # else the launcher has warned
        _warn_once(message)
    return resolve(RunConfig, [handed, later, code or {}])


def is_debug() -> bool:
    """Return ``current().value.debug`` without resolving the other settings: every collective calls this."""
    text = environ.get(CONFIG_VARIABLE)
    handed = decode(text).get("debug") if text else None
    key = BY_FIELD["debug"]
    variables = (own_variable(key.field), str(key.variable))
    found = [
        Setting(text, Origin(SettingSource.ENV, name)) for name in variables if (text := environ.get(name)) is not None
    ]
    setting = found[0] if found else handed
    if setting is None:
        return False
    return bool(coerce(field_types(RunConfig)["debug"], "debug", setting.value, where=str(setting.origin)))


def fingerprint(resolved: Resolved[RunConfig]) -> dict[str, tuple[object, str]]:
    """Return what all ranks must share: the value and origin of each setting that differs from its default."""
    default = RunConfig()
    return {
        name: (value, str(origin))
        for name, origin in resolved.origins.items()
        if name not in _PER_MACHINE and (value := getattr(resolved.value, name)) != getattr(default, name)
    }


def refuse_launchers_variables(resolved: Resolved[RunConfig]) -> None:
    """Raise for ``ECHELON_*`` variables that only ``echelon launch`` translates, in a process that it did not start.

    Raises:
        ConfigError: there is one; in a process, these settings are read from accelerate's variables.
    """
    if environ.get(CONFIG_VARIABLE) is not None:
        return
    for name, origin in resolved.origins.items():
        if origin.source is SettingSource.ENV and origin.detail == own_variable(name) and name in _BY_LAUNCHER:
            other = BY_FIELD[name].variable or ", ".join(USE)
            raise ConfigError(
                f"{origin.detail} is for echelon launch, and this process was not started by it",
                where=str(origin),
                do=f"start the script with echelon launch, or set {other}",
            )


def _says(handed: Setting | None, name: str, setting: Setting) -> bool:
    """Tell whether ``setting`` equals the value that the launcher passed on."""
    if handed is None:
        return False
    return handed.value == coerce(field_types(RunConfig)[name], name, setting.value, where=str(setting.origin))
