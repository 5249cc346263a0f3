"""Writes settings to a file: TOML with echelon's names, or YAML or JSON with accelerate's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from echelon.base.device import num_devices
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.config.derive import given
from echelon.config.files import own_file
from echelon.config.key_table import BY_FIELD, KEYS, SECTIONS
from echelon.config.resolve import Resolved
from echelon.config.schema import Precision, RunConfig

default_config_file = str(own_file())
"""Default path of ``write_basic_config``, determined when this module is imported."""

# Settings that accelerate's files do not have. echelon reads them at the top level; accelerate rejects a file with them.
_OWN = (
    "engine",
    "master_weights",
    "activation_checkpointing",
    "activation_checkpointing_blocks",
    "parity",
    "max_micro_batch_size",
    "canonical_shards",
    "verify_every",
    "verify_action",
    "spike_guard",
    "spike_factor",
    "seed",
    "allow_changed_data",
)
_TYPES = MappingProxyType({"fsdp": "FSDP", "deepspeed": "DEEPSPEED"})


def chosen(resolved: Resolved[RunConfig]) -> dict[str, Any]:
    """Return the settings given by the user that differ from the defaults."""
    default = RunConfig()
    values = {key.field: getattr(resolved.value, key.field) for key in KEYS if given(resolved, key.field)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def write(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write ``values`` (field -> value) to ``path`` in the format given by its suffix.

    Raises:
        ConfigError: the suffix is unknown, or the file cannot be written.
    """
    path = Path(path)
    comment = "" if values else _ALL_DEFAULT
    write_mapping(path, _sections(values) if path.suffix == ".toml" else for_accelerate(values), comment=comment)


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | bool:
    """Write a config file with one process per accelerator, and print how to launch with it.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        save_location: path of the file. Its suffix selects the format: .toml, or .yaml or .json with accelerate's names. If
            None, the file is written to the path where the launcher looks for it.

    Returns:
        The path, or False if the file already exists, in which case it is left unchanged.

    Raises:
        ConfigError: the precision or the file format is unknown.

    Source: accelerate.utils.write_basic_config.
    """
    path = own_file() if save_location is None else Path(save_location)
    if path.exists():
        print(_("{path} already exists and was not changed; pass another save_location to write a new file", path=path))
        return False
    precision = mixed_precision.lower()
    if precision not in get_args(Precision):
        raise ConfigError(
            _("unknown mixed_precision={mixed_precision!r}", mixed_precision=mixed_precision),
            do=_("pass one of {precision}", precision=", ".join(get_args(Precision))),
        )
    count = num_devices()
    values = {"mixed_precision": precision, "num_processes": max(1, count), "cpu": count == 0}
    write(path, values)
    how = "" if save_location is None else f" --config_file {path}"
    print(_("wrote {path}; launch with: echelon launch{how} SCRIPT", path=path, how=how))
    return path


_ALL_DEFAULT = (
    "All settings have their defaults. `echelon config explain` lists them; docs/configuration.md describes them."
)


def write_mapping(path: Path, data: Mapping[str, Any], *, suffix: str | None = None, comment: str = "") -> None:
    """Write ``data`` to ``path`` in the format given by ``suffix`` (default: the suffix of ``path``).

    Args:
        comment: first line of the file; not in JSON, which has no comments.

    Raises:
        ConfigError: the suffix is unknown, or the file cannot be written.
    """
    suffix = suffix or path.suffix
    if suffix == ".toml":
        import tomli_w  # noqa: PLC0415 - the launcher imports this module, but writes no files

        text = tomli_w.dumps(data)
    elif suffix == ".json":
        text = json.dumps(data, indent=2) + "\n"
    elif suffix in (".yaml", ".yml"):
        import yaml  # noqa: PLC0415 - as above

        text = yaml.safe_dump(data)
    else:
        raise ConfigError(
            _("{path}: unknown file format", path=path), do=_("use a file name that ends in .toml, .yaml or .json")
        )
    if comment and suffix != ".json":
        text = f"# {comment}\n{text}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            _("cannot write {path}: {strerror}", path=path, strerror=error.strerror), do=_("pass another path")
        ) from error


def unknown_to_accelerate(values: Mapping[str, Any]) -> list[str]:
    """Return the names in ``values`` that accelerate rejects."""
    alone = ["gradient_accumulation_steps"] if values.get("sharded_by") not in _DEEPSPEED else []
    return [name for name in (*_OWN, *alone) if name in values]


def _sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` as TOML tables; ``fsdp_version`` becomes ``version`` in ``[fsdp]``."""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        key = BY_FIELD[name]
        if key.section is None or key.shared:
            tables[name] = value
        else:
            table = tables.setdefault(key.section.removesuffix("_config"), {})
            table[name.removeprefix(SECTIONS[key.section])] = value
    # TOML requires plain values before tables.
    return dict(sorted(tables.items(), key=lambda item: isinstance(item[1], dict)))


def for_accelerate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` (field -> value) under accelerate's names, including the entries that accelerate requires."""
    several = values.get("num_processes", 2) > 1
    plain = ("MULTI_CPU" if values.get("cpu") else "MULTI_GPU") if several else "NO"
    sharded_by = values.get("sharded_by")
    file: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _TYPES[sharded_by] if sharded_by else plain,
        "mixed_precision": "no",
        "use_cpu": False,
        "num_machines": 1,
        "machine_rank": 0,
        "debug": False,
    }
    for name, value in values.items():
        key = BY_FIELD[name]
        if name == "sharded_by":
            continue
        at_top = key.section is None or name in unknown_to_accelerate(values)
        place = file if at_top else file.setdefault(str(key.section), {})
        place[key.written] = value
    return file


_DEEPSPEED = frozenset(name for name, kind in _TYPES.items() if kind == "DEEPSPEED")
