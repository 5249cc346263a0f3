"""The choices of a run, frozen: what echelon can be told, each with its meaning and unit."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from echelon.base.errors import ConfigError

__all__ = ["DynamoBackendName", "DynamoMode", "Parity", "Precision", "RunConfig", "coerce", "field_names"]

Precision = Literal["no", "fp16", "bf16", "fp8"]
DynamoBackendName = Literal[
    "no",
    "eager",
    "aot_eager",
    "inductor",
    "aot_ts_nvfuser",
    "nvprims_nvfuser",
    "cudagraphs",
    "ofi",
    "fx2trt",
    "onnxrt",
    "tensorrt",
    "aot_torchxla_trace_once",
    "torchxla_trace_once",
    "tvm",
    "hpu_backend",
    "neuron",
]
Parity = Literal["off", "exact", "bitwise"]
DynamoMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Every choice that flags, environment, files or code can make."""

    num_processes: int | None = None
    """Processes to start on this machine; None: one for each accelerator, one on a machine without."""
    cpu: bool = False
    """Use the CPU even where accelerators are present."""
    mixed_precision: Precision = "no"
    """The dtype of autocast in the forward pass."""
    gradient_accumulation_steps: int = 1
    """Micro-batches in one update."""
    dynamo_backend: DynamoBackendName = "no"
    """The backend of ``torch.compile`` for prepared models; no: they are not compiled."""
    dynamo_mode: DynamoMode = "default"
    """The mode of ``torch.compile``."""
    dynamo_use_fullgraph: bool = False
    """A model that does not compile into one graph is an error."""
    dynamo_use_dynamic: bool | None = None
    """Compile for changing shapes; None: torch finds out."""
    dynamo_use_regional_compilation: bool = False
    """Compile the repeated blocks of a model one by one."""
    parity: Parity = "off"
    """What the update depends on: with ``off`` on the number of processes too, as in Accelerate; with ``exact`` it does not."""
    max_micro_batch_size: int | None = None
    """Samples of one process in one forward pass, in the exact modes; None: as many as its share of the batch has."""
    seed: int | None = None
    """The seed of the run; None: the script's own."""
    debug: bool = False
    """Check structure, shapes and dtypes of every collective across the ranks before it runs, on every backend."""


_LEAST = {"num_processes": 1, "max_micro_batch_size": 1, "gradient_accumulation_steps": 1, "seed": 0}


def field_names(schema: type) -> tuple[str, ...]:
    """Return the names of the fields of the dataclass ``schema``, in order."""
    return tuple(f.name for f in fields(schema))


def _hints(schema: type) -> dict[str, object]:
    return dict(get_type_hints(schema))


def coerce(schema: type, name: str, value: object, *, where: str) -> object:
    """Return ``value`` as the type of the field ``name``: ``"8"`` and ``8`` are the same.

    Args:
        schema: a dataclass such as ``RunConfig``.
        name: one of its fields.
        value: as it was given; text from the environment or a flag, or already typed.
        where: the origin, for the message.

    Raises:
        ConfigError: ``value`` is not of the field's type or not among its choices.
    """
    hint = _hints(schema)[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
        if NoneType in kinds:
            return None
    else:
        for kind in kinds:
            found, typed = _as_kind(kind, value)
            if found:
                _check_least(name, typed, where)
                return typed
    raise ConfigError(
        f"{name}={value!r} is not {_describe(kinds)}", where=where, do=f"give {name} as {_describe(kinds)}"
    )


def _check_least(name: str, value: object, where: str) -> None:
    least = _LEAST.get(name)
    if least is not None and isinstance(value, int) and value < least:
        raise ConfigError(f"{name}={value} is below {least}", where=where, do=f"give an integer from {least} on")


_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f", ""})


def _as_kind(kind: object, value: object) -> tuple[bool, object]:
    if get_origin(kind) is Literal:
        # YAML reads a bare `no` as False, and `mixed_precision: no` is what every accelerate file says.
        text = "no" if value is False else str(value).lower()
        return (text in get_args(kind), text)
    if kind is bool:
        text = str(value).lower()
        return (text in _TRUE | _FALSE, text in _TRUE)
    if kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return True, value
        try:
            return isinstance(value, str), int(str(value))
        except ValueError:
            return False, None
    if kind is str:
        return isinstance(value, str), value
    return False, None


def _describe(kinds: tuple[object, ...]) -> str:
    words = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words.append("one of " + ", ".join(str(choice) for choice in get_args(kind)))
        else:
            words.append({int: "an integer", bool: "true or false", str: "text", NoneType: "none"}[kind])  # type: ignore[index]
    return " or ".join(words)
