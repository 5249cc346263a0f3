"""Activation checkpointing of a model's blocks: what their forward passes keep for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from echelon.base.errors import ConfigError, UsageError

# Outputs that `selective` keeps: they take most of the time to compute. Everything else is cheap, and large.
_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def blocks_of(model: nn.Module, classes: Collection[str], *, where: str) -> list[nn.Module]:
    """Return the outermost modules inside ``model`` of the classes with these names (none: those in ``_no_split_modules``).

    A model of a single module, such as a linear second model, has no blocks.

    Raises:
        ConfigError: there is no such module, or the model does not name its blocks.
    """
    present = sorted({type(module).__name__ for module in model.modules() if module is not model})
    names = set(classes) or set(getattr(model, "_no_split_modules", None) or ())
    if not present:
        return []
    if not names:
        raise ConfigError(
            f"{type(model).__name__} does not name its blocks (_no_split_modules), so there is nothing to recompute",
            where=where,
            do=f"name the classes of the blocks: activation_checkpointing_blocks='Block' (the model has {', '.join(present)})",
        )
    missing = set(classes) - set(present)
    if missing or not names & set(present):
        raise ConfigError(
            f"{type(model).__name__} has no module of class {', '.join(sorted(missing or names))}",
            where=where,
            do=f"choose from {', '.join(present)}; for several models of different blocks, remove activation_checkpointing_blocks and "
            "set model._no_split_modules = ['Block'] on each before prepare()",
        )
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # outer ones first
        if module is not model and type(module).__name__ in names and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def checkpoint_activations(blocks: Iterable[nn.Module], mode: str, *, where: str) -> None:
    """Make each block keep only its inputs (``full``), on the CPU (``offload``), or also matrix products (``selective``).

    Names of parameters do not change, and dropout draws the same masks again.

    Raises:
        ConfigError: a block changes a state in its forward pass, which the second pass would change again.

    Source: torch.utils.checkpoint (non-reentrant); accelerate.utils.fsdp_utils.fsdp2_apply_ac (1.15), which offloads in the same way.
    """
    for block in blocks:
        _require_stateless(block, where)
        run: Any = {"full": _keep_inputs, "selective": _keep_products, "offload": partial(_keep_on_cpu(), block)}[mode]
        block.forward = partial(_recomputed, block, run, block.forward)


def checkpointing_mode(model: nn.Module) -> str:
    """Return the mode of the blocks in ``model``: ``full`` also if transformers' own checkpointing is on, ``none`` if nothing is."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is _recomputed:
            run = forward.args[1]
            return "full" if run is _keep_inputs else "selective" if run is _keep_products else "offload"
    return "full" if recomputes_itself(model) else "none"


def recomputes_itself(model: nn.Module) -> bool:
    """Return whether transformers' own checkpointing is on."""
    is_on = getattr(model, "is_activation_checkpointing", None)  # since 5.23, which warns of the older name
    return bool(getattr(model, "is_gradient_checkpointing", False) if is_on is None else is_on)


def stop_checkpointing(model: Any) -> None:
    """Let the blocks of ``model`` keep everything again."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is _recomputed:
            module.forward = forward.args[2]
    if recomputes_itself(model):
        model.gradient_checkpointing_disable()


def _require_stateless(block: nn.Module, where: str) -> None:
    for name, module in block.named_modules():
        keeps_statistics = isinstance(module, _STATISTICS) and module.track_running_stats
        if keeps_statistics or type(module).__name__ == "_SpectralNorm":
            raise ConfigError(
                f"{name} in {type(block).__name__} is a {type(module).__name__}, which updates its state in each forward pass, and would "
                "do so again when the block is recomputed",
                where=where,
                do="name the classes of blocks without it (activation_checkpointing_blocks), or use a GroupNorm or LayerNorm",
            )


def _recomputed(
    block: nn.Module, run: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if block.training:
        kwargs = _without_cache(block, kwargs)
    return run(forward, *args, **kwargs)


def _without_cache(block: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a block of transformers without a cache of keys, to which the second pass would append again.

    Source: transformers.modeling_layers.GradientCheckpointingLayer (5.23).
    """
    cache = kwargs.get("past_key_values")
    if cache is None:
        return kwargs
    if cache.get_seq_length():
        raise UsageError(
            f"{type(block).__name__} got keys and values of earlier tokens (past_key_values), which cannot be recomputed",
            where="activation_checkpointing",
            do="set activation_checkpointing='none', for example for prefix tuning",
        )
    return {**kwargs, "past_key_values": None, **({"use_cache": False} if "use_cache" in kwargs else {})}


def _keep_inputs(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


# ---- selective -------------------------------------------------------------------------------------------------------


def _keep_products(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _products() else CheckpointPolicy.PREFER_RECOMPUTE


@lru_cache(maxsize=1)
def _products() -> frozenset[Any]:
    found = (getattr(torch.ops.aten, name, None) for name in _PRODUCTS)  # not all are in every torch
    return frozenset(operator.default for operator in found if operator is not None)


# ---- offload ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _keep_on_cpu() -> Callable[..., Any]:
    """Return a function that torch.compile does not trace, because hooks cannot be part of a graph; it compiles what is inside."""
    disabled: Any = torch.compiler.disable(_offload_inputs, recursive=False)  # type: ignore[no-untyped-call]
    return disabled  # type: ignore[no-any-return]


def _offload_inputs(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``forward``, and keep what it saves on the CPU, except the block's own weights, which compiled code saves too.

    ``CheckpointPolicy.MUST_CPU_OFFLOAD`` is recomputed silently outside of compiled code (https://github.com/pytorch/pytorch/issues/185015,
    torch 2.13).
    """
    own = {_address(p) for p in block.parameters()} - {None}
    has_accelerator = any(
        isinstance(one, torch.Tensor) and one.device.type != "cpu" for one in (*args, *kwargs.values())
    )
    on_cpu = save_on_cpu(pin_memory=has_accelerator)

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if _address(tensor) in own else on_cpu.pack_hook(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else on_cpu.unpack_hook(packed)

    with saved_tensors_hooks(pack, unpack):
        return _keep_inputs(forward, *args, **kwargs)


def _address(tensor: torch.Tensor) -> int | None:
    """Return where the values are; None for a tensor that wraps others (of DTensor, of a collective that has not ended, of torchao)."""
    return None if hasattr(tensor, "__tensor_flatten__") else tensor.untyped_storage().data_ptr()
