"""Translates DeepSpeed's config for the fsdp2 engine, as documented in docs/engines.md. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from echelon.base.errors import ConfigError
from echelon.engines.deepspeed.ds_config import HfDeepSpeedConfig, flatten

__all__ = ["COUNTERPARTS", "Counterpart", "FSDP2Settings", "list_without_counterpart", "table", "translate_to_fsdp2"]

_ZERO = "zero_optimization"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """The fsdp2 counterpart of one key in DeepSpeed's config."""

    does: str
    """Description of the counterpart, for the documentation."""
    is_kept: bool = True
    """Whether fsdp2 implements the key. If not, setting it causes a warning."""
    nothing: tuple[Any, ...] = (None, False, "auto")
    """Values for which the key has no effect."""


def _none(why: str, *nothing: Any) -> Counterpart:
    return Counterpart(does=f"no counterpart: {why}", is_kept=False, nothing=(None, False, "auto", *nothing))


def _is(does: str) -> Counterpart:
    return Counterpart(does=does)


_NVME = _none("fsdp2 does not offload to NVMe")
_BUCKETS = _none("fsdp2 communicates one unit (a block of the model) at a time, without buckets")
_LIVE = _none("fsdp2 keeps only the current unit and the next one unsharded")

COUNTERPARTS: Mapping[str, Counterpart] = MappingProxyType(
    {
        f"{_ZERO}.stage": _is(
            "3: `reshard_after_forward=True`; 2: `reshard_after_forward=False`; 1 and 0 raise an error (use `engine='zero1'` or `'ddp'`)"
        ),
        f"{_ZERO}.offload_optimizer.device": _is(
            "`cpu`: parameters, gradients and optimizer states are all kept on the CPU; `nvme` raises an error"
        ),
        f"{_ZERO}.offload_optimizer.pin_memory": _is(
            "`CPUOffloadPolicy(pin_memory=)`; without an accelerator, nothing is pinned"
        ),
        f"{_ZERO}.offload_optimizer.nvme_path": _NVME,
        f"{_ZERO}.offload_optimizer.buffer_count": _NVME,
        f"{_ZERO}.offload_optimizer.fast_init": _NVME,
        f"{_ZERO}.offload_param.device": _is("the same as `offload_optimizer.device`"),
        f"{_ZERO}.offload_param.pin_memory": _is("the same as `offload_optimizer.pin_memory`"),
        f"{_ZERO}.offload_param.nvme_path": _NVME,
        f"{_ZERO}.offload_param.buffer_count": _NVME,
        f"{_ZERO}.offload_param.buffer_size": _NVME,
        f"{_ZERO}.offload_param.max_in_cpu": _NVME,
        f"{_ZERO}.overlap_comm": _is("always on: communication overlaps with computation"),
        f"{_ZERO}.contiguous_gradients": _is("always on: each unit's gradients are in one buffer"),
        f"{_ZERO}.reduce_scatter": _is("always on: gradients are reduce-scattered"),
        f"{_ZERO}.sub_group_size": _none("the optimizer updates all of its shards at once"),
        f"{_ZERO}.reduce_bucket_size": _BUCKETS,
        f"{_ZERO}.allgather_bucket_size": _BUCKETS,
        f"{_ZERO}.allgather_partitions": _is("always on: shards are all-gathered"),
        f"{_ZERO}.round_robin_gradients": _none("gradients are reduced to the rank that holds the shard"),
        f"{_ZERO}.stage3_prefetch_bucket_size": _none("the next unit is always prefetched"),
        f"{_ZERO}.stage3_param_persistence_threshold": _none("small parameters are gathered with their unit"),
        f"{_ZERO}.stage3_max_live_parameters": _LIVE,
        f"{_ZERO}.stage3_max_reuse_distance": _LIVE,
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": _is(
            "always on: full state dicts can be gathered on rank zero, in float32"
        ),
        f"{_ZERO}.zero_hpz_partition_size": _is("`reshard_after_forward` is set to that number of ranks"),
        "gradient_accumulation_steps": _is("`Accelerator(gradient_accumulation_steps=)`"),
        "gradient_clipping": _is(
            "gradients are clipped to that norm before each step, unless the loop has clipped them"
        ),
        "train_batch_size": _is("must equal micro-batch size x accumulation steps x processes"),
        "train_micro_batch_size_per_gpu": _is("must equal the loader's batch size"),
        "fp16.enabled": _is('`mixed_precision="fp16"`'),
        "fp16.auto_cast": _is("always on: the model's inputs are cast"),
        "fp16.loss_scale": _is(
            "0: a dynamic scale; any other number: a scale that never grows and is halved if gradients are infinite"
        ),
        "fp16.loss_scale_window": _is("`GradScalerKwargs(growth_interval=)`"),
        "fp16.initial_scale_power": _is("`GradScalerKwargs(init_scale=2**n)`"),
        "fp16.hysteresis": _none("the scale is halved at the first infinite gradient", 1),
        "fp16.min_loss_scale": _none("the scale has no lower bound", 0),
        "bf16.enabled": _is('`mixed_precision="bf16"`'),
        "steps_per_print": _none("fsdp2 prints nothing", float("inf"), 0),
        "wall_clock_breakdown": _none("use `accelerator.profile()`"),
        "zero_allow_untested_optimizer": _is(
            "always on: any optimizer works if its state has the same shape as its parameters"
        ),
        "zero_force_ds_cpu_optimizer": _is("no effect: the optimizer passed to `prepare` is used"),
        "optimizer": _is("raises an error; pass a torch optimizer to `prepare`"),
        "scheduler": _is("raises an error; pass a torch scheduler to `prepare`"),
    }
)


