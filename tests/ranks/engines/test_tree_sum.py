"""Sums in a fixed tree are bit-identical on any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from echelon.data.global_batch_slices import shards_of
from echelon.engines.bitwise import tree_sum as canonical
from echelon.engines.bitwise.tree_sum import TreeSum
from tests.harness import run_on_ranks

WORLD_SIZES = [1, 2, 3, 4]


def _leaf(number: int, kind: str) -> list[torch.Tensor | None] | None:
    """Return numbers of very different sizes, whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(number)
    values = [
        torch.randn(n, generator=generator) * 10.0 ** torch.randint(-6, 6, (n,), generator=generator) for n in (300, 7)
    ]
    if kind == "ragged" and number in (2, 7):
        return None
    if kind == "ragged" and number % 3 == 0:
        return [values[0], None, None]
    return [*values, None]


def _by_hand(lo: int, hi: int, size: int, num_leaves: int, kind: str) -> list[torch.Tensor | None] | None:
    """Return the sum of the leaves from lo to hi, computed recursively from its halves."""
    if lo >= num_leaves:
        return None
    if size == 1:
        return _leaf(lo, kind)
    left = _by_hand(lo, lo + size // 2, size // 2, num_leaves, kind)
    right = _by_hand(lo + size // 2, hi, size // 2, num_leaves, kind)
    if left is None or right is None:
        return left if right is None else right
    return [a if b is None else b if a is None else a + b for a, b in zip(left, right)]


def _summed(num_leaves: int, kind: str, small: int) -> list[torch.Tensor | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical, "_SMALL", small)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        tree = TreeSum(num_leaves=num_leaves, rank=rank, world_size=world_size)
        *leaves, last = shards_of(rank, world_size=world_size, num_shards=num_leaves)
        for leaf in leaves:
            tree.add(_leaf(leaf, kind) or [])
        like = [torch.zeros(300), torch.zeros(7), torch.zeros(2)]
        tree.finish([torch.ones(300), None, None], like)  # a different last leaf, which must not affect later results
        found = tree.finish(_leaf(last, kind) or [], like)
        tree.add(_leaf(last, kind) or [])
        again = tree.finish(None, like)
        assert all(
            a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(found, again)
        )
        return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", ["whole", "ragged"])
def test_sums_are_bit_identical_on_any_number_of_ranks(kind: str, world_size: int) -> None:
    for num_leaves in (4, 8, 11):
        size = 1 << (num_leaves - 1).bit_length()
        expected = _by_hand(0, size, size, num_leaves, kind)
        assert expected is not None
        assert expected[2] is None
        for small in (0, 2**18):  # exchange of parts, and all-gather of everything
            for found in run_on_ranks(_summed, num_leaves, kind, small, world_size=world_size):
                assert found[2] is None
                assert all(
                    a is not None and b is not None and torch.equal(a, b) for a, b in zip(found[:2], expected[:2])
                )


def test_the_test_data_depends_on_the_order_of_addition() -> None:
    in_order = torch.stack([leaf[0] for i in range(8) if (leaf := _leaf(i, "whole")) and leaf[0] is not None]).cumsum(
        0
    )[-1]
    tree = _by_hand(0, 8, 8, 8, "whole")
    assert tree is not None
    assert tree[0] is not None
    assert not torch.equal(in_order, tree[0])
