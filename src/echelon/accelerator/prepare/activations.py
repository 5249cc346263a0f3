"""Applies ``activation_checkpointing`` to models in ``prepare``."""

from __future__ import annotations

from torch import nn

from echelon.accelerator.session import Session
from echelon.base.errors import ConfigError


def recompute_blocks(session: Session, model: nn.Module) -> None:
    """Let the blocks of ``model`` be recomputed in the backward pass, in place, if the run's settings say so.

    Models without trained parameters keep nothing for a backward pass, and are left alone.

    Raises:
        ConfigError: the model or the layout does not support it, or the blocks are already recomputed.
    """
    settings, origins = session.config.value, session.config.origins
    mode, blocks = settings.activation_checkpointing, settings.activation_checkpointing_blocks
    if mode == "none":
        if blocks is not None:
            raise ConfigError(
                f"activation_checkpointing_blocks={blocks!r} has no effect, because activation_checkpointing is 'none'",
                where=str(origins["activation_checkpointing_blocks"]),
                do="set activation_checkpointing='full', 'selective' or 'offload', or remove it",
            )
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    where = str(origins["activation_checkpointing"])
    reason = _why_not(session, model)
    if reason is not None:
        raise ConfigError(f"activation_checkpointing={mode!r}: {reason[0]}", where=where, do=reason[1])
    # Other runs do not import torch.utils.checkpoint.
    from echelon.engines.activation_checkpointing import blocks_of, checkpoint_activations  # noqa: PLC0415

    classes = () if blocks is None else tuple(name.strip() for name in blocks.split(","))
    checkpoint_activations(blocks_of(model, classes, where=where), mode, where=where)


def _why_not(session: Session, model: nn.Module) -> tuple[str, str] | None:
    plugin = session.fsdp_plugin
    if plugin is not None and plugin.activation_checkpointing:
        return (
            "the FSDP plugin's activation_checkpointing is set, too, and would recompute blocks twice",
            "set only one of them",
        )
    if session.layout is not None and session.layout.pp_enabled:
        return (
            "the blocks of a pipeline are its units",
            "set activation_checkpointing=True in FullyShardedDataParallelPlugin (--fsdp_activation_checkpointing true)",
        )
    if session.capabilities.num_devices > 1:
        return "torch's DataParallel copies the model, but not what recomputes its blocks", "use engine='ddp'"
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return (
            f"{type(model).__name__} already recomputes its blocks itself (gradient_checkpointing_enable())",
            "remove that call, or set activation_checkpointing='none'",
        )
    return None
