"""A hook that moves a module's inputs and its offloaded weights to the device on which the module runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from echelon.big_models.hooks import ModelHook, SequentialHook, add_hook_to_module, hook_of
from echelon.big_models.module_sizes import dtype_byte_size, get_non_persistent_buffers, named_module_tensors
from echelon.big_models.offload_store import PrefixedDataset, is_on_disk
from echelon.big_models.prefetch import Prefetcher, Prefetchers
from echelon.big_models.set_tensor import TiedTensors, as_device, set_module_tensor_to_device, tensor_at
from echelon.distributed.structure import find_device, send_to_device
from echelon.distributed.uncompiled import uncompiled

Device = int | str | torch.device


class AlignDevicesHook(ModelHook):
    """Moves ``forward`` arguments and offloaded weights to ``execution_device``, and frees the weights afterwards.

    Args:
        execution_device: device on which the module runs. None: do not move anything.
        offload: keep the weights in ``weights_map``, and load them onto the device only during the forward pass.
        io_same_device: return the output on the same device as the input.
        weights_map: weights by name. None: the module's current weights, moved to the CPU.
        offload_buffers: also offload the buffers that are in the state dict.
        place_submodules: include the tensors of submodules.
        skip_keys: keyword arguments that are not moved.
        tied_params_map: copies of tied parameters, so that each device has only one copy.
        prefetcher: loads the next modules' weights in advance.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedTensors | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map: Any = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.prefetcher = prefetcher
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        self.tied_pointers_to_remove: set[tuple[int, Any]] = set()
        self.names_to_load: list[str] = []
        self.num_bytes = 0

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        if self.execution_device is not None and as_device(self.execution_device).type == "meta":
            self.tied_params_map = None  # nothing is copied
        if self.offload:
            self._offload(module)
        elif self.execution_device is not None:
            self._place(module, [name for name, _ in named_module_tensors(module, recurse=self.place_submodules)])
        return module

    def _offload(self, module: nn.Module) -> None:
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        if self.weights_map is None:
            names = dict(named_module_tensors(module, self.offload_buffers, self.place_submodules))
            self.weights_map = {name: tensor.to("cpu") for name, tensor in names.items()}
        self.names_to_load = self._offloaded_names(module)
        self.num_bytes = sum(
            int(tensor.numel() * dtype_byte_size(tensor.dtype))
            for name, tensor in tensors.items()
            if name in self.names_to_load
        )
        for name in self.names_to_load:
            pointer = tensor_at(module, name).data_ptr()
            if self.tied_params_map is not None and pointer and pointer in self.tied_params_map:
                self.tied_params_names.add(name)
            set_module_tensor_to_device(module, name, "meta")
        if self.execution_device is not None:
            if self.offload_buffers:
                staying = sorted(get_non_persistent_buffers(module, recurse=self.place_submodules, fqns=True))
            else:
                staying = [name for name, _ in module.named_buffers(recurse=self.place_submodules)]
            self._place(module, staying)
        if self.prefetcher is not None:
            self.prefetcher.add(self)

    def _place(self, module: nn.Module, names: Sequence[str]) -> None:
        assert self.execution_device is not None
        for name in names:
            set_module_tensor_to_device(module, name, self.execution_device, tied_params_map=self.tied_params_map)

    def _offloaded_names(self, module: nn.Module) -> list[str]:
        return [
            name
            for name, _ in named_module_tensors(
                module, self.offload_buffers, self.place_submodules, remove_non_persistent=True
            )
        ]

    @uncompiled
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self._load(module)
        if self.execution_device is None:
            return args, kwargs
        device = as_device(self.execution_device)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _load(self, module: nn.Module) -> None:
        device: Any = self.execution_device
        self.tied_pointers_to_remove = set()
        self.names_to_load = self._offloaded_names(module)
        # The copies of tied parameters are found by the address of the weight on the CPU.
        untied = [name for name in self.names_to_load if name not in self.tied_params_names]
        loaded = {} if self.prefetcher is None else self.prefetcher.take(self, untied)
        for name in self.names_to_load:
            value = loaded[name] if name in loaded else self.weights_map[name]
            tied = self.tied_params_map
            if tied is not None and isinstance(value, torch.Tensor) and (pointer := value.data_ptr()):
                if name in self.tied_params_names:
                    tied.setdefault(pointer, {})
                if pointer in tied and device not in tied[pointer]:
                    self.tied_pointers_to_remove.add((pointer, device))
            scales = self._scales(name, value)
            set_module_tensor_to_device(module, name, device, value=value, fp16_statistics=scales, tied_params_map=tied)
        if self.prefetcher is not None:
            self.prefetcher.load_ahead(self)

    def _scales(self, name: str, value: Any) -> torch.Tensor | None:
        """Return an 8-bit weight's scales, which are stored next to it."""
        if getattr(value, "dtype", None) != torch.int8 or "weight" not in name:
            return None
        found: torch.Tensor | None = self.weights_map.get(name.replace("weight", "SCB"))
        return found

    @uncompiled
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            for name in self._offloaded_names(module):
                set_module_tensor_to_device(module, name, "meta")
            for pointer, device in self.tied_pointers_to_remove:
                if self.tied_params_map is not None and pointer in self.tied_params_map:
                    self.tied_params_map[pointer].pop(device, None)
            self.tied_pointers_to_remove = set()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if not self.offload:
            return module
        for name, device in self.original_devices.items():
            if device.type == "meta":
                continue
            value = self.weights_map.get(name)
            if value is not None and is_on_disk(self.weights_map, name):
                value = value.clone()  # the model no longer depends on the file
            set_module_tensor_to_device(module, name, device, value=value, fp16_statistics=self._scales(name, value))
        if self.prefetcher is not None:
            self.prefetcher.remove(self)
        return module


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether the direct parameters of ``module`` are offloaded."""
    return _offloading_hook(module) is not None


def _offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    hooks = [hook_of(module)]
    while hooks:
        hook = hooks.pop()
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            return hook
        hooks += hook.hooks if isinstance(hook, SequentialHook) else []
    return None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Put the direct parameters of ``module`` on ``execution_device`` inside the block.

    Args:
        execution_device: target device. None: the device on which the hook runs the module; if no weights are
            offloaded, nothing is moved.
    """
    hook = _offloading_hook(module)
    if hook is not None:
        before = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = before
    elif execution_device is not None:
        before_block = dict(module.named_parameters(recurse=False))
        try:
            for name in before_block:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, parameter in before_block.items():
                # From the meta device no values can come back.
                value = parameter.detach() if tensor_at(module, name).is_meta else None
                set_module_tensor_to_device(module, name, parameter.device, value=value)
    else:
        yield


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Attach a hook to each submodule that has none; the hook moves inputs and tensors to ``execution_device``.

    Args:
        skip_keys: keyword arguments that are not moved.
        preload_module_classes: class names of modules whose submodules get no hook.
    """
    if hook_of(module) is None and module.state_dict():
        add_hook_to_module(
            module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        )
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedTensors | None = None,
    *,
    prefetchers: Prefetchers | None = None,
) -> None:
    """Attach an ``AlignDevicesHook`` to each submodule with direct tensors, to run after any existing hook.

    Args:
        offload: keep the weights in ``weights_map``.
        offload_buffers: also offload buffers.
        preload_module_classes: class names of modules whose weights, including submodules, are loaded together, because
            the modules use submodules' weights without calling the submodules.
        prefetchers: load weights ahead.
    """
    as_whole = offload and type(module).__name__ in (preload_module_classes or ())
    prefix = f"{module_name}." if module_name else ""
    if as_whole or next(named_module_tensors(module), None) is not None:
        hook = AlignDevicesHook(
            execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=as_whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
            prefetcher=prefetchers.of(execution_device) if prefetchers is not None and offload else None,
        )
        add_hook_to_module(module, hook, append=True)
    if as_whole:
        return
    options: dict[str, Any] = {
        "skip_keys": skip_keys,
        "preload_module_classes": preload_module_classes,
        "tied_params_map": tied_params_map,
        "prefetchers": prefetchers,
    }
    for name, child in module.named_children():
        child_name = f"{prefix}{name}"
        attach_align_device_hook(child, execution_device, offload, weights_map, offload_buffers, child_name, **options)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Any = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedTensors | None = None,
    *,
    prefetchers: Prefetchers | None = None,
) -> None:
    """Attach ``AlignDevicesHook`` to a model's blocks, each with a separate device and offload setting.

    Args:
        execution_device: one device, or a device for each block by name.
        offload: whether weights are offloaded, for all blocks or for each block by name.
    """
    common: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    offloading = {"weights_map": weights_map, "offload_buffers": offload_buffers, "prefetchers": prefetchers, **common}
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(module, execution_device, True, module_name=module_name, **offloading)
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **common)
            add_hook_to_module(module, hook)
        return
    devices = execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(offload, execution_device)  # type: ignore[arg-type]
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    offloading["preload_module_classes"] = preload_module_classes
    device, is_root = devices.get(module_name), module_name == ""
    if module_name in devices and module_name in offloads:
        is_offloaded = offloads[module_name]
        if is_offloaded:
            attach_align_device_hook(module, device, True, module_name=module_name, **offloading)
        if not is_offloaded or hook_of(module) is None:
            options: dict[str, Any] = (
                {} if is_offloaded else {"offload_buffers": offload_buffers, "place_submodules": True}
            )
            add_hook_to_module(module, AlignDevicesHook(device, io_same_device=is_root, **options, **common))
        here = preload_module_classes if is_offloaded else None
        attach_execution_device_hook(module, device, preload_module_classes=here, **common)  # type: ignore[arg-type]
    elif is_root:
        add_hook_to_module(module, AlignDevicesHook(device, io_same_device=True, **common))
    for name, child in module.named_children():
        child_name = name if is_root else f"{module_name}.{name}"
        attach_align_device_hook_on_blocks(child, devices, offloads, module_name=child_name, **offloading)
