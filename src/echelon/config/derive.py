"""Derives settings from others and finds conflicts between settings, for the launcher and ``echelon config explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from echelon.base.errors import ConfigError, MissingExtraError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.optional import install_command, is_available
from echelon.config.documents import DocumentEntry, read
from echelon.config.key_table import BY_FIELD, KEYS
from echelon.config.origin import Origin, SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig

# Sharding settings that each engine accepts; the first is the default.
_TAKES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "single": (),
        "dp": (),
        "ddp": (),
        "zero1": (),
        "fsdp2": ("fsdp", "deepspeed"),
        "deepspeed": ("deepspeed",),
    }
)
_SECTION = MappingProxyType({"fsdp": "fsdp_config", "deepspeed": "deepspeed_config"})
_HOW = MappingProxyType(
    {
        "fsdp_config": N_("add --use_fsdp, or distributed_type: FSDP"),
        "deepspeed_config": N_("add --use_deepspeed, or distributed_type: DEEPSPEED"),
    }
)
# The optional package that an engine needs; the extra has the same name.
_PACKAGES = MappingProxyType({"deepspeed": "deepspeed"})
_BY_SHARDING = MappingProxyType({"fsdp": "fsdp2", "deepspeed": "deepspeed"})
SHARDING = frozenset(_HOW)
"""The sections with sharding settings; a run uses at most one of these sections."""
# Fields that a DeepSpeed JSON file can also set -> their names in that file.
_IN_JSON = MappingProxyType(
    {
        "zero_stage": "zero_optimization.stage",
        "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
        "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
        "offload_param_device": "zero_optimization.offload_param.device",
        "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
        "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "gradient_clipping",
    }
)


def given(resolved: Resolved[RunConfig], name: str) -> bool:
    """Return whether ``name`` was set by a file, the environment, a flag or code."""
    return resolved.origins[name].source > SettingSource.DERIVED


def section_in_use(resolved: Resolved[RunConfig]) -> str | None:
    """Return the section that controls how the model is sharded, or None if it is not sharded."""
    return _SECTION.get(resolved.value.sharded_by or "")


def derive(resolved: Resolved[RunConfig]) -> Resolved[RunConfig]:
    """Fill in the settings that follow from other settings; their origins name those other settings."""
    derived: dict[str, tuple[Any, str]] = {}
    value, origins = resolved.value, resolved.origins
    if value.engine is not None and value.sharded_by is None and _TAKES.get(value.engine):
        derived["sharded_by"] = (_TAKES[value.engine][0], f"engine, {origins['engine']}")
    sharded_by = derived["sharded_by"][0] if "sharded_by" in derived else value.sharded_by
    if _SECTION.get(sharded_by or "") == "fsdp_config":
        if "sharded_by" in derived and value.fsdp_version is None:
            derived["fsdp_version"] = (2, f"engine, {origins['engine']}")
        if value.fsdp_cpu_ram_efficient_loading is None:
            derived["fsdp_cpu_ram_efficient_loading"] = (True, "sharded_by: as accelerate's launcher")
    if not value.use_parallelism_config:
        layout = [name for name in BY_FIELD if name.startswith("parallelism_config_") and given(resolved, name)]
        if layout:
            derived["use_parallelism_config"] = (True, f"{layout[0]}, {origins[layout[0]]}")
    return Resolved(
        value=replace(value, **{name: found for name, (found, _) in derived.items()}),
        origins=MappingProxyType(
            {
                **origins,
                **{
                    name: Origin(SettingSource.DERIVED, _("from {setting}", setting=why))
                    for name, (_value, why) in derived.items()
                },
            }
        ),
        shadowed=resolved.shadowed,
    )


def with_engine(resolved: Resolved[RunConfig]) -> Resolved[RunConfig]:
    """Fill in the engine that the run will use. For display only: the ranks choose the engine themselves."""
    value, origins = resolved.value, resolved.origins
    if value.engine is not None or value.num_processes is None:
        return resolved
    alone = value.num_processes == 1
    why = "num_processes" if alone or value.sharded_by is None else "sharded_by"
    engine = "single" if alone else _BY_SHARDING.get(value.sharded_by or "", "ddp")
    origin = Origin(SettingSource.DERIVED, _("from {setting}, {origin}", setting=why, origin=origins[why]))
    return replace(resolved, value=replace(value, engine=engine), origins={**origins, "engine": origin})


def check(resolved: Resolved[RunConfig], *, world_size: int | None = None) -> None:
    """Raise an error for unsupported and conflicting settings.

    Raises:
        ConfigError: a setting is unsupported or has no effect, or two settings contradict each other.
    """
    _check_offered(resolved)
    _check_engine(resolved)
    check_sections(resolved)
    if section_in_use(resolved) == "deepspeed_config" and resolved.value.deepspeed_config_file is not None:
        _check_json(resolved, resolved.value.deepspeed_config_file, world_size)


def check_installed(resolved: Resolved[RunConfig], script: Path | None) -> None:
    """Raise an error if the package that the engine needs is not installed.

    Args:
        script: script that the ranks run. If it names another engine that accepts these settings, the check is left to the
            ranks.

    Raises:
        MissingExtraError: the package is not installed on this machine.
    """
    value = resolved.value
    engine = value.engine or _BY_SHARDING.get(value.sharded_by or "", "")
    package = _PACKAGES.get(engine)
    if package is None or is_available(package):
        return
    others = [name for name, takes in _TAKES.items() if name != engine and value.sharded_by in takes]
    source = "" if script is None else script.read_text(encoding="utf-8", errors="replace")
    if any(name in source for name in others):
        return
    raise MissingExtraError(
        _("engine={engine!r} requires the package {package!r}, which is not installed", engine=engine, package=package),
        where=str(resolved.origins["engine" if value.engine else "sharded_by"]),
        do=" or ".join(
            [
                install_command(package),
                *(f"pass --engine {name} to use torch's implementation instead" for name in others),
            ]
        ),
    )


def _check_offered(resolved: Resolved[RunConfig]) -> None:
    value, origins = resolved.value, resolved.origins
    if value.fp8_backend not in (None, "AO", "NO"):
        raise ConfigError(
            _(
                "fp8_backend={fp8_backend!r} is not supported; torchao (AO) is the only supported fp8 library",
                fp8_backend=value.fp8_backend,
            ),
            where=str(origins["fp8_backend"]),
            do=_("set fp8_backend to AO, and remove the settings of other fp8 libraries"),
        )
    if value.engine is not None and value.engine not in _TAKES:
        others = {point.name for point in entry_points(group="echelon.engines")}
        if value.engine not in others:
            near = get_close_matches(value.engine, [*_TAKES, *others], n=1)
            raise ConfigError(
                _("unknown engine {engine!r}", engine=value.engine),
                where=str(origins["engine"]),
                do=_("did you mean {near!r}?", near=near[0])
                if near
                else _("set engine to one of {names}", names=", ".join([*_TAKES, *sorted(others)])),
            )


def _check_engine(resolved: Resolved[RunConfig]) -> None:
    value, origins = resolved.value, resolved.origins
    takes = _TAKES.get(value.engine or "")
    if takes is None or value.sharded_by is None or value.sharded_by in takes:
        return
    detail = "sharded_by"
    if value.zero_stage is not None and section_in_use(resolved) == BY_FIELD["zero_stage"].section:
        detail = "zero_stage"
    raise ConfigError(
        _(
            "{detail}={value!r} (from {origin}) and engine={engine!r} (from {other}) contradict each other",
            detail=detail,
            value=getattr(value, detail),
            origin=origins[detail],
            engine=value.engine,
            other=origins["engine"],
        ),
        do=_(
            "remove engine, or remove sharded_by={sharded_by!r} (from {origin})",
            sharded_by=value.sharded_by,
            origin=origins["sharded_by"],
        ),
    )


def check_sections(resolved: Resolved[RunConfig]) -> None:
    """Raise an error for settings of a kind of sharding that is not used, because they would be ignored.

    Raises:
        ConfigError: there is such a setting.
    """
    used = section_in_use(resolved)
    # Sections of overridden values of sharded_by, which the launcher reports already.
    lost = {_SECTION[str(s.value)] for s in resolved.shadowed if s.name == "sharded_by" and s.value is not None}
    for key in KEYS:
        how = _HOW.get(key.section or "")
        if how is None or key.section in {used, *lost} or key.shared or not given(resolved, key.field):
            continue
        # accelerate's variable may belong to another program (FSDP_...), and has no effect without ACCELERATE_USE_...
        if resolved.origins[key.field] == Origin(SettingSource.ENV, key.variable or ""):
            continue
        raise ConfigError(
            f"{key.field}={getattr(resolved.value, key.field)!r} would have no effect: "
            + ("the model is not sharded" if used is None else f"the model is sharded by {resolved.value.sharded_by}"),
            where=str(resolved.origins[key.field]),
            do=f"{how}, or remove {key.field}",
        )


def _check_json(resolved: Resolved[RunConfig], path: str, world_size: int | None) -> None:
    origin = resolved.origins["deepspeed_config_file"]
    if not Path(path).is_file():
        raise ConfigError(
            _("the DeepSpeed config file {path} does not exist", path=path), where=str(origin), do=_("correct the path")
        )
    entries = {".".join(entry.keys): entry for entry in read(path)}
    for name, other in _IN_JSON.items():
        entry, value = entries.get(other), getattr(resolved.value, name)
        if entry is None or entry.value == "auto" or not given(resolved, name) or _same(entry.value, value):
            continue
        raise ConfigError(
            _(
                "{name}={value!r} (from {origin}) and {other}={entry_value!r} (from file {place}) contradict each "
                "other",
                name=name,
                value=value,
                origin=resolved.origins[name],
                other=other,
                entry_value=entry.value,
                place=entry.place,
            ),
            do=_('remove one of them, or set {other} to "auto" in {path}', other=other, path=path),
        )
    if world_size is not None:
        _check_batch(entries, world_size, str(resolved.origins["num_processes"]))


def _same(ours: Any, theirs: Any) -> bool:
    return str(ours).lower() == str(theirs).lower() or (
        isinstance(ours, (int, float)) and isinstance(theirs, (int, float)) and ours == theirs
    )


def _check_batch(entries: Mapping[str, DocumentEntry], world_size: int, processes: str) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    numbers = {name: entries[name] for name in names if name in entries and isinstance(entries[name].value, int)}
    if len(numbers) < len(names):
        return
    whole, micro, steps = (numbers[name].value for name in names)
    if whole != micro * steps * world_size:
        raise ConfigError(
            _(
                "train_batch_size={whole} (from file {place}) is not equal to train_micro_batch_size_per_gpu={micro} "
                "x gradient_accumulation_steps={steps} x {world_size} processes (from {processes}) = {product}",
                whole=whole,
                place=numbers[names[0]].place,
                micro=micro,
                steps=steps,
                world_size=world_size,
                processes=processes,
                product=micro * steps * world_size,
            ),
            do=_('set train_batch_size to "auto", or change one of these three numbers'),
        )
