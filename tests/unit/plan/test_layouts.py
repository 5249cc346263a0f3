"""``plan_layout`` against sums worked out by hand, and its independence of the number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.plan.devices import hardware_of
from echelon.plan.facts import Cluster, LayoutPlan, ModelFacts, Moment, ParallelLayout, StepSettings, StepTrace
from echelon.plan.layouts import plan_layout
from tests.plan_models import facts_of

SETTINGS = StepSettings(micro_batch=2)
CLUSTER = Cluster(gpus_per_node=8, nodes=2048, gpu_memory=80 * 2**30, device="H100")
WIDTH = 128  # a weight has 64 KiB


class Block(nn.Linear):
    pass


class Stack(nn.Sequential):
    _no_split_modules = ("Block",)


def _facts() -> ModelFacts:
    model = Stack(*(Block(WIDTH, WIDTH, bias=False) for _ in range(4)), nn.Linear(WIDTH, WIDTH, bias=False))
    return facts_of(model, torch.optim.SGD(model.parameters(), momentum=0.9))


def _trace(model: ModelFacts, settings: StepSettings = SETTINGS) -> StepTrace:
    """Return a step in which each block keeps 1000 * 512 bytes, and needs 512 more while it computes."""
    kept, weight = 1000 * 512, WIDTH * WIDTH * 4
    moments = [Moment("forward", unit, f"m.py:{i}: mm", (i + 1) * kept, 512, 0) for i, unit in enumerate(model.units)]
    last = len(model.units) * kept
    moments += [
        Moment("forward", "", "m.py:9: mm", last, 512, 0),
        Moment("backward", "", "m.py:9: mm", last, 512, weight),
    ]
    for i, unit in reversed(list(enumerate(model.units))):
        moments.append(Moment("backward", unit, f"m.py:{i}: mm", (i + 1) * kept, 512, (5 - i) * weight))
    moments.append(Moment("optimizer", "", "m.py:20: step", 0, 1024, 5 * weight))
    by_unit = dict.fromkeys((*model.units, ""), 10**9)
    return StepTrace(settings, tuple(moments), by_unit, dict.fromkeys(by_unit, 10**6), 1024, tokens=8)


def _plan(layout: ParallelLayout, model: ModelFacts | None = None, cluster: Cluster = CLUSTER) -> LayoutPlan:
    model = model or _facts()
    return plan_layout(model, _trace(model, layout.settings), layout, cluster)


KEPT, WEIGHT, BATCH = 1000 * 512, WIDTH * WIDTH * 4, 1024


def test_one_device_holds_everything() -> None:
    plan = _plan(ParallelLayout("single", SETTINGS))
    # Weights, momentum, activations of four blocks, and the first gradient.
    assert plan.peak == 5 * WEIGHT + 5 * WEIGHT + 4 * KEPT + 512 + 2 * WEIGHT + BATCH
    assert (plan.peak_phase, plan.peak_line) == ("backward", "m.py:3: mm")
    assert sum(plan.memory.values()) == plan.peak == max(plan.timeline)
    assert plan.checkpoint_bytes == 10 * WEIGHT


def test_a_device_waits_for_the_host_and_a_cpu_does_both() -> None:
    model, layout = _facts(), ParallelLayout("single", SETTINGS)
    trace = _trace(model)
    gpu = hardware_of(CLUSTER)
    for hardware in (gpu, replace(gpu, overlaps=False)):
        idle, few, many = (
            plan_layout(
                model,
                replace(trace, operators=dict.fromkeys(trace.flops, count)),
                layout,
                CLUSTER,
                hardware=replace(hardware, dispatch=1e-3),
            ).seconds
            for count in (0, 1, 2)
        )
        assert many - few == pytest.approx(5e-3)  # of four blocks and what is outside of them
        # 10**9 FLOPs take some microseconds.
        assert few - idle == pytest.approx(5e-3, rel=0.2 if hardware.overlaps else 1e-9)


def test_ddp_adds_buckets_and_accumulation_keeps_all_gradients() -> None:
    one = _plan(ParallelLayout("ddp", SETTINGS, dp_replicate=8))
    assert one.memory["buckets"] == 5 * WEIGHT
    several = _plan(ParallelLayout("ddp", SETTINGS, dp_replicate=8, accumulation=4))
    # All gradients are there when activations are most, and a new one is added to them.
    assert several.peak == 15 * WEIGHT + 5 * WEIGHT + 4 * KEPT + 512 + WEIGHT + BATCH
    assert [(c.count, c.bytes) for c in several.collectives] == [(c.count, c.bytes) for c in one.collectives]


def test_zero1_divides_the_state_of_whole_parameters() -> None:
    plan = _plan(ParallelLayout("zero1", SETTINGS, dp_replicate=2))
    assert plan.memory["optimizer state"] == 3 * WEIGHT  # of five parameters, three belong to the first rank
    many = _plan(ParallelLayout("zero1", SETTINGS, dp_replicate=8))
    assert many.memory["optimizer state"] == WEIGHT


def test_fully_shard_adds_the_gathered_unit_and_its_buffers() -> None:
    plan = _plan(ParallelLayout("fsdp2", SETTINGS, dp_shard=8))
    by_line = dict(zip([(m.phase, m.line) for m in _trace(_facts()).moments], plan.timeline))
    static = 10 * WEIGHT // 8
    # In the forward pass: the model's own unit, this one, and its buffer; on entering, the buffer of the one before.
    assert by_line["forward", "m.py:1: mm"] == static + 3 * WEIGHT + 2 * KEPT + 512 + BATCH
    # In the backward pass: the model's own unit, this one, the buffer of the next one, two whole gradients (of the model's own unit, and
    # of this one), the input of the last reduction, and the shard that it gave.
    assert (
        by_line["backward", "m.py:2: mm"]
        == static + 3 * WEIGHT + 2 * WEIGHT + WEIGHT + WEIGHT // 8 + 3 * KEPT + 512 + BATCH
    )
    assert by_line["optimizer", "m.py:20: step"] == static + 5 * WEIGHT // 8 + 1024 // 8 + BATCH


def test_stage_2_keeps_what_it_has_gathered() -> None:
    stage_2, stage_3 = (_plan(ParallelLayout("fsdp2", SETTINGS, dp_shard=8, stage=stage)) for stage in (2, 3))
    # When the forward pass ends: all of them, and the last buffer.
    assert stage_2.timeline[4] == 10 * WEIGHT // 8 + 6 * WEIGHT + 4 * KEPT + 512 + BATCH
    assert stage_2.peak > stage_3.peak
    assert sum(c.count for c in stage_2.collectives if c.kind == "all_gather") == 5
    assert sum(c.count for c in stage_3.collectives if c.kind == "all_gather") == 10


def test_accumulation_keeps_whole_gradients_with_fully_shard() -> None:
    plan = _plan(ParallelLayout("fsdp2", SETTINGS, dp_shard=8, accumulation=2))
    assert plan.memory["unreduced gradients"] >= 5 * WEIGHT


def test_offloaded_shards_are_in_host_memory() -> None:
    plan = _plan(ParallelLayout("fsdp2", SETTINGS, dp_shard=8, cpu_offload=True))
    assert not {"parameters", "optimizer state", "gradients"} & set(plan.memory)
    assert plan.host_memory["offload, a rank"] == 15 * WEIGHT // 8
    assert plan.host_memory["offload, a machine"] == 15 * WEIGHT


@pytest.mark.parametrize(
    ("layout", "cluster", "reason"),
    [
        (ParallelLayout("ddp", SETTINGS, dp_replicate=4), replace(CLUSTER, gpus_per_node=2, nodes=1), "needs 4 GPUs"),
        (ParallelLayout("single", SETTINGS, dp_replicate=2), CLUSTER, "one GPU"),
        (ParallelLayout("ddp", SETTINGS, dp_replicate=2, tp=2), CLUSTER, "fsdp2"),
        (ParallelLayout("fsdp2", SETTINGS, dp_shard=2, tp=2), CLUSTER, "no plan for tensor parallelism"),
        (ParallelLayout("fsdp2", SETTINGS, dp_shard=2, ep=2), CLUSTER, "no experts"),
        (ParallelLayout("fsdp2", SETTINGS, pp=2, accumulation=4), CLUSTER, "stages"),
        (ParallelLayout("ddp", SETTINGS, dp_replicate=2, cpu_offload=True), CLUSTER, "offload"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(layout: ParallelLayout, cluster: Cluster, reason: str) -> None:
    plan = _plan(layout, cluster=cluster)
    assert reason in plan.refused
    assert plan.peak == 0


@pytest.mark.parametrize(
    "shape",
    [
        lambda n: ParallelLayout("ddp", SETTINGS, dp_replicate=n),
        lambda n: ParallelLayout("zero1", SETTINGS, dp_replicate=n),
        lambda n: ParallelLayout("fsdp2", SETTINGS, dp_shard=n),
        lambda n: ParallelLayout("fsdp2", SETTINGS, dp_replicate=n // 4, dp_shard=4),
    ],
)
def test_a_plan_for_16384_ranks_costs_what_one_for_8_costs(shape: Callable[[int], ParallelLayout]) -> None:
    few, many = (_calls(lambda n=n: _plan(shape(n))) for n in (8, 16384))
    assert many <= 1.2 * few


def _calls(work: Callable[[], Any]) -> int:
    """Return how many lines of Python ``work`` executes."""
    count = 0

    def trace(_frame: Any, event: str, _arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