def list_without_counterpart(values: Mapping[str, Any]) -> list[str]:
    """Return ``key=value (reason)`` for each dotted key in ``values`` that has no counterpart in fsdp2."""
    missing = []
    for key, value in values.items():
        if key.partition(".")[0] in ("optimizer", "scheduler"):
            continue
        known = COUNTERPARTS.get(key, _none("unknown key"))
        if not known.is_kept and not any(value is one or value == one for one in known.nothing):
            missing.append(f"{key}={value} ({known.does.removeprefix('no counterpart: ')})")
    return missing


def table() -> str:
    """Return the table for the documentation as Markdown."""
    rows = [f"| `{key}` | {entry.does} |" for key, entry in COUNTERPARTS.items()]
    return "\n".join(["| DeepSpeed config key | what `fsdp2` does |", "|---|---|", *rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP2Settings:
    """The settings from DeepSpeed's config that fsdp2 implements."""

    reshard_after_forward: bool | int
    cpu_offload: bool
    pin_memory: bool
    scaler: Mapping[str, Any]
    """Arguments for torch's ``GradScaler``."""
    without_counterpart: list[str]
    """The result of ``list_without_counterpart``."""


def translate_to_fsdp2(config: HfDeepSpeedConfig) -> FSDP2Settings:
    """Translate ``config`` for the fsdp2 engine.

    Raises:
        ConfigError: fsdp2 cannot implement a setting.
    """
    where = f"engine='fsdp2', {config.origin}"
    stage = int(config.get_value(f"{_ZERO}.stage", 0))
    if stage < 2:
        raise ConfigError(
            f"ZeRO stage {stage} has no counterpart in fsdp2",
            where=f"{where} {_ZERO}.stage",
            do=f"use engine={'zero1' if stage else 'ddp'!r} without deepspeed_plugin, or ZeRO stage 2 or 3",
        )
    for key, object_ in (("optimizer", "an optimizer"), ("scheduler", "a scheduler")):
        if key in config.config:
            raise ConfigError(
                f"DeepSpeed's config defines {object_} ({key!r}), which fsdp2 does not create",
                where=f"{where} {key}",
                do=f"remove it, and pass {object_} from torch to prepare()",
            )
    pinned = _pinned(config, where)
    secondary = int(config.get_value(f"{_ZERO}.zero_hpz_partition_size", 1))
    return FSDP2Settings(
        reshard_after_forward=secondary if stage == 3 and secondary > 1 else stage == 3,
        cpu_offload=bool(pinned),
        pin_memory=all(pinned),
        scaler=_scaler_arguments(config.config.get("fp16") or {}),
        without_counterpart=list_without_counterpart(flatten(config.config)),
    )


def _pinned(config: HfDeepSpeedConfig, where: str) -> list[bool]:
    """Return ``pin_memory`` for each kind of tensor that is offloaded to the CPU."""
    pinned = []
    for name in ("offload_optimizer", "offload_param"):
        node = config.get_value(f"{_ZERO}.{name}") or {}
        device = node.get("device", "none")
        if device == "nvme":
            raise ConfigError(
                f"{_ZERO}.{name}.device='nvme' has no counterpart in fsdp2",
                where=where,
                do="use 'cpu', or engine='deepspeed'",
            )
        if device == "cpu":
            pinned.append(bool(node.get("pin_memory", True)))
    return pinned


def _scaler_arguments(fp16: Mapping[str, Any]) -> dict[str, Any]:
    if fp16.get("loss_scale", 0):
        return {"init_scale": float(fp16["loss_scale"]), "growth_interval": 2**31 - 1}  # the scale never grows
    arguments: dict[str, Any] = {}
    if "initial_scale_power" in fp16:
        arguments["init_scale"] = 2.0 ** int(fp16["initial_scale_power"])
    if "loss_scale_window" in fp16:
        arguments["growth_interval"] = int(fp16["loss_scale_window"])
    return arguments
