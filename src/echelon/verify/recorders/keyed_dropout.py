"""Draws dropout masks from the content of each sample, so that a sample has the same mask on every layout.

Records the states of the random number generators from which the script itself would draw them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from echelon.distributed.checks.sketch import generator_hash
from echelon.verify.recorders.batches import Batches
from echelon.verify.recorders.sample_rows import SampleRows
from echelon.verify.recording import Recording
from echelon.verify.trace import Rng

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as signed 64-bit integers
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_ALL_BITS = (1 << 64) - 1
_RESOLUTION = 1 << 32
_CPU = torch.device("cpu")  # where scripts are recorded
# Standard deviation and shift of alpha dropout: Klambauer et al., "Self-normalizing neural networks", equations 4 to 7.
_ALPHA = 1.7580993408473766

_DROPOUTS = tuple(f"{kind}dropout{end}" for kind in ("", "feature_", "alpha_", "feature_alpha_") for end in ("", "_"))


class KeyedDropout:
    """Replaces the masks of torch's dropout functions in training forward passes. The random number generators are not used.

    A mask depends on the update, on the number of earlier masks in this forward pass, on the sample, and on the element's position in the
    sample. In a checkpointed block, the second pass draws the masks of the first.

    One number is drawn from torch's generator in each update that has masks, so that its recorded states are equal again only if the
    script has set it back; on each layout it is one number, however many samples a rank has.

    Args:
        batches: which samples the forward pass uses.
    """

    def __init__(self, recording: Recording, batches: Batches) -> None:
        self._recording = recording
        self._num_masks = 0  # drawn in this forward pass
        self._state = 0  # of the generators when it began
        self._advanced_in: int | None = None
        self._batches = batches
        self._call = 0
        self._rows: SampleRows | None = None
        self._key = 0
        self._is_active = False
        recording.on_training_forward.append(self._begin)
        recording.on_forward_end.append(self._end)
        for name in _DROPOUTS:
            for owner in (torch, torch._VF):
                if hasattr(owner, name):
                    recording.patch(owner, name, self._keyed(getattr(owner, name), name))
        for owner in (F, torch._C._nn):
            recording.wrap(owner, "scaled_dot_product_attention", self._attention)
        blocks = torch.utils.checkpoint
        recording.wrap(blocks.CheckpointFunction, "apply", self._checkpoint)
        if getattr(blocks, "_checkpoint_without_reentrant_generator", None) is not None:
            recording.wrap(blocks, "_checkpoint_without_reentrant_generator", self._checkpoint)

    def _begin(self, model: int, root: nn.Module, args: Any, kwargs: Any) -> None:
        self._call, self._is_active, self._rows = 0, True, None
        self._key = _mixed_number(self._recording.update)
        self._num_masks, self._state = 0, generator_hash(_CPU)

    def _end(self, model: int, root: nn.Module, output: Any) -> None:
        self._is_active = False
        recording, update = self._recording, self._recording.update
        has_drawn = generator_hash(_CPU) != self._state
        if has_drawn:
            recording.note(
                f"{type(root).__name__} draws random numbers in training other than those of dropout; they depend on the layout"
            )
        draws_masks = has_drawn or self._num_masks > 0
        if draws_masks and self._advanced_in != update:
            self._advanced_in = update
            if not has_drawn:
                torch.empty((), dtype=torch.int64).random_()
        recording.add(Rng(update=update, micro_step=recording.micro_step, torch=self._state, draws_masks=draws_masks))

    def _keyed(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        is_in_place, is_feature, is_alpha = name.endswith("_"), name.startswith("feature"), "alpha" in name

        @wraps(original)
        def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
            if not train or not 0 < p < 1:
                return original(input, p, train)  # type: ignore[no-any-return]
            shape = input.shape[:2] + (1,) * (input.dim() - 2) if is_feature else input.shape
            keep = self._mask(torch.Size(shape), input.device, p)
            if keep is None:
                return original(input, p, train)  # type: ignore[no-any-return]
            if is_alpha:
                scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
                noise = keep.to(input.dtype) * scale
                shift = (~keep).to(input.dtype) * (-_ALPHA * scale) + _ALPHA * scale * p
                return input.mul_(noise).add_(shift) if is_in_place else input * noise + shift
            noise = keep.to(input.dtype) / (1 - p)
            return input.mul_(noise) if is_in_place else input * noise

        return dropout

    def _attention(
        self,
        original: Callable[..., Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if not dropout_p or not (self._is_active or self._recording.is_in_backward):
            return original(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        weights = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            is_bool = attn_mask.dtype is torch.bool
            weights = weights.masked_fill(~attn_mask, -math.inf) if is_bool else weights + attn_mask
        weights = torch._safe_softmax(weights, -1)  # rows that are masked as a whole give zeros, as in torch
        return F.dropout(weights, dropout_p) @ value

    def _checkpoint(self, original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let the second pass of a checkpointed function draw the masks of its first pass."""
        if not self._is_active:
            return original(function, *args, **kwargs)
        begin = (self._call, self._rows or self._batches.rows, self._key)

        @wraps(function)
        def keyed(*inputs: Any, **options: Any) -> Any:
            if not self._recording.is_in_backward:
                return function(*inputs, **options)
            with self._from(begin):
                return function(*inputs, **options)

        return original(keyed, *args, **kwargs)

    @contextmanager
    def _from(self, begin: tuple[int, SampleRows | None, int]) -> Iterator[None]:
        before = self._call, self._rows, self._key, self._is_active
        self._call, self._rows, self._key = begin
        self._is_active = True
        try:
            yield
        finally:
            self._call, self._rows, self._key, self._is_active = before

    def _mask(self, shape: torch.Size, device: torch.device, p: float) -> torch.Tensor | None:
        """Return which elements are kept, or None where an ordinary mask must be drawn."""
        if not self._is_active:
            return None
        rows = self._rows or self._batches.rows
        self._rows = rows
        self._call += 1
        layout = None if rows is None else _layout(shape, len(rows.rows))
        if rows is None or layout is None:
            self._recording.note(
                f"a dropout mask of shape {list(shape)} has no dimension of samples, so it depends on the layout"
            )
            return None
        self._num_masks += 1
        keys = torch.as_tensor(rows.keys.view("int64"), device=device)
        return keyed_mask(keys, shape, layout=layout, key=_mixed_number(self._key + self._call), p=p)


