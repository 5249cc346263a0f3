"""Parses sizes such as ``"5GB"`` and ``"200MiB"``."""

from __future__ import annotations

import re

from echelon.base.errors import UsageError

_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes: ``"5GB"`` is 5 * 10**9, ``"5GiB"`` 5 * 2**30, ``"5Gb"`` (bits) 5 * 10**9 / 8.

    Raises:
        UsageError: ``size`` is not a valid size.
    """
    if isinstance(size, int) and size >= 0:
        return size
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmg]i?b)\s*", size, re.IGNORECASE)
        if isinstance(size, str)
        else None
    )
    if match is None:
        raise UsageError(
            f"{size!r} is not a valid size", do="pass a number of bytes, or a string such as '5GB' or '200MiB'"
        )
    num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    is_bits = match[2].endswith("b") and match[2].upper() in ("KB", "MB", "GB")
    return num_bytes // 8 if is_bits else num_bytes
