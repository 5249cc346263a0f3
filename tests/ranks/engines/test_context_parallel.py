"""Attention over a sequence that is cut over ranks computes what one process computes with the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.engines.context_parallel.ring_attention import ring_attention
from echelon.engines.context_parallel.sequence_group import SequenceGroup
from echelon.engines.context_parallel.sequence_mask import SequenceMask, documents_of_lengths
from echelon.engines.context_parallel.sequence_order import SequenceOrder
from echelon.engines.context_parallel.ulysses_attention import ulysses_attention
from tests.harness import run_on_ranks

_LENGTH = 32
_KINDS = ["ring", "zigzag", "zigzag allgather", "ulysses"]
_MASKS = ["none", "packed", "padded", "window", "all"]


def _inputs(dtype: torch.dtype, num_kv: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, _LENGTH, 8), (2, num_kv, _LENGTH, 8), (2, num_kv, _LENGTH, 8), (2, 4, _LENGTH, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _mask(kind: str) -> SequenceMask | None:
    documents = documents_of_lengths(torch.tensor([0, 5, 19, 20, _LENGTH]), _LENGTH)
    real = torch.ones(2, _LENGTH, dtype=torch.bool)
    real[0, 27:], real[1, 30:] = False, False
    return {
        "none": None,
        "packed": SequenceMask(documents=documents),
        "padded": SequenceMask(is_real=real),
        "window": SequenceMask(window=7),
        "all": SequenceMask(documents=documents, is_real=real, window=7),
    }[kind]


def _whole(tensors: list[torch.Tensor], mask: str, is_causal: bool) -> list[torch.Tensor]:
    """Return the output and the gradients of softmax(q k^T / sqrt(d)) v, by the formula."""
    q, k, v = (part.double().requires_grad_() for part in tensors[:3])
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
    i, j = torch.arange(_LENGTH)[:, None], torch.arange(_LENGTH)[None, :]
    seen = (i >= j) if is_causal else torch.ones(_LENGTH, _LENGTH, dtype=torch.bool)
    seen = seen.expand(2, 1, -1, -1)
    if mask in ("packed", "all"):
        number = torch.tensor([0] * 5 + [1] * 14 + [2] + [3] * 12)
        seen = seen & (number[:, None] == number[None, :])
    if mask in ("padded", "all"):
        seen = seen & (j < torch.tensor([27, 30])[:, None, None, None])
    if mask in ("window", "all"):
        seen = seen & ((i - j).abs() < 7)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).nan_to_num(0.0)
    out = weights @ v.repeat_interleave(groups, 1)
    return [out, *torch.autograd.grad(out, [q, k, v], tensors[3].double())]


def _group(kind: str) -> SequenceGroup:
    order = SequenceOrder(num_ranks=dist.get_world_size(), zigzag="zigzag" in kind)
    exchange: Any = "allgather" if "allgather" in kind else "alltoall"
    return SequenceGroup(group=None, rank=dist.get_rank(), order=order, exchange=exchange)


def _cut(kind: str, mask: str, is_causal: bool, dtype: torch.dtype, num_kv: int) -> list[torch.Tensor]:
    group = _group(kind)
    q, k, v, grad = (group.order.cut(part, 2, group.rank) for part in _inputs(dtype, num_kv))
    for part in (q, k, v):
        part.requires_grad_()
    attention: Any = ulysses_attention if kind == "ulysses" else ring_attention
    out = attention(q, k, v, group=group, is_causal=is_causal, mask=_mask(mask))
    found = [out.detach(), *torch.autograd.grad(out, [q, k, v], grad)]
    return [group.gather(part, 2) for part in found]


def _all_cut(kind: str, dtype: torch.dtype, num_kv: int) -> dict[tuple[str, bool], list[torch.Tensor]]:
    return {(mask, causal): _cut(kind, mask, causal, dtype, num_kv) for mask in _MASKS for causal in (True, False)}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    # float64: sums in another order. The others are a few units of the last place of outputs and gradients of about 3.
    [
        (torch.float64, 1e-13),
        pytest.param(torch.float32, 1e-5, marks=pytest.mark.soak),
        pytest.param(torch.bfloat16, 6e-2, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_and_its_gradients_are_those_of_the_whole_sequence(
    world_size: int, kind: str, dtype: torch.dtype, bound: float
) -> None:
    for (mask, is_causal), found in run_on_ranks(_all_cut, kind, dtype, 2, world_size=world_size)[0].items():
        for part, wanted in zip(found, _whole(_inputs(dtype), mask, is_causal), strict=True):
            assert part.dtype == dtype
            difference = (part.double() - wanted).abs().max().item()
            assert difference < bound, (mask, is_causal, difference)


def test_one_key_head_serves_the_ranks() -> None:
    for kind in ("zigzag", "ulysses"):
        found = run_on_ranks(_cut, kind, "none", True, torch.float64, 1, world_size=4)[0]
        for part, wanted in zip(found, _whole(_inputs(torch.float64, 1), "none", True), strict=True):
            torch.testing.assert_close(part, wanted.detach(), rtol=0, atol=1e-13)


def test_zigzag_gives_each_rank_the_same_number_of_blocks() -> None:
    """Count the scores that are computed: pairs of positions, of which a causal triangle has half."""

    def num_scores(order: SequenceOrder, rank: int) -> int:
        local = 8
        return sum(
            len(range(local)[p.queries]) * len(range(local)[p.keys]) // (2 if p.is_diagonal else 1)
            for source in range(order.num_ranks)
            for p in order.block_pairs(rank, source, local, is_causal=True)
        )

    assert [num_scores(SequenceOrder(num_ranks=4), rank) for rank in range(4)] == [32 + 3 * 32] * 4
    contiguous = SequenceOrder(num_ranks=4, zigzag=False)
    assert [num_scores(contiguous, rank) for rank in range(4)] == [32, 96, 160, 224]


def test_each_position_is_on_one_rank_and_joins_again() -> None:
    whole = torch.arange(24.0).view(1, 24)
    order = SequenceOrder(num_ranks=3)
    parts = [order.cut(whole, 1, rank) for rank in range(3)]
    assert parts[1][0].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert [order.positions(24, rank).tolist() for rank in range(3)] == [part[0].tolist() for part in parts]
    assert torch.equal(order.join(parts, 1), whole)
