"""The step guard: three common mistakes that skip gradient synchronization train like the correct program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon import Accelerator
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings, marked_lines

FORMS = [("ddp", "inside no_sync"), ("ddp", "the bare module"), ("ddp", "an outer object"), ("fsdp2", "inside no_sync")]


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm(x).square().mean()


def _batches() -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    return torch.randn(20, 5, 6, generator=generator)


def _right() -> list[torch.Tensor]:
    """Plain PyTorch, DDP by hand, nothing of echelon."""
    torch.manual_seed(0)
    outer = _Outer()
    wrapped = DistributedDataParallel(outer)
    optimizer = torch.optim.AdamW(outer.parameters(), lr=1e-2)
    for x in _batches():
        optimizer.zero_grad()
        wrapped(x).backward()
        optimizer.step()
    return [p.detach() for p in outer.parameters()]


def _wrong(engine: str, form: str, native: bool) -> tuple[list[torch.Tensor], list[tuple[str, str]]]:
    torch.manual_seed(0)
    outer = _Outer()
    accelerator = Accelerator(engine=engine)
    with all_warnings() as caught:
        optimizer = torch.optim.AdamW(outer.parameters(), lr=1e-2)
        if form == "an outer object":
            _prepared, optimizer = accelerator.prepare(outer.lm, optimizer)
        else:
            wrapped, optimizer = accelerator.prepare(outer, optimizer)
        for x in _batches():
            optimizer.zero_grad()
            if form == "inside no_sync":
                with accelerator.no_sync(wrapped):
                    _backward(accelerator, wrapped(x), native)
                    optimizer.step()  # LINE
            else:
                _backward(accelerator, outer(x), native)
                optimizer.step()  # LINE
    ours = [(str(w.message), f"{Path(w.filename).name}:{w.lineno}") for w in caught if w.category is EchelonWarning]
    return [p.detach() for p in outer.parameters()] if engine == "ddp" else [], ours


def _backward(accelerator: Accelerator, loss: torch.Tensor, native: bool) -> None:
    loss.backward() if native else accelerator.backward(loss)


# The two ways of calling backward take turns.
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("native", "engine", "form"),
    [
        pytest.param(native, *form, marks=() if native is (i % 2 == 0) else pytest.mark.soak)
        for i, form in enumerate(FORMS)
        for native in (False, True)
    ],
)
def test_an_unsynchronised_step_reduces_gradients_first(engine: str, form: str, native: bool) -> None:
    right = run_on_ranks(_right, world_size=2)
    results = run_on_ranks(_wrong, engine, form, native, world_size=2)
    for weights, _ in results if engine == "ddp" else ():  # the engine contract compares those of shards
        assert all(map(torch.equal, weights, right[0]))
    (warned, *more), silent = results[0][1], results[1][1]
    assert (more, silent) == ([], [])
    text, line = warned
    assert "did not synchronize gradients across ranks" in text
    assert line in marked_lines(__file__, "LINE")


def _opted_out() -> list[torch.Tensor]:
    torch.manual_seed(0)
    outer = _Outer()
    accelerator = Accelerator()
    wrapped, optimizer = accelerator.prepare(outer, torch.optim.SGD(outer.parameters(), lr=0.1))
    for x in _batches():
        optimizer.zero_grad()
        with accelerator.no_sync(wrapped, unsynced=True):
            accelerator.backward(wrapped(x))
            optimizer.step()
    return [p.detach() for p in outer.parameters()]


def test_intentional_local_steps_stay_local_without_a_warning() -> None:
    first, second = run_on_ranks(_opted_out, world_size=2)
    assert not any(torch.equal(p, q) for p, q in zip(first, second))


def _stray() -> tuple[list[torch.Tensor], list[str]]:
    """The optimizer also holds a head that was not prepared, initialised differently on each rank."""
    torch.manual_seed(0)
    body = nn.Linear(6, 6)
    torch.manual_seed(dist.get_rank())
    head = nn.Linear(6, 1)
    accelerator = Accelerator()
    with all_warnings() as caught:
        body, optimizer = accelerator.prepare(body, torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1))
        for x in _batches():
            optimizer.zero_grad()
            accelerator.backward(head(body(x)).square().mean())
            optimizer.step()
    return [p.detach() for p in (*body.parameters(), *head.parameters())], [str(w.message) for w in caught]


def test_parameters_outside_prepared_models_stay_equal_on_all_ranks() -> None:
    (first, said), (second, silent) = run_on_ranks(_stray, world_size=2)
    assert all(torch.equal(p, q) for p, q in zip(first, second))
    assert len(said) == 1
    assert "2 parameter(s) of this optimizer do not belong to a prepared model" in said[0]
    assert silent == []


def _accumulated() -> tuple[int, int]:
    """Count collectives of a window of four micro-steps; the guard must stay out of a right program."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = nn.Linear(6, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reductions = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations of a hook and refuses Any
        reductions.append(1)
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    for x in torch.randn(8, 5, 6):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return len(reductions), accelerator.step


def test_gradients_are_reduced_once_per_window_without_a_warning() -> None:
    assert run_on_ranks(_accumulated, world_size=2) == [(2, 8)] * 2
