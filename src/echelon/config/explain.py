"""Formats a configuration as a table of values, origins and overridden values, and compares two configurations."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from echelon.base.messages.terminal import align_columns
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.config.documents import read
from echelon.config.resolve import Resolved, Shadowed
from echelon.config.schema import RunConfig, field_names


def show(resolved: Resolved[RunConfig]) -> str:
    """Return one line per setting: its name, value and origin, followed by the values that it overrides in parentheses."""
    return _rows_of(resolved, field_names(RunConfig))


def show_changed(resolved: Resolved[RunConfig]) -> str:
    """Return the lines of ``show`` for settings whose values are not the default, or that override a value."""
    default = RunConfig()
    lost = {setting.name for setting in resolved.shadowed}
    names = [n for n in field_names(RunConfig) if n in lost or getattr(resolved.value, n) != getattr(default, n)]
    return _rows_of(resolved, names)


def overridden(resolved: Resolved[RunConfig], lost: Shadowed) -> str:
    """Return a sentence about a value that is not used, because a source with a higher precedence set another one."""
    return _(
        "{lost}={value!r} (from {winner}) overrides {lost_value!r} (from {origin})",
        lost=lost.name,
        value=getattr(resolved.value, lost.name),
        winner=lost.winner,
        lost_value=lost.value,
        origin=lost.origin,
    )


def _rows_of(resolved: Resolved[RunConfig], names: Sequence[str]) -> str:
    rows = []
    for name in names:
        lost = [(s.value, s.origin) for s in resolved.shadowed if s.name == name]
        notes = [_("overrides {value!r} from {origin}", value=value, origin=origin) for value, origin in lost]
        note = f"  ({', '.join(notes)})" if notes else ""
        rows.append((name, repr(getattr(resolved.value, name)), f"{resolved.origins[name]}{note}"))
    return _table(rows)


def show_json(path: str, resolved: Resolved[RunConfig]) -> str:
    """Return one line per setting in a DeepSpeed JSON file: its name, value and line, and where an "auto" value is taken from."""
    rows = []
    for entry in read(path):
        name = ".".join(entry.keys)
        note = _("  (filled in from {source})", source=_filled(name, resolved)) if entry.value == "auto" else ""
        rows.append((name, repr(entry.value), _("file {name}", name=entry.place) + note))
    return _table(rows)


# Sources of "auto" values that are not settings.
_FILLED = MappingProxyType(
    {
        "train_micro_batch_size_per_gpu": N_("the DataLoader's batch size"),
        "train_batch_size": N_("micro-batch size x gradient accumulation steps x number of processes"),
        "zero_optimization.reduce_bucket_size": N_("the model's hidden size h: h x h"),
        "zero_optimization.stage3_prefetch_bucket_size": N_("the model's hidden size h: 0.9 x h x h"),
        "zero_optimization.stage3_param_persistence_threshold": N_("the model's hidden size h: 10 x h"),
    }
)
_SETTINGS = MappingProxyType(
    {
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "gradient_clipping",
        "fp16.enabled": "mixed_precision",
        "bf16.enabled": "mixed_precision",
        "zero_optimization.stage": "zero_stage",
        "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
        "zero_optimization.offload_param.device": "offload_param_device",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": "zero3_save_16bit_model",
    }
)


def _filled(name: str, resolved: Resolved[RunConfig]) -> str:
    if (field := _SETTINGS.get(name)) is not None:
        return f"{field}={getattr(resolved.value, field)!r}, {resolved.origins[field]}"
    return _(_FILLED.get(name, N_("the objects that the script passes to prepare()")))


def differences(first: Resolved[RunConfig], second: Resolved[RunConfig]) -> str:
    """Return one line for each setting that differs: its name, and both values with their origins. Empty if nothing differs."""
    rows = []
    for name in field_names(RunConfig):
        values = [repr(getattr(resolved.value, name)) for resolved in (first, second)]
        if values[0] != values[1]:
            origins = [str(resolved.origins[name]) for resolved in (first, second)]
            rows.append((name, f"{values[0]} ({origins[0]})", f"{values[1]} ({origins[1]})"))
    return _table(rows)


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    return "\n".join(align_columns(rows))
