"""The collectives that a plan counts are those that an engine starts in an update, on torch's fake process group."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from echelon import ParallelismConfig
from echelon.engines.context_parallel.region import sequence_region
from echelon.engines.context_parallel.sequence_group import SequenceGroup
from echelon.engines.context_parallel.sequence_order import SequenceOrder
from echelon.engines.ddp import DDPEngine
from echelon.engines.fsdp.fsdp2 import FSDP2Engine
from echelon.engines.fsdp.options import ShardingOptions
from echelon.engines.tensor_parallel.options import TensorParallelOptions
from echelon.engines.zero1 import Zero1Engine
from echelon.plan.facts import ModelFacts, ParallelLayout, StepSettings, StepTrace
from echelon.plan.holdings import RankClass
from echelon.plan.traffic import collectives
from echelon.world.mesh import AXES, MeshLayout
from echelon.world.world import World
from tests.collective_traffic import CollectiveTraffic, Traffic
from tests.harness import run_on_ranks
from tests.parallel_models import GPT_PLAN, tiny_gpt
from tests.plan_models import DrawnModel, LoRALinear, facts_of

Counted = dict[tuple[str, tuple[str, ...]], tuple[int, int]]


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "large":  # several buckets of DDP
        return nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(6)))
    model: Any = DrawnModel(
        vocabulary=37,
        width=10,
        hidden=30,
        num_blocks=3,
        tied=kind == "tied",
        has_buffer=kind == "buffer",
        has_scale=kind == "scale",
    )
    if kind == "lora":
        model.requires_grad_(False)
        for block in model.blocks[1:]:
            block.up, block.down = LoRALinear(block.up, 3), LoRALinear(block.down, 2)
    if kind == "frozen":
        model.embedding.requires_grad_(False)
    return model


def _batch(kind: str) -> torch.Tensor:
    return torch.randn(2, 1500) if kind == "large" else torch.tensor([1, 2, 0, 1])


def _layout(
    engine: str, world_size: int, replicas: int, stage: int, accumulation: int, precision: str
) -> ParallelLayout:
    settings = StepSettings(micro_batch=1, mixed_precision=precision)
    is_sharded = engine == "fsdp2"
    return ParallelLayout(
        engine,
        settings,
        accumulation=accumulation,
        dp_replicate=replicas if is_sharded else world_size,
        dp_shard=world_size // replicas if is_sharded else 1,
        stage=stage,
    )


def _started(layout: ParallelLayout, kind: str) -> Counted:
    """Return the collectives of the third update, by kind and axes: in the second one, DDP agrees on the order of its buckets."""
    dist.init_process_group("fake", rank=0, world_size=layout.world, store=FakeStore())
    try:
        world = World.current(cpu=True)
        if layout.engine == "fsdp2":
            low = torch.bfloat16 if layout.settings.mixed_precision == "bf16" else None
            options = ShardingOptions(
                replicas=layout.dp_replicate,
                reshard_after_forward=layout.stage == 3,
                param_dtype=low,
                reduce_dtype=None if low is None else torch.float32,
            )
            engine: Any = FSDP2Engine(world, options=options)
        else:
            engine = (DDPEngine if layout.engine == "ddp" else Zero1Engine)(world)
        model, batch = _model(kind), _batch(kind)
        prepared = engine.prepare([model], [torch.optim.AdamW(model.parameters())], [])
        (model,), (optimizer,) = prepared.models, prepared.optimizers
        if layout.engine != "fsdp2":  # the fake group has no results that DDP could wait for
            model.register_comm_hook(None, _reduce_bucket)
        for _ in range(3):
            with CollectiveTraffic() as traffic:
                for step in range(layout.accumulation):
                    is_last = step == layout.accumulation - 1
                    if not is_last:
                        with engine.no_sync(model):
                            engine.backward(model(batch).float().square().mean(), model)
                    else:
                        engine.backward(model(batch).float().square().mean(), model)
                engine.clip_grad_norm(model.parameters(), 1.0, 2.0)
                engine.step(optimizer)
                engine.zero_grad(optimizer)
        engine.release()
        sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard}
        return _plain(traffic.by_axes(MeshLayout.of(sizes, rank=0, world_size=layout.world)))
    finally:
        dist.destroy_process_group()


def _reduce_bucket(_state, bucket):  # type: ignore[no-untyped-def] # DDP rejects annotations that are text
    dist.all_reduce(bucket.buffer())
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _plain(traffic: dict[tuple[str, tuple[str, ...]], Traffic]) -> Counted:
    return {key: (one.calls, one.num_bytes) for key, one in traffic.items() if key[1]}


def _planned(layout: ParallelLayout, model: nn.Module) -> Counted:
    return _planned_of(facts_of(model, torch.optim.AdamW(model.parameters())), layout)


def _planned_of(facts: ModelFacts, layout: ParallelLayout, **sizes: Any) -> Counted:
    trace = StepTrace(layout.settings, (), {}, {}, 0, **sizes)
    found: Counted = {}
    for cost in collectives(facts, trace, layout, RankClass()):
        axes = {"dp_replicate", "dp_shard"} if cost.axis == "dp" else set(cost.axis.split())
        used = tuple(axis for axis in AXES if axis in axes and getattr(layout, axis, 1) > 1)
        count, size = found.get((cost.kind, used), (0, 0))
        found[cost.kind, used] = (count + cost.count, size + cost.bytes)
    return found


QUICK = [
    ("ddp", 2, 1, 3, 2, "no", "large"),
    ("ddp", 8, 1, 3, 2, "no", "buffer"),
    ("zero1", 3, 1, 3, 1, "no", "frozen"),
    ("zero1", 8, 1, 3, 1, "no", "tied"),
    ("fsdp2", 7, 1, 3, 2, "bf16", "tied"),
    ("fsdp2", 8, 1, 3, 1, "no", "lora"),
    ("fsdp2", 8, 2, 2, 2, "bf16", "frozen"),
    ("fsdp2", 4, 1, 3, 1, "no", "scale"),
]
ALL = [
    (engine, world_size, replicas, stage, accumulation, precision, kind)
    for world_size in range(2, 9)
    for kind in ("plain", "tied", "lora", "frozen", "buffer", "scale", "large")
    for engine, replicas, stage, accumulation, precision in [
        ("ddp", 1, 3, 1, "no"),
        ("ddp", 1, 3, 3, "no"),
        ("zero1", 1, 3, 2, "no"),
        ("fsdp2", 1, 3, 2, "bf16"),
        ("fsdp2", 1, 2, 1, "no"),
        *([("fsdp2", 2, 3, 2, "no")] if world_size % 2 == 0 and world_size > 2 else []),
    ]
]


def _all_started(cases: list[tuple[Any, ...]]) -> list[Counted]:
    return [_started(_layout(*case[:6]), case[6]) for case in cases]


def _compare(cases: list[tuple[Any, ...]]) -> None:
    (found,) = run_on_ranks(_all_started, cases, world_size=1, init_group=False, timeout=600)
    for case, started in zip(cases, found):
        assert started == _planned(_layout(*case[:6]), _model(case[6])), case


@pytest.mark.slow
def test_engines_start_the_planned_collectives() -> None:
    _compare(QUICK)


@pytest.mark.parametrize(
    "world_size", [pytest.param(n, marks=pytest.mark.slow if n in (3, 8) else pytest.mark.soak) for n in range(2, 9)]
)
def test_engines_start_the_planned_collectives_at_any_size(world_size: int) -> None:
    _compare([case for case in ALL if case[1] == world_size])


# ---- axes that are not data-parallel ------------------------------------------------------------------------------------

WORLD_SIZE, SHARDS, PIECES, WIDTH, LAYERS, ROWS, LENGTH = 64, 8, 8, 64, 2, 2, 16


def _gpt() -> Any:
    return tiny_gpt(width=WIDTH, num_heads=8, num_layers=LAYERS, dtype=torch.float32)


def _split_layers() -> Counted:
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    try:
        layout = ParallelismConfig(dp_shard_size=SHARDS, tp_size=PIECES)
        mesh: Any = layout.get_device_mesh("cpu")
        split = TensorParallelOptions(mesh=mesh["tp"], plan=GPT_PLAN)
        engine = FSDP2Engine(
            World.current(cpu=True), options=ShardingOptions(mesh=layout.parameter_mesh(), tensor_parallel=split)
        )
        model = _gpt()
        prepared = engine.prepare([model], [torch.optim.AdamW(model.parameters())], [])
        with CollectiveTraffic() as traffic:
            engine.backward(prepared.models[0](torch.zeros((ROWS, LENGTH), dtype=torch.int64)).sum(), model)
            engine.clip_grad_norm(model.parameters(), 1.0, 2.0)
            engine.step(prepared.optimizers[0])
        engine.release()
        return _plain(traffic.by_axes(layout.mesh_layout(rank=0)))
    finally:
        dist.destroy_process_group()


def _style(name: str) -> str:
    module, _, kind = name.rpartition(".")
    pattern = next((p for p in GPT_PLAN if fnmatchcase(module, p)), "")
    style = GPT_PLAN.get(pattern, "")
    return "" if style == "rowwise" and kind == "bias" else style


def test_split_layers_start_the_planned_collectives() -> None:
    (found,) = run_on_ranks(_split_layers, world_size=1, init_group=False)
    layout = ParallelLayout("fsdp2", StepSettings(micro_batch=ROWS), dp_shard=SHARDS, tp=PIECES)
    facts = facts_of(_gpt(), torch.optim.AdamW(_gpt().parameters()))
    split = replace(facts, parameters=tuple(replace(p, tp_style=_style(p.name)) for p in facts.parameters))
    assert found == _planned_of(split, layout, tokens=ROWS * LENGTH)


def _ring() -> Counted:
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    try:
        layout = ParallelismConfig(dp_shard_size=SHARDS, cp_size=PIECES)
        mesh: Any = layout.get_device_mesh("cpu")
        options = ShardingOptions(mesh=layout.parameter_mesh(), exchanges_activations=True)
        engine = FSDP2Engine(World.current(cpu=True), options=options)
        model = _gpt()
        prepared = engine.prepare([model], [torch.optim.AdamW(model.parameters())], [])
        order = SequenceOrder(num_ranks=PIECES, zigzag=True)
        group = SequenceGroup(group=mesh.get_group("cp"), rank=0, order=order, exchange="alltoall")
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        with (
            CollectiveTraffic() as traffic,
            sequence_region(group, method="ring", buffers=[ids], buffer_seq_dims=[1]) as region,
        ):
            engine.backward(prepared.models[0](ids, region.piece.positions).sum(), model)
            engine.clip_grad_norm(model.parameters(), 1.0, 2.0)
            engine.step(prepared.optimizers[0])
        engine.release()
        return _plain(traffic.by_axes(layout.mesh_layout(rank=0)))
    finally:
        dist.destroy_process_group()


def test_pieces_of_sequences_start_the_planned_collectives() -> None:
    (found,) = run_on_ranks(_ring, world_size=1, init_group=False)
    layout = ParallelLayout("fsdp2", StepSettings(micro_batch=ROWS), dp_shard=SHARDS, cp=PIECES)
    facts = facts_of(_gpt(), torch.optim.AdamW(_gpt().parameters()))
    queries = ROWS * LENGTH * WIDTH * 4
    attention = dict.fromkeys(facts.units, (queries, 2 * queries))
    assert found == _planned_of(facts, layout, tokens=ROWS * LENGTH, attention=attention)
