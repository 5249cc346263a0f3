"""What the engine fsdp2 does for each key of DeepSpeed's config: the data behind docs/engines.md and the translation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["COUNTERPARTS", "Counterpart", "table", "without_counterpart"]

_ZERO = "zero_optimization"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """What becomes of one key."""

    does: str
    """In the words of the documentation."""
    is_kept: bool = True
    """Does fsdp2 do what the key asks for, in whatever way? False: it has no counterpart, and a run is told."""
    nothing: tuple[Any, ...] = (None, False, "auto")
    """The values that ask for nothing."""


def _none(why: str, *nothing: Any) -> Counterpart:
    return Counterpart(does=f"no counterpart: {why}", is_kept=False, nothing=(None, False, "auto", *nothing))


def _is(does: str) -> Counterpart:
    return Counterpart(does=does)


_BUCKETS = "fsdp2 sends one unit (a block of the model) at once, and needs no bucket sizes"
_LIVE = "fsdp2 holds the unit that computes and the next one"

COUNTERPARTS: Mapping[str, Counterpart] = MappingProxyType(
    {
        f"{_ZERO}.stage": _is(
            "3: `reshard_after_forward=True`; 2: False; 1 and 0 are the engines `zero1` and `ddp`, and an error"
        ),
        f"{_ZERO}.offload_optimizer.device": _is(
            "`cpu`: parameters, gradients and optimizer states live on the host, all or none; `nvme` is an error"
        ),
        f"{_ZERO}.offload_optimizer.pin_memory": _is(
            "`CPUOffloadPolicy(pin_memory=)`; without an accelerator nothing is pinned"
        ),
        f"{_ZERO}.offload_optimizer.nvme_path": _none("there is no offloading to NVMe"),
        f"{_ZERO}.offload_optimizer.buffer_count": _none("there is no offloading to NVMe"),
        f"{_ZERO}.offload_optimizer.fast_init": _none("there is no offloading to NVMe"),
        f"{_ZERO}.offload_param.device": _is("as `offload_optimizer.device`"),
        f"{_ZERO}.offload_param.pin_memory": _is("as `offload_optimizer.pin_memory`"),
        f"{_ZERO}.offload_param.nvme_path": _none("there is no offloading to NVMe"),
        f"{_ZERO}.offload_param.buffer_count": _none("there is no offloading to NVMe"),
        f"{_ZERO}.offload_param.buffer_size": _none("there is no offloading to NVMe"),
        f"{_ZERO}.offload_param.max_in_cpu": _none("there is no offloading to NVMe"),
        f"{_ZERO}.overlap_comm": Counterpart(does="always: gathering and reducing overlap with computing"),
        f"{_ZERO}.contiguous_gradients": Counterpart(does="always: the gradients of a unit are one buffer"),
        f"{_ZERO}.reduce_scatter": Counterpart(does="always: gradients are reduce-scattered"),
        f"{_ZERO}.sub_group_size": _none("an optimizer steps all its parts at once"),
        f"{_ZERO}.reduce_bucket_size": _none(_BUCKETS),
        f"{_ZERO}.allgather_bucket_size": _none(_BUCKETS),
        f"{_ZERO}.allgather_partitions": Counterpart(does="always: parts are all-gathered"),
        f"{_ZERO}.round_robin_gradients": _none("gradients go to the rank that holds the part"),
        f"{_ZERO}.stage3_prefetch_bucket_size": _none("the next unit is always gathered ahead"),
        f"{_ZERO}.stage3_param_persistence_threshold": _none("small parameters are gathered with their unit"),
        f"{_ZERO}.stage3_max_live_parameters": _none(_LIVE),
        f"{_ZERO}.stage3_max_reuse_distance": _none(_LIVE),
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": _is(
            "always: whole state dicts can be gathered, on rank zero and in float32"
        ),
        f"{_ZERO}.zero_hpz_partition_size": _is("`reshard_after_forward` as that number of ranks"),
        "gradient_accumulation_steps": _is("`Accelerator(gradient_accumulation_steps=)`"),
        "gradient_clipping": _is("each step clips to that norm first, unless the loop has clipped"),
        "train_batch_size": _is("checked: micro batch x accumulation x processes"),
        "train_micro_batch_size_per_gpu": _is("checked: the batch size of a loader"),
        "fp16.enabled": _is('`mixed_precision="fp16"`'),
        "fp16.auto_cast": Counterpart(does="always: the model's inputs are cast"),
        "fp16.loss_scale": _is(
            "0: dynamic; a number: the scale, which never grows, and is halved by infinite gradients"
        ),
        "fp16.loss_scale_window": _is("`GradScalerKwargs(growth_interval=)`"),
        "fp16.initial_scale_power": _is("`GradScalerKwargs(init_scale=2**n)`"),
        "fp16.hysteresis": _none("the scale is halved at the first infinite gradient", 1),
        "fp16.min_loss_scale": _none("the scale has no lower bound", 0),
        "bf16.enabled": _is('`mixed_precision="bf16"`'),
        "steps_per_print": _none("fsdp2 prints nothing", float("inf"), 0),
        "wall_clock_breakdown": _none("use `accelerator.profile()`"),
        "zero_allow_untested_optimizer": Counterpart(does="always: any optimizer whose state lies as its parameters"),
        "zero_force_ds_cpu_optimizer": Counterpart(does="the optimizer is the one that was given"),
        "optimizer": _is("an error: give `prepare` an optimizer of torch"),
        "scheduler": _is("an error: give `prepare` a schedule of torch"),
    }
)


def without_counterpart(values: Mapping[str, Any]) -> list[str]:
    """Return, for what ``values`` (by dotted key) asks for and fsdp2 does not do, ``key=value (why)``."""
    told = []
    for key, value in values.items():
        if key.partition(".")[0] in ("optimizer", "scheduler"):
            continue
        known = COUNTERPARTS.get(key, _none("it is not known here"))
        if not known.is_kept and not any(value is one or value == one for one in known.nothing):
            told.append(f"{key}={value} ({known.does.removeprefix('no counterpart: ')})")
    return told


def table() -> str:
    """Return the table of the documentation."""
    rows = [f"| `{key}` | {entry.does} |" for key, entry in COUNTERPARTS.items()]
    return "\n".join(["| key of DeepSpeed's config | what `fsdp2` does for it |", "|---|---|", *rows])
