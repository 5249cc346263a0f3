"""Activations in canonical chunks: operations by chunk, random numbers, gradients, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from echelon.base.errors import UsageError
from echelon.engines.tensor_parallel.canonical_chunks import CanonicalChunks
from echelon.engines.tensor_parallel.chunked_tensor import RANDOM, ChunkedTensor


class _Ranks:
    """The mesh of some ranks, for what needs no communication."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def get_local_rank(self) -> int:
        return self._rank


def _layout(num_chunks: int = 4, *, num_ranks: int = 1, rank: int = 0) -> CanonicalChunks:
    mesh: Any = _Ranks(num_ranks, rank)
    return CanonicalChunks(num_chunks=num_chunks, mesh=mesh if num_ranks > 1 else None)


def _activation(*, requires_grad: bool = False) -> ChunkedTensor:
    torch.manual_seed(1)
    return ChunkedTensor([torch.randn(3, 8, requires_grad=requires_grad) for _ in range(4)], _layout())


def test_a_negative_zero_becomes_positive_as_in_a_sum_over_ranks() -> None:
    assert not torch.signbit(_layout().add_zeros(torch.tensor([-0.0]))).item()


def test_operations_are_those_of_each_chunk() -> None:
    x, y = _activation(), torch.full((8,), 0.5)
    parts = x.chunks
    norm = nn.LayerNorm(8)
    with torch.no_grad():
        results: list[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = [
            (F.gelu(x + y), lambda part: F.gelu(part + y)),
            (y / x, lambda part: y / part),
            (norm(x), norm),
            (torch.cat([x, x], dim=0), lambda part: torch.cat([part, part], dim=0)),
            (x.unflatten(-1, (-1, 4)).transpose(0, 1), lambda part: part.unflatten(-1, (-1, 4)).transpose(0, 1)),
            (x.max(dim=-1).values, lambda part: part.max(dim=-1).values),
            (torch.stack(list(x)[1:]), lambda part: part[1:]),
            (x.T, lambda part: part.T),
        ]
    for found, expected in results:
        assert isinstance(found, ChunkedTensor)
        for mine, part in zip(found.chunks, parts):
            assert torch.equal(mine, expected(part))
    assert (x.shape, x.dim(), x.dtype, len(x)) == ((3, 8), 2, torch.float32, 3)
    assert repr(x).startswith("ChunkedTensor(4 chunks")
    assert {x: 1}[x] == 1


def _masks(layout: CanonicalChunks, draw: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(5)
    found: Any = draw(ChunkedTensor([torch.ones(16) for _ in layout.own], layout))
    return list(found.chunks), int(torch.randint(2**31, ()))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: nn.Dropout(0.5)(x),
        lambda x: torch.rand_like(x),
        lambda x: x.bernoulli(0.5),
        lambda x: x.clone().bernoulli_(0.5),
        lambda x: F.scaled_dot_product_attention(*[x.view(1, 4, 4)] * 3, dropout_p=0.5),
    ],
)
def test_each_chunk_draws_its_own_numbers_on_any_number_of_ranks(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole, after = _masks(_layout(), draw)
    assert len({tuple(mask.flatten().tolist()) for mask in whole}) == 4
    for num_ranks in (2, 4):
        for rank in range(num_ranks):
            layout = _layout(num_ranks=num_ranks, rank=rank)
            own, own_after = _masks(layout, draw)
            assert all(torch.equal(mine, whole[number]) for number, mine in zip(layout.own, own))
            assert own_after == after  # what comes next is drawn from the shared state


def test_dropout_that_drops_nothing_draws_nothing() -> None:
    x = _activation()
    before = torch.get_rng_state()
    F.dropout(x, 0.5, training=False)
    nn.Dropout(0.5).eval()(x)
    F.scaled_dot_product_attention(*[x.view(1, 3, 8)] * 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_all_random_functions_of_torch_are_known() -> None:
    """By torch's tag; those that are not in torch's modules are called by functions of the list."""
    tagged = set()
    operators = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for name in operators:
        packet: Any = getattr(torch.ops.aten, name, None)
        for overload in [] if packet is None or name.startswith("_") else packet.overloads():
            operator = getattr(packet, overload)
            takes_tensors = any("Tensor" in str(argument.type) for argument in operator._schema.arguments)
            if torch.Tag.nondeterministic_seeded in operator.tags and takes_tensors:
                tagged.add(name)
    callable_ = {name for name in tagged if any(hasattr(owner, name) for owner in (torch, torch.Tensor, F))}
    without_input = {"rand", "randint", "randn", "randperm"}  # Tensor: only as out=
    assert callable_ >= {"dropout", "bernoulli", "uniform_", "rand_like"}
    assert callable_ - without_input - {"miopen_rnn"} <= RANDOM


def test_the_gradient_of_a_whole_tensor_is_the_sum_over_chunks_in_the_tree() -> None:
    x = _activation()
    whole = torch.randn(8, requires_grad=True)
    scaled: Any = (x * whole).square()
    sum(part.sum() for part in scaled.chunks).backward()
    by_chunk = [(2 * (part * whole) * part).sum(0) for part in x.chunks]
    assert whole.grad is not None
    assert torch.equal(whole.grad, (by_chunk[0] + by_chunk[1]) + (by_chunk[2] + by_chunk[3]))


class _Doubled(Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


_REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bool": (lambda x: bool((x > 0).all()), "bool() reads values of an activation that is divided into 4 chunks"),
    "item": (lambda x: x.sum().item(), "item() reads values"),
    "tolist": (lambda x: x.tolist(), "tolist() reads values"),
    "format": (lambda x: f"{x.sum():.3f}", "format() reads values"),
    "equal": (lambda x: torch.equal(x, x), "equal() reads values"),
    "backward": (lambda x: x.sum().backward(), "backward() reads values"),
    "hook": (lambda x: x.register_hook(print), "register_hook() reads values"),
    "nonzero": (lambda x: (x > 0).nonzero(), "nonzero() gives results of different kinds"),
    "function": (lambda x: _Doubled.apply(x) + 1, "_DoubledBackward is a custom autograd function"),
    "in place": (lambda x: torch.zeros(3, 8).add_(x), "add_() writes an activation that is divided into chunks"),
    "assignment": (lambda x: torch.zeros(1, 3, 8).__setitem__(0, x), "__setitem__() writes"),
    "operator": (lambda x: torch.zeros(3, 8).__iadd__(x), "writes an activation"),
    "out": (lambda x: torch.add(x, 1, out=torch.zeros(3, 8)), "add() writes"),
    "view": (lambda x: x.view(5, -1), "view() failed on one of the 4 chunks"),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_what_cannot_be_done_by_chunk_is_refused_by_name(kind: str) -> None:
    operation, text = _REFUSED[kind]
    with pytest.raises(UsageError) as caught:
        operation(_activation(requires_grad=True))
    assert text in str(caught.value)
