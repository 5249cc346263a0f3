"""Applies ``master_weights`` to models and optimizers in ``prepare``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from echelon.accelerator.session import Session
from echelon.base.errors import ConfigError, UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _
from echelon.base.sharded import is_dtensor, is_fsdp_module
from echelon.base.warnings import warn
from echelon.config.origin import SettingSource
from echelon.engines.random_numbers import restore_states, save_states
from echelon.precision.policy import LOW_PRECISION

_logger = get_logger(__name__)


def cast_trained_weights(session: Session, model: nn.Module, optimizers: Sequence[Any]) -> None:
    """Apply ``master_weights="float32"`` to ``model`` before it is distributed.

    Source: accelerate.utils.fsdp_utils.fsdp2_prepare_model (1.15), which casts in the same way, but only for FSDP.

    Raises:
        ConfigError: the script asks for master weights that the run cannot have.
        UsageError: see ``MasterWeights.cast``.
    """
    mode, origin = session.config.value.master_weights, session.config.origins["master_weights"]
    facts, is_asked = session.capabilities, origin.source is not SettingSource.DEFAULT
    low = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype in LOW_PRECISION]
    if mode != "float32" and not facts.exposes_state and low:
        raise ConfigError(
            f"master_weights={mode!r} does not work with the {facts.name} engine, which steps float32 weights",
            where=str(origin),
            do="remove master_weights, or use engine='ddp', 'zero1' or 'fsdp2'",
        )
    if mode != "float32" or facts.owns_master_weights:
        return
    if session.precision.mode == "no":
        if is_asked and low:
            raise ConfigError(
                f"master_weights='float32', but without mixed precision nothing computes with low-precision copies of them, and "
                f"{len(low)} trained parameters of {type(model).__name__} ({low[0]}, ...) are {model.get_parameter(low[0]).dtype}",
                where=str(origin),
                do="set mixed_precision='bf16', or call model.float() to train in float32, or remove master_weights",
            )
        return
    # Whoever has wrapped the model has already laid out its weights and gradients in their dtype.
    is_laid_out = is_fsdp_module(model) or any(isinstance(m, DistributedDataParallel) for m in model.modules())
    if is_laid_out:
        if is_asked and low:
            raise ConfigError(
                f"master_weights='float32', but {type(model).__name__} was already wrapped (DistributedDataParallel or fully_shard) with "
                f"low-precision weights ({low[0]}, ...)",
                where=str(origin),
                do="pass the model itself to prepare(), or call model.float() before you wrap it",
            )
        return
    torch_optimizers = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]
    dtypes = session.masters.cast(model, torch_optimizers)
    if not dtypes:
        return
    kind, name = _short(dtypes[0]), type(model).__name__
    if is_asked:
        _logger.info("%d trained parameters of %s are cast from %s to float32", len(dtypes), name, kind)
        return
    warn(
        _(
            "{number} trained parameters of {name} are {kind}, and mixed_precision={mode!r}: they are cast to float32 master "
            "weights, so that small updates are not lost. With AdamW, that is 16 bytes per parameter for weights, gradients and "
            "state, not 8. Saved models are {kind} again; checkpoints hold the float32 weights. "
            "Accelerator(master_weights='keep') trains the {kind} weights themselves; 'float32' does this without a "
            "warning",
            number=len(dtypes),
            name=name,
            kind=kind,
            mode=session.precision.mode,
        )
    )


def check_stepped_weights(session: Session, optimizers: Sequence[Optimizer]) -> None:
    """Check that optimizers can step weights that are still of low precision, or warn once.

    Raises:
        ConfigError: ``master_weights="stochastic"`` cannot be right in this run.
    """
    if not optimizers or not session.capabilities.exposes_state:
        return
    held = [p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad]
    low = [p for p in held if p.dtype in LOW_PRECISION]
    if session.config.value.master_weights == "stochastic":
        _round_stochastically(session, optimizers, held, low)
        return
    if session.precision.mode == "no" or session.warned_of_low_precision or not low:
        return
    session.warned_of_low_precision = True
    warn(
        _(
            "mixed_precision={mode!r}, but {number} of {total} trained parameters are {kind} themselves, and so is the optimizer's "
            "state of them: an update that changes a weight by less than about 1/256 of it is lost. To train float32 weights, "
            "set master_weights='float32' (echelon launch --master_weights float32), or load the model in float32 "
            "(from_pretrained(..., dtype=torch.float32)); the forward pass still computes in low precision",
            mode=session.precision.mode,
            number=len(low),
            total=len(held),
            kind=_short(low[0].dtype),
        )
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


@runtime_checkable
class _RoundsStochastically(Protocol):
    """An optimizer of torchao."""

    bf16_stochastic_round: bool


def _round_stochastically(
    session: Session, optimizers: Sequence[Optimizer], held: Sequence[torch.Tensor], low: Sequence[torch.Tensor]
) -> None:
    """Let the ranks draw the same random numbers in each step, so that copies of a weight are rounded alike."""
    reason = _why_not_stochastic(session, held, low)
    if reason is not None:
        raise ConfigError(
            f"master_weights='stochastic': {reason[0]}",
            where=str(session.config.origins["master_weights"]),
            do=reason[1],
        )
    for optimizer in optimizers:
        inner = session.engine.stepping_optimizer(optimizer)
        if not isinstance(inner, _RoundsStochastically) or not inner.bf16_stochastic_round:
            raise ConfigError(
                f"master_weights='stochastic', but {type(inner).__name__} rounds its updates to the nearest bfloat16",
                where=str(session.config.origins["master_weights"]),
                do="use an optimizer of torchao, such as torchao.optim.AdamW8bit(model.parameters(), lr, bf16_stochastic_round=True); "
                "with a Trainer, set optim='adamw_torch_8bit'",
            )
        _share_draws(session, optimizer, len(session.objects.optimizers))


def _why_not_stochastic(
    session: Session, held: Sequence[torch.Tensor], low: Sequence[torch.Tensor]
) -> tuple[str, str] | None:
    others = [] if session.layout is None else [axis for axis in session.layout.non_dp_dim_names if axis != "cp"]
    if any(p.dtype == torch.float16 for p in low):
        return "float16 weights cannot be rounded stochastically", "load the model in bfloat16, or use 'float32'"
    if not low:
        return "no trained parameter is bfloat16", "load the model in bfloat16, or remove master_weights"
    if others:
        return (
            f"the ranks of the axes {', '.join(others)} have parts of different sizes beside copies of the same weights, which would be "
            "rounded differently",
            "use master_weights='float32', or data-parallel axes only",
        )
    if session.capabilities.shards_parameters and session.parity != "off":
        return (
            f"each rank draws for its own shards, so the updates would depend on the number of ranks, but parity={session.parity!r}",
            "use engine='ddp' or 'zero1', master_weights='float32', or parity='off'",
        )
    if session.capabilities.shards_parameters and not all(map(is_dtensor, held)):
        return (
            "some trained parameters are not sharded (ignored_modules, or scalars), and the ranks would round them differently",
            "shard all trained parameters, or use master_weights='float32'",
        )
    return None


def _share_draws(session: Session, optimizer: Optimizer, number: int) -> None:
    device, before = session.world.device, list[Any]()

    def seed(_optimizer: Any, args: Any, kwargs: Any) -> None:
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise UsageError(
                "a step with stochastic rounding does not take a closure, whose dropout masks would come from the same numbers",
                where="optimizer.step(closure), master_weights='stochastic'",
                do="call backward() and step() without a closure",
            )
        before[:] = [save_states(device)]
        # The position in the run is part of the seed, so a resumed run rounds as an uninterrupted one.
        value = (((session.config.value.seed or 0) * 1_000_003 + number) * 1_000_003 + session.progress.step) % 2**63
        torch.default_generator.manual_seed(value)
        if device.type not in ("cpu", "meta"):
            torch.get_device_module(device).manual_seed(value)

    def restore(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        restore_states(device, before.pop())

    optimizer.register_step_pre_hook(seed)
    optimizer.register_step_post_hook(restore)
