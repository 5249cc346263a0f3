"""How many accelerators one process trains on: several by DataParallel, where nothing else was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from echelon.accelerator.setup.local_devices import num_devices_of_process

if TYPE_CHECKING:
    from echelon.trainer.arguments.training_arguments import TrainingArguments

__all__ = ["engine_of", "lies_as_it_is", "num_devices_of"]


def num_devices_of(args: TrainingArguments) -> int:
    """Return the accelerators that this process trains on; 0: it trains on the CPU.

    Several where the engine is ``dp``, or where no engine was chosen and one process, which nothing started as a rank, sees
    several of them: transformers' Trainer uses all of them then.
    """
    state = args.distributed_state
    count = num_devices_of_process(state.device, engine=args.engine, parity=args.parity)
    is_split = state.num_processes > 1 or args.fsdp or args.deepspeed or args.parallelism_config
    return min(count, 1) if is_split else count


def engine_of(args: TrainingArguments) -> str | None:
    """Return the engine for the Accelerator; None: it chooses."""
    return "dp" if args.engine is None and args.n_gpu > 1 and num_devices_of(args) > 1 else args.engine


def lies_as_it_is(model: Any) -> bool:
    """Tell whether ``model`` cannot be copied to other devices: it is spread over several, or its weights are quantized."""
    if not isinstance(model, nn.Module):
        return False
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    quantized = ("is_loaded_in_8bit", "is_loaded_in_4bit")
    return len(devices) > 1 or any(bool(getattr(model, name, False)) for name in quantized)
