"""Makes models of transformers compute attention over the whole sequence inside a region."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.engines.context_parallel.region import SequenceRegion, current_region
from echelon.engines.context_parallel.sequence_mask import SequenceMask, documents_of_positions

_NAME = "sequence_parallel"
_UNSUPPORTED = ("softcap", "position_bias", "s_aux", "sinks")
_PLAIN_MASKS = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
)
_WINDOWS = ("sliding_window_overlay", "sliding_window_bidirectional_overlay")
_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")


def pretrained_models(models: Iterable[nn.Module]) -> list[Any]:
    """Return the outermost models of transformers in ``models``."""
    if "transformers" not in sys.modules:
        return []
    kind: Any = import_module("transformers.modeling_utils").PreTrainedModel
    found: list[Any] = []
    for model in models:
        inner: set[int] = set()
        for module in model.modules():
            if isinstance(module, kind) and id(module) not in inner:
                found.append(module)
                inner.update(map(id, module.modules()))
    return found


def attach(model: Any) -> list[Any]:
    """Register the attention function with transformers, and check and complete the inputs of ``model`` in regions.

    Returns the handles of the hooks.
    """
    functions: Any = import_module("transformers.modeling_utils").AttentionInterface
    functions.register(_NAME, _attention)
    masks: Any = import_module("transformers.masking_utils").AttentionMaskInterface
    masks.register(_NAME, _mask)
    if not getattr(type(model), "_supports_sdpa", False):
        raise UsageError(
            f"{type(model).__name__} does not compute attention with transformers' attention interface, so it cannot be computed over "
            "a sequence that is cut over ranks",
            where="prepare(), cp_size or sp_size above 1",
            do="use a model that supports attn_implementation='sdpa', or set cp_size and sp_size to 1",
        )
    signature = inspect.signature(model.forward)

    def complete(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        region = current_region()
        return (args, kwargs) if region is None else _completed(region, module, signature, args, kwargs)

    def end(module: Any, args: Any, out: Any) -> None:
        region = current_region()
        if region is not None:
            region.is_completed = False

    return [model.register_forward_pre_hook(complete, with_kwargs=True), model.register_forward_hook(end)]


@contextmanager
def attention_replaced(models: Sequence[Any]) -> Iterator[None]:
    """Let the ``models`` of transformers use the attention function of the active region inside the block."""
    kind: Any = None if not models else import_module("transformers.modeling_utils").PreTrainedModel
    configs = {id(m.config): m.config for model in models for m in model.modules() if isinstance(m, kind)}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def _completed(
    region: SequenceRegion, model: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``forward`` with position ids of the whole sequence; take documents and padding into the region."""
    bound = signature.bind_partial(*args, **kwargs)
    given = {**bound.arguments, **kwargs}
    _check_labels(model, given)
    if "position_ids" not in signature.parameters:
        raise UsageError(
            f"{type(model).__name__}.forward has no position_ids, so each rank would number its piece of the sequence from 0",
            where="context_parallel()",
            do="use a model whose forward takes position_ids, or set cp_size and sp_size to 1",
        )
    region.is_completed = True
    attention_mask = given.get("attention_mask")
    positions = given.get("position_ids")
    if positions is None:
        inputs = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        assert inputs is not None
        kwargs = {**kwargs, "position_ids": region.piece.positions[None].expand(inputs.shape[0], -1).to(inputs.device)}
    mask = region.given_mask
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[1] != region.piece.positions.numel():
            raise UsageError(
                f"an attention_mask of shape {tuple(attention_mask.shape)} is not supported for a sequence that is cut over ranks",
                where="context_parallel()",
                do="pass a padding mask of shape (batch, length) in buffers=, or no attention_mask",
            )
        real = region.group.gather(attention_mask.to(torch.uint8), 1).bool()
        if not bool(real.all()):
            mask = replace(mask, is_real=real if mask.is_real is None else mask.is_real & real)
    elif positions is not None and positions.dim() == 2 and mask.documents is None and not _has_cache(model, given):
        # As transformers: documents are seen by their positions if there is neither a mask nor a cache.
        mask = replace(mask, documents=documents_of_positions(region.group.gather(positions, 1)))
    if region.num_attended and _recomputes(model) and not _equal(mask, region.mask):
        raise UsageError(
            "two forward passes in one block have different documents or padding, and activation checkpointing would repeat the first "
            "one with those of the second",
            where="context_parallel()",
            do="use a block for each forward and backward pass",
        )
    region.mask = mask
    return args, kwargs


