"""Enums of Accelerate's interface; values for scripts to read, never branched on here."""

from __future__ import annotations

from enum import Enum

import torch

__all__ = ["DistributedType"]


class DistributedType(str, Enum):
    """How the run is spread, in Accelerate's words."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"

    @classmethod
    def of(cls, device: torch.device, *, distributed: bool) -> DistributedType:
        """Return the plain kind: one process, or several on this kind of device."""
        name = {"cuda": "GPU"}.get(device.type, device.type.upper())
        return cls(f"MULTI_{name}") if distributed else cls.NO

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"
