"""fsdp_plugin and parallelism_config on 4 ranks: the placement of the model, and that it trains."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from echelon.accelerator import DistributedType
from echelon.base import environ
from tests.harness import run_on_ranks
from tests.reference import gaussian, tanh_net

_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, int] | None, tuple[int, int]]] = {
    # arguments of the plugin, sizes, (copies of the model, parts of each)
    "plugin": ({}, None, (1, 4)),
    "sizes": ({}, {"dp_replicate_size": 2, "dp_shard_size": 2}, (2, 2)),
    "NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, None, (4, 1)),
}


def _trained(name: str) -> dict[str, Any]:
    plugin, sizes, _ = _SETTINGS[name]
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy=lambda m: isinstance(m, nn.Linear), **plugin),
        parallelism_config=None if sizes is None else ParallelismConfig(**sizes),
    )
    model = tanh_net(8, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(_rows()[accelerator.process_index]).mean())
    optimizer.step()
    weight = next(model.parameters())
    assert isinstance(weight, DTensor)
    full: dict[str, torch.Tensor] | None = accelerator.get_state_dict(model)
    state = accelerator.state
    assert state.fsdp_plugin is accelerator.fsdp_plugin
    assert (accelerator.is_fsdp2, accelerator.is_composable_parallelism_enabled) == (True, True)
    assert accelerator.distributed_type is DistributedType.FSDP
    facts = {"held": weight.to_local().numel(), "full": full and {k: v.tolist() for k, v in full.items()}}
    if sizes is not None:
        mesh = accelerator.torch_device_mesh
        assert mesh is not None
        assert state.device_mesh is mesh
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch will require keeping combined axes explicitly; scripts slice them
            facts["axes"] = (mesh.mesh_dim_names, mesh.size(0), mesh["dp"].size())
        facts["place"] = (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank)
        assert accelerator.tensor_parallel_rank == 0
    return facts


def _rows() -> torch.Tensor:
    return gaussian(4, 3, 8)


@pytest.mark.parametrize("name", _SETTINGS)
def test_the_settings_place_the_model_and_training_matches_one_process(name: str) -> None:
    model = tanh_net(8, 4, 1)
    model(_rows()).mean().backward()
    with torch.no_grad():
        expected = {key: p - 0.5 * p.grad for key, p in model.named_parameters() if p.grad is not None}
    answers = run_on_ranks(_trained, name, world_size=4)
    _, sizes, (_, parts) = _SETTINGS[name]
    assert [answer["held"] for answer in answers] == [32 // parts] * 4
    for key, value in expected.items():  # float64: sums in another order
        torch.testing.assert_close(torch.tensor(answers[0]["full"][key], dtype=value.dtype), value, rtol=0, atol=1e-12)
    if sizes is not None:
        assert [answer["place"] for answer in answers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert {answer["axes"] for answer in answers} == {(("dp_replicate", "dp_shard"), 2, 4)}


def _in_bf16_from_the_environment() -> tuple[Any, ...]:
    variables = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }
    with environ.patch(variables):
        accelerator = Accelerator()
    seen = []
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, inputs, output: seen.append(module.weight.dtype))
    model = accelerator.prepare(model)
    out = model(torch.ones(2, 4))
    accelerator.backward(out.sum())
    weight = next(model.parameters())
    assert accelerator.fsdp_plugin is not None
    assert weight.grad is not None
    return seen, out.dtype, weight.dtype, weight.grad.dtype, accelerator.fsdp_plugin.reshard_after_forward


def test_the_environment_enables_sharding_and_bf16_with_float32_weights() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert run_on_ranks(_in_bf16_from_the_environment) == [([bf16], fp32, fp32, fp32, False)] * 2


def _layouts_that_are_kept() -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig())
    assert accelerator.parallelism_config is not None
    assert accelerator.parallelism_config.dp_replicate_size == 2
    assert (accelerator.capabilities.name, accelerator.data_parallel_rank) == ("ddp", accelerator.process_index)
    plugin = FullyShardedDataParallelPlugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2))
    assert accelerator.capabilities.name == "fsdp2"
    assert accelerator.data_parallel_shard_rank == accelerator.process_index
    assert accelerator.data_parallel_rank == 0


def test_an_empty_layout_means_ddp_and_one_axis_means_sharding() -> None:
    run_on_ranks(_layouts_that_are_kept)
