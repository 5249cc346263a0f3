"""Sizes of dtypes, tensors and shards in bytes, and the dtypes in which weights are stored, computed and reduced."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from echelon.plan.facts import ModelFacts, ParallelLayout, ParameterFacts, TensorFacts

ALLOCATION_BYTES = 512  # CUDA's caching allocator rounds each tensor up to a multiple of it
LOW_PRECISION = ("bfloat16", "float16")
_COMPUTED: Mapping[str, str] = MappingProxyType({"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"})
_ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
        **dict.fromkeys(("float32", "int32", "uint32"), 4),
        **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
        **dict.fromkeys(("int8", "uint8", "bool"), 1),
        "complex128": 16,
    }
)


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element (``"bfloat16"``: 2)."""
    return 1 if dtype.startswith("float8") else _ITEM_BYTES[dtype]


def allocated(num_bytes: int) -> int:
    """Return ``num_bytes`` of one tensor, rounded up as CUDA's allocator does."""
    return -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements."""
    return math.prod(shape)


def rows_of_shard(rows: int, shards: int, index: int) -> int:
    """Return how many of ``rows`` shard ``index`` has. Shards are equal; the last ones are shorter or empty, as of ``torch.chunk``."""
    size = -(-rows // shards)
    return max(0, min(size, rows - index * size))


def padded(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """Return the shape whose first dimension is rounded up to a multiple of ``shards``, as fully_shard gathers and reduces it."""
    return (-(-shape[0] // shards) * shards, *shape[1:])


def parse_size(text: str) -> int:
    """Return the bytes of ``80GB`` (10^9), ``80GiB`` (2^30), ``16000MB`` or a number of bytes.

    For Accelerate's ``convert_file_size_to_int``, 80Gb are bits.

    Raises:
        ValueError: ``text`` is not a size.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(text)
    power = " KMGT".index(match[2].upper() or " ")
    scale: int = (1024 if match[3] else 1000) ** power
    return round(float(match[1]) * scale)


# ---- dtypes -----------------------------------------------------------------------------------------------------------


def is_floating(dtype: str) -> bool:
    """Return whether ``dtype`` is a floating-point dtype that mixed precision casts."""
    return dtype.startswith(("float", "bfloat"))


def has_masters(model: ModelFacts, layout: ParallelLayout) -> bool:
    """Return whether trained weights of low precision are cast to float32 (``MasterWeights.cast``)."""
    settings = layout.settings
    if settings.mixed_precision == "no" or settings.master_weights != "float32":
        return False
    if layout.engine == "deepspeed":  # it has masters of its own
        return False
    return any(is_low_precision(p) and p.is_trainable for p in model.parameters)


def is_low_precision(parameter: ParameterFacts) -> bool:
    """Return whether a parameter was loaded in bfloat16 or float16, and is a plain tensor."""
    return parameter.tensor.dtype in LOW_PRECISION and parameter.tensor.storage_bytes is None


def stored_dtype(parameter: ParameterFacts, *, masters: bool) -> str:
    """Return the dtype in which ranks hold a parameter between steps. ``masters`` is ``has_masters`` of its model."""
    tensor = parameter.tensor
    is_cast = masters and is_low_precision(parameter) and (parameter.is_trainable or tensor.follows_masters)
    return "float32" if is_cast else tensor.dtype


def buffer_dtype(buffer: TensorFacts, *, masters: bool) -> str:
    """Return the dtype in which ranks hold a buffer."""
    return "float32" if masters and buffer.follows_masters and buffer.dtype in LOW_PRECISION else buffer.dtype


def computed_dtype(stored: str, layout: ParallelLayout) -> str:
    """Return the dtype in which fully_shard gathers a parameter that is stored as ``stored``."""
    computed = _COMPUTED.get(layout.settings.mixed_precision)
    return computed if computed is not None and is_floating(stored) else stored


def reduced_dtype(computed: str, layout: ParallelLayout) -> str:
    """Return the dtype in which fully_shard reduces the gradient of a parameter that is computed as ``computed``."""
    return computed if layout.settings.mixed_precision == "no" else "float32"
