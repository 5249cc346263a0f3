"""The floating-point operations per second of devices, for the model FLOPs utilization (MFU)."""

from __future__ import annotations

import re
from types import MappingProxyType

# Dense bfloat16 and float16, from the manufacturers' data sheets, by a pattern of the device's name.
_PEAKS = MappingProxyType(
    {
        r"B200": 2250e12,
        r"G?H200": 989e12,
        r"H100 PCIe": 756e12,
        r"H100 NVL": 835e12,
        r"H100": 989e12,
        r"A100": 312e12,
        r"A30": 165e12,
        r"A10": 125e12,
        r"L40S": 362e12,
        r"L40": 181e12,
        r"L4": 121e12,
        r"V100": 125e12,
        r"RTX 3090": 71e12,
        r"RTX 4090": 165e12,
        r"RTX 5090": 209e12,
        r"MI250X?": 181e12,  # one of the two devices of a card
        r"MI300X": 1307e12,
    }
)


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of a device, such as "NVIDIA H100 80GB HBM3"; None if it is unknown."""
    found = (peak for name, peak in _PEAKS.items() if re.search(rf"(?<![A-Z0-9]){name}(?![A-Z0-9])", device))
    return next(found, None)
