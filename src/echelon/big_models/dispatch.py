"""Prepares a model to run with its parts on several devices, on the CPU or on disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_
from echelon.big_models.align_devices import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from echelon.big_models.device_map import check_device_map
from echelon.big_models.hooks import MOVING_METHODS, add_hook_to_module
from echelon.big_models.module_sizes import parts_of
from echelon.big_models.offload_store import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    has_index,
    offload_state_dict,
)
from echelon.big_models.prefetch import Prefetchers
from echelon.big_models.set_tensor import TiedTensors, as_device, set_module_tensor_to_device, tensor_at
from echelon.big_models.tied_parameters import find_tied_parameters, retie_parameters
from echelon.compat.machine import check_cuda_p2p_ib_support

_logger = get_logger(__name__)
_OFFLOADED = ("cpu", "disk")


def cpu_offload(
    model: nn.Module,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of ``model`` on the CPU; each module's weights are on ``execution_device`` only while it runs.

    Args:
        model: the model, which is changed and returned.
        execution_device: device on which modules run. None: the device of the first parameter.
        offload_buffers: also offload buffers.
        state_dict: the weights on the CPU. None: the model's weights.
        preload_module_classes: class names of modules whose weights, including submodules, are loaded together.

    Examples:
        >>> model = cpu_offload(model, execution_device=torch.device("cuda", 0))  # doctest: +SKIP
    """
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    return _offload(model, state_dict, execution_device, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of ``model`` on disk; each module's weights are on ``execution_device`` only while it runs.

    Args:
        model: the model, which is changed and returned.
        offload_dir: folder to which the weights are written, or whose existing offloaded weights are used.
        execution_device: device on which modules run. None: the device of the first parameter.
        offload_buffers: also offload buffers.
        preload_module_classes: class names of modules whose weights, including submodules, are loaded together.

    Examples:
        >>> model = disk_offload(model, "offloaded", execution_device=torch.device("cpu"))
    """
    if not has_index(offload_dir):
        offload_state_dict(offload_dir, model.state_dict())
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload(model, weights, execution_device, offload_buffers, preload_module_classes)


def _offload(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    execution_device: torch.device | None,
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
) -> nn.Module:
    if execution_device is None:
        execution_device = next(model.parameters()).device
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        prefetchers=Prefetchers(),
    )
    return model


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: Any = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place the parts of ``model`` according to ``device_map``, with hooks that move inputs and offloaded weights.

    With a single device, the model is only moved there. The map is stored as ``model.hf_device_map``.

    Args:
        model: the model, which is changed and returned.
        device_map: device by module name; with an accelerator, ``"cpu"`` and ``"disk"`` modules are offloaded.
        main_device: device on which offloaded parts run. None: the first accelerator in the map, else the CPU.
        state_dict: weights of the parts on the CPU. None: the model's weights.
        offload_dir: folder for parts on disk; existing offloaded weights in it are used.
        offload_index: location of each weight on disk, by name. None: the index in ``offload_dir``.
        offload_buffers: also offload buffers.
        skip_keys: keyword arguments that are not moved.
        preload_module_classes: class names of modules whose weights, including submodules, are loaded together.
        force_hooks: attach hooks even for a single device.

    Raises:
        UsageError: the map does not cover the model, or maps parts to the disk without a folder.

    Examples:
        >>> model = dispatch_model(model, device_map={"": "cpu"})
    """
    # transformers leaves some parameters out of its map on purpose, and names them in this attribute.
    if getattr(model, "_no_placement_params", None) is None:
        check_device_map(model, device_map)
    devices = list(dict.fromkeys(device_map.values()))
    if len(devices) > 1 or "disk" in devices or force_hooks:
        main = _main_device(devices) if main_device is None else main_device
        places = dict(_disjoint(model, device_map))
        weights = _offloaded_weights(model, places, main, state_dict, offload_dir, offload_index)
        tied = find_tied_parameters(model)
        running = {name: main if at in _OFFLOADED else at for name, at in places.items()}
        _place_single_tensors(model, running, weights)
        at_rest = ("disk",) if str(main).partition(":")[0] in ("cpu", "mps") else _OFFLOADED
        attach_align_device_hook_on_blocks(
            model,
            {**running, "": running.get("", main)},
            {name: at in at_rest for name, at in places.items()},
            weights,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=_copies_of_tied(model, tied),
            prefetchers=Prefetchers(),
        )
        if offloaded := [at for at in devices if at in at_rest]:
            _logger.info("parts of the %s are offloaded to: %s", type(model).__name__, ", ".join(offloaded))
        retie_parameters(model, tied)
        _guard_moves(model)
        if len([at for at in devices if at not in _OFFLOADED]) > 1 and not check_cuda_p2p_ib_support():
            _logger.warning(
                N_(
                    "the driver of these RTX 40 GPUs is older than 550.40.07 and may corrupt data sent between GPUs; "
                    "update the driver"
                )
            )
    else:
        model.to(as_device(devices[0]))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _disjoint(model: nn.Module, device_map: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of ``device_map``; an entry that contains others is split into entries for its remaining parts."""
    for name, at in device_map.items():
        yield from _split(model, name, at, device_map)


def _split(model: nn.Module, name: str, at: Any, device_map: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if not any(other != name and other.startswith(f"{name}." if name else "") for other in device_map):
        yield name, at
        return
    for part, _ in parts_of(model.get_submodule(name), name, buffers=True):
        if part not in device_map:
            yield from _split(model, part, at, device_map)


def _place_single_tensors(
    model: nn.Module, running: Mapping[str, Any], weights: Mapping[str, torch.Tensor] | None
) -> None:
    """Move each tensor with its own map entry to the device where it is used, because hooks offload whole modules."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in [name for name in running if name not in modules]:
        tensor = tensor_at(model, name)
        value = weights.get(name) if weights is not None and tensor.is_meta else None
        set_module_tensor_to_device(model, name, running[name], value=None if value is None else value.clone())


def _main_device(devices: list[Any]) -> Any:
    accelerators = [at for at in devices if at not in _OFFLOADED]
    numbers = [at for at in accelerators if isinstance(at, int)]
    return min(numbers) if numbers else next(iter(accelerators), "cpu")


def _offloaded_weights(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main: Any,
    state_dict: Mapping[str, torch.Tensor] | None,
    folder: str | os.PathLike[str] | None,
    index: Mapping[str, Any] | None,
) -> OffloadedWeightsLoader | None:
    on_cpu, on_disk = ([name for name, at in device_map.items() if at == place] for place in _OFFLOADED)
    if main != "cpu" and state_dict is None and on_cpu:
        state_dict = extract_submodules_state_dict(model.state_dict(), on_cpu)
    if on_disk and folder is None and index is None:
        raise UsageError(
            f"the device map puts {', '.join(name or 'the model' for name in on_disk)} on disk, but no folder was "
            "given",
            do="pass offload_dir= (offload_folder= of load_checkpoint_and_dispatch)",
        )
    if on_disk and index is None and folder is not None and not has_index(folder):
        offload_state_dict(folder, extract_submodules_state_dict(model.state_dict(), on_disk))
    save_folder = folder if on_disk else None
    if state_dict is None and save_folder is None and index is None:
        return None
    return OffloadedWeightsLoader(state_dict, save_folder, index)


def _copies_of_tied(model: nn.Module, tied: list[list[str]]) -> TiedTensors:
    tensors = [tensor_at(model, name) for names in tied for name in names]
    return {tensor.data_ptr(): {} for tensor in tensors if not tensor.is_meta and tensor.data_ptr()}


def _guard_moves(model: Any) -> None:
    """Make ``model.to(device)`` and similar methods raise if parts are offloaded, and log a warning otherwise."""

    def guard(name: str, move: Any) -> Any:
        @functools.wraps(move)
        def moved(*args: Any, **kwargs: Any) -> Any:
            target = torch._C._nn._parse_to(*args, **kwargs)[0] if name == "to" else name
            if any(parameter.is_meta for parameter in model.parameters()):
                raise _MovedError(
                    f"{type(model).__name__} cannot be moved, because parts of it are offloaded to the CPU or to disk",
                    do="call echelon.hooks.remove_hook_from_submodules(model) first",
                )
            if target is not None:
                _logger.warning(
                    N_(
                        "%s was placed on devices by dispatch_model(), and %s() moves it, so its hooks may no longer match"
                    ),
                    type(model).__name__,
                    name,
                )
            return move(*args, **kwargs)

        return moved

    for name in MOVING_METHODS:
        if hasattr(model, name):
            setattr(model, name, guard(name, getattr(model, name)))


class _MovedError(UsageError, RuntimeError):
    """Raised when a dispatched model is moved; also a RuntimeError, as in Accelerate."""
