"""Sparse gradients that only some ranks have."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon import Accelerator
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from echelon.distributed import process_group
from tests.harness import errors_on_ranks, run_on_ranks
from tests.reference import EmbeddingSum


def _of_rank_zero(factor: float) -> list[torch.Tensor]:
    """Return the parameters after a plain step on ``factor`` times the loss of rank zero's batch."""
    model = EmbeddingSum()
    (model(*model.batch(0)) * factor).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [p.detach() for p in model.parameters()]


def _prepared(engine: str) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, engine=engine)
    model = EmbeddingSum()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _unseen(engine: str) -> list[torch.Tensor]:
    accelerator, model, optimizer = _prepared(engine)
    with accelerator.no_sync(model):
        inner = accelerator.unwrap_model(model)
        accelerator.backward(model(*EmbeddingSum.batch(0)) if dist.get_rank() == 0 else inner.layer.weight.sum() * 0.0)
        with (
            pytest.warns(EchelonWarning, match="did not synchronize gradients")
            if dist.get_rank() == 0
            else nullcontext()
        ):
            optimizer.step()
    return [p.detach() for p in inner.parameters()]


def _without_items(engine: str) -> list[torch.Tensor]:
    accelerator, model, optimizer = _prepared(engine)
    loss = model(*EmbeddingSum.batch(0))
    is_first = dist.get_rank() == 0
    accelerator.backward(loss if is_first else torch.zeros((), requires_grad=True), num_items=4.0 if is_first else 0.0)
    optimizer.step()
    return [p.detach() for p in accelerator.unwrap_model(model).parameters()]


def _gradients(engine: str | None) -> list[torch.Tensor]:
    """Return the gradients of the mean over the ranks; without an engine, of torch's DDP in a process group of level 1."""
    model = EmbeddingSum()
    with process_group() if engine is None else nullcontext():
        # Kept until the backward pass is over.
        wrapped = DistributedDataParallel(model) if engine is None else Accelerator(engine=engine).prepare(model)
        wrapped(*model.batch(dist.get_rank())).backward()
        return [p.grad.to_dense() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("engine", ["ddp", "zero1", None])
def test_sparse_gradients_do_not_scale_those_of_other_layers(engine: str | None) -> None:
    """The layer and the embedding get the same gradient in backward."""
    model = EmbeddingSum()
    for rank in range(2):
        (model(*model.batch(rank)) / 2).backward()
    expected = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
    for found in run_on_ranks(_gradients, engine, world_size=2, init_group=engine is not None):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)  # float64


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
@pytest.mark.parametrize(("program", "factor"), [(_unseen, 0.5), (_without_items, 1.0)])
def test_a_rank_without_sparse_gradients_contributes_zeros(program: Any, factor: float, engine: str) -> None:
    expected = _of_rank_zero(factor)
    for found in run_on_ranks(program, engine, timeout=20):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)  # float64


def _mixed() -> list[float]:
    # A parameter outside prepared models, whose gradient is sparse on one rank and dense on the other.
    accelerator, model, _ = _prepared("ddp")
    table = nn.Parameter(torch.ones(5, 3, dtype=torch.float64))
    mine = accelerator.prepare(torch.optim.SGD([table], lr=1.0))
    is_first = dist.get_rank() == 0
    picked = nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True).sum() if is_first else table.sum()
    accelerator.backward(model(*EmbeddingSum.batch(0)) + picked)
    with pytest.warns(EchelonWarning, match="do not belong to a prepared model") if is_first else nullcontext():
        mine.step()
    return table[:, 0].tolist()


def test_sparse_and_dense_gradients_of_different_ranks_are_averaged() -> None:
    assert (
        run_on_ranks(_mixed, timeout=20) == [[0.5, -0.5, 0.5, 0.5, 0.5]] * 2
    )  # 1 - (0 + 1) / 2; row 1: 1 - (2 + 1) / 2


def _join(engine: str) -> None:
    accelerator, model, _ = _prepared(engine)
    with accelerator.join_uneven_inputs([model]):
        pass


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_the_error_for_joining_sparse_gradients_names_the_layer(engine: str) -> None:
    for text in errors_on_ranks(UsageError, _join, engine, timeout=20, num_errors=2):
        assert "embedding is an embedding with sparse=True" in text
        assert "even_batches=True" in text
