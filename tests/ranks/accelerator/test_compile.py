"""torch.compile through the Accelerator: the numbers of the plain loop, the user's parameter names, and no second compilation."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from echelon import Accelerator, FullyShardedDataParallelPlugin
from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.utils import (
    DynamoBackend,
    TorchDynamoPlugin,
    extract_model_from_parallel,
    has_compiled_regions,
    is_compiled_module,
)
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings, train_prepared
from tests.reference import PlainTraining, gaussian, mean_square, train_updates

KINDS = ["own", "own in place", "regions", "whole"]
NAMES = ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "head.weight", "head.bias"]
# torch's tracing looks at the .grad of what is no leaf (torch 2.13).
of_torch = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        result: torch.Tensor = self.head(x)
        return result


class _Block(nn.Linear):
    """A class of its own: torch compiles no module of its own classes that is a unit of fully_shard."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def _model() -> _Net:
    torch.manual_seed(0)
    return _Net()


def _batches(rank: int) -> torch.Tensor:
    return gaussian(6, 5, 6, seed=10 + rank, dtype=torch.float32)


def _plain() -> PlainTraining:
    """One process, nothing compiled: updates of two micro-batches of each of two ranks."""
    model = _model()
    windows = torch.cat([_batches(rank).view(3, 2, 5, 6) for rank in range(2)], dim=1)
    return train_updates(model, lambda x: mean_square(model(x)), windows, torch.optim.SGD(model.parameters(), lr=0.5))


def _setup(kind: str, **more: Any) -> tuple[Accelerator, _Net, nn.Module]:
    """Return the Accelerator, the model, and what is given to prepare()."""
    plugin = {
        "whole": TorchDynamoPlugin(backend="aot_eager"),
        "regions": TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True),
    }.get(kind)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_plugin=plugin, **more)
    model = _model()
    if kind == "own in place":
        model.compile(backend="aot_eager")
    return accelerator, model, torch.compile(model, backend="aot_eager") if kind == "own" else model  # type: ignore[return-value]


def _ignore_what_tracing_warns_of() -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # that is no leaf (torch 2.13)


def _train(kind: str, shards: bool) -> tuple[dict[str, torch.Tensor] | None, int, list[str]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["_Block"]
    )
    accelerator, model, given = _setup(kind, fsdp_plugin=plugin if shards else None)
    with all_warnings() as caught:
        prepared, optimizer = accelerator.prepare(given, torch.optim.SGD(model.parameters(), lr=0.5))
        for x in _batches(accelerator.process_index):
            train_prepared(accelerator, prepared, optimizer, [x])
            extract_model_from_parallel(prepared)  # looking inside changes nothing
            accelerator.unwrap_model(prepared)
    warned = [str(w.message) for w in caught if issubclass(w.category, EchelonWarning)]
    return accelerator.get_state_dict(prepared), torch._dynamo.utils.counters["stats"]["unique_graphs"], warned


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_two_compiled_ranks_train_like_one_uncompiled_process(kind: str, shards: bool) -> None:
    expected = dict(zip(NAMES, _plain().weights, strict=True))
    for rank, (weights, graphs, warned) in enumerate(run_on_ranks(_train, kind, shards, world_size=2, timeout=120)):
        assert warned == []
        # A block with and without a gradient of its input, and the head.
        assert graphs > 0 if shards else graphs == (3 if kind == "regions" else 1)
        if weights is None:
            assert shards
            assert rank > 0
            continue
        assert list(weights) == NAMES
        torch.testing.assert_close(dict(weights), expected, rtol=1e-5, atol=1e-6)  # float32, another order of sums


def _guarded() -> list[torch.Tensor]:
    accelerator, model, given = _setup("whole")
    prepared, optimizer = accelerator.prepare(given, torch.optim.SGD(model.parameters(), lr=0.5))
    (x, *_) = _batches(accelerator.process_index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EchelonWarning)
        _ignore_what_tracing_warns_of()
        with accelerator.no_sync(prepared):
            accelerator.backward(prepared(x).square().mean())
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    means = []
    for gradient in before:
        total = gradient.clone()
        dist.all_reduce(total)
        means.append(total / 2)
    start = _model().parameters()
    torch.testing.assert_close(list(model.parameters()), [p - 0.5 * g for p, g in zip(start, means)])
    return before


