"""Keeps a pipeline's models on the CPU, and moves each whole model to the device when it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from echelon.base.device import choose_device
from echelon.big_models.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from echelon.big_models.set_tensor import as_device, check_device_same
from echelon.distributed.structure import send_to_device
from echelon.distributed.uncompiled import uncompiled


class CpuOffload(ModelHook):
    """Moves a model to the CPU when attached, and to ``execution_device`` when the model runs; it then stays there.

    Args:
        execution_device: device on which the model runs. None: this process's accelerator, if any.
        prev_module_hook: hook of the previous model in a pipeline, which is moved to the CPU first.
    """

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        if execution_device is None:
            execution_device = choose_device(local_rank=0, local_world_size=1)
        self.execution_device = execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    @uncompiled
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        before = self.prev_module_hook
        if isinstance(before, UserCpuOffloadHook) and _device_of(before.model).type != "cpu":
            before.offload()
            if torch.accelerator.is_available():
                torch.accelerator.memory.empty_cache()  # the next model has tensors of other sizes
        device = as_device(self.execution_device)
        if check_device_same(_device_of(module), device):
            return args, kwargs
        module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """Lets the user move a model back to the CPU or remove its hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays on its current device."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep ``model`` on the CPU until it runs; it then stays on the device until you call the returned hook's
    ``offload()``.

    Args:
        prev_module_hook: hook of the previous model in a pipeline, which is moved to the CPU first.

    Examples:
        >>> encoder, encoder_hook = cpu_offload_with_hook(encoder, "cuda")  # doctest: +SKIP
        >>> decoder, decoder_hook = cpu_offload_with_hook(decoder, "cuda", encoder_hook)  # doctest: +SKIP
        >>> image = decoder(encoder(x))  # doctest: +SKIP
        >>> decoder_hook.offload()  # doctest: +SKIP
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _device_of(model: nn.Module) -> torch.device:
    found = next(model.parameters(), None)
    return torch.device("cpu") if found is None else found.device
