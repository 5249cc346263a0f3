"""The verdict on layouts, with a planner and a step that are formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from echelon.plan.facts import (
    Cluster,
    LayoutPlan,
    ModelFacts,
    Moment,
    ParallelLayout,
    StepSettings,
    StepTrace,
    TensorFacts,
)
from echelon.plan.verdict import (
    PlanVerdict,
    Reserve,
    Traces,
    Variant,
    flags_of,
    format_bytes,
    global_batch,
    layout_name,
    search,
)

GB = 10**9
KEEPS = {"none": 8, "selective": 4, "full": 1, "offload": 1}  # GB of activations per sample
SLOWS = {"none": 1.0, "selective": 1.1, "full": 1.3, "offload": 1.5}
NOTHING_KEPT = Reserve(context=0, communicator=0, share=0.0)


class _Step:
    """A model with ``weights`` GB of states, and a step whose activations grow with the micro-batch."""

    can_chunk_loss = False

    def __init__(self, weights: int = 16, samples: Mapping[int, int] | None = None) -> None:
        self.samples = samples or {}  # micro-batch -> how many samples' activations it keeps
        self.model = ModelFacts(
            parameters=(), buffers=(TensorFacts((weights * GB,), "uint8"),), units=(), class_name="Formula"
        )
        self.traced: list[StepSettings] = []

    def trace(self, settings: StepSettings) -> StepTrace:
        self.traced.append(settings)
        kept = KEEPS[settings.activation_checkpointing] * GB
        kept *= self.samples.get(settings.micro_batch, settings.micro_batch)
        moment = Moment("backward", "", "", kept, 0, 0)
        return StepTrace(settings, (moment,), {"": settings.micro_batch}, {}, 0)


def _plan(model: ModelFacts, trace: StepTrace, layout: ParallelLayout, cluster: Cluster) -> LayoutPlan:
    sharded = {"fsdp2": layout.dp_shard * layout.tp, "zero1": 2}.get(layout.engine, 1)
    states = 0 if layout.cpu_offload else model.buffers[0].shape[0] // sharded
    kept = trace.moments[0].activations // layout.tp
    slow = {"single": 1.0, "ddp": 1.0, "zero1": 1.05, "fsdp2": 1.2}[layout.engine] * (10 if layout.cpu_offload else 1)
    slow *= SLOWS[layout.settings.activation_checkpointing] * layout.tp * (1 + 0.1 * layout.accumulation)
    return LayoutPlan(
        layout=layout,
        memory={"states": states, "activations": kept},
        peak=states + kept,
        peak_phase="backward",
        peak_line="model.py:1",
        timeline=(states + kept,),
        host_memory={},
        collectives=(),
        flops=0,
        checkpoint_bytes=0,
        seconds=slow,
        refused="no stages" if layout.pp > 1 else "no experts" if layout.ep > 1 else "",
        worst_peak=0,
    )


def _verdict(
    step: _Step, asked: ParallelLayout, memory: int, gpus: int, variants: tuple[Variant, ...] = ()
) -> PlanVerdict:
    cluster = Cluster(gpus_per_node=gpus, nodes=1, gpu_memory=memory * GB)
    return search(Traces(step), asked, cluster, _plan, reserve=NOTHING_KEPT, variants=variants)


DDP = ParallelLayout(engine="ddp", settings=StepSettings(micro_batch=2), dp_replicate=4)


def test_a_layout_that_fits_says_by_how_much_and_needs_no_change() -> None:
    verdict = _verdict(_Step(), DDP, memory=40, gpus=4)
    assert verdict.asked.fits
    assert verdict.asked.margin == 40 * GB - (16 + 16) * GB
    assert verdict.changes == ()


def test_the_fastest_layout_that_fits_has_the_same_global_batch() -> None:
    verdict = _verdict(_Step(), DDP, memory=18, gpus=4)
    assert verdict.best is not None
    assert verdict.best.fits
    # 16 GB of states leave 2 GB, so that ddp would recompute everything. Half of the states leave one sample's 8 GB.
    assert layout_name(verdict.best.plan.layout) == "zero1 dp_replicate=4"
    assert verdict.best.plan.layout.settings == StepSettings(micro_batch=1)
    fitting = [one for one in verdict.candidates if one.fits]
    assert {global_batch(one.plan.layout) for one in fitting} == {8}
    assert verdict.best.plan.seconds == min(one.plan.seconds for one in fitting)


def test_each_change_makes_the_step_fit_alone_and_the_cheapest_is_first() -> None:
    verdict = _verdict(_Step(), DDP, memory=25, gpus=4)
    changes = verdict.changes
    assert all(change.candidate.fits for change in changes)
    assert [c.candidate.plan.seconds for c in changes] == sorted(c.candidate.plan.seconds for c in changes)
    assert [change.flags for change in changes] == [
        ("--engine zero1",),
        ("--gradient_accumulation_steps 2",),
        ("--activation_checkpointing selective",),
        ("--engine fsdp2", "--fsdp_reshard_after_forward false"),
        ("--engine fsdp2",),
        ("--activation_checkpointing full",),
        ("--activation_checkpointing offload",),
        ("--engine fsdp2", "--fsdp_offload_params true"),
    ]


def test_a_layout_is_traced_itself_before_it_is_said_to_fit() -> None:
    step = _Step(weights=0, samples={2: 3})  # between micro-batches 1 and 4 lies 2
    asked = ParallelLayout(engine="single", settings=StepSettings(micro_batch=4))
    verdict = _verdict(step, asked, memory=20, gpus=1)
    assert verdict.best is not None
    best = verdict.best.plan
    assert best.layout.settings in step.traced
    # Micro-batch 2 without recomputation needs 24 GB, not 16. Of 4, half is recomputed.
    assert (best.layout.settings, best.peak) == (StepSettings(4, activation_checkpointing="selective"), 16 * GB)
    assert StepSettings(2) in step.traced


def test_what_is_not_counted_is_kept_free() -> None:
    cluster = Cluster(gpus_per_node=4, nodes=1, gpu_memory=33 * GB)
    verdict = search(Traces(_Step()), DDP, cluster, _plan, reserve=Reserve(context=GB // 2, communicator=GB, share=0.0))
    assert not verdict.asked.fits  # 32 GB, 0.5 GB for the context, 1 GB for the one axis with several ranks
    assert verdict.asked.margin == 33 * GB - 32 * GB - GB // 2 - GB


def test_if_no_layout_fits_a_smaller_model_or_more_devices_are_proposed() -> None:
    asked = ParallelLayout(engine="single", settings=StepSettings(micro_batch=1))
    lora = Variant(text="LoRA", arguments="--lora r=16", build=lambda: _Step(weights=2))
    step = _Step(weights=64)
    cluster = Cluster(gpus_per_node=1, nodes=1, gpu_memory=12 * GB, host_memory=1)

    def in_host_memory(model: ModelFacts, trace: StepTrace, layout: ParallelLayout, cluster: Cluster) -> LayoutPlan:
        plan = _plan(model, trace, layout, cluster)
        return replace(plan, host_memory={"a machine at load": GB if layout.cpu_offload else 0})

    verdict = search(Traces(step), asked, cluster, in_host_memory, reserve=NOTHING_KEPT, variants=(lora,))
    assert verdict.best is None
    assert [change.arguments for change in verdict.changes] == ["--lora r=16", "--gpus 8 --nodes 1"]
    refused = [one.plan.refused for one in verdict.candidates if one.plan.layout.cpu_offload]
    assert refused
    assert all("of host memory" in text for text in refused)


def test_with_experts_on_several_ranks_the_fullest_one_decides() -> None:
    def uneven(model: ModelFacts, trace: StepTrace, layout: ParallelLayout, cluster: Cluster) -> LayoutPlan:
        plan = _plan(model, trace, layout, cluster)
        return replace(plan, worst_peak=plan.peak + 9 * GB)

    cluster = Cluster(gpus_per_node=4, nodes=1, gpu_memory=40 * GB)
    verdict = search(Traces(_Step()), DDP, cluster, uneven, reserve=NOTHING_KEPT)
    assert not verdict.asked.fits
    assert verdict.asked.margin == -GB


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (DDP, "--engine ddp"),
        (replace(DDP, engine="fsdp2", dp_replicate=1, dp_shard=4, stage=2), "--engine fsdp2 --fsdp_reshard_after_forward false"),
        (
            replace(DDP, engine="fsdp2", dp_replicate=2, dp_shard=4, tp=2, accumulation=3),
            "--engine fsdp2 --parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 4 "
            "--parallelism_config_tp_size 2 --gradient_accumulation_steps 3",
        ),
        (
            replace(DDP, settings=StepSettings(1, mixed_precision="bf16", activation_checkpointing="full")),
            "--engine ddp --mixed_precision bf16 --activation_checkpointing full",
        ),
    ],
)  # fmt: skip
def test_the_flags_of_a_layout(layout: ParallelLayout, flags: str) -> None:
    assert " ".join(flags_of(layout)) == flags


def test_sizes_are_written_as_vendors_of_gpus_write_them() -> None:
    assert [format_bytes(n) for n in (80 * GB, 1.25 * GB, 900_000_000, 4096, 5, -3 * GB)] == [
        "80.0 GB", "1.2 GB", "900 MB", "4.1 kB", "5 B", "-3.0 GB",
    ]  # fmt: skip
