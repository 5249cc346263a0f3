"""What is pending in an update (its micro-steps, its gradients, what fp16 has done to them) ends with it, on every engine.

The references are plain loops in float64: a loss scale is a power of two, so it does not round. Sums in another order: 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Accelerator, FullyShardedDataParallelPlugin
from echelon.utils import GradScalerKwargs
from tests.harness import run_on_ranks
from tests.prepared_loop import share_of, weights_of
from tests.programs.program import Case, Layout, Program
from tests.programs.runner import require_plain
from tests.reference import train_updates

BATCHES = torch.arange(4.0 * 4 * 3, dtype=torch.float64).reshape(4, 4, 3).sin()  # of all ranks together
LAYOUTS = [(1, "single"), (2, "ddp"), (2, "zero1"), (2, "fsdp2 stage 2"), (2, "fsdp2 stage 3")]
PARITIES = ["off", "exact", "bitwise"]


# ---- loops in which an update is skipped or left --------------------------------------------------------------------

_WINDOWS = Program(num_samples=24, batch_size=4, accumulation=2, optimizer="momentum")
_SKIPPING = [
    Program(num_samples=24, batch_size=2, optimizer="momentum", fp16=True, leaves_out=True, clipping=clipping)
    for clipping in ("norm", "value")
]


def _cases(program: Program, parity: str) -> list[Case]:
    layouts = [Layout(world_size=size, parity=parity, engine=None if size == 1 else name) for size, name in LAYOUTS]
    return [Case(program=program, layout=layout) for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("parity", ["off", "exact"])
def test_an_fp16_update_that_the_loop_skips_leaves_the_next_gradients_scaled(parity: str) -> None:
    require_plain([case for program in _SKIPPING for case in _cases(program, parity)])


@pytest.mark.slow
@pytest.mark.parametrize("parity", ["off", "exact"])
def test_fp16_gradients_may_be_clipped_in_each_micro_step(parity: str) -> None:
    require_plain(_cases(replace(_WINDOWS, fp16=True, reads=True), parity))


@pytest.mark.slow
@pytest.mark.parametrize("parity", PARITIES)
@pytest.mark.parametrize("end", ["memory", "batch_size", "second", "again"])
def test_a_training_after_one_that_ended_in_a_window_is_that_of_a_new_process(end: str, parity: str) -> None:
    """It ended by an error, by ``free_memory()``, or the next one just begins; bitwise refuses fp16."""
    for fp16 in (False, True)[: 1 if parity == "bitwise" else 2]:
        require_plain(_cases(replace(_WINDOWS, retries=end, fp16=fp16), parity))


@pytest.mark.slow
@pytest.mark.parametrize("parity", PARITIES)
@pytest.mark.parametrize("returns", ["update", "window", "nan"])
def test_a_return_to_a_checkpoint_drops_the_window(returns: str, parity: str) -> None:
    for fp16 in (False, True)[: 1 if parity == "bitwise" else 2]:
        program = replace(_WINDOWS, returns=returns, returns_after=2, reads=fp16, fp16=fp16)
        require_plain(_cases(program, parity))


# ---- fp16 steps that no plain loop makes so -------------------------------------------------------------------------


def _model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()  # type: ignore[no-any-return]


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _accelerator(engine: str) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=engine == "fsdp2 stage 3")
    return Accelerator(
        cpu=True,
        engine=engine.split()[0],
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        fsdp_plugin=plugin if engine.startswith("fsdp2") else None,
    )


def _check(layout: tuple[int, str], run: Callable[[str], Any], want: list[torch.Tensor]) -> None:
    world_size, engine = layout
    for found in run_on_ranks(run, engine, world_size=world_size):
        for mine, wanted in zip(found, want, strict=True):
            # fully_shard computes in fp16, with an epsilon of 1e-3; gradients add up a few such numbers.
            atol = 4e-3 if engine.startswith("fsdp2") else 1e-14
            torch.testing.assert_close(mine.double(), wanted, rtol=1e-12, atol=atol)


def _step_twice(engine: str) -> list[torch.Tensor]:
    accelerator, model = _accelerator(engine), _model()
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    for x in map(share_of, BATCHES[:3]):
        accelerator.backward(_loss(model, x))
        optimizer.step()
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()  # with the same gradients
        optimizer.zero_grad()
    return weights_of(accelerator, model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_fp16_steps_with_the_same_gradients_are_equal(layout: tuple[int, str]) -> None:
    model = _model()
    optimizer = _optimizer(model)
    for x in BATCHES[:3]:
        optimizer.zero_grad()
        _loss(model, x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.step()
    _check(layout, _step_twice, [p.detach() for p in model.parameters()])


def _find_infinity(engine: str) -> list[torch.Tensor]:
    accelerator, model = _accelerator(engine), _model()
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for number, x in enumerate(map(share_of, BATCHES[:3])):
        accelerator.backward(_loss(model, x) * (math.inf if number == 1 and is_last else 1.0))
        if accelerator.clip_grad_norm_(model.parameters(), 1e6).isfinite():
            optimizer.step()
        optimizer.zero_grad()
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 512.0
    return weights_of(accelerator, model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_infinite_update_that_the_loop_itself_skips_lowers_the_loss_scale(layout: tuple[int, str]) -> None:
    model = _model()
    plain = train_updates(model, lambda k: _loss(model, BATCHES[k]), [[0], [2]], _optimizer(model))
    _check(layout, _find_infinity, plain.weights)


def _keep_one_optimizer_waiting(engine: str) -> list[torch.Tensor]:
    """Clip both models, of which only the first one steps; the second one's gradients wait for another loss."""
    accelerator, models = _accelerator(engine), [_model(), _model(1)]
    first, second, stepped, waiting = accelerator.prepare(*models, *map(_optimizer, models))
    for number, x in enumerate(map(share_of, BATCHES)):
        accelerator.backward(_loss(first, x) + _loss(second, x))
        accelerator.clip_grad_norm_(first.parameters(), 1e6)
        stepped.step()
        stepped.zero_grad()
        if number % 2:
            waiting.step()
            waiting.zero_grad()
    return weights_of(accelerator, second)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp16_gradients_of_an_optimizer_that_waits_keep_their_size(layout: tuple[int, str]) -> None:
    model = _model(1)
    optimizer = _optimizer(model)
    for number, x in enumerate(BATCHES):
        _loss(model, x).backward()  # type: ignore[no-untyped-call]
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    _check(layout, _keep_one_optimizer_waiting, [p.detach() for p in model.parameters()])
