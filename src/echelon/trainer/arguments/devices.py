"""The number of accelerators that one process trains on; more than one selects DataParallel."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.accelerator import PartialState
from echelon.accelerator.setup.local_devices import num_devices_of_process
from echelon.trainer.arguments.fields import TrainingFields

__all__ = ["has_fixed_devices", "num_devices_of"]


def num_devices_of(args: TrainingFields, state: PartialState) -> int:
    """Return the number of accelerators that this process trains on; 0 on the CPU.

    As in transformers, the number exceeds 1 if a process that was started without a launcher sees several accelerators,
    unless an engine other than ``dp`` is set.
    """
    count = num_devices_of_process(state.device, engine=args.engine, parity=args.parity)
    is_split = state.num_processes > 1 or args.fsdp or args.deepspeed or args.parallelism_config
    return min(count, 1) if is_split else count


def has_fixed_devices(model: Any) -> bool:
    """Return whether ``model`` cannot be replicated: it is split over several devices, or its weights are quantized."""
    if not isinstance(model, nn.Module):
        return False
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    quantized = ("is_loaded_in_8bit", "is_loaded_in_4bit")
    return len(devices) > 1 or any(bool(getattr(model, name, False)) for name in quantized)