def keyed_mask(keys: torch.Tensor, shape: torch.Size, *, layout: tuple[int, int], key: int, p: float) -> torch.Tensor:
    """Return a mask that is False with probability ``p``.

    Args:
        keys: int64, ``(num_samples,)``.
        layout: the dimension of the samples, and how many consecutive entries of it belong to one sample.
        key: identifies the call.
    """
    samples, num_each = layout
    numbers = _mixed(keys + key)
    if num_each > 1:  # samples times heads
        numbers = _mixed(numbers[:, None] + _hashes_of_positions(num_each, -1, keys.device)).reshape(-1)
    numbers = numbers.reshape(-1, *[1] * (len(shape) - samples - 1))
    # Coordinates are hashed one by one: a flat index would depend on the padded length of attention weights.
    for dim, size in enumerate(shape):
        if dim != samples and size > 1:
            numbers = numbers + _hashes_of_positions(size, dim, keys.device).reshape(-1, *[1] * (len(shape) - dim - 1))
    numbers = (numbers ^ (numbers >> 29)) * _MIX[0]
    return numbers >> 32 >= round((p - 0.5) * _RESOLUTION)


def _layout(shape: torch.Size, num_samples: int) -> tuple[int, int] | None:
    """Return the dimension of the samples and the number of entries for each sample; None if there is none."""
    if not shape or not num_samples:
        return None
    if shape[0] == num_samples:
        return 0, 1
    is_multiple = shape[0] % num_samples == 0
    if len(shape) > 2 and shape[1] == num_samples and not (is_multiple and shape[1] == shape[2]):
        return 1, 1  # (length, samples, ...)
    return (0, shape[0] // num_samples) if is_multiple else None


@lru_cache(maxsize=256)
def _hashes_of_positions(size: int, dim: int, device: torch.device) -> torch.Tensor:
    return _mixed(torch.arange(size, device=device) + (dim + 2) * (1 << 40))


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int64 number (the finalizer of splitmix64, with arithmetic shifts)."""
    numbers = (numbers + 1) * _GOLDEN
    numbers = (numbers ^ (numbers >> 30)) * _MIX[0]
    numbers = (numbers ^ (numbers >> 27)) * _MIX[1]
    return numbers ^ (numbers >> 31)


def _mixed_number(number: int) -> int:
    """Return a hash of one number as a signed 64-bit integer."""
    number = (number + 1) * _GOLDEN & _ALL_BITS
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        number = (number ^ (number >> shift)) * factor & _ALL_BITS
    number ^= number >> 31
    return number - (1 << 64) if number >> 63 else number
