"""Builds layers of settings from flags, environment variables and code, and the JSON that the launcher passes to the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.config.key_table import BY_FIELD, KEYS, OTHER_VARIABLES, USE, own_variable
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import Layer, Resolved, resolve
from echelon.config.schema import RunConfig, coerce, field_types

CONFIG_VARIABLE = "ECHELON_CONFIG"

CHOSEN_THREADS = "ECHELON_CHOSEN_THREADS"
"""Variable that holds the OMP_NUM_THREADS chosen by the launcher; ignored if results must not depend on the machine."""

WROTE_VARIABLE = "ECHELON_WROTE_FOR_TRANSFORMERS"
"""Variable with the names of the variables that echelon set for transformers, which are no settings of the user."""

# Unknown variables with one of the last two prefixes may belong to other programs and are not checked for misspellings.
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
# Settings that may differ between machines.
_PER_MACHINE = frozenset(
    {"num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "gpu_ids"}
    | {"same_network", "deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"}
    | {"stall_timeout", "slow_timeout", "on_stall"}  # the values of the rendezvous host apply
)


def from_flags(values: Mapping[str, tuple[object, str]]) -> Layer:
    """Return a layer with command-line flags, given as field -> (value, flag as typed)."""
    return {name: Setting(value, Origin(SettingSource.FLAG, flag)) for name, (value, flag) in values.items()}


def from_code(owner: str, values: Mapping[str, object]) -> Layer:
    """Return a layer with those arguments of the class or function ``owner`` that are not None."""
    return {
        name: Setting(value, Origin(SettingSource.CODE, f"{owner}({name}=)"))
        for name, value in values.items()
        if value is not None
    }


def from_environment() -> Layer:
    """Return a layer with the ``ECHELON_*`` variables and accelerate's equivalents.

    Raises:
        ConfigError: a variable is misspelled, or both kinds of sharding are requested.
    """
    layer: dict[str, Setting] = {}
    use = []
    ours = (environ.get(WROTE_VARIABLE) or "").split()
    for variable, text in environ.snapshot().items():
        if not variable.startswith(_PREFIXES) or not text or variable in ours:
            continue
        field = _FIELDS.get(variable)
        if field is not None:
            if field not in layer or variable == own_variable(field):  # echelon's variable takes precedence
                layer[field] = Setting(text, Origin(SettingSource.ENV, variable))
            if field.startswith("parallelism_config_") and variable == own_variable(field):
                uses_layout = Setting(
                    True,
                    Origin(
                        SettingSource.DERIVED,
                        _("from {setting}, {origin}", setting=field, origin=_("env {name}", name=variable)),
                    ),
                )
                layer.setdefault("use_parallelism_config", uses_layout)
        elif variable in USE:
            use += [variable] if coerce((bool,), variable, text, where=_("env {name}", name=variable)) else []
        elif variable not in OTHER_VARIABLES:
            for prefix in _PREFIXES[:2]:
                _refuse_misspelled(variable, prefix)
    if use and "sharded_by" not in layer:
        if len(use) > 1:
            raise ConfigError(
                _("{use} are both true", use=" and ".join(use)),
                where=_("env {name}", name=", ".join(use)),
                do=_("set one of them to false"),
            )
        layer["sharded_by"] = Setting(USE[use[0]], Origin(SettingSource.ENV, use[0]))
    return layer


def refuse_misspelled(prefix: str) -> None:
    """Check for misspelled variables with ``prefix``; unknown names that do not resemble a setting's are ignored.

    Raises:
        ConfigError: an unknown variable resembles a setting's, which the message names.
    """
    for name in environ.snapshot():
        _refuse_misspelled(name, prefix)


def _refuse_misspelled(name: str, prefix: str) -> None:
    # Compared without the prefix, which would make short names such as ECHELON_HELD and ECHELON_SEED similar.
    known = (*_FIELDS, *OTHER_VARIABLES, *USE)
    ends = sorted(one.removeprefix(prefix) for one in known if one.startswith(prefix))
    end = name.removeprefix(prefix)
    if name.startswith(prefix) and end not in ends and (near := _nearest(end, ends)):
        raise ConfigError(
            _("unknown variable {name}", name=name),
            where=_("env {name}", name=name),
            do=_(
                "did you mean {prefix}{near}? Your program's own variables must not have the prefix {prefix}",
                prefix=prefix,
                near=near,
            ),
        )


def _nearest(word: str, words: list[str]) -> str | None:
    """Return the word that ``word`` likely misspells: at least 75% similar, or one typo away for short words."""
    near = get_close_matches(word, words, n=1, cutoff=0.75)
    return near[0] if near else next((other for other in words if _is_one_typo(word, other)), None)


def _is_one_typo(one: str, other: str) -> bool:
    """Return whether the words differ by one replaced, missing or added letter, or by two swapped neighbors."""
    if len(one) > len(other):
        one, other = other, one
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))
    if len(one) < len(other):
        return len(other) - len(one) == 1 and one[at:] == other[at + 1 :]
    swapped = one[:at] + one[at : at + 2][::-1] + one[at + 2 :]
    return swapped == other or one[at + 1 :] == other[at + 1 :]


def without_effect() -> str | None:
    """Return a warning about unknown variables with echelon's prefix, or None if there are none."""
    names = sorted(
        name
        for name, text in environ.snapshot().items()
        if name.startswith(_OWN_PREFIX) and text and name not in _FIELDS and name not in OTHER_VARIABLES
    )
    if not names:
        return None
    return (
        f"ignoring unknown environment variables: {', '.join(names)}. For your own variables, choose names "
        f"that do not start with {_OWN_PREFIX}; `echelon config explain` shows the settings in effect"
    )


