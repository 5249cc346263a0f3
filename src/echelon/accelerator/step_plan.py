"""``Accelerator.plan``, the plan of a Trainer, and what an Accelerator's settings mean for ``plan/``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.accelerator.models.save_objects import unwrap_model
from echelon.accelerator.rng_states import current_random_states, restore_random_states
from echelon.accelerator.session import Session
from echelon.accelerator.tracking import record_hyperparameters
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.base.device import total_memory
from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.sharded import is_dtensor
from echelon.distributed.control import raise_on_all_ranks
from echelon.engines.registry import default_engine
from echelon.plan.capture import capture_step, has_no_memory
from echelon.plan.devices import build_cluster
from echelon.plan.facts import Cluster
from echelon.plan.layouts import plan_layout
from echelon.plan.sizes import parse_size
from echelon.plan.sources import PlannedStep, StepChoices, captured_step
from echelon.plan.verdict import PlanVerdict, Reserve, Traces, judge, search
from echelon.plan.verdict_text import to_hyperparameters, to_lines, to_short_lines, verdict_text


def plan_step(
    session: Session,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    compute_loss: Callable[[nn.Module, Any], torch.Tensor] | None,
    *,
    gpus: int | None,
    nodes: int | None,
    device: str | None,
    gpu_memory: int | str | None,
    interconnect: str | None,
) -> PlanVerdict:
    """Implement ``Accelerator.plan``."""
    world = session.world
    own = world.local_world_size, max(1, world.world_size // world.local_world_size)
    cluster = build_cluster(
        gpus=gpus or own[0],
        nodes=nodes or own[1],
        device=device,
        gpu_memory=_bytes(gpu_memory, where="Accelerator.plan(gpu_memory=)"),
        interconnect=interconnect,
        where="Accelerator.plan(gpu_memory=)",
        example=_("pass device='H100' or another name, or gpu_memory='80GB'"),
    )
    total = cluster.gpus_per_node * cluster.nodes
    choices = step_choices(session, world_size=total, local_world_size=cluster.gpus_per_node)
    step = step_of_objects(session, model, optimizer, batch, compute_loss or _own_loss, choices, world_size=total)
    found = search(Traces(step.source), step.layout(total), cluster, plan_layout)
    if (cluster.gpus_per_node, cluster.nodes) == own:
        record_hyperparameters("training", to_hyperparameters(found.asked))
    return replace(found, text="\n".join(to_lines(step.title, found, script=_script())))


def plan_run(
    session: Session,
    model: nn.Module,
    optimizer: Any,
    make_batch: Callable[[], Any],
    compute_loss: Callable[[nn.Module, Any], torch.Tensor],
    *,
    accumulation: int,
) -> None:
    """Print the plan of this run's own step on rank zero, before it is prepared.

    The memory is the setting ``gpu_memory``, or that of the device; on a CPU without this setting, nothing is refused.

    Args:
        make_batch: returns one batch of the loader.
        compute_loss: returns the loss of a model for a batch.
        accumulation: batches of a step.

    Collective: call on every rank.

    Raises:
        ConfigError: the step does not fit.
    """
    if has_no_memory(model):  # a script that ``echelon plan`` runs
        return
    with raise_on_all_ranks("plan=True"):
        if session.world.is_rank_zero:
            states = current_random_states(session.world.device.type)
            try:
                batch = make_batch()
            finally:
                restore_random_states(states)
            _plan_run(session, model, optimizer, batch, compute_loss, accumulation)


def _plan_run(
    session: Session,
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    compute_loss: Callable[[nn.Module, Any], torch.Tensor],
    accumulation: int,
) -> None:
    world, given = session.world, session.config.value.gpu_memory
    memory = _bytes(given, where=str(session.config.origins["gpu_memory"]))
    if memory is None and world.device.type != "cpu":
        memory = total_memory()
    cluster = Cluster(
        gpus_per_node=world.local_world_size,
        nodes=max(1, world.world_size // world.local_world_size),
        gpu_memory=sys.maxsize if memory is None else memory,
    )
    choices = step_choices(session, world_size=world.world_size, local_world_size=world.local_world_size)
    step = step_of_objects(
        session,
        model,
        optimizer,
        batch,
        compute_loss,
        choices,
        world_size=world.world_size,
        accumulation=accumulation,
        where="TrainingArguments.plan",
    )
    traces, layout, reserve = Traces(step.source), step.layout(world.world_size), Reserve()
    judged = judge(traces, layout, cluster, plan_layout, reserve)
    record_hyperparameters("training", to_hyperparameters(judged))
    if judged.fits or memory is None:
        lines = to_short_lines(step.title, judged, None if memory is None else cluster, reserve)
    else:
        lines = to_lines(step.title, search(traces, layout, cluster, plan_layout), script=_script())
    print("\n".join(lines), flush=True)
    if memory is not None and not judged.fits:
        raise ConfigError(
            verdict_text(judged, cluster),
            where="TrainingArguments.plan",
            do=_("make one of the changes that the plan lists, or remove plan=True to try it"),
        )


def step_of_objects(
    session: Session,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    compute_loss: Callable[[nn.Module, Any], torch.Tensor],
    choices: StepChoices,
    *,
    world_size: int,
    accumulation: int | None = None,
    where: str = "Accelerator.plan",
) -> PlannedStep:
    """Return the step of these objects on ``world_size`` ranks with the session's settings.

    Args:
        model: prepared or not.
        optimizer: prepared or not.
        batch: one micro-batch.
        compute_loss: returns the loss of a model for a batch.
        choices: what ``step_choices`` returned.
        world_size: number of ranks.
        accumulation: micro-batches of a step. None: the session's.
        where: what asks, for an error.

    Raises:
        UsageError: the model or the optimizer is sharded, or is none of torch's.
    """
    module = unwrap_model(session, model, keep_torch_compile=False)
    capabilities = session.capabilities
    is_sharded = capabilities.shards_optimizer_state and isinstance(optimizer, AcceleratedOptimizer)
    if is_sharded or any(map(is_dtensor, module.parameters())):
        raise UsageError(
            _(
                "the engine {name} has sharded the model or the optimizer, and a plan is for whole ones",
                name=capabilities.name,
            ),
            where=where,
            do=_("call plan() before prepare()"),
        )
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    if not isinstance(inner, Optimizer):
        raise UsageError(
            _("a plan needs a torch optimizer, not a {kind}", kind=type(inner).__name__),
            where=where,
            do=_("pass an optimizer such as torch.optim.AdamW(model.parameters())"),
        )
    value, plugin = session.config.value, session.fsdp_plugin
    mode: str = value.activation_checkpointing
    if plugin is not None and plugin.activation_checkpointing:
        mode = "offload" if plugin.activation_checkpointing_offload else "full"
    capture = capture_step(
        module,
        inner,
        batch,
        compute_loss,
        mixed_precision=value.mixed_precision,
        activation_checkpointing=mode,
        accumulation=accumulation or session.gradient_state.num_steps,
    )
    return captured_step(capture, choices, world=world_size)


def _script() -> str:
    """Return the words that start this program, or a name in their place, such as in a notebook."""
    return shlex.join(sys.argv) if Path(sys.argv[0]).suffix == ".py" else "train.py"


def _bytes(size: int | str | None, *, where: str) -> int | None:
    try:
        return parse_size(size) if isinstance(size, str) else size
    except ValueError as error:
        raise UsageError(
            _("{value!r} is not a size such as 80GB", value=size),
            where=where,
            do=_("pass a number of bytes, or a size such as '80GB'"),
        ) from error


def _own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(**batch) if isinstance(batch, Mapping) else None
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            _("{name} does not compute its own loss of this batch", name=type(model).__name__),
            where="Accelerator.plan",
            do=_("pass a function that does: compute_loss=lambda model, batch: ..."),
        )
    return loss


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
