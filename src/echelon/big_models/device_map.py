"""Device maps, which assign each part of a model to a device, the CPU or the disk."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import warn
from echelon.big_models.device_memory import get_max_memory
from echelon.big_models.module_sizes import (
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    parts_of,
)
from echelon.big_models.tied_parameters import check_tied_parameters_in_config, find_tied_parameters
from echelon.compat.byte_sizes import convert_file_size_to_int

_logger = get_logger(__name__)
Part = tuple[str, Any]
"""A submodule, parameter or buffer, preceded by its full name."""


def infer_auto_device_map(
    model: nn.Module,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Any]:
    """Assign the parts of ``model`` to the devices in ``max_memory`` in order, then to the CPU, then to the disk.

    Memory for the largest layer is reserved on the first device and on the CPU, because offloaded layers run there.
    Tied parameters are placed together. Only sizes are used, so the model may be on the meta device.

    Args:
        max_memory: memory per device in bytes or as a string (``{0: "10GiB", "cpu": "30GiB"}``). None: all available
            memory.
        no_split_module_classes: class names of modules that must not be split across devices, such as blocks with a
            residual connection.
        verbose: print each decision.
        clean_result: merge the entries of a module whose parts are all on one device.
        offload_buffers: also offload the buffers of offloaded layers. False: warn if no device has enough memory for
            them.
        fallback_allocation: if the next part does not fit on an empty device, search for any part that fits.

    Source: Accelerate's function of the same name (returns the same maps).

    Examples:
        >>> infer_auto_device_map(model, max_memory={"cpu": "1GB"})
        {'': 'cpu'}
    """
    memory: dict[Any, Any] = get_max_memory(max_memory)
    if isinstance(no_split_module_classes, str):
        no_split_module_classes = [no_split_module_classes]
    planner = _Planner(model, memory, list(no_split_module_classes or []), dtype, special_dtypes, verbose=verbose)
    if check_tied_parameters_in_config(model) and not planner.tied:
        _logger.warning(
            N_(
                "the configuration of %s ties weights, but the model's weights are not tied; call model.tie_weights() "
                "before infer_auto_device_map()"
            ),
            type(model).__name__,
        )
    while planner.pending:
        planner.place_next(try_others=fallback_allocation)
    if not offload_buffers:
        planner.check_room_for_buffers()
    if planner.needed:
        _logger.info(
            "these devices have insufficient memory for any part of the model (required bytes for the first part): %s",
            planner.needed,
        )
    return clean_device_map(planner.placed) if clean_result else planner.placed


class _Planner:
    """Fills one device after another with a model's parts, in model order."""

    def __init__(
        self,
        model: nn.Module,
        memory: dict[Any, Any],
        unsplit: list[str],
        dtype: str | torch.dtype | None,
        special_dtypes: Mapping[str, str | torch.dtype] | None,
        *,
        verbose: bool,
    ) -> None:
        self.memory = memory
        self.devices = [*memory, *(["disk"] if "disk" not in memory else [])]
        accelerators = [device for device in self.devices if device not in ("cpu", "disk")]
        # Offloaded layers are moved to these devices, which keep room for the largest one.
        self.running = {"mps"} if "mps" in accelerators else {*accelerators[:1], "cpu"}
        self.sizes = compute_module_sizes(model, dtype, special_dtypes)
        self.tied = find_tied_parameters(model)
        self.pending: list[Part] = parts_of(model, buffers=True)
        self.placed: dict[str, Any] = {}
        self.needed: dict[Any, float] = {}
        """Bytes required by the first part, for devices on which nothing fits."""
        self._unsplit = unsplit
        self._dtypes = dtype, special_dtypes
        self._used: dict[Any, float] = dict.fromkeys(self.devices, 0)
        self._buffers: dict[Any, float] = dict.fromkeys(self.devices, 0)
        self._rank = 0  # position of the current device in `devices`
        self._verbose = verbose
        self._largest, self._largest_names = get_max_layer_size(self.pending, self.sizes, unsplit)

    def place_next(self, *, try_others: bool) -> None:
        """Place the first pending part, replace it with its parts, or move on to the next device."""
        name, part = self.pending.pop(0)
        self._leave_out_of_largest(name)
        device = self.devices[self._rank]
        reserved = self._largest if device in self.running else 0
        limit = None if device == "disk" else self.memory[device] - reserved
        own = self.sizes.get(name, 0)
        ties = _ties_outside(name, self.tied)
        size, tied_names, tied_parts = get_module_size_with_ties(ties, own, self.sizes, self.pending)
        used = self._used[device]
        if limit is None or used + size <= limit:
            self._place(name, part, device, size, tied_names)
            return
        self._tell(
            f"{name} ({size} bytes, with {tied_names}) does not fit on {device}, which has {limit - used} bytes free"
        )
        if ties and used + own <= limit and self._split_tied(name, part, tied_names, tied_parts):
            return
        if used + own >= limit and self._can_split(part):
            self._tell(f"{name} is split")
            self.pending = parts_of(part, name) + self.pending
            self._find_largest()
            return
        if used == 0 and try_others and device != "disk":
            room = self.memory[device] - max(self._largest, size)
            other, found, rest = fallback_allocate(self.pending, self.sizes, room, self._unsplit, self.tied)
            if other is not None:
                self._tell(f"{other} is tried first")
                self.pending = [(other, found), (name, part), *rest]
                return
        if used == 0:
            self.needed[device] = size + reserved
        self._used[device] += reserved
        self._rank += 1
        self.pending.insert(0, (name, part))

    def check_room_for_buffers(self) -> None:
        """Warn if no device has enough memory for the buffers of offloaded layers, which are not offloaded themselves."""
        needed = self._buffers.get("cpu", 0) + self._buffers["disk"]
        places = [device for device in self.devices if device not in ("cpu", "disk")]
        if needed and places and not any(self.memory[at] >= needed + self._used[at] for at in places):
            warn(
                _(
                    "the offloaded layers have {needed} bytes of buffers, which stay on the device, but no device has "
                    "that much memory left; if the device runs out of memory, pass offload_buffers=True",
                    needed=needed,
                )
            )

    def _place(self, name: str, part: Any, device: Any, size: float, tied_names: list[str]) -> None:
        self._tell(f"{name} ({size} bytes, with {tied_names}) is placed on {device}")
        self._used[device] += size
        self.placed[name] = device
        for other in tied_names:
            self.placed[other] = device
        self.pending = [(at, one) for at, one in self.pending if at not in tied_names]
        if isinstance(part, nn.Module):
            self._buffers[device] += compute_module_total_buffer_size(part, *self._dtypes)

    def _split_tied(self, name: str, part: Any, tied_names: list[str], tied_parts: list[Any]) -> bool:
        """Replace the first splittable tied part with its parts, and try ``part`` again."""
        for other, found in zip(tied_names, tied_parts):
            if self._can_split(found):
                self._tell(f"{other}, which is tied to {name}, is split")
                at = [one for one, _ in self.pending].index(other)
                self.pending = [(name, part), *self.pending[:at], *parts_of(found, other), *self.pending[at + 1 :]]
                self._find_largest()
                return True
        return False

    def _can_split(self, part: Any) -> bool:
        return _has_children(part) and type(part).__name__ not in self._unsplit

    def _leave_out_of_largest(self, name: str) -> None:
        left = [one for one in self._largest_names if one != name and not one.startswith(f"{name}.")]
        self._largest_names = left
        if not left:
            self._find_largest()

    def _find_largest(self) -> None:
        modules = [(name, part) for name, part in self.pending if isinstance(part, nn.Module)]
        self._largest, self._largest_names = get_max_layer_size(modules, self.sizes, self._unsplit)

    def _tell(self, text: str) -> None:
        if self._verbose:
            print(text)


