"""Records the outputs of a model and of its leaf modules, a few numbers for each sample."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from echelon.distributed.tree import leaves
from echelon.verify.recorders.batches import Batches
from echelon.verify.recorders.models import plain_name
from echelon.verify.recording import Recording
from echelon.verify.trace import NUM_PROJECTIONS, Forward

_BLOCK = 1 << 14
"""Elements of a row that are projected at once; each block of a longer row has its own signs."""


class Forwards:
    """Records what the root and each leaf module return in training.

    Args:
        batches: which samples the forward pass uses.
    """

    def __init__(self, recording: Recording, batches: Batches) -> None:
        self._recording = recording
        self._batches = batches
        self._names: WeakKeyDictionary[nn.Module, dict[nn.Module, str]] = WeakKeyDictionary()
        self._active: dict[nn.Module, str] = {}
        self._model = 0
        recording.on_training_forward.append(self._begin)
        recording.on_forward_end.append(lambda *_: self._active.clear())
        recording.undo.callback(register_module_forward_hook(self._after_module).remove)

    def _begin(self, model: int, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = self._names.get(root)
        if names is None:
            names = {
                module: plain_name(name)
                for name, module in root.named_modules()
                if module is root or not any(True for _ in module.children())
            }
            self._names[root] = names
        self._active, self._model = dict(names), model

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        recording, name = self._recording, self._active.get(module)
        if name is None or recording.is_in_backward:
            return
        samples = self._batches.rows
        count = None if samples is None else len(samples.rows)
        value = _value(output, count)
        if value is None:
            return
        lengths = {} if samples is None else samples.lengths
        rows = projection_of_rows(value, count, lengths)
        has_rows = rows is not None and len(rows) > 0
        recording.add(
            Forward(
                update=recording.update,
                micro_step=recording.micro_step,
                model=self._model,
                module=name,
                shape=list(value.shape),
                rows=np.zeros((0, NUM_PROJECTIONS)) if rows is None else rows,
                is_without_padding=has_rows and bool(lengths) and _has_known_lengths(value, count, lengths),
            )
        )


def projection_of_rows(value: torch.Tensor, count: int | None, lengths: dict[int, np.ndarray]) -> np.ndarray | None:
    """Project each sample's part of ``value`` on random signs.

    The sum of squares of a projected difference is on average ``NUM_PROJECTIONS`` times that of the difference itself.

    Args:
        value: ``(count, ...)``, or ``(length, count, ...)``.
        count: number of samples.
        lengths: lengths of the samples without padding, by length with padding; positions of padding count as zeros.

    Returns:
        ``(count, NUM_PROJECTIONS)``, or None if ``value`` has no dimension of samples.
    """
    if count is None or value.dim() == 0:
        return None
    if value.size(0) != count:
        if value.dim() < 3 or value.size(1) != count:
            return None
        value = value.transpose(0, 1)
    flat = (_without_padding(value, lengths) if lengths else value).reshape(count, -1)
    if flat.size(1) <= _BLOCK:
        return (flat.to(torch.float64) @ _first_signs(flat.size(1), flat.device)).cpu().numpy()
    signs = _signs(flat.device)
    total = torch.zeros(count, NUM_PROJECTIONS, dtype=torch.float64, device=flat.device)
    for index, start in enumerate(range(0, flat.size(1), _BLOCK)):
        part = flat[:, start : start + _BLOCK].to(torch.float64)
        total += (part @ signs[: part.size(1)]) * signs[index % _BLOCK]
    return total.cpu().numpy()


def _value(output: Any, count: int | None) -> torch.Tensor | None:
    """Return the tensor of ``output`` that is recorded: the first with an entry for each sample, or else the first."""
    if type(output) is torch.Tensor and output.is_floating_point() and output.layout is torch.strided:
        return output.detach()
    if isinstance(output, torch.Tensor):
        found = [output]
    else:
        found = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
    found = [
        one for one in found if one.is_floating_point() and not isinstance(one, DTensor) and one.layout is torch.strided
    ]
    per_sample = [one for one in found if one.dim() > 0 and one.size(0) == count]
    chosen = (per_sample or found)[:1]
    return chosen[0].detach() if chosen else None


def _has_known_lengths(value: torch.Tensor, count: int | None, lengths: dict[int, np.ndarray]) -> bool:
    if value.dim() < 3:
        return False
    length = value.size(1) if value.size(0) == count else value.size(0)
    return length in lengths or length + 1 in lengths


def _without_padding(value: torch.Tensor, lengths: dict[int, np.ndarray]) -> torch.Tensor:
    """Set positions of padding to zero in ``(count, length, ...)``; also if the last position was cut off (inputs of a language model)."""
    if value.dim() < 3:
        return value
    for cut in (0, 1):
        ends = lengths.get(value.size(1) + cut)
        if ends is not None:
            if int(ends.min()) >= value.size(1) + cut:
                return value
            positions = torch.arange(value.size(1), device=value.device)
            is_padding = positions >= torch.as_tensor(ends - cut, device=value.device)[:, None]
            return value.masked_fill(is_padding.view(*is_padding.shape, *[1] * (value.dim() - 2)), 0)
    return value


@lru_cache(maxsize=256)
def _first_signs(count: int, device: torch.device) -> torch.Tensor:
    return _signs(device)[:count]


@lru_cache(maxsize=8)
def _signs(device: torch.device) -> torch.Tensor:
    """Return ``(_BLOCK, NUM_PROJECTIONS)`` random signs, the same in every process.

    Each four rows are orthogonal, so that nothing is lost of samples with up to four elements.
    """
    generator = torch.Generator().manual_seed(0x5EED)
    hadamard = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    signs = torch.randint(0, 2, (_BLOCK, 1), generator=generator) * 2 - 1
    return (signs * hadamard.repeat(_BLOCK // NUM_PROJECTIONS, 1)).to(device, torch.float64)
