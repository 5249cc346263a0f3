"""What an Accelerator's settings mean for ``plan/``: the engine, the mesh, and how batches are divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.accelerator.session import Session
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.engines.registry import default_engine
from echelon.plan.sources import StepChoices


def step_choices(session: Session, *, world_size: int, local_world_size: int) -> StepChoices:
    """Return how the session's step is distributed on ``world_size`` ranks; an engine that only follows from their number is none.

    Raises:
        ConfigError: the ranks cannot be divided as the sharding plugin says.
        UsageError: plans do not know the mesh axis sp.
    """
    value, layout, plugin = session.config.value, session.layout, session.fsdp_plugin
    options: dict[str, Any] = {}
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    sizes = {} if layout is None else {axis: getattr(layout, f"{axis}_size") or 1 for axis in axes}
    if layout is not None and (layout.sp_size or 1) > 1:
        raise UsageError(
            _("a plan does not know the mesh axis sp"),
            where="ParallelismConfig(sp_size=)",
            do=_("plan it with cp_size"),
        )
    if plugin is not None:
        world = replace(session.world, world_size=world_size, local_world_size=local_world_size)
        sharding = plugin.sharding_options(
            world, mixed_precision=value.mixed_precision, replicas=sizes.get("dp_replicate")
        )
        sizes["dp_replicate"] = sharding.replicas
        options = {
            "sharding": sharding,
            "cpu_offload": sharding.cpu_offload,
            # With a number of ranks, parameters stay gathered in part: the plan counts them whole.
            "stage": 3 if sharding.reshard_after_forward is True else 2,
        }
    elif session.deepspeed.plugin is not None:
        options = {
            "stage": max(1, int(session.deepspeed.plugin.zero_stage)),
            "cpu_offload": "cpu" in (value.offload_optimizer_device, value.offload_param_device),
        }
    name = session.capabilities.name
    follows = {default_engine(world_size=size, shard=False) for size in (1, 2)} | {"dp"}
    return StepChoices(
        engine=None if name in follows else name,
        sizes={axis: size for axis, size in sizes.items() if size > 1},
        master_weights=value.master_weights,
        shares_batch=session.dataloader_config.split_batches or session.update.uses_global_batches,
        max_micro_batch=value.max_micro_batch_size,
        blocks=tuple(name for name in (value.activation_checkpointing_blocks or "").split(",") if name),
        **options,
    )