def get_module_size_with_ties(
    tied_params: Sequence[str], module_size: float, module_sizes: Mapping[str, float], modules_to_treat: Sequence[Part]
) -> tuple[float, list[str], list[Any]]:
    """Return the size of a module including the parts tied to it, and the names and values of these parts.

    Args:
        tied_params: parameters outside the module that are tied to a parameter inside it.
        module_sizes: sizes by name, from ``compute_module_sizes``.
        modules_to_treat: parts that have not been placed yet.
    """
    found = []
    for name in tied_params:
        holder = next((part for part in modules_to_treat if _is_in(name, part[0])), None)
        if holder is not None:  # None: it is placed already
            found.append(holder)
            # The tied parameter itself is counted once.
            module_size += module_sizes.get(holder[0], 0) - module_sizes.get(name, 0)
    return module_size, [name for name, _ in found], [part for _, part in found]


def fallback_allocate(
    modules: Sequence[Part],
    module_sizes: Mapping[str, float],
    size_limit: float | str,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[Part]]:
    """Return the first of ``modules`` or their submodules that fits into ``size_limit``, and the remaining parts.

    Args:
        module_sizes: sizes by name, from ``compute_module_sizes``.
        size_limit: maximum size of the part, including parts that are tied to it.
        no_split_module_classes: class names of modules that must not be split.

    Returns:
        Name, part and remaining parts; (None, None, ``modules``) if nothing fits.
    """
    try:
        limit = convert_file_size_to_int(int(size_limit) if isinstance(size_limit, float) else size_limit)
    except UsageError:  # also a negative size
        return None, None, list(modules)
    queue = list(modules)
    while queue:
        name, part = queue.pop(0)
        ties = _ties_outside(name, tied_parameters or [])
        size, _, _ = get_module_size_with_ties(ties, module_sizes.get(name, 0), module_sizes, queue)
        if size <= limit:
            return name, part, _without(name, list(modules))
        if _has_children(part) and type(part).__name__ not in (no_split_module_classes or ()):
            queue = parts_of(part, name) + queue
    return None, None, list(modules)