def test_the_step_guard_works_with_a_compiled_model() -> None:
    first, second = run_on_ranks(_guarded, world_size=2, timeout=120)
    assert not torch.equal(first[0], second[0])  # in no_sync the gradients were each rank's own


@pytest.mark.slow
@of_torch
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_unwrapping_returns_the_users_model(kind: str, precision: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    accelerator, model, given = _setup(kind, mixed_precision=precision)
    prepared = accelerator.prepare(given)
    assert accelerator.prepare(given) is prepared
    assert accelerator.prepare(prepared) is prepared
    x = torch.ones(3, 6)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        expected = model.head(model.blocks[1](model.blocks[0](x).tanh()).tanh()).float()
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), expected, rtol=0, atol=0)
    assert prepared(x).dtype == torch.float32
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    kept = accelerator.unwrap_model(prepared)
    assert is_compiled_module(kept) == (kind in ("whole", "own"))
    assert has_compiled_regions(kept) == (kind != "own in place")
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert list(accelerator.get_state_dict(prepared)) == NAMES
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False, keep_torch_compile=False)
    with torch.no_grad():
        own = bare.head(bare.blocks[1](bare.blocks[0](x).tanh()).tanh())
        torch.testing.assert_close(bare(x), own, rtol=0, atol=0)  # in float32 again
    assert bare.__dict__.get("forward") is None


@of_torch
def test_a_compiled_model_is_not_compiled_again() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    given = torch.compile(_model(), backend="eager")
    assert accelerator.prepare(given) is given
    in_place = _model()
    in_place.compile(backend="eager")
    assert accelerator.prepare(in_place) is in_place
    evaluated = accelerator.prepare_model(_model(), evaluation_mode=True)
    assert is_compiled_module(evaluated)
    assert accelerator._models == [given, in_place]


def _kinds_of_own() -> list[str]:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    own, in_place = torch.compile(_model(), backend="eager"), _model()
    in_place.compile(backend="eager")
    prepared = [accelerator.prepare(model) for model in (own, in_place, _model())]
    assert {type(accelerator.unwrap_model(model, keep_torch_compile=False)) for model in prepared} == {_Net}
    return [type(model).__name__ for model in prepared]


def test_a_compiled_model_is_not_compiled_again_on_two_ranks() -> None:
    expected = ["DistributedDataParallel", "DistributedDataParallel", "OptimizedModule"]
    assert run_on_ranks(_kinds_of_own, world_size=2) == [expected] * 2


@of_torch
def test_regional_compilation_without_repeated_blocks_compiles_the_whole_model() -> None:
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
    assert is_compiled_module(accelerator.prepare(nn.Linear(2, 2)))
    assert not is_compiled_module(accelerator.prepare(_model()))


def test_code_or_environment_selects_the_backend() -> None:
    assert Accelerator(cpu=True).state.dynamo_plugin.backend is DynamoBackend.NO
    assert Accelerator(cpu=True, dynamo_backend="INDUCTOR").state.dynamo_plugin.to_kwargs() == {"backend": "inductor"}
    variables = {
        "ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER",
        "ACCELERATE_DYNAMO_MODE": "max-autotune",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "1",
    }
    with environ.patch(dict(variables)):
        plugin = Accelerator(cpu=True).state.dynamo_plugin
        in_code = Accelerator(cpu=True, dynamo_backend=DynamoBackend.EAGER)
        assert TorchDynamoPlugin() == plugin
    expected = {"backend": "aot_eager", "mode": "max-autotune", "fullgraph": True, "dynamic": False}
    assert plugin.to_kwargs() == expected
    assert plugin.use_regional_compilation
    assert in_code.state.dynamo_plugin.backend is DynamoBackend.EAGER
    assert str(in_code.config.origins["dynamo_backend"]) == "code Accelerator(dynamo_backend=)"
    given = TorchDynamoPlugin(backend="eager", fullgraph=True)
    assert Accelerator(cpu=True, dynamo_plugin=given).config.value.dynamo_use_fullgraph


