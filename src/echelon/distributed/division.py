"""Divides samples over ranks: the rule that ``shard()``, the prepared loaders and the exact modes share."""

from __future__ import annotations


def slice_range(samples: range, *, num_parts: int, part: int) -> range:
    """Return slice ``part`` of ``samples`` split into ``num_parts``. In an uneven split, the first slices are longer by one."""
    size, extra = divmod(len(samples), num_parts)
    start = samples.start + part * size + min(part, extra)
    return range(start, start + size + (part < extra))


def share_sizes(num_samples: int, num_parts: int) -> list[int]:
    """Return the length of each slice of ``slice_range``."""
    size, extra = divmod(num_samples, num_parts)
    return [size + 1] * extra + [size] * (num_parts - extra)


def real_sizes(num_real: int, size: int, num_parts: int) -> list[int]:
    """Return how many of ``num_real`` samples are in each of ``num_parts`` slices of ``size``, of which the first are filled first."""
    return [min(max(num_real - part * size, 0), size) for part in range(num_parts)]
