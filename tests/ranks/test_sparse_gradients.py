"""Sparse gradients where the ranks do not all have them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Accelerator
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import RanksFailed, run_on_ranks


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.embedding = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) + self.embedding(ids)).square().mean()  # type: ignore[no-any-return]


def _net() -> Any:
    torch.manual_seed(0)
    return _Net().double()


def _batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(4, 2, generator=g, dtype=torch.float64), torch.randint(0, 5, (4,), generator=g)


def _of_rank_zero(factor: float) -> list[torch.Tensor]:
    """Return the parameters after a plain step by ``factor`` of the loss of rank zero's batch."""
    model = _net()
    (model(*_batch(0)) * factor).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [p.detach() for p in model.parameters()]


def _prepared(engine: str) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, engine=engine)
    model = _net()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _unseen(engine: str) -> list[torch.Tensor]:
    accelerator, model, optimizer = _prepared(engine)
    with accelerator.no_sync(model):
        inner = accelerator.unwrap_model(model)
        accelerator.backward(model(*_batch(0)) if dist.get_rank() == 0 else inner.layer.weight.sum() * 0.0)
        with pytest.warns(EchelonWarning, match="was not synchronized") if dist.get_rank() == 0 else nullcontext():
            optimizer.step()
    return [p.detach() for p in inner.parameters()]


def _without_items(engine: str) -> list[torch.Tensor]:
    accelerator, model, optimizer = _prepared(engine)
    loss = model(*_batch(0))
    is_first = dist.get_rank() == 0
    accelerator.backward(loss if is_first else torch.zeros((), requires_grad=True), num_items=4.0 if is_first else 0.0)
    optimizer.step()
    return [p.detach() for p in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
@pytest.mark.parametrize(("program", "factor"), [(_unseen, 0.5), (_without_items, 1.0)])
def test_a_rank_without_sparse_gradients_brings_zeros(program: Any, factor: float, engine: str) -> None:
    expected = _of_rank_zero(factor)
    for found in run_on_ranks(program, engine, timeout=20):
        for mine, wanted in zip(found, expected):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-14)  # float64


def _mixed() -> list[float]:
    # A parameter of no prepared model, whose gradient is sparse on one rank and dense on the other.
    accelerator, model, _ = _prepared("ddp")
    table = nn.Parameter(torch.ones(5, 3, dtype=torch.float64))
    mine = accelerator.prepare(torch.optim.SGD([table], lr=1.0))
    is_first = dist.get_rank() == 0
    picked = nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True).sum() if is_first else table.sum()
    accelerator.backward(model(*_batch(0)) + picked)
    with pytest.warns(EchelonWarning, match="belong to no prepared model") if is_first else nullcontext():
        mine.step()
    return table[:, 0].tolist()


def test_sparse_gradients_of_one_rank_and_dense_ones_of_another_are_averaged() -> None:
    assert (
        run_on_ranks(_mixed, timeout=20) == [[0.5, -0.5, 0.5, 0.5, 0.5]] * 2
    )  # 1 - (0 + 1) / 2; row 1: 1 - (2 + 1) / 2


def _join(engine: str) -> None:
    accelerator, model, _ = _prepared(engine)
    with accelerator.join_uneven_inputs([model]):
        pass


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_sparse_gradients_cannot_be_joined_and_are_refused_by_the_layer_s_name(engine: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_join, engine, timeout=20)
    for rank in range(2):
        assert isinstance(failed.value.errors[rank], UsageError)
        assert "embedding is an embedding with sparse=True" in str(failed.value.errors[rank])
        assert "even_batches=True" in str(failed.value.errors[rank])
