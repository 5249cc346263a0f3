"""Loads the next modules' weights while the current module computes.

For an accelerator, a thread copies weights into pinned memory and from there to the device, on a separate stream. For
modules that run on the CPU, the operating system is asked to read the next weights from disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.big_models.offload_store import is_on_disk, read_ahead
from echelon.big_models.set_tensor import as_device

_MAX_AHEAD = 16  # modules; more small ones in a row are loaded in time anyway


class LoadsWeights(Protocol):
    """A hook that loads weights before the forward pass of its module."""

    weights_map: Any
    names_to_load: list[str]
    """Names in ``weights_map``."""
    num_bytes: int
    """Size of these weights."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A weight as it was when its copy started."""

    tensor: torch.Tensor
    version: int | None
    """Version counter of in-place changes; None if they are not tracked."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Copies of weights on the device, and the event that marks their completion."""

    sources: dict[str, _Source]
    copies: dict[str, torch.Tensor]
    event: torch.Event | None


class Prefetcher:
    """Loads weights to one device in advance, in the order in which the modules ran last time.

    The weights loaded in advance never take more bytes than the largest module.

    Args:
        copies: whether to copy weights to the device. None: only if the device is an accelerator.
    """

    def __init__(self, device: int | str | torch.device, *, copies: bool | None = None) -> None:
        self.device = as_device(device)
        self._copies = self.device.type not in ("cpu", "meta") if copies is None else copies
        self._after: dict[int, LoadsWeights] = {}
        """Maps each hook's id to the hook that ran after it or, before the first forward pass, was attached after it."""
        self._known: dict[int, LoadsWeights] = {}
        self._previous: LoadsWeights | None = None
        self._first: LoadsWeights | None = None
        self._pending: dict[int, Future[_Loaded]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.Stream | None = None

    def add(self, hook: LoadsWeights) -> None:
        """Expect ``hook`` to run after the hook that was added last."""
        if self._known and self._first is None:
            self._after[next(reversed(self._known))] = hook
        self._known[id(hook)] = hook

    def remove(self, hook: LoadsWeights) -> None:
        """Forget ``hook``, which no longer loads weights."""
        self._known.pop(id(hook), None)
        self._pending.pop(id(hook), None)
        if not self._known:
            self._after.clear()
            self._previous = self._first = None
            self.close()

    def take(self, hook: LoadsWeights, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the weights among ``names`` that are already on the device when ``hook`` starts to run."""
        if self._previous is not None:
            self._after[id(self._previous)] = hook
        self._first = self._first or hook
        self._previous = hook
        pending = self._pending.pop(id(hook), None)
        if pending is None:
            return {}
        try:
            loaded = pending.result()
        except torch.OutOfMemoryError:
            self._copies = False
            self._pending.clear()
            warn(
                _(
                    "{device} has no memory left to load weights in advance, so each module waits for its weights; to "
                    "run faster, reduce max_memory for this device",
                    device=self.device,
                )
            )
            return {}
        if loaded.event is not None:
            current = torch.accelerator.current_stream(self.device)
            current.wait_event(loaded.event)
            for copy in loaded.copies.values():
                copy.record_stream(current)  # its memory belongs to the other stream
        return {
            name: copy
            for name, copy in loaded.copies.items()
            if name in names and _is_current(hook.weights_map, name, loaded.sources[name])
        }

    def load_ahead(self, hook: LoadsWeights) -> None:
        """Start loading the weights of the modules that ran after this hook's module in the last forward pass."""
        ahead = list(self._next(hook))
        if not self._copies:
            for following in ahead:
                for name in following.names_to_load:
                    read_ahead(following.weights_map, name)
            return
        expected = {id(following) for following in ahead}
        self._pending = {key: future for key, future in self._pending.items() if key in expected}
        for following in ahead:
            if id(following) not in self._pending:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
                weights, names = following.weights_map, list(following.names_to_load)
                self._pending[id(following)] = self._thread.submit(self._load, weights, names)

    def close(self) -> None:
        """Stop the thread; the next use starts a new one."""
        self._pending.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def _next(self, hook: LoadsWeights) -> Iterator[LoadsWeights]:
        budget = max((one.num_bytes for one in self._known.values()), default=0)
        following = self._after.get(id(hook))
        for _time in range(_MAX_AHEAD):
            # The first module of a pass would wait in memory while no model runs.
            if following is None or following in (self._first, hook) or id(following) not in self._known:
                return
            budget -= following.num_bytes
            if budget < 0:
                return
            yield following
            following = self._after.get(id(following))

    def _load(self, weights: Mapping[str, Any], names: Sequence[str]) -> _Loaded:
        """Copy weights to the device; runs in the prefetch thread."""
        sources: dict[str, _Source] = {}
        copies: dict[str, torch.Tensor] = {}
        is_accelerator = self.device.type != "cpu"
        if is_accelerator and self._stream is None:
            self._stream = torch.Stream(device=self.device)
        with self._stream or nullcontext():
            for name in names:
                tensor = weights[name]
                if not _can_be_copied(tensor):
                    continue
                sources[name] = _Source(tensor, None if tensor.is_inference() else tensor._version)
                staging = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_accelerator)
                staging.copy_(tensor.detach())
                copies[name] = staging.to(self.device, non_blocking=True)
        return _Loaded(sources, copies, None if self._stream is None else self._stream.record_event())

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefetcher:
        return Prefetcher(self.device, copies=self._copies)

    def __reduce__(self) -> tuple[Any, ...]:
        return Prefetcher, (self.device,)


class Prefetchers:
    """One Prefetcher for each device on which a model's modules run."""

    def __init__(self) -> None:
        self._of: dict[torch.device, Prefetcher] = {}

    def of(self, device: int | str | torch.device | None) -> Prefetcher | None:
        """Return the Prefetcher for ``device``; None without a device."""
        if device is None:
            return None
        place = as_device(device)
        if place not in self._of:
            self._of[place] = Prefetcher(place)
        return self._of[place]


def _can_be_copied(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def _is_current(weights: Mapping[str, Any], name: str, source: _Source) -> bool:
    """Return whether the weight ``name`` is unchanged since it was copied."""
    if is_on_disk(weights, name):
        return True
    return weights.get(name) is source.tensor and (source.version is None or source.tensor._version == source.version)