@cache
def _warn_once(message: str) -> None:
    warn(message)


def encode(resolved: Resolved[RunConfig]) -> str:
    """Return the non-default settings and their origins as JSON for ``ECHELON_CONFIG``."""
    values: dict[str, Any] = asdict(resolved.value)
    chosen = {
        name: [values[name], int(origin.source), origin.detail]
        for name, origin in resolved.origins.items()
        if origin.source is not SettingSource.DEFAULT
    }
    return json.dumps(chosen, sort_keys=True)


def decode(text: str) -> Layer:
    """Return the layer written by ``encode``, with the original origins.

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
            _(
                "{config_variable} does not contain a configuration written by echelon launch: {error}",
                config_variable=CONFIG_VARIABLE,
                error=error,
            ),
            where=_("env {name}", name=CONFIG_VARIABLE),
            do=_("unset {config_variable}; only echelon launch may set it", config_variable=CONFIG_VARIABLE),
        ) from error


def current(code: Layer | None = None) -> Resolved[RunConfig]:
    """Resolve this process's settings: ``code`` overrides the environment, which overrides the launcher's settings."""
    text = environ.get(CONFIG_VARIABLE)
    passed = decode(text) if text else {}
    # The launcher also exports its settings under accelerate's names. Only a variable with a different value overrides them.
    changed = {
        name: _after_launch(passed.get(name), name, setting)
        for name, setting in from_environment().items()
        if not _is_same(passed.get(name), name, setting)
    }
    if not text and (message := without_effect()) is not None:  # otherwise the launcher has warned
        _warn_once(message)
    return resolve(RunConfig, [passed, changed, code or {}])


def is_debug() -> bool:
    """Return ``current().value.debug`` without resolving the other settings, because every collective calls this function."""
    text = environ.get(CONFIG_VARIABLE)
    passed = decode(text).get("debug") if text else None
    key = BY_FIELD["debug"]
    variables = (own_variable(key.field), str(key.variable))
    found = [
        Setting(text, Origin(SettingSource.ENV, name)) for name in variables if (text := environ.get(name)) is not None
    ]
    setting = found[0] if found else passed
    if setting is None:
        return False
    return bool(coerce(field_types(RunConfig)["debug"], "debug", setting.value, where=str(setting.origin)))


def set_debug(debug: bool) -> None:
    """Change ``debug`` for this process and its children."""
    # accelerate's variable, because changing it overrides a flag.
    environ.write({own_variable("debug"): None, str(BY_FIELD["debug"].variable): "1" if debug else "0"})


def fingerprint(resolved: Resolved[RunConfig]) -> dict[str, tuple[object, str]]:
    """Return the value and origin of each non-default setting that must be the same on all ranks."""
    default = RunConfig()
    return {
        name: (value, str(origin))
        for name, origin in resolved.origins.items()
        if name not in _PER_MACHINE and (value := getattr(resolved.value, name)) != getattr(default, name)
    }


def _is_same(passed: Setting | None, name: str, setting: Setting) -> bool:
    """Return whether ``setting`` equals the value that the launcher passed."""
    if passed is None:
        return False
    return passed.value == coerce(field_types(RunConfig)[name], name, setting.value, where=str(setting.origin))


def _after_launch(passed: Setting | None, name: str, setting: Setting) -> Setting:
    """Return ``setting`` with its origin: code, if the launcher had set its variable to a stronger value and the program changed it."""
    variable = BY_FIELD[name].variable
    if passed is None or passed.origin.source <= SettingSource.ENV or setting.origin.detail != variable:
        return setting
    return Setting(setting.value, Origin(SettingSource.CODE, f"os.environ[{variable!r}]"))