def _without(name: str, parts: list[Part]) -> list[Part]:
    """Return ``parts`` without ``name``; modules that contain it are replaced with their parts."""
    while all(one != name for one, _ in parts):
        at = next(i for i, (one, _) in enumerate(parts) if _is_in(name, one))
        parts = [*parts[:at], *parts_of(parts[at][1], parts[at][0]), *parts[at + 1 :]]
    return [one for one in parts if one[0] != name]


def _ties_outside(name: str, tied: Sequence[Sequence[str]]) -> list[str]:
    """Return the parameters outside the part ``name`` that are tied to a parameter inside it."""
    return [
        other for group in tied if any(_is_in(one, name) for one in group) for other in group if not _is_in(other, name)
    ]


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _has_children(part: Any) -> bool:
    return isinstance(part, nn.Module) and next(part.children(), None) is not None


def clean_device_map(device_map: MutableMapping[str, Any], module_name: str = "") -> Any:
    """Merge entries of ``module_name`` and its submodules in place if all parts are on one device; return the map."""
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        device = device_map[inside[0]]
        for name in inside:
            del device_map[name]
        device_map[module_name] = device
        return device_map
    depth = prefix.count(".") + 1
    children = {".".join(name.split(".")[:depth]): None for name in inside if len(name) > len(module_name)}
    for child in children:
        clean_device_map(device_map, child)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that ``device_map`` has a device for each tensor in ``model``; warn about entries that match nothing.

    Raises:
        UsageError: some tensors have no device.
    """
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    tensors = [
        *dict(model.named_parameters(remove_duplicate=False)),
        *dict(model.named_buffers(remove_duplicate=False)),
    ]
    if unknown := [name for name in device_map if name not in modules and name not in tensors]:
        warn(
            _(
                "these device map entries match no part of the {name}: {unknown}",
                name=type(model).__name__,
                unknown=", ".join(unknown),
            )
        )
    if "" in device_map:
        return
    left = [name for name in model.state_dict() if not any(_is_in(name, part) for part in device_map)]
    if left:
        raise UsageError(
            f"the device map has no device for {', '.join(left)}",
            do='add entries for them, or one for the rest of the model: {"": device}',
        )
