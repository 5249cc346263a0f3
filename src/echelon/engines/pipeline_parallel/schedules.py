"""The schedules of ``torch.distributed.pipelining`` by name, and which rank has which stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from echelon.base.errors import ConfigError
from echelon.base.versions import torch_version

_WHERE = "prepare_pipeline(schedule=)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """A schedule of torch."""

    name: str
    """Torch's name of it, without ``Schedule``."""
    stages_per_rank: int
    is_v: bool = False
    """Whether a rank has the stages r and 2 * ranks - 1 - r; otherwise it has every ranks-th one."""

    def ranks(self, num_ranks: int) -> list[int]:
        """Return the rank of each stage."""
        turn = range(num_ranks)
        if self.is_v:
            return [*turn, *reversed(turn)]
        return [*turn] * self.stages_per_rank

    def check(self, num_ranks: int, num_micro_batches: int) -> None:
        """Raise ConfigError if the schedule needs another number of micro-batches."""
        least, divisor = 1, 1
        if self.name == "DualPipeV":
            least = 2 * num_ranks
        elif self.name == "1F1B":
            least = num_ranks
        elif self.name in ("Interleaved1F1B", "InterleavedZeroBubble"):
            divisor = max(1, num_micro_batches // num_ranks)
        if num_micro_batches < least or num_micro_batches % divisor:
            wish = (
                f"at least {least}"
                if num_micro_batches < least
                else f"a multiple of the {num_ranks} ranks on the axis pp"
            )
            raise ConfigError(
                f"the schedule {self.name} does not work with {num_micro_batches} micro-batches on {num_ranks} ranks",
                where="prepare_pipeline(num_micro_batches=)",
                do=f"set {wish}",
            )


SCHEDULES: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind(name="GPipe", stages_per_rank=1),
        ScheduleKind(name="1F1B", stages_per_rank=1),
        ScheduleKind(name="Interleaved1F1B", stages_per_rank=2),
        ScheduleKind(name="LoopedBFS", stages_per_rank=2),
        ScheduleKind(name="InterleavedZeroBubble", stages_per_rank=2),
        ScheduleKind(name="ZBVZeroBubble", stages_per_rank=2, is_v=True),
        ScheduleKind(name="DualPipeV", stages_per_rank=2, is_v=True),
    )
}
"""All schedules that are offered."""


def schedule_kind(name: str) -> ScheduleKind:
    """Return the schedule with this name, in any case of its letters.

    Raises:
        ConfigError: there is none, or this version of torch does not have it.
    """
    found = {known.lower(): kind for known, kind in SCHEDULES.items()}.get(str(name).lower())
    if found is None:
        raise ConfigError(f"schedule={name!r} is unknown", where=_WHERE, do=f"use one of {', '.join(SCHEDULES)}")
    if not hasattr(schedules, f"Schedule{found.name}"):
        raise ConfigError(
            f"torch {torch_version} does not have the schedule {found.name}",
            where=_WHERE,
            do="install a newer torch, or use '1F1B' or 'Interleaved1F1B'",
        )
    return found


def build_schedule(
    kind: ScheduleKind,
    modules: Mapping[int, nn.Module],
    boundaries: Sequence[tuple[torch.Tensor, ...]],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    num_micro_batches: int,
    loss_fn: Callable[[Any, torch.Tensor], torch.Tensor],
) -> Any:
    """Return torch's schedule for this rank.

    Args:
        kind: the schedule.
        modules: this rank's stages by number.
        boundaries: the inputs of each stage, then the outputs of the last one, as tensors without values. Torch then neither
            infers shapes with a forward pass nor exchanges them.
        group: the ranks of the pipeline.
        device: the device of this rank.
        num_micro_batches: the number of micro-batches of a step.
        loss_fn: called with outputs and targets of a micro-batch on the rank of the last stage.
    """
    stages = [
        PipelineStage(
            module,
            number,
            len(boundaries) - 1,
            device,
            input_args=boundaries[number],
            output_args=boundaries[number + 1],
            group=group,
        )
        for number, module in modules.items()
    ]
    build = getattr(schedules, f"Schedule{kind.name}")
    # The losses are already divided by the number of items of the update.
    options: dict[str, Any] = {"loss_fn": loss_fn, "scale_grads": False}
    return build(stages[0] if kind.stages_per_rank == 1 else stages, num_micro_batches, **options)


def run_schedule(schedule: Any, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor) -> None:
    """Run forward and backward passes of all micro-batches. Collective: call on every rank of the pipeline."""
    # torch before 2.9 always keeps the outputs.
    more = {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
    schedule.step(*inputs, target=targets, **more)
