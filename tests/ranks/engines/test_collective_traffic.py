"""The collectives of an update at 64 ranks, on torch's fake process group, are those of the formulas in docs/parallelism.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from echelon import MixtureOfExperts, ParallelismConfig
from echelon.engines.context_parallel.region import sequence_region
from echelon.engines.context_parallel.sequence_group import SequenceGroup
from echelon.engines.context_parallel.sequence_order import SequenceOrder
from echelon.engines.fsdp.fsdp2 import FSDP2Engine
from echelon.engines.fsdp.options import ShardingOptions
from echelon.engines.tensor_parallel.options import TensorParallelOptions
from echelon.world.mesh import MeshLayout
from echelon.world.world import World
from tests.collective_traffic import CollectiveTraffic, Traffic
from tests.harness import run_on_ranks
from tests.parallel_models import GPT_PLAN, VOCABULARY, tiny_gpt

Counted = dict[tuple[str, tuple[str, ...]], Traffic]

WORLD_SIZE, NUM_BLOCKS, WIDTH, MICRO_STEPS = 64, 3, 128, 2


class _Block(nn.Linear):
    pass


def _update(stage: int, replicas: int, hidden_gather: bool) -> Counted:
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    try:
        options = ShardingOptions(replicas=replicas, wrap_classes=(_Block,), reshard_after_forward=stage == 3)
        engine = FSDP2Engine(World.current(cpu=True), options=options)
        model: Any = nn.Sequential(*(_Block(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, WIDTH))
        optimizer: Any = torch.optim.AdamW(model.parameters())
        prepared = engine.prepare([model], [optimizer], [])
        (model,), (optimizer,) = prepared.models, prepared.optimizers
        with CollectiveTraffic() as traffic:
            for step in range(MICRO_STEPS):
                with engine.sync_next_backward(model) if step == MICRO_STEPS - 1 else engine.no_sync(model):
                    engine.backward(model(torch.randn(2, WIDTH)).sum(), model)
            engine.clip_grad_norm(model.parameters(), 1.0, 2.0)
            engine.step(optimizer)
            engine.zero_grad(optimizer)
            if hidden_gather:
                next(model.parameters()).full_tensor()
        engine.release()
        sizes = {"dp_replicate": replicas, "dp_shard": WORLD_SIZE // replicas}
        return traffic.by_axes(MeshLayout.of(sizes, rank=0, world_size=WORLD_SIZE))
    finally:
        dist.destroy_process_group()


def _formula(stage: int, replicas: int) -> Counted:
    units, num_bytes = NUM_BLOCKS + 1, (NUM_BLOCKS + 1) * (WIDTH * WIDTH + WIDTH) * 4
    # Stage 2 keeps a unit's parameters from its forward pass until the end of its backward pass.
    gathers = 2 * MICRO_STEPS if stage == 3 else MICRO_STEPS
    found: Counted = {
        ("all_gather", ("dp_shard",)): Traffic(gathers * units, gathers * num_bytes),
        ("reduce_scatter", ("dp_shard",)): Traffic(units, num_bytes),
        ("all_reduce", ("dp_shard",)): Traffic(1, 4),  # the norm
    }
    if replicas > 1:
        found["all_reduce", ("dp_replicate",)] = Traffic(units, num_bytes // (WORLD_SIZE // replicas))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(("stage", "replicas"), [(3, 1), (2, 1), (3, 4), (2, 16)])
def test_fsdp2_starts_the_collectives_of_its_formula(stage: int, replicas: int) -> None:
    (found,) = run_on_ranks(_update, stage, replicas, False, world_size=1, init_group=False)
    assert found == _formula(stage, replicas)


def test_a_hidden_gather_is_counted() -> None:
    (found,) = run_on_ranks(_update, 3, 1, True, world_size=1, init_group=False)
    assert found["all_gather", ("dp_shard",)].calls == _formula(3, 1)["all_gather", ("dp_shard",)].calls + 1


_TOKENS, _WIDTH, _HIDDEN, _EXPERTS, _TOP_K, _LAYERS = 6, 8, 12, 8, 2, 2


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MixtureOfExperts(_WIDTH, _HIDDEN, num_experts=_EXPERTS, top_k=_TOP_K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)


def _divided_experts() -> tuple[dict[Any, Traffic], list[torch.Tensor]]:
    layout = ParallelismConfig(dp_shard_size=4, ep_size=2)
    options = ShardingOptions(
        wrap_classes=(_Sparse,), expert_mesh=layout.build_expert_mesh("cpu"), exchanges_activations=True
    )
    engine = FSDP2Engine(World.current(cpu=True), options=options)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(_Sparse() for _ in range(_LAYERS)), nn.Linear(_WIDTH, 4)).double()
    routed: list[torch.Tensor] = []
    for block in model[:_LAYERS]:
        block.moe.gate.register_forward_hook(lambda _module, _inputs, output: routed.append(output[2]))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    (model,), (optimizer,) = (prepared := engine.prepare([model], [optimizer], [])).models, prepared.optimizers
    x = torch.randn(_TOKENS + dist.get_rank(), _WIDTH, dtype=torch.float64, requires_grad=True)
    with CollectiveTraffic() as traffic:
        engine.backward(model(x).sum(), model)
        engine.clip_grad_norm(model.parameters(), 1.0, 2.0)
        engine.step(optimizer)
    engine.release()
    return traffic.by_ranks, routed


def test_divided_experts_start_the_collectives_of_their_formula() -> None:
    found = run_on_ranks(_divided_experts, world_size=4)
    of_experts = _LAYERS * _EXPERTS * 3 * _WIDTH * _HIDDEN * 8  # bytes
    dense = (_LAYERS * _EXPERTS * _WIDTH + 4 * _WIDTH + 4) * 8
    for rank, (counted, routed) in enumerate(found):
        everyone, ep, efsdp = (0, 1, 2, 3), (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        # What this rank sends and what it receives, in rows; each of four exchanges in a layer has the larger one.
        num_bytes = 0
        for layer in range(_LAYERS):
            sent = routed[layer].numel()
            local = range((rank % 2) * 4, (rank % 2) * 4 + 4)
            received = sum(int(torch.isin(found[other][1][layer], torch.tensor(local)).sum()) for other in ep)
            num_bytes += 4 * max(sent, received) * _WIDTH * 8 + _EXPERTS * 8
        units = _LAYERS + 1
        assert counted == {
            ("all_to_all", ep): Traffic(5 * _LAYERS, num_bytes),
            ("all_gather", efsdp): Traffic(2 * _LAYERS, 2 * of_experts // 2),
            ("reduce_scatter", efsdp): Traffic(_LAYERS, of_experts // 2),
            ("all_gather", everyone): Traffic(2 * units, 2 * dense),
            ("reduce_scatter", everyone): Traffic(units, dense),
            ("all_reduce", everyone): Traffic(1, 8),  # the norm
            ("all_reduce", efsdp): Traffic(1, 8),
            ("all_reduce", ep): Traffic(1, 8),
        }


_SHARDS, _SPLITS, _GPT_WIDTH, _BATCH = 8, 8, 64, (2, 16)


def _split_layers(num_layers: int) -> Counted:
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    try:
        layout = ParallelismConfig(dp_shard_size=_SHARDS, tp_size=_SPLITS)
        mesh: Any = layout.get_device_mesh("cpu")
        split = TensorParallelOptions(mesh=mesh["tp"], plan=GPT_PLAN)
        engine = FSDP2Engine(
            World.current(cpu=True), options=ShardingOptions(mesh=layout.parameter_mesh(), tensor_parallel=split)
        )
        model: Any = tiny_gpt(width=_GPT_WIDTH, num_heads=8, num_layers=num_layers)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        prepared = engine.prepare([model], [optimizer], [])
        with CollectiveTraffic() as traffic:
            engine.backward(prepared.models[0](torch.zeros(_BATCH, dtype=torch.int64)).sum(), prepared.models[0])
            engine.clip_grad_norm(model.parameters(), 1.0, 2.0)
            engine.step(prepared.optimizers[0])
        engine.release()
        return traffic.by_axes(layout.mesh_layout(rank=0))
    finally:
        dist.destroy_process_group()


def _local_bytes(num_layers: int) -> int:
    """Bytes of a tp rank's parameters, with the first dimension padded to a multiple of the shards."""
    total = 0
    for name, p in tiny_gpt(width=_GPT_WIDTH, num_heads=8, num_layers=num_layers).named_parameters():
        is_column = any(part in name for part in (".q.", ".k.", ".v.", ".up.", "head", "embedding.weight"))
        is_row = any(part in name for part in (".o.weight", ".down.weight"))
        rows = p.shape[0] // _SPLITS if is_column else p.shape[0]
        rest = p.numel() // p.shape[0] // (_SPLITS if is_row else 1)
        total += -(-rows // _SHARDS) * _SHARDS * rest * 8
    return total


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_tensor_parallel_starts_the_collectives_of_its_formula(num_layers: int) -> None:
    (found,) = run_on_ranks(_split_layers, num_layers, world_size=1, init_group=False)
    num_tokens, units = _BATCH[0] * _BATCH[1], num_layers + 1
    activations = num_tokens * _GPT_WIDTH * 8
    calls = (
        6 * num_layers + 2
    )  # each layer: o and down forward; q, k, v and up backward. Embedding forward, head backward.
    local = _local_bytes(num_layers)
    assert found == {
        ("all_reduce", ("tp",)): Traffic(calls + 1, calls * activations + 8),  # and the norm
        ("all_gather", ("tp",)): Traffic(1, num_tokens * VOCABULARY * 8),  # logits
        ("all_gather", ("dp_shard",)): Traffic(2 * units, 2 * local),
        ("reduce_scatter", ("dp_shard",)): Traffic(units, local),
        ("all_reduce", ("dp_shard",)): Traffic(2, 16),  # the norms of what is split over tp, and of what is not
    }


# ---- pieces of sequences, and stages ----------------------------------------------------------------------------------

_PIECES, _LENGTH = 8, 32
_PIECE_TOKENS = _BATCH[0] * _LENGTH // _PIECES


def _pieces(axis: str, exchange: Any, num_layers: int) -> Counted:
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    try:
        layout = ParallelismConfig(dp_shard_size=_SHARDS, **{f"{axis}_size": _PIECES})  # type: ignore[arg-type]
        mesh: Any = layout.get_device_mesh("cpu")
        options = ShardingOptions(mesh=layout.parameter_mesh(), exchanges_activations=True)
        engine = FSDP2Engine(World.current(cpu=True), options=options)
        model: Any = tiny_gpt(width=_GPT_WIDTH, num_heads=8, num_layers=num_layers)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        prepared = engine.prepare([model], [optimizer], [])
        order = SequenceOrder(num_ranks=_PIECES, zigzag=axis == "cp")
        group = SequenceGroup(group=mesh.get_group(axis), rank=0, order=order, exchange=exchange)
        ids = torch.zeros(_BATCH[0], _LENGTH, dtype=torch.int64)
        method: Any = "ring" if axis == "cp" else "ulysses"
        with (
            CollectiveTraffic() as traffic,
            sequence_region(group, method=method, buffers=[ids], buffer_seq_dims=[1]) as region,
        ):
            engine.backward(prepared.models[0](ids, region.piece.positions).sum(), prepared.models[0])
            engine.clip_grad_norm(model.parameters(), 1.0, 2.0)
            engine.step(prepared.optimizers[0])
        engine.release()
        return traffic.by_axes(layout.mesh_layout(rank=0))
    finally:
        dist.destroy_process_group()


def _padded_bytes(num_layers: int) -> int:
    """Bytes of the parameters, with the first dimension padded to a multiple of the shards."""
    parameters = tiny_gpt(width=_GPT_WIDTH, num_heads=8, num_layers=num_layers).parameters()
    return sum(-(-p.shape[0] // WORLD_SIZE) * WORLD_SIZE * (p.numel() // p.shape[0]) * 8 for p in parameters)


@pytest.mark.parametrize(("axis", "exchange"), [("cp", "alltoall"), ("cp", "allgather"), ("sp", "alltoall")])
def test_pieces_of_sequences_start_the_collectives_of_their_formula(axis: str, exchange: str) -> None:
    num_layers = 2
    (found,) = run_on_ranks(_pieces, axis, exchange, num_layers, world_size=1, init_group=False)
    units, whole, piece = num_layers + 1, _padded_bytes(num_layers), _PIECE_TOKENS * _GPT_WIDTH * 8
    expected: Counted = {
        ("all_gather", ("dp_shard", axis)): Traffic(2 * units, 2 * whole),
        ("reduce_scatter", ("dp_shard", axis)): Traffic(units, whole),
        ("all_reduce", ("dp_shard", axis)): Traffic(1, 8),  # the norm
    }
    if axis == "sp":  # q, k, v and the output, and their gradients
        expected["all_to_all", ("sp",)] = Traffic(8 * num_layers, 8 * num_layers * piece)
    elif exchange == "alltoall":  # keys and values together go to n - 1 ranks in each pass, and their gradients to n
        calls = num_layers * (2 * (_PIECES - 1) + _PIECES)
        expected["send", ("cp",)] = expected["recv", ("cp",)] = Traffic(calls, calls * 2 * piece)
    else:
        expected["all_gather", ("cp",)] = Traffic(2 * num_layers, 2 * num_layers * 2 * _PIECES * piece)
        expected["reduce_scatter", ("cp",)] = Traffic(num_layers, num_layers * 2 * _PIECES * piece)
    assert found == expected


_STAGE_LAYERS, _MICRO_BATCHES, _ROWS = 2, 4, 3


def _stage() -> Counted:
    """Run the second step of a pipeline of two stages: before the first one, torch's stages exchange messages of their own."""
    from echelon.engines.pipeline_parallel.pipeline import PipelineStages  # slow to import
    from echelon.engines.pipeline_parallel.schedules import schedule_kind
    from echelon.engines.pipeline_parallel.stages import cut_model

    layout = ParallelismConfig(pp_size=2, dp_shard_size=2)
    mesh: Any = layout.get_device_mesh("cpu")
    engine = FSDP2Engine(World.current(cpu=True), options=ShardingOptions(mesh=layout.parameter_mesh()))
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2 * _STAGE_LAYERS)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    stages = PipelineStages(
        model,
        cut_model(model, 2),
        kind=schedule_kind("1F1B"),
        group=mesh.get_group("pp"),
        device=torch.device("cpu"),
        num_micro_batches=_MICRO_BATCHES,
        loss_fn=lambda out, _: out.square().mean(),
    )
    engine.use_pipeline(stages)
    optimizer = engine.prepare([model], [optimizer], []).optimizers[0]
    batch = torch.randn(_MICRO_BATCHES * _ROWS, WIDTH)
    for _ in range(2):
        with CollectiveTraffic() as traffic:
            engine.run_pipeline(stages, lambda: stages.run(batch) and None)
            engine.clip_grad_norm(model.parameters(), 1.0, 2.0)
            engine.step(optimizer)
            engine.zero_grad(optimizer)
    engine.release()
    return traffic.by_axes(layout.mesh_layout(rank=dist.get_rank()))


def test_stages_start_the_collectives_of_their_formula() -> None:
    num_bytes = _STAGE_LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    activations = Traffic(_MICRO_BATCHES, _MICRO_BATCHES * _ROWS * WIDTH * 4)
    for found in run_on_ranks(_stage, world_size=4):
        assert found == {
            (
                "send",
                ("pp",),
            ): activations,  # of the first stage its outputs, of the last one the gradients of its inputs
            ("recv", ("pp",)): activations,
            ("all_reduce", ("pp",)): Traffic(2, 16 + 8),  # the loss with a flag, and the norm
            # Parameters stay gathered for all micro-batches.
            ("all_gather", ("dp_shard",)): Traffic(_STAGE_LAYERS, num_bytes),
            ("reduce_scatter", ("dp_shard",)): Traffic(_STAGE_LAYERS, num_bytes),
            ("all_reduce", ("dp_shard",)): Traffic(1, 4),
        }