def test_a_backend_and_a_plugin_are_mutually_exclusive() -> None:
    with pytest.raises(ConfigError, match="dynamo_backend='eager' and dynamo_plugin are both set") as raised:
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())
    assert "pass only one of them" in str(raised.value.do)
    with environ.patch({"ACCELERATE_DYNAMO_BACKEND": "torhchxla_trace_once"}), pytest.raises(ConfigError) as raised:
        Accelerator(cpu=True)
    assert "env ACCELERATE_DYNAMO_BACKEND" in str(raised.value)
    assert "aot_torchxla_trace_once, torchxla_trace_once" in str(raised.value)


# ---- a whole step that is compiled -----------------------------------------------------------------------------------


def _start_compiling() -> None:
    """Clear what was compiled, and ignore torch's own warnings while it compiles."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for own in ("The .grad attribute of a Tensor", "`torch.jit"):
        warnings.filterwarnings("ignore", own)


def _train_by_compiled_steps(how: str) -> list[torch.Tensor]:
    """Train on the windows of ``_plain`` by a compiled step, or a compiled loop if the data has a loader."""
    _start_compiling()
    settings: dict[str, Any] = {"parity": how} if how in ("exact", "bitwise") else {"engine": how}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    windows = torch.cat([_batches(rank).view(3, 2, 5, 6) for rank in range(2)], dim=1)
    data = DataLoader(windows.view(-1, 6), batch_size=20) if "parity" in settings else None  # type: ignore[arg-type,var-annotated]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    prepared, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

    def step(x: torch.Tensor) -> torch.Tensor:
        with accelerator.accumulate(prepared):
            loss = mean_square(prepared(x))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1e9)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        shared: torch.Tensor = accelerator.gather(loss.detach())
        return shared

    def loop() -> int:
        return sum(len(step(x)) for _ in accelerator.epochs(1) for x in data)

    if data is None:
        compiled = torch.compile(step, backend="eager")
        assert all(compiled(x).shape == (2,) for x in _batches(accelerator.process_index))
    else:
        num_micro_steps = {"exact": 3 * 2, "bitwise": 3 * 4}[
            how
        ]  # bitwise: 8 shards per update, half of them on each rank
        assert torch.compile(loop, backend="eager")() == 2 * num_micro_steps
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in prepared.parameters()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["ddp", "zero1", "fsdp2", "exact", "bitwise"])
def test_ranks_with_a_compiled_step_train_like_one_uncompiled_process(how: str) -> None:
    for parameters in run_on_ranks(_train_by_compiled_steps, how, timeout=120):
        torch.testing.assert_close(parameters, _plain().weights, rtol=1e-5, atol=1e-6)  # float32, another order of sums


def _train_ddp_by_compiled_steps(*, prepares: bool) -> list[torch.Tensor]:
    _start_compiling()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    accelerator = Accelerator(cpu=True)
    if prepares:
        ddp, optimizer = accelerator.prepare(model, optimizer)
    else:
        ddp = nn.parallel.DistributedDataParallel(model)

    def step(x: torch.Tensor) -> None:
        mean_square(ddp(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(step, backend="eager")
    for x in _batches(dist.get_rank()):
        compiled(x)
    return [p.detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("prepares", [False, True])
def test_a_compiled_step_may_call_backward_of_the_loss(prepares: bool) -> None:
    model = _model()
    windows = torch.stack([_batches(rank) for rank in range(2)], dim=1)
    plain = train_updates(model, lambda x: mean_square(model(x)), windows, torch.optim.SGD(model.parameters(), lr=0.5))
    for parameters in run_on_ranks(_train_ddp_by_compiled_steps, prepares=prepares, timeout=120):
        torch.testing.assert_close(parameters, plain.weights, rtol=1e-5, atol=1e-6)
