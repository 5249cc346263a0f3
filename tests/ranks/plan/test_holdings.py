"""What real ranks hold between two steps, storage by storage, is what ``plan/holdings.py`` computes from the facts of the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from echelon.base.errors import UsageError
from echelon.plan.facts import Cluster, ParallelLayout, StepSettings
from echelon.plan.holdings import RankClass, fullest_rank, held_bytes, holdings
from echelon.plan.layouts import refusal
from tests.harness import errors_on_ranks, run_on_ranks
from tests.plan_models import Drawn, draw, facts_of

QUICK = (0, 3, 5, 12)
NUM_DRAWN = 200


def _layout(drawn: Drawn) -> ParallelLayout:
    settings = StepSettings(micro_batch=2, mixed_precision=drawn.mixed_precision, master_weights=drawn.master_weights)
    is_sharded = drawn.engine == "fsdp2"
    return ParallelLayout(
        engine=drawn.engine,
        settings=settings,
        accumulation=drawn.accumulation,
        dp_replicate=drawn.replicas if is_sharded else drawn.world_size,
        dp_shard=drawn.world_size // drawn.replicas if is_sharded else 1,
        stage=drawn.stage,
        cpu_offload=drawn.cpu_offload,
    )


def _held(seed: int, max_world_size: int) -> dict[str, int]:
    """Train one update; return the bytes of the storages of this rank by category."""
    drawn = draw(seed, max_world_size=max_world_size)
    settings: dict[str, Any] = {"engine": drawn.engine}
    if drawn.engine == "fsdp2":
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=drawn.stage == 3, cpu_offload=drawn.cpu_offload
        )
        if drawn.replicas > 1:
            settings["parallelism_config"] = ParallelismConfig(
                dp_replicate_size=drawn.replicas, dp_shard_size=drawn.world_size // drawn.replicas
            )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=drawn.mixed_precision,
        master_weights=drawn.master_weights if drawn.mixed_precision != "no" else None,
        gradient_accumulation_steps=drawn.accumulation,
        **settings,
    )
    model, optimizer = drawn.build()
    with warnings.catch_warnings():  # of weights in low precision, which some configurations ask for
        warnings.simplefilter("ignore")
        model, optimizer = accelerator.prepare(model, optimizer)
    buckets: list[int] = []
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(buckets, _count_bucket)
    for _ in range(2 * drawn.accumulation):  # DDP builds its buckets anew in the second update
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([1, 2, 0, 1])).float().square().mean())
            if accelerator.sync_gradients:
                held = buckets[:]
                buckets.clear()
            optimizer.step()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found = {
                "parameters": _storages(model.parameters()),
                "gradients": _storages(gradients),
                "optimizer state": _storages(_tensors(optimizer.optimizer.state.values())),
                "buffers": _storages(model.buffers()),
                "buckets": sum(held) if accelerator.sync_gradients else 0,
            }
            optimizer.zero_grad()
    return found


def _count_bucket(sizes, bucket):  # type: ignore[no-untyped-def] # DDP rejects annotations that are text
    sizes.append(bucket.buffer().untyped_storage().nbytes())
    buffer = bucket.buffer().div_(dist.get_world_size())
    future: Any = dist.all_reduce(buffer, async_op=True).get_future()  # type: ignore[union-attr]
    done: torch.futures.Future[torch.Tensor] = future.then(lambda reduced: reduced.value()[0])
    return done


def _tensors(entries: Iterable[Any]) -> Iterable[torch.Tensor]:
    for entry in entries:
        yield from (value for value in entry.values() if isinstance(value, torch.Tensor))


def _storages(tensors: Iterable[torch.Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def _compare(seed: int, max_world_size: int) -> None:
    drawn = draw(seed, max_world_size=max_world_size)
    model, optimizer = drawn.build()
    facts, layout = facts_of(model, optimizer), _layout(drawn)
    if refusal(facts, layout, Cluster(drawn.world_size, 1, gpu_memory=2**30)):
        errors_on_ranks(UsageError, _held, seed, max_world_size, world_size=drawn.world_size)
        return
    found = run_on_ranks(_held, seed, max_world_size, world_size=drawn.world_size, timeout=120)
    expected = []
    for rank in range(drawn.world_size):
        index = rank % layout.dp_shard if drawn.engine == "fsdp2" else rank
        held = dict(held_bytes(holdings(facts, layout, RankClass(index))))
        held["parameters"] = held.get("parameters", 0) + held.pop("master weights", 0)
        expected.append({name: held.get(name, 0) for name in found[rank]})
    assert found == expected, drawn
    fullest = held_bytes(holdings(facts, layout, fullest_rank(facts, layout)))
    assert sum(fullest.values()) == max(sum(held.values()) for held in found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", QUICK)
def test_ranks_hold_the_planned_bytes(seed: int) -> None:
    _compare(seed, 2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(NUM_DRAWN))
def test_ranks_of_any_configuration_hold_the_planned_bytes(seed: int) -> None:
    _compare(seed, 8)