def _equal(one: SequenceMask, other: SequenceMask) -> bool:
    pairs = ((one.documents, other.documents), (one.is_real, other.is_real))
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _has_cache(model: Any, given: dict[str, Any]) -> bool:
    use_cache = given.get("use_cache")
    if use_cache is None:
        use_cache = getattr(model.config, "use_cache", False)
    # transformers repeats forward passes without a cache.
    return given.get("past_key_values") is not None or bool(use_cache and not (model.training and _recomputes(model)))


def _recomputes(model: nn.Module) -> bool:
    """Return whether activation checkpointing of transformers is on."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _check_labels(model: Any, given: dict[str, Any]) -> None:
    if given.get("labels") is None:
        return
    kind = str(getattr(model, "loss_type", None) or type(model).__name__)
    if kind.endswith("ForCausalLM"):
        extra = given.get("kwargs") or {}
        if given.get("shift_labels") is None and extra.get("shift_labels") is None:
            raise UsageError(
                f"{type(model).__name__} shifts labels inside this rank's piece of the sequence, so the labels at its ends would be wrong",
                where="context_parallel()",
                do="before the block: batch['shift_labels'] = echelon.utils.shift_labels(batch['labels']), add it to buffers=, and call "
                "model(**batch)",
            )
    elif not kind.endswith(_UNSHIFTED):
        raise UsageError(
            f"the loss of {type(model).__name__} is not a mean over positions, so it cannot be computed for a piece of a sequence",
            where="context_parallel()",
            do="use a causal or masked language model, or compute the loss outside the model",
        )


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' attention interface asks for it."""
    region = current_region()
    if region is None:
        raise UsageError(
            f"{type(module).__name__} ran outside accelerator.context_parallel() after it had begun inside",
            where="backward()",
            do="call accelerator.backward(loss) inside the block, because activation checkpointing repeats the forward pass",
        )
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise UsageError(
                f"{type(module).__name__} uses {name}, which attention over a sequence that is cut over ranks does not support",
                where="context_parallel()",
                do="use another model, or set cp_size and sp_size to 1",
            )
    assert attention_mask is None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    out = region.attend(
        query, key, value, is_causal=bool(causal), scale=scaling, dropout_p=dropout, window=sliding_window
    )
    return out.transpose(1, 2).contiguous(), None


def _mask(*args: Any, mask_function: Any = None, **options: Any) -> None:
    """Return no mask, because the region has documents and padding; refuse what it cannot express."""
    unknown = [name for name in _parts_of(mask_function) if name not in (*_PLAIN_MASKS, *_WINDOWS)]
    if unknown:
        raise UsageError(
            f"the model masks attention with {', '.join(unknown)}, which attention over a sequence that is cut over ranks does not support",
            where="context_parallel()",
            do="use a model with causal, bidirectional or sliding-window attention, or set cp_size and sp_size to 1",
        )


def _parts_of(mask_function: Any) -> Iterator[str]:
    """Yield the names of the functions that ``mask_function`` combines."""
    name = mask_function.__qualname__.split(".")[0]
    if name != "and_masks":
        yield name
    if name not in ("and_masks", "remap_positions_for_packed_sequence"):
        return
    for cell in mask_function.__closure__ or ():
        contents = cell.cell_contents
        for part in contents if isinstance(contents, (tuple, list)) else [contents]:
            if callable(part):
                yield from _parts_of(part)
